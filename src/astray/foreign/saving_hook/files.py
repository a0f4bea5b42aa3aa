"""The saving hook's files: what their names say, and the files of a folder by their names.

    tensors/rank_0/tensor_idx_7_layer_class_Linear_layer_name_mlp.fc_micro_step_2.npy
    grads/rank_0/grad_idx_3_of_param_name_mlp.fc.weight_micro_step_2.npy

A layer that gives several tensors has a file for each, `layer_name_lstm@1.0`: what comes behind the `@` is its place in
the output. The layer that is the model itself has an empty name. What no file name may hold is written as in a URL.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from astray.errors import RunError
from astray.records import ROOT
from astray.store.run_format.folder import listing
from astray.store.safe_paths import entries, file_name
from astray.wording import counted

NAME = "saving_hook"

Folder = Literal["tensors", "grads"]
FOLDERS: tuple[Folder, ...] = ("tensors", "grads")
RESULTS = "compare_rst"
"""Where the checker puts its results, beside the folders of ranks."""

RANK_FOLDER = re.compile(r"rank_(\d{1,9})")

# A class has no `_layer_name_` in its name, and a layer may; numbers are short enough for the columns of a run.
_OF_LAYER = r"tensor_idx_(\d{1,9})_layer_class_(.+?)_layer_name_(.*)_micro_step_(\d{1,9})\.npy"
_OF_PARAMETER = r"(?:grad|tensor)_idx_(\d{1,9})_of_param_name_(.+)_micro_step_(\d{1,9})\.npy"
_TENSOR = re.compile(_OF_LAYER, re.DOTALL)
_GRAD = re.compile(_OF_PARAMETER, re.DOTALL)
_DRAFT = re.compile(r"\..*\.npy\.\d+", re.DOTALL)

_FORBIDDEN = re.compile(r"[/%@\x00]")
_ESCAPED = re.compile(r"%(2F|25|40|00)")


class FileName(NamedTuple):
    """What the name of a file says. `type` is the class of a layer; `path` the place of a tensor in the output."""

    idx: int
    site: str
    type: str
    micro: int
    path: str


class TensorFile(NamedTuple):
    """A file of one tensor, and what its name says."""

    saved: FileName
    path: Path


class RankListing(NamedTuple):
    """The files of one rank in the order of their index, and what is wrong with them, a sentence each."""

    files: list[TensorFile]
    problems: list[str]


def parse(folder: Folder, name: str) -> FileName | None:
    """What the name of a file in this folder says; None when it is of another form.

    >>> parse("grads", "grad_idx_3_of_param_name_linear_0.w_0_micro_step_2.npy")
    Saved(idx=3, site='linear_0.w_0', type='Parameter', micro=2, path='grad')
    """
    if any("\ud800" <= sign <= "\udfff" for sign in name):  # bytes that are no text, which no table could hold
        return None
    match = _GRAD.fullmatch(name) if folder == "grads" else None
    if match is not None:
        return FileName(int(match[1]), _plain(match[2]), "Parameter", int(match[3]), "grad")
    match = _TENSOR.fullmatch(name)  # the document of the format shows names of this form among the gradients too
    if match is None:
        return None
    if folder == "grads":
        return FileName(int(match[1]), _plain(match[3]), _plain(match[2]), int(match[4]), "grad")
    site, at, place = match[3].partition("@")
    path = f"out.{_plain(place)}" if at else "out"
    return FileName(int(match[1]), _plain(site) or ROOT, _plain(match[2]), int(match[4]), path)


def compose(folder: Folder, saved: FileName) -> str | None:
    """The name of a file; None when it would be longer than a name can be."""
    site = _FORBIDDEN.sub(_escape, "" if saved.site == ROOT else saved.site)
    if folder == "tensors":
        place = "" if saved.path == "out" else f"@{_FORBIDDEN.sub(_escape, saved.path.removeprefix('out.'))}"
        middle = f"tensor_idx_{saved.idx}_layer_class_{_FORBIDDEN.sub(_escape, saved.type)}_layer_name_{site}{place}"
    else:
        middle = f"grad_idx_{saved.idx}_of_param_name_{site}"
    return file_name(f"{middle}_micro_step_{saved.micro}", ".npy")


def is_draft(name: str) -> bool:
    """Whether it is a file that a kill has kept from being finished."""
    return _DRAFT.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """The rank whose folder is called so; None for any other folder."""
    match = RANK_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])


def rank_folders(path: Path, folder: Folder) -> tuple[dict[int, Path], list[str]]:
    """The folders of ranks in `path/folder`, and what else is there that does not belong. Raises RunError."""
    if not (path / folder).is_dir():
        return {}, []
    if folder in _leading_out(path):
        return {}, [f"{path / folder} leads out of {path}, and was not read."]
    found: dict[int, Path] = {}
    strange = _leading_out(path / folder)
    for entry in entries(path / folder):
        rank = rank_of(entry.name)
        if rank is not None and entry.is_dir():
            found[rank] = entry
        elif entry.name != RESULTS:  # the checker's own
            strange.append(entry.name)
    sentence = f"{path / folder} holds what is no folder of a rank, and was not read: {listing(strange)}."
    return dict(sorted(found.items())), [sentence] if strange else []


def list_rank(home: Path, folder: Folder) -> RankListing:
    """The files in the folder of a rank."""
    try:
        names = entries(home)
        outside = _leading_out(home)
    except RunError as error:
        return RankListing([], [str(error)])
    files, strange, drafts = [], [], 0
    for path in names:
        saved = parse(folder, path.name)
        if saved is not None:
            files.append(TensorFile(saved, path))
        elif is_draft(path.name):
            drafts += 1
        else:
            strange.append(path.name)
    files.sort(key=lambda file: (file.saved.idx, file.saved))
    problems = [f"{home} has links that lead out of it, and are not read: {listing(outside)}."] if outside else []
    if strange:
        problems.append(f"{home} holds files of another form, which were not read: {listing(strange)}.")
    if drafts:
        problems.append(f"{home} holds {counted(drafts, 'file')} not finished when the program ended.")
    return RankListing(files, problems + _wrong_indices(home, files))


def _leading_out(folder: Path) -> list[str]:
    kept = {path.name for path in entries(folder)}
    return sorted(path.name for path in folder.iterdir() if path.name not in kept)


def _wrong_indices(home: Path, files: list[TensorFile]) -> list[str]:
    """Indices count what was saved, so each of them is there once."""
    counts = Counter(file.saved.idx for file in files)
    several = [str(index) for index, count in counts.items() if count > 1]
    missing = max(counts, default=-1) + 1 - len(counts)
    found = []
    if several:
        found.append(
            f"{home} has more than one file of index {listing(several)}: it holds more than one recording. Save each "
            "into a folder of its own."
        )
    if missing:
        found.append(
            f"{home} lacks {counted(missing, 'file')} below index {max(counts)}. Where a layer is called several "
            "times, a later call may bear the number of an earlier one."
        )
    return found


def _escape(sign: re.Match[str]) -> str:
    return f"%{ord(sign[0]):02X}"


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
