"""The files of a checkpoint: a few are open at a time, and bytes are copied out of them by their places.

Nothing is mapped into memory: pages of a mapped file count as memory of the process, and a file that shrinks ends it.
"""

from __future__ import annotations

import stat
import threading
import weakref
from collections import OrderedDict
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.errors import CheckpointError
from astray.wording import printable

MOST_OPEN = 32
"""A distributed checkpoint may have thousands of files, and a process may open about that many."""

_AT_ONCE = 1 << 30
"""What the kernel is asked for at most; Linux gives no more than 2 GiB to one read."""


class Files:
    """Reads parts of files. May be used from several threads; `close` gives the files back."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, FileIO] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _close_all, self._open)

    def size(self, path: Path) -> int:
        """The size of a file. What is no plain file, such as a pipe or a device, is refused."""
        try:
            found = path.stat()
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path} is no plain file, so it is not read.")
        return found.st_size

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        """So many bytes from a place in a file."""
        found = np.empty(nbytes, np.uint8)
        self.read_into(path, offset, found)
        return found.tobytes()

    def read_into(self, path: Path, offset: int, into: npt.NDArray[Any]) -> None:
        """Fill a contiguous array from a place in a file. Raises CheckpointError when the file ends before that."""
        flat: Any = into.reshape(-1).view(np.uint8)
        room = memoryview(flat)
        done = 0
        with self._lock:
            file = self._file(path)
            while done < len(room):
                try:
                    file.seek(offset + done)
                    got = file.readinto(room[done : done + _AT_ONCE])
                except (OSError, OverflowError) as error:
                    raise _unreadable(path, error) from None
                if not got:
                    raise CheckpointError(
                        f"{path} ends after {offset + done:,} bytes, before {len(room) - done:,} that belong to a "
                        "tensor: the file was cut, or has been changed since it was opened. Copy it again."
                    )
                done += got

    def _file(self, path: Path) -> FileIO:
        if self._closed:
            raise CheckpointError(f"{path} was closed with its checkpoint. Open that again.")
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        self.size(path)  # opening a pipe would wait for somebody to write to it
        while len(self._open) >= MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        try:
            self._open[path] = FileIO(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        return self._open[path]

    def close(self) -> None:
        """Close what is open. Nothing can be read after that."""
        with self._lock:
            self._closed = True
            _close_all(self._open)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """The system's reason; or Python's, for a name that no file can have and for a place beyond all files."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return CheckpointError(f"{printable(str(path))} cannot be read: {why}.")


def _close_all(files: OrderedDict[Path, FileIO]) -> None:
    while files:
        files.popitem()[1].close()
