"""Files that are complete or not there at all: a report is written beside its place, and moved there when it is done.

An older report stays until then, whatever happens: a full disk, a kill, Ctrl-C. Every writer of `report` uses it.
Devices and pipes, such as /dev/stdout, are not replaced: what was written is copied into them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(place: Path) -> Iterator[Path]:
    """A file to write to, in a folder of its own; at the end of the `with` it takes its place.

    >>> with atomic_file(Path("out/diff.json")) as file:
    ...     file.write_text("{}")

    Folders are made as needed. Raises OSError with the name of the place for whatever the system refuses.
    """
    try:
        check_place(place)
        folder = _home(place)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=folder) as room:
            file = Path(room) / place.name
            yield file
            if folder is None:
                _copy(file, place)
            else:
                file.replace(place.resolve())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(place)) from None


def check_place(place: Path) -> None:
    """Raises OSError if nothing can be written there, as far as that can be known without writing."""
    around = next(folder for folder in place.absolute().parents if folder.exists())
    if place.is_dir():
        wrong = errno.EISDIR
    elif not around.is_dir():
        wrong = errno.ENOTDIR
    elif _home(place) is not None and not os.access(around, os.W_OK):
        wrong = errno.EACCES
    else:
        return
    raise OSError(wrong, os.strerror(wrong), str(place))


def _home(place: Path) -> Path | None:
    """The folder that a file is replaced in, also where a link leads to it; None for what cannot be replaced."""
    special = place.exists() and not place.is_file()
    return None if special or Path("/dev") in place.absolute().parents else place.resolve().parent


def _copy(file: Path, place: Path) -> None:
    with file.open("rb") as written, place.open("wb") as output:
        shutil.copyfileobj(written, output)
