"""Sentences about a parameter or a buffer that differs before anything was computed with it.

Reads the pairs of one rank, feeds `first`: which others differ with it, and where to look for what wrote to it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from astray.comparison.blame import clues
from astray.comparison.divergence import TensorPlace
from astray.comparison.rows import Bools, Ints
from astray.comparison.verdict import AGREEING
from astray.graph import graph_of
from astray.records import ROOT
from astray.store import RankRun, Table

STATE_ROLES = ("parameter", "state")


class OtherWeights(NamedTuple):
    """How many other parameters and buffers differ in the same step."""

    parameters: int
    buffers: int

    def __str__(self) -> str:
        """In words: "another parameter and 3 other buffers"."""
        nouns = ((self.parameters, "parameter"), (self.buffers, "buffer"))
        return " and ".join(
            f"another {noun}" if count == 1 else f"{count:,} other {noun}s" for count, noun in nouns if count
        )


def others(pairs: Table, row: int, bad: Bools, reference: RankRun, candidate: RankRun) -> OtherWeights:
    """Count the other wrong parameters and buffers in the step of `row`. Two names of one tied tensor count once."""
    step = pairs.numbers("step")
    in_step = bad & (step == step[row])
    rows = np.flatnonzero(in_step & has_role(pairs, *STATE_ROLES)).tolist()
    rows += _weights_among(pairs, np.flatnonzero(in_step & has_role(pairs, "input")), reference)
    tensors = {_tensor(pairs, row, reference, candidate)}
    names = {_name(pairs, row)}
    count = dict.fromkeys(STATE_ROLES, 0)
    for row_of_step in rows:
        name, tensor = _name(pairs, row_of_step), _tensor(pairs, row_of_step, reference, candidate)
        if name not in names and tensor not in tensors:
            count["state" if pairs["role"][row_of_step] == "state" else "parameter"] += 1
        names.add(name)
        tensors.add(tensor)
    return OtherWeights(count["parameter"], count["state"])


def _weights_among(pairs: Table, rows: Ints, run: RankRun) -> list[int]:
    """Those of some inputs that are parameters."""
    at = pairs.numbers("row_reference")[rows]
    needs_gradient = run.tensors.numbers("requires_grad").astype(bool)
    rows = rows[(at >= 0) & needs_gradient[at]]
    return [row for row in rows.tolist() if weight_of(run, int(pairs["row_reference"][row])) is not None]


def weight_of(run: RankRun, row: int) -> str | None:
    """The parameter that a function takes as an input: a recording of functions alone has no other row of it.

    Nothing recorded has made it, it takes a gradient, and one of its shape was seen of a parameter of that module, if
    any gradient was. Empty where it is not known which; None for what is not a parameter.
    """
    call = int(run.call_rows[row])
    if not run.tensors["requires_grad"][row] or run.calls["kind"][call] == "module":
        return None
    if run.tensors["role"][row] != "input" or graph_of(run).producer[row] >= 0:
        return None
    kind, site, shape = run.calls.coded("kind"), run.calls.coded("site"), run.tensors.coded("shape")
    gradients = np.append(kind.codes == kind.code("parameter"), False)[run.call_rows]
    if not gradients.any():
        return ""
    alike = gradients & (shape.codes == shape.codes[row])
    module = f"{run.calls['site'][call].partition('/')[0]}.".removeprefix(f"{ROOT}.")
    names = {str(site[at]) for at in run.call_rows[alike].tolist()}
    names = {name for name in names if name.startswith(module)}
    path = str(run.tensors["path"][row]).rpartition(".")[2]
    exact = [name for name in names if name == module + path]
    return None if not names else exact[0] if exact else names.pop() if len(names) == 1 else ""


def sentence(
    pairs: Table,
    row: int,
    weight: TensorPlace,
    name: str,
    inputs: list[TensorPlace],
    company: OtherWeights,
    reference: RankRun,
) -> str:
    """What is known about the parameter or buffer `weight` of `row`, by name, and where to look."""
    agree = clues.agreement([("input", inputs)])
    text = f"{agree}, but its" if agree else "Its"
    text += f" {weight.tensor} already differs on entry ({clues.verdict_of(weight)})"
    if any(company):
        text += f", and so {'does' if sum(company) == 1 else 'do'} {company} in this step"
    else:
        text += f", as the only {weight.noun} in this step"
    if weight.phase == "update":
        return f"{text}. {_about_entry(pairs, weight)}"
    agreed = _agreed_before(pairs, row)
    if agreed is not None and (agreed.step == weight.step or weight.role == "state"):
        own = f", be it the forward of {weight.module} itself or other code" if weight.role == "state" else ""
        return f"{text}. It still agreed at {agreed}: look at what wrote to it since{own}."
    step = _step_before(pairs, weight.step)
    if step is None:
        return f"{text}. {_about_first_step(weight.step, reference)}"
    if step != weight.step - 1:
        return f"{text}. The step before was not compared: look at what wrote to it since step {step}."
    if weight.role == "state":
        return f"{text}. Look at what wrote to it in step {step}."
    gradient = _gradient(pairs, name, step)
    if gradient is None:
        return f"{text}. Its gradient in step {step} was not compared: look at the update of step {step}."
    text += f", though its gradient in step {step} agrees ({clues.verdict_of(gradient)}): look at "
    if any(company):
        return (
            f"{text}the update of step {step}, that is the optimizer and its settings, and at what clips or scales "
            "the gradients after the backward."
        )
    return f"{text}what wrote to it after the backward of step {step}, be it the optimizer or other code."


def about_update(entry: TensorPlace) -> str:
    """The sentence where an optimizer is given something wrong, and everything before agrees."""
    if entry.path.startswith("param_groups"):
        return f"The setting `{entry.path}` of {entry.site} differs: look at how it is made, and at its schedule."
    return (
        f"The gradient that the optimizer is given for {entry.site} already differs, though everything before agrees: "
        "look at what happens to gradients after the backward, such as clipping, unscaling and summing over ranks."
    )


def _about_entry(pairs: Table, weight: TensorPlace) -> str:
    """Where to look for what wrote to a weight, or to the state of an optimizer, before its step."""
    if weight.role == "state":
        return "Look at what was loaded into the optimizer, and at its steps before."
    module, _, name = weight.site.rpartition(".")
    site, path = pairs.coded("site"), pairs.coded("path")
    used = (site.codes == site.code(module or ROOT)) & (path.codes == path.code(name)) & has_role(pairs, "parameter")
    rows = np.flatnonzero(used & (pairs.numbers("step") == weight.step))
    if not len(rows) or pairs.coded("verdict").codes[rows[-1]] not in AGREEING:
        return "Look at what wrote to it before the optimizer did."
    place = TensorPlace.of(pairs, int(rows[-1]))
    return f"It still agreed at {place}: look at what wrote to it since, before the optimizer."


def has_role(pairs: Table, *roles: str) -> Bools:
    """Which rows are in one of these roles."""
    column = pairs.coded("role")
    return np.isin(column.codes, [column.code(role) for role in roles])


def _about_first_step(step: int, reference: RankRun) -> str:
    if np.any(reference.calls.numbers("step") < step):
        return (
            "The step before was not compared: compare from an earlier step on, to tell whether the initialisation "
            "or an update is to blame."
        )
    if step:
        return (
            "This is the first step of the recording: look at the initialisation or the loaded weights, and at the "
            "steps before it."
        )
    return "This is the first step: look at the initialisation or the loaded weights."


def _step_before(pairs: Table, step: int) -> int | None:
    """The last step before this one that has rows."""
    steps: Ints = np.unique(pairs.numbers("step"))
    before = steps[steps < step]
    return int(before[-1]) if len(before) else None


def _agreed_before(pairs: Table, row: int) -> TensorPlace | None:
    """The last earlier row of the same parameter or buffer, if it agrees."""
    same = np.ones(row, np.bool_)
    for name in ("site", "role", "path"):
        codes = pairs.coded(name).codes
        same &= codes[:row] == codes[row]
    rows = np.flatnonzero(same)
    if not len(rows) or pairs.coded("verdict").codes[rows[-1]] not in AGREEING:
        return None
    return TensorPlace.of(pairs, int(rows[-1]))


def _gradient(pairs: Table, name: str, step: int) -> TensorPlace | None:
    """The last gradient of the parameter in that step, if it was compared."""
    site = pairs.coded("site")
    wanted = (site.codes == site.code(name)) & (pairs.numbers("step") == step) & has_role(pairs, "gradient")
    rows = np.flatnonzero(wanted)
    if not len(rows) or pairs.coded("verdict").codes[rows[-1]] not in AGREEING:
        return None
    return TensorPlace.of(pairs, int(rows[-1]))


def _name(pairs: Table, row: int) -> tuple[int, ...]:
    return tuple(int(pairs.coded(name).codes[row]) for name in ("role", "site", "path"))


def _tensor(pairs: Table, row: int, reference: RankRun, candidate: RankRun) -> tuple[int, ...]:
    """What the names of one tied tensor have in common: the bits on both sides.

    Tensors of one repeated value, such as fresh norms and biases, have the same bits without being tied.
    """
    bits: list[int] = []
    for run, side in ((reference, "reference"), (candidate, "candidate")):
        cells = run.tensors.row(int(pairs.numbers(f"row_{side}")[row]))
        if cells["fingerprint"] is None or cells["min"] == cells["max"]:
            return (row,)
        bits.append(cells["fingerprint"])
    return tuple(bits)
