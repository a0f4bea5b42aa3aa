"""What a `PrecisionDebugger` was asked for: config.json and the arguments that win over it, checked.

Every key of msprobe 26.2.0 is known here: what it means, or that it means nothing for astray (`IDLE`), or why it cannot
be had (`REFUSED`). A word that nobody knows is an error: msprobe ignores it, and records something else than was meant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from astray.capture.config_file import file_version, load
from astray.errors import RecordError
from astray.foreign.msprobe.translator import Level
from astray.process import absolute
from astray.wording import did_you_mean

TASKS = ("statistics", "tensor", "overflow_check", "acc_check", "structure")
LEVELS: tuple[Level, ...] = get_args(Level)
DATA_MODES = ("all", "input", "output", "forward", "backward")
SUMMARY_MODES = ("statistics", "md5")

IDLE = {
    "async_dump": "files are always written by a thread of their own",
    "precision": "statistics are always summed up in float64",
    "risk_level": "every function is recorded; `list` and support_wrap_ops choose",
    "custom_op_namespaces": "operators of every library are seen",
    "enable_dataloader": "the workers of a DataLoader are left alone, and the program says where steps end",
    "acl_config": "kernels of the NPU are not dumped",
    "check_mode": "results are looked at, not flags of the device",
    "error_data_path": "it is for the check that runs later",
    "file_format": "tensors are written as .pt",
    "backward_input": "it is for kernels of the NPU",
}
"""Keys that are taken and mean nothing here, and why."""

REFUSED = {
    "load": "putting recorded inputs in the place of a module's own is not what a recording does. Leave it out.",
    "slice": "statistics would be those of a part. Leave it out, or keep a slice with astray.record(slice=…).",
    "request_id": "requests of a server are not told apart. Leave it out.",
    "bench_path": "nothing is compared while it is recorded. Leave it out, and call compare(…) afterwards.",
}
"""Keys whose wish cannot be met."""

_TASKS_REFUSED = {
    "nan_check": "It asks an NPU for its flags. 'overflow_check' looks at the results, on any device.",
    "diff_check": "Dump with 'tensor', and call compare(…) afterwards.",
    "free_benchmark": "Use astray.experiment.elsewhere (another device or precision) or astray.record(perturb=True).",
    "exception_dump": "What was recorded until an exception is on disk with every task.",
    "run_ut": "Dump with 'tensor', and give that to `msprobe acc_check`.",
    "grad_probe": "Use astray.state.Monitor.",
}

_SELECTING = ("scope", "list", "data_mode", "slice", "request_id")
_SECTIONS: dict[str, tuple[str, ...]] = {
    "statistics": (*_SELECTING, "summary_mode", "tensor_list"),
    "tensor": (*_SELECTING, "summary_mode", "bench_path", "file_format", "backward_input"),
    "overflow_check": (*_SELECTING, "overflow_nums", "check_mode"),
    "acc_check": (*_SELECTING, "white_list", "black_list", "error_data_path"),
    "structure": _SELECTING,
}
_COMMON = (
    "task", "dump_path", "rank", "step", "level", "extra_info", "dump_enable", "support_wrap_ops", "load",
    "async_dump", "precision", "risk_level", "custom_op_namespaces", "enable_dataloader", "acl_config",
)  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """What is recorded, and where to.

    steps, ranks: which ones; empty for all. scope: the first and the last entry. names: texts of which one must be in
    the name of an entry. tensors: the same for entries of which statistics are not enough. white, black: functions.
    overflows: after how many entries with NaN or infinity to stop; None for never.
    """

    dump_path: Path
    task: str = "statistics"
    level: Level = "L1"
    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    scope: tuple[str, str] | None = None
    names: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    white: tuple[str, ...] = ()
    black: tuple[str, ...] = ()
    phases: frozenset[str] = frozenset(("forward", "backward"))
    roles: frozenset[str] = frozenset(("input", "output"))
    md5: bool = False
    extra_info: bool = True
    enabled: bool = True
    overflows: int | None = None
    functions: Any = None
    home: Path = field(default=Path(), compare=False)  # what relative paths are relative to
    file: Path | None = field(default=None, compare=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def check(
        cls,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Any = None,
        support_wrap_ops: Any = None,
    ) -> Configuration:
        """From the file, if there is one, and the arguments, which win. A RecordError says what is wrong."""
        given = {"task": task, "dump_path": dump_path, "level": level, "step": step}
        given |= {"support_wrap_ops": support_wrap_ops}
        given = {name: value for name, value in given.items() if value is not None}
        home = absolute("")  # a program may go to another folder before the file is read again
        return _made({}, given, home) if config_path is None else _of_file(Path(config_path), given, home)

    @property
    def version(self) -> tuple[int, ...]:
        """What changes when the file does."""
        return () if self.file is None else file_version(self.file)

    def read_again(self) -> Configuration:
        """What the file says now."""
        assert self.file is not None, "only a file changes"
        return _of_file(self.file, self.arguments, self.home)

    def differences(self, other: Configuration) -> list[str]:
        """Where two configurations are not the same, in words."""
        return [
            f"{one.name} {getattr(self, one.name)!r} instead of {getattr(other, one.name)!r}"
            for one in fields(self)
            if one.compare and getattr(self, one.name) != getattr(other, one.name)
        ]

    def but_for_switch(self, other: Configuration) -> list[str]:
        """The same, but for `dump_enable`."""
        return replace(self, enabled=other.enabled).differences(other)


def _of_file(path: Path, given: Mapping[str, Any], home: Path) -> Configuration:
    held = load(path)
    if not isinstance(held, dict):
        raise RecordError(f'{path} holds {held!r}. It is a JSON object such as {{"task": "statistics"}}.')
    functions = held.get("support_wrap_ops")
    if isinstance(functions, str):
        held["support_wrap_ops"] = str(absolute(path.parent / functions))
    try:
        return replace(_made(held, given, home), file=absolute(path), arguments=given)
    except RecordError as error:
        raise RecordError(f"In {path}: {error}") from None


def _made(held: Mapping[str, Any], given: Mapping[str, Any], home: Path) -> Configuration:
    """The configuration of what a file holds and of the arguments."""
    everything = {**held, **given}
    sections = {*_SECTIONS, *_TASKS_REFUSED}
    _check_keys(everything, _COMMON, sections)
    task = _task(everything.get("task"))
    section = everything.get(task) or {}
    if not isinstance(section, dict):
        raise RecordError(f'{task} is {section!r}. It is an object such as {{"list": []}}.')
    _check_keys(section, _SECTIONS[task], (), f"{task}: ")
    level = _level(everything.get("level"), task)
    path = everything.get("dump_path")
    if not path or not isinstance(path, str | os.PathLike):
        raise RecordError(f"dump_path is {path!r}. Say in which folder to put the dump: dump_path='./dump_path'.")
    modes = words(section, "data_mode", DATA_MODES)
    if "all" in modes and len(modes) > 1:
        raise RecordError(f"data_mode is {sorted(modes)}: 'all' is already everything. Leave out either.")
    functions = everything.get("support_wrap_ops")
    md5 = word(section, "summary_mode", SUMMARY_MODES, "statistics") == "md5"
    return Configuration(
        dump_path=home / path,
        task=task,
        level=level,
        steps=numbers("step", everything.get("step")),
        ranks=numbers("rank", everything.get("rank")),
        scope=scope(section.get("scope"), level),
        names=texts(section, "list"),
        tensors=texts(section, "tensor_list"),
        white=texts(section, "white_list"),
        black=texts(section, "black_list"),
        phases=frozenset(modes & {"forward", "backward"} or {"forward", "backward"}),
        roles=frozenset(modes & {"input", "output"} or {"input", "output"}),
        md5=md5,
        extra_info=flag(everything, "extra_info", True),
        enabled=flag(everything, "dump_enable", True),
        overflows=overflows(section.get("overflow_nums")) if task == "overflow_check" else None,
        functions=home / functions if isinstance(functions, str | os.PathLike) else functions,
        home=home,
    )


def _check_keys(held: Mapping[str, Any], known: tuple[str, ...], besides: Collection[str], where: str = "") -> None:
    for name, value in held.items():
        if name in REFUSED and name in known and value:
            raise RecordError(f"{where}{name} is {value!r}, which is not possible here: {REFUSED[name]}")
        if name not in known and name not in besides:
            hint = did_you_mean(name, [*known, *besides]) or f" There are {', '.join(known)}."
            raise RecordError(f"{where}{name}={value!r} is no key.{hint}")


def _task(given: Any) -> str:
    if given is None or given == "":
        return "statistics"
    if isinstance(given, str) and given in _TASKS_REFUSED:
        raise RecordError(f"task is {given!r}, which is not there. {_TASKS_REFUSED[given]}")
    if given not in TASKS:
        raise RecordError(f"task is {given!r}. It is one of {', '.join(TASKS)}.{did_you_mean(given, TASKS)}")
    return str(given)


def _level(given: Any, task: str) -> Level:
    if given == "L2":
        raise RecordError("level is 'L2', which dumps kernels of an NPU. The operators below functions are recorded by "
                          "astray.record(level='op').")  # fmt: skip
    if given not in (None, "", *LEVELS):
        raise RecordError(f"level is {given!r}. It is one of {', '.join(LEVELS)}.{did_you_mean(given, LEVELS)}")
    level: Level = given or "L1"
    if task == "structure" and level == "L1" and not given:
        return "mix"
    if task == "structure" and level in ("L1", "debug"):
        raise RecordError(
            f"task is 'structure' at level {level!r}, where there are no modules. Set level to L0 or mix."
        )
    if task == "acc_check" and level != "L1":
        raise RecordError(f"task is 'acc_check' at level {level!r}. It is about functions: set level to L1.")
    if task == "overflow_check" and level == "debug":
        raise RecordError("task is 'overflow_check' at level 'debug', where only what you save is recorded. Set level "
                          "to L0, L1 or mix.")  # fmt: skip
    return level


# -- one value of config.json → what it means, or a RecordError that says what would be right --------------------------

_FUNCTION = r"(?!Module\.|Cell\.)\w+\..+\.\d+\.(forward|backward)"
_MODULE = r"(Module|Cell)\..+\.(forward|backward)\.\d+"
_NAMES = {"L0": _MODULE, "L1": _FUNCTION, "mix": f"{_FUNCTION}|{_MODULE}"}
_LARGEST = 1_000_000


def numbers(name: str, given: Any) -> tuple[int, ...]:
    """Steps or ranks as msprobe writes them: numbers, "3", and "4-6", which has its end.

    >>> numbers("step", [0, "4-6"])
    (0, 4, 5, 6)
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple | range):
        raise RecordError(f'{name} is {given!r}. It is a list such as [0, "4-6"]; [] means all.')
    found: set[int] = set()
    for one in given:
        span = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", one) if isinstance(one, str) else None
        if span is not None:
            first, last = int(span[1]), int(span[2] or span[1])
        elif isinstance(one, int) and not isinstance(one, bool):
            first = last = one
        else:
            raise RecordError(f'{name} has {one!r}. It holds whole numbers, or spans such as "4-6".')
        if not 0 <= first <= last <= _LARGEST:
            raise RecordError(f"{name} has {one!r}. Its numbers go from 0 to {_LARGEST:,}, the smaller one first.")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def scope(given: Any, level: str) -> tuple[str, str] | None:
    """The names of two entries, as this level has them."""
    if not given:
        return None
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(isinstance(one, str) for one in given):
        raise RecordError(f"scope is {given!r}. It is two names, the first and the last entry that are dumped.")
    if level == "debug":
        raise RecordError("scope is given at level 'debug', where only what you save is recorded. Leave out either.")
    for name in given:
        if not re.fullmatch(_NAMES[level], name):
            example = "Module.fc.Linear.forward.0" if level == "L0" else "Functional.linear.0.forward"
            raise RecordError(f"scope has {name!r}, which is no name of level {level}. They look like {example}.")
    return given[0], given[1]


