"""Keeps a reader inside the folder it was given: a dump is somebody else's, and its names may lead anywhere."""

from __future__ import annotations

from pathlib import Path

from astray.errors import RunError

MOST_BYTES = 4 << 30
"""A text file beyond this is no dump's: reading it would take the machine's memory."""


def inside(folder: Path, name: str) -> Path:
    """The file of this name in a folder. Raises RunError where the name, or a link, leads out of it."""
    path = folder / name
    try:
        home, place = folder.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name with a null in it
        raise RunError(f"{name!r} in {folder} cannot be followed: {error}.") from None
    if Path(name).is_absolute() or not place.is_relative_to(home):
        raise RunError(f"{name!r} leads out of {folder}, and is not read. Copy the file into the folder if it belongs.")
    return path


def entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name, without links that lead out of it."""
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror}.") from None
    return [path for path in found if not path.is_symlink() or _stays(folder, path)]


def text(path: Path) -> bytes:
    """The bytes of a text file of a dump."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise RunError(f"{path} has {size:,} bytes, more than the {MOST_BYTES:,} that are read of a text.")
        if not path.is_file():
            raise RunError(f"{path} is no plain file.")
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None


def _stays(folder: Path, path: Path) -> bool:
    try:
        inside(folder, path.name)
    except RunError:
        return False
    return True
