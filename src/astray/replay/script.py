"""The text of a script that makes one recorded call again with nothing but torch, to attach to a bug report.

Reads a `ScriptedCall`. The call stands first, as a person would write it; what reads the
file and measures errors is the same in every script (`script_parts.py`). Its readers have never heard of astray, so it
holds no more than it needs, and it is formatted as Black and ruff do.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from decimal import ROUND_CEILING, Context

from astray.replay import script_parts
from astray.replay.scripted_call import ScriptedCall, StoredTensor
from astray.replay.source import WIDTH, Bracketed, Statement, literal, part_of
from astray.stats.dtypes import DTYPES

_THREE_DIGITS = Context(prec=3, rounding=ROUND_CEILING)


def script(call: ScriptedCall, script_name: str, values_name: str) -> str:
    """The script. script_name, values_name: of its two files."""
    integers = any(not each.dtype.is_floating_point for each in call.results.values())
    parts = [
        f"{_docstring(call, script_name, values_name)}\n\n{_imports(call)}\n\n{_constants(call, values_name)}",
        _compute(call),
        script_parts.LAID_OUT if call.layouts else "",
        script_parts.READ,
        script_parts.ULPS,
        script_parts.off(integers),
        script_parts.main(call.draws),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _docstring(call: ScriptedCall, script_name: str, values_name: str) -> str:
    script_name, values_name = (ascii(name)[1:-1].replace('"', "'") for name in (script_name, values_name))
    plain, device = f"    python {script_name}", f"    python {script_name} --device cuda"
    usage = f"{plain:{len(device)}}    makes the call again, on the CPU"
    usage += "" if call.draws else f"\n{device}    or on an accelerator"
    exact = (
        "The exact result is that of the CPU here, since in float64 it would draw other random numbers."
        if call.draws
        else "The exact result is computed in float64."
    )
    paragraphs = [
        f"One call of {call.written.name} in {_dtype(call)}.",
        _filled(call.summary),
        usage,
        _filled(
            f"It needs torch, and {values_name} beside it. It says how far the recorded result and that of this device "
            f"are from the exact one, and whether they are the same to the bit. {exact}"
        ),
        _filled("Exit code 0: this device is as exact as rounding allows, 1: it is not, 125: it does not run here."),
    ]
    return '"""' + "\n\n".join(paragraphs) + '\n"""'


def _dtype(call: ScriptedCall) -> str:
    """The dtype of the first result."""
    return str(next(iter(call.results.values())).dtype).removeprefix("torch.")


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _imports(call: ScriptedCall) -> str:
    unlimited = math.inf in {limit for each in call.results.values() for limit in (each.most, each.most_rms)}
    names = ["argparse", "json", *(["math"] if unlimited else []), "sys"]
    return "\n".join([*(f"import {name}" for name in names), "from pathlib import Path", "", "import torch"])


def _constants(call: ScriptedCall, values_name: str) -> str:
    dtypes = [f"{literal(str(DTYPES[name].safetensors))}: torch.{name}" for name in call.dtypes]
    results = [
        f"    {literal(name)}: ({each.dtype}, {_limit(each.most)}, {_limit(each.most_rms)}),"
        for name, each in call.results.items()
    ]
    origin = [f"# {line}" for text in call.origin for line in textwrap.wrap(text, WIDTH - 2)]
    return "\n".join(
        [
            *origin,
            Statement("RECORDED = ", literal(call.recorded_on)).formatted(0),
            Statement("FILE = ", f"Path(__file__).with_name({literal(values_name)})").formatted(0),
            Statement("DTYPES = ", Bracketed("{", [*dtypes], "}")).formatted(0),
            "",
            *(["# As torch was set.", *call.settings, ""] if call.settings else []),
            *_layouts(call),
            "# Of each result the dtype that it is rounded to, and what rounding explains in ulps of",
            "# that: the largest error of an element, and the root mean square of all.",
            "RESULTS = {",
            *results,
            "}",
        ]
    )


def _layouts(call: ScriptedCall) -> Iterator[str]:
    if call.layouts:
        yield "# What did not lie in one block: its shape, and the strides of its dimensions."
        yield "LAYOUTS = {"
        for name, each in call.layouts.items():
            yield f"    {literal(name)}: ({each.shape}, {each.stride}),"
        yield "}"
        yield ""


def _limit(value: float) -> str:
    """A limit in three digits, rounded up."""
    return "math.inf" if value == math.inf else repr(float(_THREE_DIGITS.create_decimal(value)))


# -- the call ----------------------------------------------------------------------------------------------------------


def _compute(call: ScriptedCall) -> str:
    results = [f"{literal(name)}: {_expression(each.part, each.recorded)}" for name, each in call.results.items()]
    return "\n".join(
        [
            "def compute(tensors, device, exact):",
            '    """The results of the call by their names: as it was made, or exact."""',
            "",
            *_given(call),
            "",
            *([*_inputs(call), ""] if call.written.variables else []),
            *(['    torch.set_rng_state(given("generator"))'] if call.draws else []),
            *(statement.formatted(4) for statement in call.written.statements),
            "",
            *(_gradients(call, number) for number in range(len(call.backwards))),
            Statement("return ", Bracketed("{", [*results], "}")).formatted(4),
        ]
    )


def _expression(part: str, recorded: StoredTensor) -> str:
    return f"torch.view_as_real({part}.resolve_conj())" if recorded.pairs else part


def _given(call: ScriptedCall) -> Iterator[str]:
    """The function that takes a tensor from the file."""
    changes = []
    if call.cast is not None:
        changes += ["if tensor.is_floating_point():", f"    tensor = tensor.to({call.cast})  # as autocast did"]
    if not call.draws:  # in another dtype other random numbers are drawn
        changes += ["if exact and tensor.is_floating_point():", "    tensor = tensor.double()"]
    copied = "tensors[name].to(device, copy=True)"
    yield "    def given(name):"
    if changes or call.layouts:
        yield f"        tensor = {copied}"
        yield from (f"        {line}" for line in changes)
        copied = "laid_out(tensor, *LAYOUTS[name]) if name in LAYOUTS else tensor" if call.layouts else "tensor"
    yield f"        return {copied}"


def _inputs(call: ScriptedCall) -> Iterator[str]:
    """The inputs, each in a variable."""
    leaves = {call.written.variables[path] for each in call.backwards for path in each.sent}
    for variable in dict.fromkeys(call.written.variables.values()):
        line = f"    {variable} = {_taken(variable, call.inputs[variable])}"
        if variable not in leaves:
            yield line
        elif len(line) + len(".requires_grad_()") <= WIDTH:
            yield f"{line}.requires_grad_()"
        else:
            yield f"{line}\n    {variable}.requires_grad_()"


def _taken(name: str, stored: StoredTensor) -> str:
    """The expression for a tensor of the file."""
    given = f"given({literal(name)})"
    return f"torch.view_as_complex({given})" if stored.pairs else given


def _gradients(call: ScriptedCall, number: int) -> str:
    """The gradients that a backward of the call sends, of those that arrived."""
    backward = call.backwards[number]
    roots = [part_of(path) for path in backward.arrived]
    variables = [call.written.variables[path] for path in backward.sent]
    arrived = [_taken(name, call.inputs[name]) for name in backward.arrived.values()]
    items: list[Bracketed | str] = [Bracketed("[", [*each], "]") for each in (roots, variables, arrived)]
    if number < len(call.backwards) - 1:
        items.append("retain_graph=True")
    names = list(backward.sent.values())
    target = f"({names[0]},)" if len(names) == 1 else ", ".join(names)
    return Statement(f"{target} = ", Bracketed("torch.autograd.grad(", items, ")")).formatted(4)