def overflows(given: Any) -> int | None:
    """How many entries with NaN or infinity to dump; None for all."""
    if given is None:
        return 1
    if isinstance(given, bool) or not isinstance(given, int) or (given < 1 and given != -1):
        raise RecordError(f"overflow_nums is {given!r}. It is how many entries to dump, from 1 on, or -1 for all.")
    return None if given == -1 else given


def texts(section: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of names, or of parts of them."""
    given = section.get(name)
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) and one for one in given):
        raise RecordError(f'{name} is {given!r}. It is a list of names, or of parts of names: ["relu"].')
    return tuple(given)


def words(section: Mapping[str, Any], name: str, known: tuple[str, ...]) -> set[str]:
    """A list of known words."""
    found = texts(section, name)
    for word in found:
        if word not in known:
            raise RecordError(f"{name} has {word!r}. It holds {', '.join(known)}.{did_you_mean(word, known)}")
    return set(found)


def word(section: Mapping[str, Any], name: str, known: tuple[str, ...], default: str) -> str:
    """One of the known words."""
    given = section.get(name) or default
    if given == "xor":
        raise RecordError(f"{name} is 'xor'. That sum does not see two rows swapped: use 'md5'.")
    if given not in known:
        raise RecordError(f"{name} is {given!r}. It is one of {', '.join(known)}.{did_you_mean(given, known)}")
    return str(given)


def flag(held: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false."""
    given = held.get(name)
    if given is not None and not isinstance(given, bool):
        raise RecordError(f"{name} is {given!r}. It is true or false.")
    return default if given is None else given
