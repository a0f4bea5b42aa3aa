"""What this process is and may do: its threads, file sizes and rank, paths that outlive a `chdir`, objects held weakly.

Used by every package; imports no framework.
"""

from __future__ import annotations

import errno
import os
import platform
import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from astray.errors import UsageError
from astray.interrupts import pass_interrupt

THREADS = "ASTRAY_THREADS"

RANK_VARIABLES = (("RANK", "WORLD_SIZE"), ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"))
"""The variables in which launchers say which rank a process is, and of how many: those of torch and of Paddle."""

T = TypeVar("T")


def configured_threads() -> int | None:
    """The number of threads in `ASTRAY_THREADS`; None when it is unset or 0. Raises UsageError for anything else."""
    given = os.environ.get(THREADS, "").strip()
    if not given:
        return None
    if not given.isascii() or not given.isdecimal():
        raise UsageError(
            f"{THREADS}={given!r} is not a number of threads. Set it to a whole number from 1 on, or unset it for one "
            "thread for each core."
        )
    return int(given[:9]) or None


def largest_file() -> int | None:
    """The most bytes in a file that this process writes; None where there is no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def reason(error: OSError) -> str:
    """Why the system refused something, with the limit that was reached and how to raise it.

    The text of an `OSError` says what failed and not why: a file may be "too large" for a limit of the shell.
    """
    message = error.strerror or str(error)
    limit = largest_file() if error.errno == errno.EFBIG else None
    if limit is not None:
        return f"{message}: files may have {limit:,} bytes here (raise that with `ulimit -f unlimited`)"
    if error.errno == errno.EMFILE:
        return f"{message} (allow more with `ulimit -n`)"
    return message


@cache
def processor_name() -> str:
    """The architecture and the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration) as error:
        pass_interrupt(error)
        name = platform.processor()
    return f"{platform.machine()} {name}".strip()


def rank_and_world_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Which process of a distributed program this is, as the launcher's environment says; 0 of 1 for other programs."""
    names = next((names for names in RANK_VARIABLES if names[0] in environment), RANK_VARIABLES[0])
    try:
        rank, world_size = (int(environment.get(name, default)) for name, default in zip(names, (0, 1), strict=True))
    except ValueError:
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)


def absolute(path: str | os.PathLike[str]) -> Path:
    """An absolute path, for later: a program may change its folder, as Hydra does. Links are not resolved."""
    try:
        return Path(path).absolute()
    except OSError:  # the current folder is gone: writing there will raise
        return Path(path)


def relative_to_cwd(path: Path) -> str:
    """A path for a message: relative if it lies in the current folder.

    >>> relative_to_cwd(Path.cwd() / "runs" / "a")
    'runs/a'
    """
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


class WeakRegistry(Generic[T]):
    """The objects that were added and are still alive, such as those to be notified of a fork.

    >>> recordings = WeakRegistry()
    >>> recordings.add(recording)
    >>> list(recordings)
    [<recording>]

    A `WeakSet` removes dead objects in a callback written in Python. The garbage collector runs it, and when a signal
    comes meanwhile, the exception of the program's handler is raised there and lost. This one drops them in `add`.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, member: T) -> None:
        living = [reference for reference in self._references if reference() is not None]
        self._references = [*living, weakref.ref(member)]

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            member = reference()
            if member is not None:
                yield member
