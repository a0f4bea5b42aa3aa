"""The configuration of a `PrecisionDebugger`: config.json, and the arguments that override it, checked.

Every key of msprobe 26.2.0 is known here: what it means, that it has no effect in astray (`IDLE`), or why it is not
supported (`REFUSED`). An unknown key is an error: msprobe ignores it, and records something else than was meant.
`EntryFilter` says which entries of a step the configuration selects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
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
"""Keys that are accepted without effect, and why they have none."""

REFUSED = {
    "load": "putting recorded inputs in the place of a module's own is not what a recording does. Leave it out.",
    "slice": "statistics would be those of a part. Leave it out, or keep a slice with astray.record(slice=…).",
    "request_id": "requests of a server are not told apart. Leave it out.",
    "bench_path": "nothing is compared while it is recorded. Leave it out, and call compare(…) afterwards.",
}
"""Keys that are not supported."""

_TASKS_REFUSED = {
    "nan_check": "It asks an NPU for its flags. 'overflow_check' looks at the results, on any device.",
    "diff_check": "Dump with 'tensor', and call compare(…) afterwards.",
    "free_benchmark": "Use astray.experiment.swap (another device or precision) or astray.record(perturb=True).",
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

    steps, ranks: which ones; empty for all. scope: the first and the last entry. names: entries whose name contains one
    of these texts. tensors: the same for entries whose values are dumped too. white, black: functions.
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
    home: Path = field(default=Path(), compare=False)  # the base of relative paths
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
        """From the file, if there is one, and the arguments, which override it. Raises RecordError."""
        arguments = {"task": task, "dump_path": dump_path, "level": level, "step": step}
        arguments |= {"support_wrap_ops": support_wrap_ops}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        home = absolute("")  # a program may change its directory before the file is read again
        if config_path is None:
            return _from_keys({}, arguments, home)
        return _from_file(Path(config_path), arguments, home)

    @property
    def version(self) -> tuple[int, ...]:
        """The version of the file, to notice that it has changed."""
        return () if self.file is None else file_version(self.file)

    def read_again(self) -> Configuration:
        """The configuration by the file as it is now, with the same arguments."""
        assert self.file is not None, "called only when the file has changed"
        return _from_file(self.file, self.arguments, self.home)

    def differences(self, other: Configuration) -> list[str]:
        """The fields in which two configurations differ, in words."""
        return [
            f"{field.name} {getattr(self, field.name)!r} instead of {getattr(other, field.name)!r}"
            for field in fields(self)
            if field.compare and getattr(self, field.name) != getattr(other, field.name)
        ]


def _from_file(path: Path, arguments: Mapping[str, Any], home: Path) -> Configuration:
    content = load(path)
    if not isinstance(content, dict):
        raise RecordError(f'{path} holds {content!r}. It is a JSON object such as {{"task": "statistics"}}.')
    functions = content.get("support_wrap_ops")
    if isinstance(functions, str):
        content["support_wrap_ops"] = str(absolute(path.parent / functions))
    try:
        return replace(_from_keys(content, arguments, home), file=absolute(path), arguments=arguments)
    except RecordError as error:
        raise RecordError(f"In {path}: {error}") from None


def _from_keys(content: Mapping[str, Any], arguments: Mapping[str, Any], home: Path) -> Configuration:
    """The configuration of the content of a file and of the arguments."""
    everything = {**content, **arguments}
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


def _check_keys(section: Mapping[str, Any], known: tuple[str, ...], sections: Collection[str], where: str = "") -> None:
    for name, value in section.items():
        if name in REFUSED and name in known and value:
            raise RecordError(f"{where}{name} is {value!r}, which is not possible here: {REFUSED[name]}")
        if name not in known and name not in sections:
            hint = did_you_mean(name, [*known, *sections]) or f" There are {', '.join(known)}."
            raise RecordError(f"{where}{name}={value!r} is not a key.{hint}")


def _task(given: Any) -> str:
    if given is None or given == "":
        return "statistics"
    if isinstance(given, str) and given in _TASKS_REFUSED:
        raise RecordError(f"task is {given!r}, which is not supported. {_TASKS_REFUSED[given]}")
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


# -- the values of config.json, checked; errors say what would be right ------------------------------------------------

_FUNCTION = r"(?!Module\.|Cell\.)\w+\..+\.\d+\.(forward|backward)"
_MODULE = r"(Module|Cell)\..+\.(forward|backward)\.\d+"
_NAMES = {"L0": _MODULE, "L1": _FUNCTION, "mix": f"{_FUNCTION}|{_MODULE}"}
_LARGEST = 1_000_000


def numbers(name: str, given: Any) -> tuple[int, ...]:
    """Steps or ranks as msprobe writes them: numbers, "3", and "4-6", which includes 6.

    >>> numbers("step", [0, "4-6"])
    (0, 4, 5, 6)
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple | range):
        raise RecordError(f'{name} is {given!r}. It is a list such as [0, "4-6"]; [] means all.')
    chosen: set[int] = set()
    for item in given:
        span = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", item) if isinstance(item, str) else None
        if span is not None:
            first, last = int(span[1]), int(span[2] or span[1])
        elif isinstance(item, int) and not isinstance(item, bool):
            first = last = item
        else:
            raise RecordError(f'{name} has {item!r}. It holds whole numbers, or spans such as "4-6".')
        if not 0 <= first <= last <= _LARGEST:
            raise RecordError(f"{name} has {item!r}. Its numbers go from 0 to {_LARGEST:,}, the smaller one first.")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def scope(given: Any, level: str) -> tuple[str, str] | None:
    """The names of two entries, in the form they have at this level."""
    if not given:
        return None
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(isinstance(name, str) for name in given):
        raise RecordError(f"scope is {given!r}. It is two names, the first and the last entry that are dumped.")
    if level == "debug":
        raise RecordError("scope is given at level 'debug', where only what you save is recorded. Leave out either.")
    for name in given:
        if not re.fullmatch(_NAMES[level], name):
            example = "Module.fc.Linear.forward.0" if level == "L0" else "Functional.linear.0.forward"
            raise RecordError(f"scope has {name!r}, which is not a name of level {level}. They look like {example}.")
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
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) and text for text in given):
        raise RecordError(f'{name} is {given!r}. It is a list of names, or of parts of names: ["relu"].')
    return tuple(given)


