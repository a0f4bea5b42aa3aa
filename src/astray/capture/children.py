"""The processes that a program under `astray run` starts: ranks are recorded, the others leave a note why not.

`ChildProcesses` is the side of `astray run`: it leaves word in the environment, and gathers what the ranks have
recorded into the run. `reach` is the side of the child, where Python runs it at the start by
`cli/child_startup/sitecustomize.py`. A child is a rank when torch.distributed says so at the first call of a
module; until then nothing is done but to wait for that. Ranks record beside the run, for the process that starts them
has its own recording in it. A child that is forked has the recording of its parent, and none of its own: it says so
(`tell_of_fork`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from astray.errors import AstrayError
from astray.interrupts import pass_interrupt
from astray.process import relative_to_cwd

if TYPE_CHECKING:
    from astray.capture.recorder import RecordingWatcher

    GuardFactory = Callable[[Mapping[str, Any]], RecordingWatcher]

VARIABLE = "ASTRAY_RUN"
PATIENCE = 60.0  # seconds to wait for a rank that has not ended its recording yet, while its process lives

_FRAMEWORK = "torch"
_NOTE = "process-{}.json"
_FORKED = "it was forked, where no recording follows; start it by the method `spawn`, or by torchrun"
_waiting: list[ImportHook] = []
_told: int | None = None  # the process that has left the note of being forked


class Note(NamedTuple):
    """What a child process says of itself: `why` it was not recorded, or None."""

    process: int
    rank: int
    world_size: int
    why: str | None


class ChildProcesses:
    """The child processes of a program, as the process sees them that was started by `astray run`.

    startup: the folder whose `sitecustomize` Python is to run at their start.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], guard: Mapping[str, Any] | None, startup: Path) -> None:
        self.place = path.with_name(f"{path.name}.ranks")
        self._path = path
        self._startup = str(startup)
        self._word = {"place": str(self.place), "settings": _as_json(settings), "guard": guard, "parent": os.getpid()}
        self._before: dict[str, str | None] = {}

    def refuse(self, *, overwrite: bool) -> None:
        """Before the program runs: raises RunExists where ranks of an earlier run are there, or removes them."""
        if not self.place.exists():
            return
        from astray.store.run_format.folder import (  # and not before: the script is to import numpy itself
            check_recordable,
            discard,
        )

        if not overwrite:
            check_recordable(self.place, 0, overwrite=False)
        discard(self.place)

    def leave_word(self, environment: MutableMapping[str, str]) -> None:
        """Makes the processes that are started from now on call `reach`."""
        self._before = {name: environment.get(name) for name in (VARIABLE, "PYTHONPATH")}
        environment[VARIABLE] = json.dumps(self._word)
        there = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([self._startup, *([there] if there else [])])

    def take_word_back(self, environment: MutableMapping[str, str]) -> None:
        for name, value in self._before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value

    def notes(self) -> list[Note]:
        """The notes of the children, in the order of their ranks. Those that still record are waited for."""
        found = []
        for file in sorted(self.place.glob(_NOTE.format("*"))) if self.place.is_dir() else ():
            try:
                note = Note(*json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):  # cut, as the process was killed
                continue
            if note.why is None:
                _wait(note.process, self.place / f"rank{note.rank}" / "end.json")
            found.append(note)
        return sorted(found, key=lambda note: (note.rank, note.process))

    def summary(self, ranks: int) -> str:
        """What the run holds now, in a line."""
        return _as_sentence(self._path, ranks)

    def gather(self, notes: list[Note], has_own: bool) -> bool:
        """Puts the ranks into the run. `has_own`: this process has recorded calls too, as rank 0.

        False where both this process and a child are rank 0: then the children stay where they are.
        """
        from astray.store.run_format.folder import move_ranks

        ranks = {note.rank: note.world_size for note in notes if note.why is None}
        for note in notes:
            (self.place / _NOTE.format(note.process)).unlink(missing_ok=True)
        if not ranks:
            if self.place.is_dir() and not any(self.place.iterdir()):
                self.place.rmdir()
            return True
        if has_own and 0 in ranks:
            return False
        move_ranks(self._path, self.place, max(ranks.values()))
        return True


def _as_sentence(path: Path, ranks: int) -> str:
    from astray.store import open_run
    from astray.wording import counted

    run = open_run(path)
    first = run.ranks[min(run.ranks)]
    parts = [counted(len(run.steps), "step"), counted(len(first.calls), "call"), counted(len(first.tensors), "tensor")]
    where = f"on rank {first.rank}; {counted(ranks, 'rank')}, in child processes"
    return f"{', '.join(parts)} in {relative_to_cwd(path)} ({where})"


