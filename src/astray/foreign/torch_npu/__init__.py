"""Dumps of torch_npu.hooks, read as runs and written: a ".pkl" of JSON lines, or a folder of numpy's files.

They know functions and no modules, steps or micro steps: every call lies in step 0, in a site of its function alone.

names.py      a tensor of a dump, and its name
lines.py      reads the ".pkl", and says what is wrong with it
numbers.py    the numbers of its lines
arrays.py     reads the folder
calls.py      the tensors of a dump → calls
writer.py     the rows of a recording → whole calls → either form
dumping.py    the recordings behind `register_hook`, and which steps they dump
overflow.py   the guard behind `wrap_checkoverflow_hook`
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from astray.errors import RunError
from astray.foreign.dump_rows import DumpRank, DumpRows
from astray.foreign.torch_npu import arrays, lines
from astray.foreign.torch_npu.calls import gather
from astray.foreign.torch_npu.names import TorchNpuDump
from astray.foreign.torch_npu.writer import translate
from astray.store.run import RankRun, RunData
from astray.store.run_info import RunInfo
from astray.store.safe_paths import entries

__all__ = ["NAME", "open_dump", "read", "recognises", "translate"]

NAME = "torch_npu"

_OF_RANK = re.compile(r"(?:(.+)_)?rank(\d{1,6})(?:\.\w+)?")


def recognises(path: Path) -> bool:
    """Whether a file or a folder is such a dump: of one rank, or of several side by side."""
    if path.is_file():
        return lines.recognises(path)
    return path.is_dir() and (arrays.recognises(path) or bool(_ranks_in(path)))


def open_dump(path: Path) -> RunData:
    """The dump as a run. Raises RunError when nothing of it can be read."""
    if not path.exists():
        raise RunError(f"{path} does not exist.")
    places = {_rank_of(path): path} if path.is_file() or arrays.recognises(path) else _ranks_in(path)
    if not places:
        raise RunError(f"{path} holds no dump of torch_npu.hooks, or several. Give the file.")
    problems: list[str] = []
    ranks = {rank: one for rank, place in places.items() if (one := _rank(rank, place, problems)) is not None}
    if not ranks:
        raise RunError(problems[0])
    stamp = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    info = RunInfo(
        astray="",
        created=stamp.isoformat(timespec="seconds"),
        framework="torch",
        world_size=max(places) + 1,
        settings={"format": NAME, "level": ["function"], "modules": "not known", "steps": "not known: all are step 0"},
    )
    return RunData(path, info, ranks, problems)


def read(path: Path) -> TorchNpuDump:
    """The tensors of one rank as the dump has them, in order. Raises RunError when there are none."""
    return arrays.read(path) if path.is_dir() else lines.read(path)


def _rank(rank: int, path: Path, problems: list[str]) -> RankRun | None:
    """None, and a problem, when nothing of it can be read."""
    try:
        dump = read(path)
    except RunError as error:
        problems.append(str(error))
        return None
    rows = DumpRows()
    rows.problems.extend(dump.problems)
    gather(dump.tensors, rows)
    return DumpRank(rank, rows.source(complete=not dump.is_cut, ended="cut short" if dump.is_cut else "normally"))


def _rank_of(path: Path) -> int:
    """The rank by the name of a file; 0 when it says none."""
    found = _OF_RANK.fullmatch(path.name)
    return int(found[2]) if found else 0


def _ranks_in(folder: Path) -> dict[int, Path]:
    """The ranks of one dump that lie side by side in a folder, as astray writes them; none when there are several."""
    try:
        inside = entries(folder)
    except RunError:
        return {}
    found: dict[str, dict[int, Path]] = {}
    for path in inside:
        rank = _OF_RANK.fullmatch(path.name)
        if rank and (arrays.recognises(path) if path.is_dir() else lines.recognises(path)):
            found.setdefault(rank[1] or "", {})[int(rank[2])] = path
    return dict(sorted(found.popitem()[1].items())) if len(found) == 1 else {}
