"""The processes that a program under `astray run` starts: ranks are recorded, the others leave a note with the reason.

`ChildProcesses` runs in the process of `astray run`: it puts a message into the environment, and moves what the ranks
have recorded into the run. `prepare_child` runs in the child, where `cli/child_startup/sitecustomize.py` calls it when
Python starts. A child is a rank if torch.distributed says so at the first call of a module; until then it only waits
for that call. Ranks record into a folder beside the run, because the process that starts them has its own recording in
it. A forked child has its parent's recording and none of its own; `note_fork` writes a note that says so.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from astray.capture.imports import FRAMEWORKS, ImportHook, after_first_call
from astray.errors import AstrayError
from astray.interrupts import pass_interrupt
from astray.process import relative_to_cwd

if TYPE_CHECKING:
    from astray.capture.recorder import RecordingWatcher

    GuardFactory = Callable[[Mapping[str, Any]], RecordingWatcher]

VARIABLE = "ASTRAY_RUN"
RANK_TIMEOUT = 60.0  # seconds to wait for a rank that has not ended its recording yet, while its process lives

_NOTE = "process-{}.json"
_FORKED = "it was forked, where no recording follows; start it by the method `spawn`, or by torchrun"
_waiting: list[ImportHook] = []
_is_recorded = False  # this process, which is a rank
_fork_noted_by: int | None = None  # the process that has left the note of being forked


class Note(NamedTuple):
    """What a child process has written about itself: `why` it was not recorded, or None."""

    process: int
    rank: int
    world_size: int
    why: str | None


class ChildProcesses:
    """The child processes of a program, seen from the process of `astray run`.

    startup: the folder whose `sitecustomize` Python is to run at their start. until: the step after which ranks end.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        guard: Mapping[str, Any] | None,
        startup: Path,
        until: int | None = None,
    ) -> None:
        self.folder = path.with_name(f"{path.name}.ranks")
        self._path = path
        self._startup = str(startup)
        self._message = {
            "place": str(self.folder),
            "settings": _as_json(settings),
            "guard": guard,
            "until": until,
            "parent": os.getpid(),
        }
        self._previous: dict[str, str | None] = {}

    def check_folder(self, *, overwrite: bool) -> None:
        """Called before the program runs: ranks of an earlier run raise RunExists, or are removed with `overwrite`."""
        if not self.folder.exists():
            return
        from astray.store.run_format.folder import (  # and not before: the script is to import numpy itself
            check_recordable,
            discard,
        )

        if not overwrite:
            check_recordable(self.folder, 0, overwrite=False)
        discard(self.folder)

    def set_environment(self, environment: MutableMapping[str, str]) -> None:
        """Makes the processes that are started from now on call `prepare_child`."""
        self._previous = {name: environment.get(name) for name in (VARIABLE, "PYTHONPATH")}
        environment[VARIABLE] = json.dumps(self._message)
        existing = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([self._startup, *([existing] if existing else [])])

    def restore_environment(self, environment: MutableMapping[str, str]) -> None:
        for name, value in self._previous.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value

    def notes(self) -> list[Note]:
        """The notes of the children, in the order of their ranks. Waits for children that still record."""
        notes = []
        for file in sorted(self.folder.glob(_NOTE.format("*"))) if self.folder.is_dir() else ():
            try:
                note = Note(*json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):  # cut, as the process was killed
                continue
            if note.why is None:
                _wait(note.process, self.folder / f"rank{note.rank}" / "end.json")
            notes.append(note)
        return sorted(notes, key=lambda note: (note.rank, note.process))

    def summary(self, ranks: int) -> str:
        """What the run holds now, in one line."""
        return _summary(self._path, ranks)

    def gather(self, notes: list[Note], has_own: bool) -> bool:
        """Moves the ranks into the run.

        `has_own`: this process has recorded calls too, as rank 0. Returns False where both this process and a child are
        rank 0: then the children's runs are not moved.
        """
        from astray.store.run_format.folder import move_ranks

        ranks = {note.rank: note.world_size for note in notes if note.why is None}
        for note in notes:
            (self.folder / _NOTE.format(note.process)).unlink(missing_ok=True)
        if not ranks:
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()
            return True
        if has_own and 0 in ranks:
            return False
        move_ranks(self._path, self.folder, max(ranks.values()))
        return True


def _summary(path: Path, ranks: int) -> str:
    from astray.store import open_run
    from astray.wording import counted

    run = open_run(path)
    first = run.ranks[min(run.ranks)]
    parts = [counted(len(run.steps), "step"), counted(len(first.calls), "call"), counted(len(first.tensors), "tensor")]
    where = f"on rank {first.rank}; {counted(ranks, 'rank')}, in child processes"
    return f"{', '.join(parts)} in {relative_to_cwd(path)} ({where})"


