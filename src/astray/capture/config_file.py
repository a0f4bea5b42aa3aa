"""Settings in a file: YAML, JSON or TOML, read once at the start and again whenever it is edited.

Knows the file formats; `settings` knows the keys. The YAML that is read has fewer implicit types than the standard: in
YAML 1.1, `10:20` is the number 620 (ten minutes and twenty seconds), but in a configuration it means steps.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.errors import RecordError
from astray.interrupts import pass_interrupt
from astray.safe_text import bounded_loader, check_bounded

if TYPE_CHECKING:
    import yaml

    from astray.capture.settings import Settings

PathLike = str | os.PathLike[str]


def load(path: PathLike) -> Any:
    """The content of a file, parsed according to its ending; None when it is empty. Raises RecordError."""
    ending = Path(path).suffix.lower()
    if ending not in _PARSERS:
        raise RecordError(f"{path} has the ending {ending!r}. Settings are read from {', '.join(_PARSERS)}.")
    try:
        text = Path(path).read_text("utf-8-sig")
    except FileNotFoundError as error:
        pass_interrupt(error)
        raise RecordError(f"There is no file {path}.") from None
    except OSError as error:
        pass_interrupt(error)
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path} is not a text in UTF-8.") from None
    try:
        return _PARSERS[ending](text) if text.strip() else None
    except (_ParseError, RecursionError) as error:
        raise RecordError(f"{path} is not valid {ending[1:].upper()}: {error}.") from None


def settings_in(path: PathLike) -> dict[str, Any]:
    """The settings that a file holds, by name, as they are written; `settings.checked` knows what they mean."""
    settings = load(path)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise RecordError(f"In {path}: it holds {settings!r}. Settings are written by name, such as `keep: stats`.")
    if "config" in settings:
        raise RecordError(f"In {path}: config={settings['config']!r} names another file. One file holds all settings.")
    if isinstance(settings.get("functions"), str):
        settings["functions"] = str(Path(path).parent / settings["functions"])
    return settings


class LiveConfig:
    """A file of settings that may be edited while the program runs.

    `settings` are those in force. The `overrides` win over the file, now and after every edit.

    >>> live = LiveConfig("astray.yaml", {"keep": "tensors"})
    >>> live.changed()  # once a step; None until the file says something else
    """

    def __init__(self, path: PathLike, overrides: Mapping[str, Any]) -> None:
        from astray.capture.settings import Settings, checked  # not at the top: settings read files too

        self._path = Path(path).absolute()  # the program may go to another folder
        self._overrides = checked(overrides)
        self._version = file_version(self._path)
        self.settings = Settings(**(checked(settings_in(path), f"In {path}: ") | self._overrides))

    def changed(self) -> Settings | None:
        """The new settings if the file has been edited, else None. Costs one `stat` when it has not.

        An edit that cannot be used, such as a file that is half written, empty or gone, leaves the settings as they
        are and raises a RecordError to log, once for each version of the file.
        """
        version = file_version(self._path)
        if version == self._version:
            return None
        settings, problem = self._read()
        if file_version(self._path) != version:  # it was written to while it was read: look again next time
            return None
        self._version = version
        if problem is not None:
            raise RecordError(f"{problem} The settings stay as they were.")
        if settings is None or settings == self.settings:
            return None
        self.settings = settings
        return settings

    def _read(self) -> tuple[Settings | None, RecordError | None]:
        from astray.capture.settings import Settings, checked

        try:
            settings = settings_in(self._path)
            if not settings:  # at the start that would mean the defaults; now it is about to be written
                return None, RecordError(f"{self._path} says nothing now.")
            return Settings(**(checked(settings, f"In {self._path}: ") | self._overrides)), None
        except RecordError as error:
            return None, error


def file_version(path: Path) -> tuple[int, ...]:
    """Time, size and inode of a file, which change when it does; empty when there is no file."""
    try:
        status = path.stat()
    except OSError as error:
        pass_interrupt(error)
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


class _ParseError(Exception):
    """A text is not valid in the format of its file's ending. The message follows a colon."""


def _json(text: str) -> Any:
    import json

    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise _ParseError(f"{error.msg} in line {error.lineno}") from None
    except ValueError as error:  # a number of thousands of digits
        raise _ParseError(str(error)) from None


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise _ParseError(str(error)) from None


def _yaml(text: str) -> Any:
    import yaml

    try:
        document = yaml.load(text, Loader=_yaml_loader())  # a safe one
        check_bounded(document)
        return document
    except yaml.MarkedYAMLError as error:
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _ParseError(f"{error.problem or error}{where}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise _ParseError(str(error).replace("\n", " ")) from None


_PARSERS = {".yaml": _yaml, ".yml": _yaml, ".json": _json, ".toml": _toml}


@functools.cache
def _yaml_loader() -> type[yaml.SafeLoader]:
    """The safe loader without numbers in base 60 and without dates, and with keys that stand only once."""
    import yaml

    class UniqueKeyLoader(bounded_loader()):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            _unique_keys([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return mapping

    plainer = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
    UniqueKeyLoader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag not in plainer]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = r"[-+]?(?:0|[1-9][0-9_]*)"
    UniqueKeyLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"{number}\Z"), list("-+0123456789"))
    UniqueKeyLoader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(rf"{number}(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)\Z"),
        list("-+0123456789"),
    )
    return UniqueKeyLoader


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of the pairs. Of a key that stands twice, every parser would drop the first in silence."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise _ParseError(f"{key!r} stands in it twice")
        mapping[key] = value
    return mapping
