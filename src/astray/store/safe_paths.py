"""Keeps a reader inside the folder it was given, and a writer's file names within the limits of file systems.

A run may come from another machine: a name in it may lead out of its folder, or to a link, a pipe or a file larger than
memory. Readers of runs and dumps list and open files with this module; writers that name files after calls use
`file_name`.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from astray.errors import RunError

MOST_BYTES = 4 << 30
"""No text file of a dump is larger: reading it would take the machine's memory."""

MOST_NAME_BYTES = 240
"""File systems allow names of 255 bytes, and a file has a longer name while it is a draft."""

_FORBIDDEN = re.compile("[/\0\ud800-\udfff]")
"""What the name of a file cannot hold: separators, nulls, and lone surrogates, which are not text."""

_NONBLOCKING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def inside(folder: Path, name: str) -> Path:
    """The file of this name in a folder. Raises RunError where the name, or a link, leads out of it."""
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, a name with a null in it
        raise RunError(f"{name!r} in {folder} cannot be followed: {error}.") from None
    if Path(name).is_absolute() or not target.is_relative_to(home):
        raise RunError(f"{name!r} leads out of {folder}, and is not read. Copy the file into the folder if it belongs.")
    return path


def entries(folder: Path) -> list[Path]:
    """The entries of a folder, sorted by name, without links that lead out of it."""
    try:
        with os.scandir(folder) as listed:
            names = sorted(entry.name for entry in listed)
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror}.") from None
    plain = plain_files(folder)
    paths = [folder / name for name in names]
    return [path for path in paths if path.name in plain or not path.is_symlink() or _stays_inside(folder, path)]


def plain_files(folder: Path) -> set[str]:
    """The names of the files in a folder that are not links; empty where there is no such folder."""
    try:
        with os.scandir(folder) as listed:
            return {entry.name for entry in listed if entry.is_file(follow_symlinks=False)}
    except OSError:
        return set()


def other_names(folder: Path, plain: set[str]) -> set[str]:
    """The names of everything else in the folder, without links that lead out of it."""
    with os.scandir(folder) as listed:
        paths = [folder / entry.name for entry in listed if entry.name not in plain]
    return {path.name for path in paths if not path.is_symlink() or _stays_inside(folder, path)}


def open_file(path: Path, home: Path | None = None) -> BinaryIO:
    """Open a file for reading, without waiting where it is a pipe.

    home: the folder that neither the file nor a link on its path may leave; by default the one the file is in.

    Raises RunError where it leaves `home` or is not a plain file, and OSError where the system cannot open it.
    """
    home = path.parent if home is None else home
    inside(home, str(path.relative_to(home)))
    file = os.open(path, os.O_RDONLY | _NONBLOCKING)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise RunError(f"{path} is not a plain file, and is not read.")
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_file(path: Path, home: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file, opened by `open_file`. Raises RunError where there are more than `most`."""
    with open_file(path, home) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise RunError(f"{path} has {size:,} bytes, more than the {most:,} that are read of such a file.")
        return file.read(size)  # no more, for it may grow while it is read; asking for `most` would take that memory


def read_text_file(path: Path) -> bytes:
    """The bytes of a text file of a dump."""
    try:
        return read_file(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None


def _stays_inside(folder: Path, path: Path) -> bool:
    try:
        inside(folder, path.name)
    except RunError:
        return False
    return True


def file_name(text: str, ending: str) -> str | None:
    """The text as the name of a file, with `_` for forbidden characters; None where it would be hidden or too long.

    >>> file_name("Module.a/b.forward", ".pt"), file_name("x" * 300, ".pt"), file_name("..", ".pt")
    ('Module.a_b.forward.pt', None, None)
    """
    name = _FORBIDDEN.sub("_", text) + ending
    return None if name.startswith(".") or len(name.encode()) > MOST_NAME_BYTES else name
