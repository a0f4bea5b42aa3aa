"""Opens a folder of the saving hook as a run: outputs of leaf layers, and the gradients of parameters.

Rows are in the order of execution: micro step by micro step, first outputs and then gradients, by their index. Headers
of files are read on opening, values on demand.
"""

from __future__ import annotations

import datetime
from collections import Counter
from functools import partial
from itertools import groupby
from pathlib import Path

from astray.errors import RunError
from astray.foreign import array_files as npy
from astray.foreign.dump_rows import DumpRank, DumpRows, ValueLocation
from astray.foreign.saving_hook.files import FOLDERS, NAME, Folder, TensorFile, list_rank, rank_folders, rank_of
from astray.records import Role
from astray.store.run import RankRun, RunData
from astray.store.run_info import RunInfo


def recognises(path: Path) -> bool:
    """Whether a folder has the folders of ranks in `tensors` or `grads`."""
    try:
        return any(
            rank_of(entry.name) is not None and entry.is_dir()
            for folder in FOLDERS
            if (path / folder).is_dir()
            for entry in (path / folder).iterdir()
        )
    except OSError:  # no permission to read it
        return False


def open_dump(path: Path) -> RunData:
    """Open the dump at `path`. What cannot be read is listed in `problems`; raises RunError where there is nothing."""
    homes: dict[Folder, dict[int, Path]] = {}
    problems: list[str] = []
    for folder in FOLDERS:
        homes[folder], of_folder = rank_folders(path, folder)
        problems += of_folder
    ranks = sorted({rank for rank_homes in homes.values() for rank in rank_homes})
    if not ranks:
        raise RunError(f"{path} has no folder of a rank, such as tensors/rank_0. Give the folder that holds `tensors`.")
    read: dict[int, RankRun] = {
        rank: _read_rank(rank, {folder: ranks_of[rank] for folder, ranks_of in homes.items() if rank in ranks_of})
        for rank in ranks
    }
    created = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    info = RunInfo(
        astray="", created=created.isoformat(timespec="seconds"), world_size=len(ranks), settings={"format": NAME}
    )
    return RunData(path, info, read, problems)


def _read_rank(rank: int, homes: dict[Folder, Path]) -> DumpRank:
    rows = DumpRows()
    by_micro: dict[tuple[int, Folder], list[TensorFile]] = {}
    for folder, home in homes.items():
        listed = list_rank(home, folder)
        rows.problems += listed.problems
        for file in listed.files:
            by_micro.setdefault((file.name.micro, folder), []).append(file)
    with_gradient: set[str] = set()
    for (_, folder), files in sorted(by_micro.items(), key=lambda item: (item[0][0], FOLDERS.index(item[0][1]))):
        if folder == "tensors":
            _add_outputs(rows, files)
        else:
            _add_gradients(rows, files, with_gradient)
    return DumpRank(rank, rows.source())


def _add_outputs(rows: DumpRows, files: list[TensorFile]) -> None:
    """Add calls for the outputs of one micro step.

    The tensors of one call follow each other, each with another path; a path that comes again begins the next call.
    """
    calls_at: Counter[str] = Counter()
    for (site, type), of_layer in groupby(files, key=lambda file: (file.name.site, file.name.type)):
        seq, seen = -1, set[str]()
        for file in of_layer:
            path = file.name.path
            if not seen or path in seen or "out" in (path, *seen):
                seq = rows.call(site, type, micro=file.name.micro, call=calls_at[site])
                calls_at[site] += 1
                seen.clear()
            seen.add(path)
            _add_tensor(rows, seq, "output", path, file.path)


def _add_gradients(rows: DumpRows, files: list[TensorFile], with_gradient: set[str]) -> None:
    """Add the gradients of one micro step: the first of a parameter has the path `grad`, later ones `added`.

    These are the paths of a recording with gradient accumulation, where `grad` is the sum so far. The files hold no
    sums.
    """
    calls_at: Counter[str] = Counter()
    before = frozenset(with_gradient)
    for file in files:
        site, type = file.name.site, file.name.type
        seq = rows.call(site, type, kind="parameter", micro=file.name.micro, call=calls_at[site], phase="backward")
        calls_at[site] += 1
        _add_tensor(rows, seq, "gradient", "added" if site in before else "grad", file.path)
        with_gradient.add(site)


def _add_tensor(rows: DumpRows, seq: int, role: Role, path: str, file: Path) -> None:
    try:
        if not file.is_file():
            raise RunError(f"{file} is not a plain file.")
        spec = npy.describe(file)
    except RunError as error:  # the call stays, so that later calls keep their numbers
        rows.problem(str(error))
        return
    rows.tensor(seq, role, path, *spec, values=ValueLocation(str(file), partial(npy.read, file), spec.nbytes))
