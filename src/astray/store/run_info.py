"""What is known about a run as a whole: `run.json` at its start, `end.json` for each rank at its end.

Both are plain JSON. An unknown field is ignored, so that an older astray opens what a newer one wrote within the same
format version; a missing or mistyped field is an error that names it.
"""

from __future__ import annotations

import datetime
import errno
import os
import platform
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from astray.errors import RunError
from astray.records import MissedTensor
from astray.safe_text import check_depth
from astray.store import safe_paths

FORMAT = 4
"""The format version this astray writes. docs/reference/format.md has the history."""


class Flight(msgspec.Struct, kw_only=True):
    """Marks a flight recording: held in memory, then written when something triggered it on some rank."""

    why: str
    rank: int
    written: str  # UTC, ISO 8601
    remember: int  # how many steps were held
    max_bytes: int  # how many bytes they might take


class RunInfo(msgspec.Struct, kw_only=True):
    """What ran, where, and with which settings. `RunInfo.of_process()` fills in what the process knows of itself."""

    format: int = FORMAT
    astray: str  # version that wrote the run
    created: str  # UTC, ISO 8601
    command: list[str] = []
    framework: str | None = None
    versions: dict[str, str] = {}  # framework, numpy, CUDA: everything that may change a number
    python: str = ""
    platform: str = ""
    devices: list[str] = []
    seed: int | None = None
    world_size: int = 1
    settings: dict[str, Any] = {}  # level, keep, selection, as given by the user
    flight: Flight | None = None  # of a flight recording

    @property
    def perturbed(self) -> int | None:
        """The seed by which the inputs were changed by roundings; None when they were as the program made them."""
        seed = self.settings.get("perturb")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    def words(self, setting: str) -> list[str]:
        """The words of a setting that is one or a list of them, such as `keep`. A run may hold any JSON there."""
        value = self.settings.get(setting)
        return [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]

    @classmethod
    def of_process(cls, **known: Any) -> RunInfo:
        """Describe this process; `known` adds or replaces fields.

        >>> RunInfo.of_process(framework="torch", seed=0).command[0].endswith(".py")
        True
        """
        import importlib.metadata

        try:
            version = importlib.metadata.version("astray")
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            version = "0+unknown"
        facts: dict[str, Any] = {
            "astray": version,
            "created": now(),
            "command": [plain(word) for word in sys.argv],
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        return cls(**(facts | known))


class End(msgspec.Struct, kw_only=True):
    """How the recording of one rank ended, written last."""

    complete: bool  # everything handed to the writer is in the files
    ended: str = "normally"  # else what ended the program
    finished: str = ""  # UTC, ISO 8601
    failure: str | None = None  # why writing stopped early
    steps: int = 0
    calls: int = 0
    tensors: int = 0
    stacks: int = 0
    setup: int | None = None  # lines of setup.jsonl; None when it was written before there was one
    values: int = 0  # how many blobs
    value_bytes: int = 0
    waited_seconds: float = 0.0  # how long the program waited because the disk was slower
    missed: list[MissedTensor] = []  # what was not observed, why, how often
    why: str | None = None  # of a flight recording: why this rank wrote it


Document = TypeVar("Document", bound=msgspec.Struct)


def now() -> str:
    """The time in UTC, as the files write it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def plain(text: str) -> str:
    """The text with `?` for what UTF-8 cannot hold, such as stray bytes in a file name."""
    return text.encode(errors="replace").decode()


MOST_JSON = 64 << 20
"""Bytes of a JSON file beyond which astray did not write it. The largest is `end.json` with an entry for each miss."""


def read_json(path: Path, kind: type[Document], home: Path | None = None) -> Document:
    """Decode a JSON file that lies in `home`, or say in a sentence what is wrong with it."""
    try:
        content = safe_paths.read_file(path, home, MOST_JSON)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        check_depth(content.decode(errors="replace"))  # settings may be any JSON, and are walked and written out
    except ValueError as error:
        raise RunError(f"{path} does not hold what it should: {error}.") from None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise RunError(f"{path} does not hold what it should: {error}.") from None
    except RecursionError:
        raise RunError(f"{path} does not hold what it should: it is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path} ({len(content)} bytes) is not whole JSON: {error}.") from None


def write_json(path: Path, document: msgspec.Struct, writer: str | None = None) -> None:
    """Write a JSON file atomically: it exists in full or not at all.

    `writer` names this process in the draft's name, where processes of other machines may write the same file.
    """
    draft = path.with_name(f".{path.name}.{writer or os.getpid()}")
    with draft.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2) + b"\n")
        file.flush()
        sync(file.fileno())
    draft.replace(path)


def sync(file: int) -> None:
    """Wait until a file or folder is on the disk, where the file system supports that."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
