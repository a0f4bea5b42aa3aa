"""The saving hook's files: what their names say, the files of a folder by their names, and the folder as a run.

    tensors/rank_0/tensor_idx_7_layer_class_Linear_layer_name_mlp.fc_micro_step_2.npy
    grads/rank_0/grad_idx_3_of_param_name_mlp.fc.weight_micro_step_2.npy

A layer with several output tensors has a file for each, `layer_name_lstm@1.0`: what follows the `@` is the path in the
output. A layer that is the model itself has an empty name. Characters that a file name cannot have are written as in a
URL.

Rows of the run are in the order of execution: micro step by micro step, first outputs and then gradients, by their
index. Headers of files are read on opening, values on demand.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from astray.errors import RunError
from astray.foreign import array_files as npy
from astray.foreign.dump_rows import DumpRank, DumpRows, ValueLocation
from astray.records import ROOT, Role
from astray.store.run import RankRun, RunData
from astray.store.run_format.folder import listing
from astray.store.run_info import RunInfo
from astray.store.safe_paths import entries, file_name
from astray.wording import counted

NAME = "saving_hook"

FolderName = Literal["tensors", "grads"]
FOLDERS: tuple[FolderName, ...] = ("tensors", "grads")
RESULTS = "compare_rst"
"""The folder of the checker's results, beside the folders of ranks."""

RANK_FOLDER = re.compile(r"rank_(\d{1,9})")

# The name of a layer may contain `_layer_name_`, that of a class does not; numbers fit the columns of a run.
_OF_LAYER = r"tensor_idx_(\d{1,9})_layer_class_(.+?)_layer_name_(.*)_micro_step_(\d{1,9})\.npy"
_OF_PARAMETER = r"(?:grad|tensor)_idx_(\d{1,9})_of_param_name_(.+)_micro_step_(\d{1,9})\.npy"
_TENSOR = re.compile(_OF_LAYER, re.DOTALL)
_GRAD = re.compile(_OF_PARAMETER, re.DOTALL)
_DRAFT = re.compile(r"\..*\.npy\.\d+", re.DOTALL)

_FORBIDDEN = re.compile(r"[/%@\x00]")
_ESCAPED = re.compile(r"%(2F|25|40|00)")


class FileName(NamedTuple):
    """The name of a file in its parts. `type` is the class of a layer; `path` that of a tensor in the output."""

    idx: int
    site: str
    type: str
    micro: int
    path: str


class TensorFile(NamedTuple):
    """A file of one tensor, and its name in parts."""

    name: FileName
    path: Path


class RankListing(NamedTuple):
    """The files of one rank in the order of their index, and their problems, a sentence each."""

    files: list[TensorFile]
    problems: list[str]


def parse(folder: FolderName, name: str) -> FileName | None:
    """The name of a file in this folder in its parts; None when it has another form.

    >>> parse("grads", "grad_idx_3_of_param_name_linear_0.w_0_micro_step_2.npy")
    FileName(idx=3, site='linear_0.w_0', type='Parameter', micro=2, path='grad')
    """
    if any("\ud800" <= char <= "\udfff" for char in name):  # undecodable bytes, which no table could hold
        return None
    match = _GRAD.fullmatch(name) if folder == "grads" else None
    if match is not None:
        return FileName(int(match[1]), _unescape(match[2]), "Parameter", int(match[3]), "grad")
    match = _TENSOR.fullmatch(name)  # the format's documentation shows names of this form among the gradients too
    if match is None:
        return None
    if folder == "grads":
        return FileName(int(match[1]), _unescape(match[3]), _unescape(match[2]), int(match[4]), "grad")
    site, separator, inner = match[3].partition("@")
    path = f"out.{_unescape(inner)}" if separator else "out"
    return FileName(int(match[1]), _unescape(site) or ROOT, _unescape(match[2]), int(match[4]), path)


