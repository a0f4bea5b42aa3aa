"""A replay as text, for a terminal: the worst calls, one call in detail, what was left out; and as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import PurePath
from typing import Any

from astray.formatting import figures
from astray.formatting.page import BOLD, GREEN, RED, TextPage, TextTable
from astray.replay.call_judgement import ReplayedTensor
from astray.replay.replay import Replay, ReplayedCall
from astray.wording import counted

WIDTH = 100
TOP = 10
"""Calls in the table, unless more are asked for; those that stand out are all there."""

_MOST_STANDING_OUT = 50
_MOST_TYPES = 4

_TABLE = TextTable(
    words=("site", "phase", "tensor", "where"),
    droppable=("dtype", "where", "plain"),
    min_widths={"site": 24, "where": 14, "tensor": 10},
    last_resort={"site": 12, "tensor": 6},
)


def render(
    replay: Replay,
    *,
    top: int = TOP,
    detailed: bool = False,
    width: int = WIDTH,
    table_width: int | None = None,
    colour: bool = False,
) -> str:
    """The report as text. top: calls in the table, 0 for all. detailed: each tensor of each call instead."""
    page = TextPage(width, colour, table_width)
    page.line(
        page.paint(replay.path, BOLD) + f"        {len(replay.calls):,} of {counted(replay.total, 'call')} replayed"
    )
    page.line()
    _verdict(page, replay)
    page.line()
    shown = (replay.calls[:top] if top else replay.calls) if detailed else _shown(replay, top)
    if detailed:
        for call in shown:
            _call_in_detail(page, call)
    elif shown:
        _table(page, shown)
    if len(shown) < len(replay.calls):
        page.line(f"… {counted(len(replay.calls) - len(shown), 'more call')}. --top 0 shows all.")
        page.line()
    if shown and not detailed:
        page.entry("surprise", "how many times as far off as rounding explains: beyond 1 a call stands out", margin=0)
    _left_out(page, replay)
    return page.text()


def _verdict(page: TextPage, replay: Replay) -> None:
    number = len(replay.stands_out)
    if not replay.calls:
        page.line(page.paint("No call could be replayed.", BOLD))
    elif not number:
        text = "Nothing stands out: no result is further from the exact one than rounding explains."
        page.line(page.paint("✓ ", GREEN) + text)
    else:
        worst = replay.calls[0]
        gives = "gives what its" if number == 1 else "give what their"
        said = f"{counted(number, 'call')} {gives} inputs do not explain"
        page.line(page.paint(f"✗ {said}, first {worst.site}#{worst.call['call']}", RED))
        if worst.stack:
            frame = worst.stack[0]
            page.code(f"{PurePath(frame.file).name}:{frame.line} in {frame.function}", frame.code)


def _shown(replay: Replay, top: int) -> list[ReplayedCall]:
    """The first calls, and all that stand out."""
    return replay.calls[: max(top, min(len(replay.stands_out), _MOST_STANDING_OUT))] if top else replay.calls


def _table(page: TextPage, calls: list[ReplayedCall]) -> None:
    places = [name for name in ("rank", "step", "micro") if len({call.call[name] for call in calls}) > 1]
    for line in _TABLE.lines([_cells(call, call.worst, places) for call in calls], page.table_width):
        page.line(line)
    page.line()


def _cells(call: ReplayedCall, tensor: ReplayedTensor, places: list[str]) -> dict[str, str]:
    """What a row has. places: those of `rank`, `step` and `micro` in which the calls differ."""
    judgement = tensor.judgement
    return {
        **{name: str(call.call[name]) for name in places},
        "site": f"{call.site}#{call.call['call']}",
        "phase": tensor.phase,
        "tensor": tensor.path,
        "dtype": figures.dtype(tensor.dtype),
        "ulps": _number(judgement.ulps) if judgement.unequal is None else _differing(judgement.unequal),
        "plain": _number(judgement.plain),
        "ratio": _number(judgement.ratio),
        "surprise": _number(judgement.surprise),
        "where": _where(tensor),
    }


def _differing(unequal: int) -> str:
    return f"{unequal:,} differ" if unequal else "equal"


def _where(tensor: ReplayedTensor) -> str:
    """The tile that is wrong, or the worst element."""
    judgement = tensor.judgement
    if not judgement.ulps:
        return ""
    if judgement.tile is not None and judgement.unequal is None and tensor.shape:
        return "[{}:{}, {}:{}]".format(*judgement.tile)
    return str(list(judgement.at)) if judgement.at else ""


def _call_in_detail(page: TextPage, call: ReplayedCall) -> None:
    row = call.call
    place = f"step {row['step']}, micro step {row['micro']}, rank {row['rank']}"
    page.line(page.paint(f"{call.site}#{row['call']}", BOLD) + f"    {row['type']}, {place}")
    if call.stack:
        frame = call.stack[0]
        page.code(f"{PurePath(frame.file).name}:{frame.line} in {frame.function}", frame.code)
    for tensor in call.tensors:
        judgement = tensor.judgement
        page.line()
        name = f"{tensor.phase} {tensor.path}"
        page.entry(
            name[:11],
            f"{figures.dtype(tensor.dtype)} {figures.shape(tensor.shape)}" + (f"  ({name})" if len(name) > 11 else ""),
        )
        if judgement.unequal is not None:
            page.entry(
                "",
                "equal" if not judgement.unequal else f"{judgement.unequal:,} of {judgement.size:,} elements differ",
            )
            continue
        page.entry("recorded", f"{_number(judgement.ulps)} ulps off at most, {_number(judgement.rms)} root mean square")
        page.entry(
            "plain",
            f"{_number(judgement.plain)} at most, {_number(judgement.plain_rms)}: the same call on this processor",
        )
        page.entry("ratio", f"{_number(judgement.ratio)}; in the worst tile {_number(judgement.tile_ratio)}")
        page.entry("explained", _explanation(judgement.surprise))
        if judgement.recorded is not None and judgement.ulps:
            page.entry("worst", f"{list(judgement.at)}: {judgement.recorded:.6g}, exact {judgement.exact:.9g}")
        if judgement.tile is not None:
            first = judgement.tile
            page.entry(
                "tile",
                f"rows {first[0]}:{first[1]}, columns {first[2]}:{first[3]}; rows are counted through all dimensions",
            )
        if judgement.beyond:
            page.entry(
                "beyond", f"{judgement.beyond:,} of {judgement.size:,} elements are further off than can be explained"
            )
    for reason, number in Counter(call.lost).items():
        page.line()
        page.entry("not judged", reason + (f" ({number:,} times)" if number > 1 else ""))
    page.line()


def _explanation(surprise: float) -> str:
    if surprise > 1:
        return f"no: {_number(surprise)} times as far off as rounding explains"
    return f"yes: {_number(surprise)} of what rounding explains"


def _left_out(page: TextPage, replay: Replay) -> None:
    gone = Counter(reason for call in replay.calls for reason in call.lost)
    label = "not replayed"
    for reason, types in sorted(replay.left_out.items(), key=lambda each: -sum(each[1].values())):
        names = sorted(types, key=lambda name: -types[name])
        more = f" and {len(names) - _MOST_TYPES:,} more" if len(names) > _MOST_TYPES else ""
        page.entry(
            label,
            f"{counted(sum(types.values()), 'call')}: {reason} ({', '.join(names[:_MOST_TYPES])}{more})",
            margin=0,
        )
        label = ""
    label = "not judged"
    for reason, number in gone.most_common():
        page.entry(label, f"{counted(number, 'tensor')} of replayed calls: {reason}", margin=0)
        label = ""


def _number(value: float) -> str:
    """Two digits; 0.9996 is 1.0, as 1.0004 is."""
    if 0.995 <= value < 1:
        value = 1.0
    return figures.surprise(value) if value else "0"


def as_json(replay: Replay) -> str:
    """The replay as JSON: every call with all its tensors, and what was left out. What is not finite is a text."""
    content = {
        "run": replay.path,
        "calls": [_call_as_json(call) for call in replay.calls],
        "stand out": len(replay.stands_out),
        "left out": [{"reason": reason, "types": types} for reason, types in replay.left_out.items()],
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def _call_as_json(call: ReplayedCall) -> dict[str, Any]:
    fields = ("rank", "step", "micro", "site", "call", "type", "kind", "recompute")
    return {
        **{name: call.call[name] for name in fields},
        "stands out": call.stands_out,
        "tensors": [
            {
                "phase": tensor.phase,
                "path": tensor.path,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                **{name: _plain(value) for name, value in tensor.judgement._asdict().items()},
            }
            for tensor in call.tensors
        ],
        "not judged": call.lost,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
