"""What modules and their configurations are set to: plain attributes, read without running code of the program.

Only `vars` are read, never a property. Checking an object that has not changed is one comparison of the objects in its
`__dict__`: 0.4 µs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from operator import is_, itemgetter
from typing import Any

from astray.capture.setup_log import NOT_PLAIN, plain

MOST_ATTRIBUTES = 64
MOST_FIELDS = 256
"""How many attributes of a module, and fields of a configuration, are noted."""

POSITIONS = frozenset({"name_or_path", "layer_idx", "layer_id", "layer_number"})
"""Attributes that only say where in the model a module is."""

_CONFIGS = ("config", "cfg")
_PRIVATE_SETTINGS = ("_implementation", "_implementation_internal")
"""Private attributes of transformers' configurations that decide which kernels run."""

_NOT_SETTINGS_OF_CONFIGS = frozenset({"transformers_version", "architectures", "name_or_path"})


class WatchedObject:
    """Some attributes of an object, as they were when it was last read. The object is held weakly."""

    __slots__ = ("_get", "_kind", "_object", "_size", "_values", "site")

    def __init__(self, watched: Any, site: str, names: Any) -> None:
        self._object = weakref.ref(watched)
        self._kind = type(watched)
        self.site = site
        own = vars(watched)
        known = [name for name in names if name in own]
        # Twice the first: of one name alone, `itemgetter` does not give a tuple.
        self._get: Callable[[Any], tuple[Any, ...]] = itemgetter(*known, *known[:1]) if known else _nothing
        self._size = len(own)
        self._values = self._get(own)

    def changed(self) -> Any:
        """The object, if any of these attributes has changed since it was last read; else None."""
        watched = self._object()
        if watched is None:
            return None
        own = watched.__dict__
        try:
            is_known = len(own) == self._size and type(watched) is self._kind
            is_known = is_known and all(map(is_, self._get(own), self._values))
        except KeyError:
            is_known = False
        return None if is_known else watched


def _nothing(_: Any) -> tuple[Any, ...]:
    return ()


def plain_attributes(own: Mapping[str, Any], names: Collection[str], by_name: tuple[type, ...]) -> dict[str, Any]:
    """Those of the named attributes that have plain values. `by_name` are types whose values are written as text."""
    found = {}
    for name in names:
        noted = NOT_PLAIN if name in POSITIONS else plain(own[name], by_name)
        if noted is not NOT_PLAIN:
            found[name] = noted
    return found


def config_of(module: Any, kind: type) -> Any:
    """The configuration object of a module of this kind; None when it has none."""
    own = vars(module)
    for name in _CONFIGS:
        config = own.get(name)
        if isinstance(config, Mapping) or hasattr(config, "__dict__"):
            return None if isinstance(config, type | kind) else config
    return None


def fields_of(config: Any) -> Mapping[str, Any]:
    """The fields of a configuration, read from its `__dict__`."""
    return config if type(config) is dict else vars(config) if hasattr(config, "__dict__") else {}


def configured(config: Any, by_name: tuple[type, ...]) -> dict[str, Any]:
    """The plain fields of a configuration; fields of nested dicts and configurations get the outer name as a prefix."""
    values: dict[str, Any] = {}
    _collect_fields(fields_of(config), "", values, 2, by_name)
    return dict(list(values.items())[:MOST_FIELDS])


def _collect_fields(
    fields: Mapping[str, Any], prefix: str, values: dict[str, Any], depth: int, by_name: tuple[type, ...]
) -> None:
    for name, value in fields.items():
        if not isinstance(name, str) or name in _NOT_SETTINGS_OF_CONFIGS:
            continue
        if name.startswith("_"):
            if not name.endswith(_PRIVATE_SETTINGS):
                continue
            name = name.removesuffix("_internal")
        noted = plain(value, by_name)
        if noted is not NOT_PLAIN:
            values[prefix + name] = noted
        elif depth and (type(value) is dict or type(value).__name__.endswith("Config")):
            _collect_fields(fields_of(value), f"{prefix}{name}.", values, depth - 1, by_name)
