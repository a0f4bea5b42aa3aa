"""Starts the processes that train (see turns.py), lets them take turns, and adds up what they measured.

Imports no torch: a process starts with the peak memory of the one that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Tool(NamedTuple):
    """A script of this folder that records, in which environment, and with which settings of its own kind.

    `packages` is a folder that is looked into for packages before the environment is.
    """

    name: str
    script: str
    settings: dict[str, Any]
    python: Path = Path(sys.executable)
    packages: Path | None = None


class Work(NamedTuple):
    """What is trained: the arguments of `gpt.gpt`."""

    size: str = "small"
    device: str = "cpu"
    mixed: bool = False


ON_THE_CPU = Work()


class MissingError(Exception):
    """A tool could not be run, or ended before its time."""


class Process:
    """A process that trains when it is asked to. `versions` are those of what it runs."""

    def __init__(self, tool: Tool, work: Work, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / "log"
        arguments = str(folder), json.dumps(tool.settings), json.dumps(work._asdict())
        command = [str(tool.python), str(HERE / tool.script), *arguments]
        paths = [str(tool.packages or ""), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            with self._log.open("wb") as log:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(
                    command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True
                )
        except OSError as error:
            raise MissingError(f"{tool.python}: {error.strerror}") from None
        self.versions: dict[str, str] = self._answer()

    def ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text().splitlines()[-1:]
            raise MissingError(f"its process ended with {self._process.wait()}: {''.join(last)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Side:
    """One tool in one case, and what was measured of it: seconds of each step, and what all steps have left."""

    def __init__(self, tool: Tool, work: Work, folder: Path) -> None:
        self.tool = tool
        self.steps = self.turns = 0
        self.bare: list[float] = []
        self.recorded: list[float] = []
        self.left: dict[str, float] = {"tensors": 0, "bytes": 0, "files": 0, "waited": 0, "behind": 0}
        self.more_memory = 0.0  # bytes, at the peak
        self.process = Process(tool, work, folder)

    def turn(self, steps: int) -> None:
        self.turns += 1
        self.steps += steps
        self.bare += self.process.ask(f"bare {steps}")["seconds"]
        answer = self.process.ask(f"recorded {steps}")
        self.recorded += answer.pop("seconds")
        for name, amount in answer.items():
            self.left[name] += amount

    def end(self, bare_peak: float | None) -> None:
        if bare_peak is not None:
            self.more_memory = self.process.ask("peak")["peak"] - bare_peak
        self.process.end()


class TurnTaking:
    """Runs tools against each other. Of a tool that cannot be run it remembers why.

    Without `memory` their peak memory is not compared with that of the bare training, which takes one more process.
    """

    def __init__(self, folder: Path, steps: int, work: Work = ON_THE_CPU, memory: bool = True) -> None:
        self._folder = folder
        self._steps = steps
        self._work = work
        self._memory = memory
        self._started = 0
        self._bare_peaks: dict[Path, float] = {}
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def run(self, tools: list[Tool], rounds: int) -> list[Side | None]:
        """Each tool gets a fresh process, which ends with the case. None for a tool that could not be run."""
        sides = [self._start(tool) for tool in tools]
        for number in range(rounds):
            order = slice(None, None, -1 if number % 2 else 1)  # so that no tool is always the first
            sides[order] = [self._take_turn(side) for side in sides[order]]
        for side in sides:
            if side is not None:
                side.end(self._bare_peak(side.tool.python) if self._memory else None)
        return sides

    def _start(self, tool: Tool) -> Side | None:
        try:
            side = Side(tool, self._work, self._new_folder())
        except MissingError as error:
            self.missing[tool.name] = str(error)
            return None
        self.versions |= side.process.versions
        return side

    def _take_turn(self, side: Side | None) -> Side | None:
        if side is not None:
            try:
                side.turn(self._steps)
            except MissingError as error:
                self.missing[side.tool.name] = str(error)
                return None
        return side

    def _bare_peak(self, python: Path) -> float:
        """The memory that the training alone takes in an environment, at its peak."""
        if python not in self._bare_peaks:
            process = Process(Tool("no tool", "bare.py", {}, python), self._work, self._new_folder())
            process.ask("bare 2")
            self._bare_peaks[python] = process.ask("peak")["peak"]
            process.end()
        return self._bare_peaks[python]

    def _new_folder(self) -> Path:
        self._started += 1
        return self._folder / str(self._started)


def tell_missing(missing: dict[str, str]) -> None:
    """Says in the report and, loudly, on the screen which tools could not be run."""
    for tool, why in missing.items():
        warning = f"MISSING: the numbers of {tool}, which could not be run: {why}"
        print(f"\n**{warning}**")
        print(f"\n{'!' * 100}\n{warning}\n{'!' * 100}", file=sys.stderr)
