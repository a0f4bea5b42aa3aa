"""The files of a saving hook's folder, by what their names say. Used by the reader and by the checker."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from astray.errors import RunError
from astray.foreign.saving_hook.files import RESULTS, Folder, Saved, is_draft, parse, rank_of
from astray.store.run_format.folder import listing
from astray.store.safe_paths import entries
from astray.wording import counted


class File(NamedTuple):
    """A file of one tensor, and what its name says."""

    saved: Saved
    path: Path


class Listed(NamedTuple):
    """The files of one rank in the order of their index, and what is wrong with them, a sentence each."""

    files: list[File]
    problems: list[str]


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


def list_rank(home: Path, folder: Folder) -> Listed:
    """The files in the folder of a rank."""
    try:
        names = entries(home)
        outside = _leading_out(home)
    except RunError as error:
        return Listed([], [str(error)])
    files, strange, drafts = [], [], 0
    for path in names:
        saved = parse(folder, path.name)
        if saved is not None:
            files.append(File(saved, path))
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
    return Listed(files, problems + _wrong_indices(home, files))


def _leading_out(folder: Path) -> list[str]:
    kept = {path.name for path in entries(folder)}
    return sorted(path.name for path in folder.iterdir() if path.name not in kept)


def _wrong_indices(home: Path, files: list[File]) -> list[str]:
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
