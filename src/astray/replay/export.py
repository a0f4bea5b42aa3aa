"""Writes one recorded call as a script and a safetensors file that make it again with nothing but torch.

What `run.export_call()` and `astray replay --export` do. Here is which call is meant, and how files are written;
`scripted_call.py` has what is said of a call, and `script.py` how.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from astray.errors import RunError, RunExists, UsageError
from astray.replay.arguments import NotPlainError
from astray.replay.calls import CannotReplayError, RecordedCalls
from astray.replay.replay import ReplayedCall, no_such_call, parse_selection
from astray.replay.script import script
from astray.replay.scripted_call import scripted
from astray.stats.dtypes import DTYPES
from astray.steps import StepSelection
from astray.store import RankRun, RunData
from astray.wording import counted, sized

LARGEST_ATTACHMENT = 25_000_000
"""Bytes that trackers of issues take as an attachment; some take less."""

_MOST_LISTED = 8


class ExportedCall(NamedTuple):
    """The two files of a call, and what it is called.

    >>> print(exported)
    Wrote bug.py (5.1 kB) and bug.safetensors (98.4 kB): torch.nn.functional.linear of h.0.proj/linear#0 in step 0.
    Run it with: python bug.py
    """

    script: Path
    values: Path
    what: str

    def __str__(self) -> str:
        sizes = [sized(path.stat().st_size) for path in (self.script, self.values)]
        text = f"Wrote {self.script} ({sizes[0]}) and {self.values} ({sizes[1]}): {self.what}."
        if self.values.stat().st_size > LARGEST_ATTACHMENT:
            text += f"\nMost issue trackers take files of {sized(LARGEST_ATTACHMENT)}; put this one where a link leads."
        return f"{text}\nRun it with: python {self.script}"


class _Candidate(NamedTuple):
    """A call that may be meant."""

    calls: RecordedCalls
    rank: RankRun
    row: int
    call: dict[str, Any]


def export_call(
    run: RunData,
    call: str | ReplayedCall,
    path: str | os.PathLike[str],
    *,
    steps: str | int | None = None,
    rank: int | None = None,
    micro: int | None = None,
    phase: str | None = None,
    force: bool = False,
) -> ExportedCall:
    """Writes a call as a script and a file of its tensors. See `astray.Run.export_call` for the arguments."""
    target = Path(path)
    values = target.with_suffix(".safetensors")
    _check(target, values, force)
    found = _chosen(run, call, steps, {"rank": rank, "micro": micro, "phase": phase})
    try:
        with torch.random.fork_rng(devices=[]):
            content = scripted(found.calls, found.rank, found.row)
        text = script(content, target.name, values.name)
    except (CannotReplayError, NotPlainError) as error:
        raise RunError(f"{_place(found.call)} cannot be exported: {error}.") from None
    tensors = {name: each.values for name, each in content.inputs.items()}
    tensors |= {f"recorded.{name}": each.recorded.values for name, each in content.results.items()}
    try:
        _replace(values, safetensors(tensors))
        _replace(target, [text.encode()])
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error.strerror or error}. Choose another place.") from None
    return ExportedCall(target, values, f"{content.written.name} of {_place(found.call)}")


def _check(target: Path, values: Path, force: bool) -> None:
    if target.suffix != ".py":
        raise UsageError(f"{target} is not a name for a script. Give one that ends in .py.")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder. Make it first, or give the name of a script elsewhere.")
    for path in (target, values):
        if path.is_dir():
            raise UsageError(f"{path} is a folder. Give the name of a script in it.")
        if path.exists() and not force:
            raise RunExists(f"{path} is there already. Choose another name, or overwrite it with --force.")


def _place(call: Mapping[str, Any]) -> str:
    micro = f", micro step {call['micro']}" if call["micro"] else ""
    return f"{call['site']}#{call['call']} in step {call['step']}{micro}"


# -- which call --------------------------------------------------------------------------------------------------------


def _chosen(run: RunData, call: str | ReplayedCall, steps: str | int | None, wanted: Mapping[str, Any]) -> _Candidate:
    """The one call that is meant. Raises UsageError where it is none, or several."""
    if run.info.framework != "torch":
        raise RunError(
            f"{run.path} was recorded from {run.info.framework or 'no framework'}, and only calls of PyTorch can be "
            "exported."
        )
    if wanted["rank"] is not None and wanted["rank"] not in run.ranks:
        raise UsageError(f"{run.path} has no rank {wanted['rank']}; it has {', '.join(map(str, run.ranks)) or 'none'}.")
    found = list(_candidates(run))
    if isinstance(call, ReplayedCall):
        row = call.call
        found = [each for each in found if (each.call["rank"], each.call["seq"]) == (row["rank"], row["seq"])]
        call, steps = f"{row['site']}#{row['call']}", row["step"]
    selection, wanted_steps = parse_selection(call), StepSelection.parse(steps)
    assert selection is not None
    sites = {each.call["site"] for each in found}
    found = [each for each in found if selection.wants(each.call) and each.call["step"] in wanted_steps]
    found = [each for each in found if all(value in (None, each.call[name]) for name, value in wanted.items())]
    if not found:
        raise no_such_call(run, call, selection, wanted_steps, sites)
    exactly = [each for each in found if each.call["site"] == selection.site]
    found = exactly or found  # a module's own call rather than those inside of it
    if len(found) > 1:
        raise _several(run, call, [each.call for each in found])
    return found[0]


def _candidates(run: RunData) -> Iterator[_Candidate]:
    for rank in run.ranks.values():
        calls = RecordedCalls(rank)
        for row in calls.rows():
            yield _Candidate(calls, rank, row, calls.call(row))


def _several(run: RunData, site: str, calls: list[dict[str, Any]]) -> UsageError:
    """Lists the calls, and says by what one of them is chosen."""
    options = {"step": "--steps", "rank": "--rank", "micro": "--micro", "phase": "--phase"}
    differing = [name for name in options if len({each[name] for each in calls}) > 1]
    listed = [
        " ".join([f"{each['site']}#{each['call']}", *(f"{options[name]} {each[name]}" for name in differing)])
        for each in calls[:_MOST_LISTED]
    ]
    more = f", and {len(calls) - _MOST_LISTED:,} more" if len(calls) > _MOST_LISTED else ""
    return UsageError(
        f"{run.path} has {counted(len(calls), 'call')} of {site!r}, and one is exported. Choose one: "
        f"{', '.join(listed)}{more}."
    )


# -- files -------------------------------------------------------------------------------------------------------------


def safetensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    """The parts of a safetensors file. The largest elements come first, so that all of them are aligned."""
    ordered = sorted(tensors.items(), key=lambda each: -each[1].element_size())
    header, end = dict[str, Any](), 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")].safetensors
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        yield tensor.view(-1).view(torch.uint8).numpy().tobytes()


def _replace(target: Path, parts: Iterable[bytes]) -> None:
    """Writes a file: the complete one, or none."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.writelines(parts)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