def _wait(process: int, file: Path) -> None:
    """Waits for a file that a process is about to write, for as long as that process lives."""
    until = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < until and _lives(process):
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:  # a child that has ended stays until its parent reaps it, which is left to the program (WNOWAIT)
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
    except (AttributeError, OSError):  # of another parent, or on another system
        pass
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}


# -- in the child ----------------------------------------------------------------------------------------------------


def reach(environment: Mapping[str, str], make_guard: GuardFactory) -> None:
    """Waits for the first call of a module, should this process ever import torch. Raises nothing.

    make_guard: makes the guard of a recording of what `astray run` was asked for; called if it was, with a dict.
    """
    try:
        word = json.loads(environment[VARIABLE])
        if word["parent"] == os.getpid():
            return
        _waiting.append(ImportHook(_FRAMEWORK, lambda: _await_call(word, make_guard)).install())
    except Exception as error:  # noqa: BLE001 - the program must not fail because we did
        sys.stderr.write(f"astray: this process is not recorded ({type(error).__name__}: {error}).\n")


def tell_of_fork() -> None:
    """A module is called in a forked child of the program, which recordings do not follow. Raises nothing of ours."""
    global _told
    if _told == os.getpid() or VARIABLE not in os.environ or multiprocessing.current_process().daemon:
        return
    _told = os.getpid()
    try:
        place = Path(json.loads(os.environ[VARIABLE])["place"])
        _write_note(place, Note(os.getpid(), -1, 0, _FORKED))
    except Exception as error:  # noqa: BLE001 - the program must not fail because we did
        pass_interrupt(error)


def stand_down() -> None:
    """This process is an `astray run` of its own, inside of another, and is not recorded as a child."""
    while _waiting:
        _waiting.pop().remove()


def _await_call(word: Mapping[str, Any], make_guard: GuardFactory) -> None:
    from astray.capture.pytorch.model_discovery import FirstCall

    FirstCall(lambda ranks: _begin(word, ranks, make_guard))


def _begin(word: Mapping[str, Any], ranks: tuple[int, int] | None, make_guard: GuardFactory) -> Any:
    """A module is called in this process for the first time: the recorder, which has been started, if it is a rank."""
    if multiprocessing.current_process().daemon:  # a worker of a DataLoader, or of a pool
        return None
    place, why, recorder = Path(word["place"]), None, None
    if ranks is None:
        why = "it is no rank of torch.distributed"
    else:
        try:
            recorder = _recorder(word, place, make_guard)
        except AstrayError as error:
            why = str(error)
    rank, world_size = ranks or (-1, 0)
    _write_note(place, Note(os.getpid(), rank, world_size, why))
    return recorder


def _write_note(place: Path, note: Note) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / _NOTE.format(note.process)).write_text(json.dumps(note), encoding="utf-8")


def _recorder(word: Mapping[str, Any], place: Path, make_guard: GuardFactory) -> Any:
    import atexit

    from astray.capture.adapters import discovering_adapter
    from astray.capture.recorder import BaseRecorder

    settings = {name: value for name, value in word["settings"].items() if value is not None}
    if "perturb" in settings:
        raise AstrayError("inputs are perturbed in the process alone that `astray run` starts")
    guard = None if word["guard"] is None else make_guard(word["guard"])
    recorder = BaseRecorder.discovering(place, discovering_adapter(_FRAMEWORK), guard=guard, **settings).start()
    ended = _Ended()
    atexit.register(lambda: recorder.stop(ended.how))
    return recorder


class _Ended:
    """How this process ends, as far as it shows."""

    def __init__(self) -> None:
        self.how = "normally"
        self._others = sys.excepthook
        sys.excepthook = self._excepted

    def _excepted(self, kind: Any, error: Any, trace: Any) -> None:
        self.how = f"{kind.__name__}: {error}"
        self._others(kind, error, trace)


# -- on import -------------------------------------------------------------------------------------------------------


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls `then()` once, after `package` is first imported; at once when it is there already. Does not import it.

    A script may set environment variables before it imports its framework: importing that first would ignore them.
    """

    def __init__(self, package: str, then: Callable[[], None]) -> None:
        self._package = package
        self._then = then

    def install(self) -> ImportHook:
        if self._package in sys.modules:
            self._then()
        else:
            sys.meta_path.insert(0, self)
        return self

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._package:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the real loader does, then gives the module its real loader back."""

    def __init__(self, real: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._real = real
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._then()
