"""What the system allows this process, and how it is said when that was not enough.

Sentences of an `OSError` tell what failed and not why: a file that is "too large" may be so for a shell's limit that
nobody remembers.
"""

from __future__ import annotations

import errno
import os

from astray.errors import UsageError

THREADS = "ASTRAY_THREADS"


def threads_asked() -> int | None:
    """How many threads `ASTRAY_THREADS` asks for; None when it does not. Raises UsageError when it says no number."""
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
    """The bytes that a file may have which this process writes; None where there is no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def reason(error: OSError) -> str:
    """Why the system refused something, with the limit that it has run into and how to raise it."""
    said = error.strerror or str(error)
    limit = largest_file() if error.errno == errno.EFBIG else None
    if limit is not None:
        return f"{said}: files may have {limit:,} bytes here (raise that with `ulimit -f unlimited`)"
    if error.errno == errno.EMFILE:
        return f"{said} (allow more with `ulimit -n`)"
    return said