def words(section: Mapping[str, Any], name: str, known: tuple[str, ...]) -> set[str]:
    """A list of known words."""
    chosen = texts(section, name)
    for word in chosen:
        if word not in known:
            raise RecordError(f"{name} has {word!r}. It holds {', '.join(known)}.{did_you_mean(word, known)}")
    return set(chosen)


def word(section: Mapping[str, Any], name: str, known: tuple[str, ...], default: str) -> str:
    """One of the known words."""
    given = section.get(name) or default
    if given == "xor":
        raise RecordError(f"{name} is 'xor'. That sum does not see two rows swapped: use 'md5'.")
    if given not in known:
        raise RecordError(f"{name} is {given!r}. It is one of {', '.join(known)}.{did_you_mean(given, known)}")
    return str(given)


def flag(section: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false."""
    given = section.get(name)
    if given is not None and not isinstance(given, bool):
        raise RecordError(f"{name} is {given!r}. It is true or false.")
    return default if given is None else given


# -- which entries it selects ------------------------------------------------------------------------------------------

_FORWARD = re.compile(r"\.forward(\.\d+)?$")
_GRADIENT = re.compile(r"(.+)\.parameters_grad(?:\.(\d+))?")


class EntryFilter:
    """Which entries of one step are dumped: `list`, `scope`, `tensor_list`, `white_list` and `black_list`.

    Called once for each entry, in the order in which they start.

    >>> selects = EntryFilter(Configuration(Path("dump"), level="mix", names=("fc1",)))
    >>> selects("Module.fc1.Linear.forward.0"), selects("Functional.linear.0.forward", ["Module.fc1.Linear.forward.0"])
    (True, True)
    """

    def __init__(self, configuration: Configuration) -> None:
        self._names = configuration.names
        self._scope = configuration.scope
        self._by_module = configuration.level == "mix"  # naming a module selects everything inside it
        self._white, self._black = frozenset(configuration.white), frozenset(configuration.black)
        self._forward = "forward" in configuration.phases
        self._in_scope = self._closing = False

    @staticmethod
    def is_needed(configuration: Configuration) -> bool:
        """False when every entry is selected."""
        criteria = (configuration.names, configuration.scope, configuration.white, configuration.black)
        return any(criteria) or "forward" not in configuration.phases

    def __call__(self, name: str, around: Sequence[str] = ()) -> bool:
        """Whether an entry is dumped. around: the entries of the modules around it."""
        if not self._is_in_scope(name, around):  # which keeps state, so it is called for every entry
            return False
        return self._is_of_phase(name) and self._is_listed(name, around) and self._is_of_chosen_function(name)

    def _is_in_scope(self, name: str, around: Sequence[str]) -> bool:
        """From the start of the first entry to the end of the last, whatever is inside it included."""
        if self._scope is None:
            return True
        begin, end = self._scope
        if self._closing and name != end and end not in around:
            self._in_scope = self._closing = False
        if name == begin:
            self._in_scope, self._closing = True, False
        if name == end and self._in_scope:
            self._closing = True
        return self._in_scope

    def _is_of_phase(self, name: str) -> bool:
        """Forward calls are recorded in any case, since backward calls are numbered by them, and left out here."""
        return self._forward or not _FORWARD.search(name)

    def _is_listed(self, name: str, around: Sequence[str]) -> bool:
        if not self._names:
            return True
        gradient = _GRADIENT.fullmatch(name)  # goes with the backward of its module
        names = [name, f"{gradient[1]}.backward.{gradient[2] or 0}"] if gradient else [name]
        if self._by_module:
            names += around
        return any(part in candidate for candidate in names for part in self._names)

    def _is_of_chosen_function(self, name: str) -> bool:
        if not self._white and not self._black:
            return True
        function = ".".join(name.split(".")[1:-2])
        return function not in self._black and (not self._white or function in self._white)