def compose(folder: FolderName, name: FileName) -> str | None:
    """The name of a file; None when it would be longer than a name can be."""
    site = _escape("" if name.site == ROOT else name.site)
    if folder == "tensors":
        inner = "" if name.path == "out" else f"@{_escape(name.path.removeprefix('out.'))}"
        stem = f"tensor_idx_{name.idx}_layer_class_{_escape(name.type)}_layer_name_{site}{inner}"
    else:
        stem = f"grad_idx_{name.idx}_of_param_name_{site}"
    return file_name(f"{stem}_micro_step_{name.micro}", ".npy")


def is_draft(name: str) -> bool:
    """Whether it is the name of a file that was not finished because the program was killed."""
    return _DRAFT.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """The rank of a folder by its name; None for other folders."""
    match = RANK_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])


def rank_folders(path: Path, folder: FolderName) -> tuple[dict[int, Path], list[str]]:
    """The folders of ranks in `path/folder`, and problems with its other content. Raises RunError."""
    if not (path / folder).is_dir():
        return {}, []
    if folder in _links_outside(path):
        return {}, [f"{path / folder} leads out of {path}, and was not read."]
    ranks: dict[int, Path] = {}
    strange = _links_outside(path / folder)
    for entry in entries(path / folder):
        rank = rank_of(entry.name)
        if rank is not None and entry.is_dir():
            ranks[rank] = entry
        elif entry.name != RESULTS:
            strange.append(entry.name)
    sentence = f"{path / folder} holds entries that are not folders of ranks, and were not read: {listing(strange)}."
    return dict(sorted(ranks.items())), [sentence] if strange else []


def list_rank(home: Path, folder: FolderName) -> RankListing:
    """The files in the folder of a rank."""
    try:
        paths = entries(home)
        outside = _links_outside(home)
    except RunError as error:
        return RankListing([], [str(error)])
    files, strange, drafts = [], [], 0
    for path in paths:
        name = parse(folder, path.name)
        if name is not None:
            files.append(TensorFile(name, path))
        elif is_draft(path.name):
            drafts += 1
        else:
            strange.append(path.name)
    files.sort(key=lambda file: (file.name.idx, file.name))
    problems = [f"{home} has links that lead out of it, and are not read: {listing(outside)}."] if outside else []
    if strange:
        problems.append(f"{home} holds files of another form, which were not read: {listing(strange)}.")
    if drafts:
        problems.append(f"{home} holds {counted(drafts, 'file')} not finished when the program ended.")
    return RankListing(files, problems + _wrong_indices(home, files))


def _links_outside(folder: Path) -> list[str]:
    """The names of links that lead out of a folder."""
    inside = {path.name for path in entries(folder)}
    return sorted(path.name for path in folder.iterdir() if path.name not in inside)


def _wrong_indices(home: Path, files: list[TensorFile]) -> list[str]:
    """Problems with the indices, which count the files: each should occur once."""
    counts = Counter(file.name.idx for file in files)
    repeated = [str(index) for index, count in counts.items() if count > 1]
    missing = max(counts, default=-1) + 1 - len(counts)
    problems = []
    if repeated:
        problems.append(
            f"{home} has more than one file of index {listing(repeated)}: it holds more than one recording. Save each "
            "into a folder of its own."
        )
    if missing:
        problems.append(
            f"{home} lacks {counted(missing, 'file')} below index {max(counts)}. Where a layer is called several "
            "times, a later call may bear the number of an earlier one."
        )
    return problems


def _escape(text: str) -> str:
    return _FORBIDDEN.sub(lambda match: f"%{ord(match[0]):02X}", text)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


# -- a run -------------------------------------------------------------------------------------------------------------


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
    homes: dict[FolderName, dict[int, Path]] = {}
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


def _read_rank(rank: int, homes: dict[FolderName, Path]) -> DumpRank:
    rows = DumpRows()
    by_micro: dict[tuple[int, FolderName], list[TensorFile]] = {}
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
