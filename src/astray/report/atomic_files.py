"""Files that are complete or absent: a report is written beside its destination, and moved there when it is complete.

An older report survives a full disk, a kill or Ctrl-C before that. Every writer of `report` uses it.
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
def atomic_file(target: Path) -> Iterator[Path]:
    """A file to write to, in a temporary folder; at the end of the `with` it is moved to `target`.

    >>> with atomic_file(Path("out/diff.json")) as file:
    ...     file.write_text("{}")

    Folders are made as needed. Raises OSError with the name of `target` for whatever the system refuses.
    """
    try:
        check_writable(target)
        folder = _folder_of(target)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder) as temporary:
            file = Path(temporary) / target.name
            yield file
            if folder is None:
                _copy(file, target)
            else:
                file.replace(target.resolve())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(target)) from None


def check_writable(target: Path) -> None:
    """Raises OSError if nothing can be written there, as far as that can be known without writing."""
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if target.is_dir():
        code = errno.EISDIR
    elif not parent.is_dir():
        code = errno.ENOTDIR
    elif _folder_of(target) is not None and not os.access(parent, os.W_OK):
        code = errno.EACCES
    else:
        return
    raise OSError(code, os.strerror(code), str(target))


def _folder_of(target: Path) -> Path | None:
    """The folder that a file is replaced in, also where a link leads to it; None for what cannot be replaced."""
    special = target.exists() and not target.is_file()
    return None if special or Path("/dev") in target.absolute().parents else target.resolve().parent


def _copy(file: Path, target: Path) -> None:
    with file.open("rb") as written, target.open("wb") as output:
        shutil.copyfileobj(written, output)