def _wait(process: int, file: Path) -> None:
    """Waits for a file that a process is about to write, for as long as that process lives."""
    until = time.monotonic() + RANK_TIMEOUT
    while not file.exists() and time.monotonic() < until and _is_alive(process):
        time.sleep(0.05)


def _is_alive(process: int) -> bool:
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


def prepare_child(environment: Mapping[str, str], make_guard: GuardFactory) -> None:
    """Waits for the first call of a module, if this process imports a framework at all. Raises nothing.

    make_guard: makes the guard of the recording from the dict of its settings; called only if `astray run` was given
        one.
    """
    try:
        message = json.loads(environment[VARIABLE])
        if message["parent"] == os.getpid():
            return
        for framework in FRAMEWORKS:
            then = partial(_wait_for_first_call, framework, message, make_guard)
            _waiting.append(ImportHook(framework, then).install())
    except Exception as error:  # noqa: BLE001 - the program must not fail because we did
        sys.stderr.write(f"astray: this process is not recorded ({type(error).__name__}: {error}).\n")


def note_fork() -> None:
    """Writes a note when a module is called in a forked child, which is not recorded. Raises no error of ours."""
    global _fork_noted_by
    if _fork_noted_by == os.getpid() or VARIABLE not in os.environ or multiprocessing.current_process().daemon:
        return
    _fork_noted_by = os.getpid()
    try:
        folder = Path(json.loads(os.environ[VARIABLE])["place"])
        _write_note(folder, Note(os.getpid(), -1, 0, _FORKED))
    except Exception as error:  # noqa: BLE001 - the program must not fail because we did
        pass_interrupt(error)


def disarm_child() -> None:
    """Undoes `prepare_child`: this process is an `astray run` itself, and is not recorded as a child of another."""
    while _waiting:
        _waiting.pop().remove()


def _wait_for_first_call(framework: str, message: Mapping[str, Any], make_guard: GuardFactory) -> None:
    after_first_call(framework, lambda ranks: _start_recording(framework, message, ranks, make_guard))


def _start_recording(
    framework: str, message: Mapping[str, Any], ranks: tuple[int, int] | None, make_guard: GuardFactory
) -> Any:
    """Called at the first call of a module in this process. Returns a started recorder if the process is a rank."""
    global _is_recorded
    if multiprocessing.current_process().daemon:  # a worker of a DataLoader, or of a pool
        return None
    if _is_recorded:  # of another framework, whose module was called first
        return None
    folder, why, recorder = Path(message["place"]), None, None
    if ranks is None:
        why = f"it is not a rank of {framework}.distributed"
    else:
        try:
            recorder = _recorder(framework, message, folder, make_guard)
            _is_recorded = True
        except AstrayError as error:
            why = str(error)
    rank, world_size = ranks or (-1, 0)
    _write_note(folder, Note(os.getpid(), rank, world_size, why))
    return recorder


def _write_note(folder: Path, note: Note) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NOTE.format(note.process)).write_text(json.dumps(note), encoding="utf-8")


def _recorder(framework: str, message: Mapping[str, Any], folder: Path, make_guard: GuardFactory) -> Any:
    import atexit

    from astray.capture.adapters import discovering_adapter
    from astray.capture.recorder import BaseRecorder

    settings = {name: value for name, value in message["settings"].items() if value is not None}
    if "perturb" in settings:
        raise AstrayError("inputs are perturbed in the process alone that `astray run` starts")
    guard = None if message["guard"] is None else make_guard(message["guard"])
    recorder = BaseRecorder.discovering(folder, discovering_adapter(framework), guard=guard, **settings).start()
    if message["until"] is not None:
        recorder.on_step_end = partial(end_after, message["until"])
    ended = _ExitWatch()
    atexit.register(lambda: recorder.stop(ended.how))
    return recorder


class LastStep(SystemExit):
    """Ends a program after the step that was asked for, as `sys.exit()` does."""

    def __init__(self, step: int) -> None:
        super().__init__(0)
        self.step = step


def end_after(step: int, finished: int) -> None:
    """Ends the program once so many steps are finished that this one is among them."""
    if finished > step:
        raise LastStep(step)


class _ExitWatch:
    """How this process ends: `normally`, or by the exception that `sys.excepthook` has seen."""

    def __init__(self) -> None:
        self.how = "normally"
        self._previous_hook = sys.excepthook
        sys.excepthook = self._note_exception

    def _note_exception(self, kind: Any, error: Any, trace: Any) -> None:
        self.how = f"{kind.__name__}: {error}"
        self._previous_hook(kind, error, trace)
