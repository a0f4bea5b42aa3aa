"""Keeps a reader inside the folder it was given: a run is somebody else's, and its names may lead anywhere."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from astray.errors import RunError

MOST_BYTES = 4 << 30
"""A text file beyond this is no dump's: reading it would take the machine's memory."""

_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


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
        with os.scandir(folder) as there:
            names = sorted(entry.name for entry in there)
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror}.") from None
    plain = plain_files(folder)
    found = [folder / name for name in names]
    return [path for path in found if path.name in plain or not path.is_symlink() or _stays(folder, path)]


def plain_files(folder: Path) -> set[str]:
    """The names of the files in a folder that are no links; none where there is no such folder."""
    try:
        with os.scandir(folder) as found:
            return {entry.name for entry in found if entry.is_file(follow_symlinks=False)}
    except OSError:
        return set()


def other_names(folder: Path, plain: set[str]) -> set[str]:
    """The names of what else lies there, without links that lead out of it."""
    with os.scandir(folder) as there:
        found = [folder / entry.name for entry in there if entry.name not in plain]
    return {path.name for path in found if not path.is_symlink() or _stays(folder, path)}


def opened(path: Path, home: Path | None = None) -> BinaryIO:
    """Open a file for reading, without ever waiting for one that is a pipe.

    Raises RunError where it is not a plain file, or where it or a link on its way leads out of `home`, which is the
    folder it lies in unless another around it is given; and OSError where the system cannot open it.
    """
    home = path.parent if home is None else home
    inside(home, str(path.relative_to(home)))
    file = os.open(path, os.O_RDONLY | _WITHOUT_WAITING)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise RunError(f"{path} is not a plain file, and is not read.")
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def content(path: Path, home: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file that is opened as by `opened`, and has no more than so many of them."""
    with opened(path, home) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise RunError(f"{path} has {size:,} bytes, more than the {most:,} that are read of such a file.")
        return file.read(size)  # no more, for it may grow while it is read; asking for `most` would take that memory


def text(path: Path) -> bytes:
    """The bytes of a text file of a dump."""
    try:
        return content(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None


def _stays(folder: Path, path: Path) -> bool:
    try:
        inside(folder, path.name)
    except RunError:
        return False
    return True


# -- file names --------------------------------------------------------------------------------------------------------
# Names from a recording as names of files. Every writer that names files after what was called asks here.


MOST_NAME_BYTES = 240
"""Of a name: file systems take 255 bytes, and the draft of a file has a longer name."""

_FORBIDDEN = re.compile("[/\0\ud800-\udfff]")
"""What no name of a file can hold: separators, nulls, and halves of pairs, which are no text."""


def file_name(text: str, ending: str) -> str | None:
    """The text as the name of a file, with `_` for what none can hold; None where it would be hidden or too long.

    >>> file_name("Module.a/b.forward", ".pt"), file_name("x" * 300, ".pt"), file_name("..", ".pt")
    ('Module.a_b.forward.pt', None, None)
    """
    name = _FORBIDDEN.sub("_", text) + ending
    return None if name.startswith(".") or len(name.encode()) > MOST_NAME_BYTES else name
