"""Opens a folder of the saving hook as a run: outputs of leaf layers, and the gradients of parameters.

Rows are put into the order of execution: micro step by micro step, first outputs and then gradients, by their index.
Headers of files are read on opening, values when they are looked at.
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
    except OSError:  # a folder that may not be read
        return False


def open_dump(path: Path) -> RunData:
    """Open the dump at `path`. What cannot be read is a sentence in `problems`; RunError says that nothing is there."""
    homes: dict[Folder, dict[int, Path]] = {}
    problems: list[str] = []
    for folder in FOLDERS:
        homes[folder], wrong = rank_folders(path, folder)
        problems += wrong
    ranks = sorted({rank for found in homes.values() for rank in found})
    if not ranks:
        raise RunError(f"{path} has no folder of a rank, such as tensors/rank_0. Give the folder that holds `tensors`.")
    read: dict[int, RankRun] = {
        rank: _read_rank(rank, {folder: found[rank] for folder, found in homes.items() if rank in found})
        for rank in ranks
    }
    created = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    info = RunInfo(
        astray="", created=created.isoformat(timespec="seconds"), world_size=len(ranks), settings={"format": NAME}
    )
    return RunData(path, info, read, problems)


def _read_rank(rank: int, homes: dict[Folder, Path]) -> DumpRank:
    rows = DumpRows()
    of_micro: dict[tuple[int, Folder], list[TensorFile]] = {}
    for folder, home in homes.items():
        listed = list_rank(home, folder)
        rows.problems += listed.problems
        for file in listed.files:
            of_micro.setdefault((file.saved.micro, folder), []).append(file)
    have_gradients: set[str] = set()
    for (_, folder), files in sorted(of_micro.items(), key=lambda item: (item[0][0], FOLDERS.index(item[0][1]))):
        if folder == "tensors":
            _add_outputs(rows, files)
        else:
            _add_gradients(rows, files, have_gradients)
    return DumpRank(rank, rows.source())


def _add_outputs(rows: DumpRows, files: list[TensorFile]) -> None:
    """Make calls of the outputs of one micro step.

    The tensors of one call come one after another, each at another place of the output; what comes again at the same
    place is of the next call.
    """
    numbers: Counter[str] = Counter()
    for (site, type), of_layer in groupby(files, key=lambda file: (file.saved.site, file.saved.type)):
        seq, seen = -1, set[str]()
        for file in of_layer:
            path = file.saved.path
            if not seen or path in seen or "out" in (path, *seen):
                seq = rows.call(site, type, micro=file.saved.micro, call=numbers[site])
                numbers[site] += 1
                seen.clear()
            seen.add(path)
            _add_tensor(rows, seq, "output", path, file.path)


def _add_gradients(rows: DumpRows, files: list[TensorFile], have_gradients: set[str]) -> None:
    """Make events of the gradients of one micro step: the first of a parameter is its `grad`, later ones are `added`.

    So a recording of gradient accumulation calls them, in which `grad` is the sum so far. The files hold no sums.
    """
    numbers: Counter[str] = Counter()
    before = frozenset(have_gradients)
    for file in files:
        site, type = file.saved.site, file.saved.type
        seq = rows.call(site, type, kind="parameter", micro=file.saved.micro, call=numbers[site], phase="backward")
        numbers[site] += 1
        _add_tensor(rows, seq, "gradient", "added" if site in before else "grad", file.path)
        have_gradients.add(site)


def _add_tensor(rows: DumpRows, seq: int, role: Role, path: str, file: Path) -> None:
    try:
        if not file.is_file():
            raise RunError(f"{file} is no plain file.")
        spec = npy.describe(file)
    except RunError as error:  # the call stays, so that those after it keep their numbers
        rows.problem(str(error))
        return
    rows.tensor(seq, role, path, *spec, values=ValueLocation(str(file), partial(npy.read, file), spec.nbytes))
