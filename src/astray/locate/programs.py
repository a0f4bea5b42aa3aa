"""A program that can be run again and again, each time recorded in another way.

`locate` asks for recordings by a `RecordingRequest`. `ScriptProgram` runs `astray run` in a process of its own, so that
each recording starts from nothing, and keeps what the program printed beside the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from astray.errors import RunError
from astray.process import relative_to_cwd

_LAST_LINES = 3
"""Lines of a failed program's output that are shown; the rest is in its log."""


class RecordingRequest(NamedTuple):
    """How a program is to be recorded, in the words of `astray run`.

    steps: which steps; all without. until: the step after which the program ends. match: only sites that this fits.
    """

    steps: str = ""
    until: int | None = None
    level: str = "module"
    keep: str = "stats"
    match: str = ""
    optimizer: str = ""
    grafts: tuple[str, ...] = ()
    swaps: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """As settings of `astray.record`, without those that are not asked for. The others are the program's task."""
        words = {"level": self.level, "keep": self.keep, "optimizer": self.optimizer}
        settings: dict[str, Any] = {name: value.split(",") for name, value in words.items() if value}
        settings |= {name: value for name in ("steps", "match") if (value := getattr(self, name))}
        return settings | ({"graft": list(self.grafts)} if self.grafts else {})

    def options(self) -> list[str]:
        """As options of `astray run`."""
        words = ["--level", self.level, "--keep", self.keep]
        for name in ("steps", "match", "optimizer"):
            if value := getattr(self, name):
                words += [f"--{name}", value]
        if self.until is not None:
            words += ["--until", str(self.until)]
        for option, values in (("--graft", self.grafts), ("--swap", self.swaps)):
            for value in values:
                words += [option, value]
        return words


class Program(Protocol):
    """What `locate` runs."""

    def record(self, path: Path, request: RecordingRequest) -> None:
        """Runs the program from its start and records it into a folder. Raises RunError where it leaves no run."""


class ScriptProgram:
    """A script, run by `astray run`.

    launch: the words before `run`, which start astray, perhaps on several ranks. script: the script and its arguments.
    """

    def __init__(self, script: Sequence[str], launch: Sequence[str] = (sys.executable, "-m", "astray")) -> None:
        self._launch = list(launch)
        self._script = list(script)

    def __str__(self) -> str:
        return " ".join(self._script)

    def record(self, path: Path, request: RecordingRequest) -> None:
        log = path.with_name(f"{path.name}.log")
        words = [*self._launch, "run", "-o", os.fspath(path), "--force", *request.options(), *self._script]
        path.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode and not (path / "run.json").exists():
            raise RunError(self._failure(log, done.returncode))

    def _failure(self, log: Path, code: int) -> str:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        said = f" The last it printed: {' / '.join(lines)}" if lines else ""
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{self} {how} before anything was recorded (log: {relative_to_cwd(log)}).{said}"
