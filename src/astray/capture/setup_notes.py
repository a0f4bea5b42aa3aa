"""Notes what the program is set to: its framework, modules and their configurations, autocast.

Everything is read at the start and at the first outermost call of a step. Nothing is done for a tensor, and for a call
only at its module's first. What a framework has to say comes from its `FrameworkSettings` and `ModuleDescriber`; its
own class adds optimizers and scalers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol

from astray.capture.engine import Engine
from astray.capture.module_settings import WatchedObject, config_of, configured, fields_of
from astray.capture.setup_log import MOST_CHANGES, NOT_PLAIN, environment, plain
from astray.capture.sites import Chain
from astray.records import ROOT

if TYPE_CHECKING:
    from astray.capture.native.core import Site

SUBJECT = "what the program is set to"


class FrameworkSettings(Protocol):
    """A module that reads what a framework is set to. Reading starts no device and changes nothing."""

    def state(self) -> tuple[Any, ...]:
        """A cheap summary: when it changes, everything is read again."""

    def settings(self) -> dict[str, Any]: ...
    def seeds(self) -> dict[str, Any]: ...
    def versions(self) -> dict[str, str]: ...
    def devices(self) -> dict[str, str]: ...
    def process(self) -> dict[str, Any]: ...
    def autocast(self) -> str: ...


class ModuleDescriber(NamedTuple, Generic[Chain]):
    """What is noted of a module: its class, its plain attributes, and `described`, all there is.

    `kind` is the class of all modules, `sources` names the attributes from whose values the noted ones are made, and
    `by_name` are types whose values are written as text.
    """

    kind: type
    type_name: Callable[[Any], str]
    attributes: Callable[[Any], dict[str, Any]]
    sources: Callable[[Any], Any]
    described: Callable[[Chain], dict[str, Any]]
    by_name: tuple[type, ...]


class SetupNotes(Generic[Chain]):
    """Notes in the engine's `SetupLog` what the program is set to.

    `framework` is the subject of its own settings. `chains` returns every module that is recorded, `site` the site of
    one. `unobserved` keeps what is read here out of recordings.
    """

    def __init__(
        self,
        engine: Engine,
        framework: str,
        flags: FrameworkSettings,
        describer: ModuleDescriber[Chain],
        chains: Callable[[], list[Chain]],
        site: Callable[[Any], Site | None],
        unobserved: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._engine = engine
        self._framework = framework
        self._flags = flags
        self._describer = describer
        self._chains = chains
        self._site = site
        self._unobserved = unobserved
        self._step = -1  # the last one in which everything was read
        self._is_stale = False  # whether modules were added or replaced since
        self._modules: list[WatchedObject] = []
        self._configs: list[WatchedObject] = []
        self._autocast: dict[str, str] = {}
        self._state: tuple[Any, ...] | None = None  # of the framework's flags, when they were last read

    def start(self, *, seeded: bool) -> None:
        """The recording begins. `seeded`: the program has already set its seed."""
        with self._reporting():
            self._note("environment", "", environment(os.environ))
            self._note_framework(seeds=seeded)
            if self._is_stale:
                self._describe_all()

    def modules_changed(self) -> None:
        """Modules were added or replaced: all are read again before the next call."""
        self._is_stale = True

    def outermost(self, root: str) -> None:
        """An outermost module is about to run."""
        try:  # not `_reporting`: what calls this is not observed anyway
            if self._step != self._engine.step or self._is_stale:
                self._step = self._engine.step
                if self._flags.state() != self._state:
                    self._note_framework()
                self._note_changed_modules()
            state = self._flags.autocast()
            if self._autocast.get(root) != state:
                self._autocast[root] = state
                self._note("autocast", root or ROOT, {"autocast": state})
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(SUBJECT, error)

    def first_call(self, site: Site) -> None:
        """A module is called for the first time: autocast may have been switched inside the outermost one."""
        outer, state = self._autocast.get(site.root), self._flags.autocast()
        if outer is not None and state != outer:
            self._note("autocast", site.name, {"autocast": state})

    # -- looking -----------------------------------------------------------------------------------------------------

    def _note_framework(self, *, seeds: bool = True) -> None:
        flags = self._flags
        self._state = flags.state() if seeds else None
        self._note(self._framework, "", flags.settings())
        if seeds:
            self._note("seed", "", flags.seeds())
        self._note("version", "", flags.versions())
        self._note("device", "", flags.devices())
        self._note("process", "", flags.process())

    def _note_changed_modules(self) -> None:
        if self._is_stale:
            self._describe_all()
            return
        describer = self._describer
        for at, watched in enumerate(self._modules):
            module = watched.changed()
            if module is not None:
                self._modules[at] = WatchedObject(module, watched.site, describer.sources(module))
                noted = {"class": describer.type_name(module), **describer.attributes(module)}
                self._note("module", watched.site, noted, MOST_CHANGES)
        for at, watched in enumerate(self._configs):
            config = watched.changed()
            if config is not None:
                self._configs[at] = WatchedObject(config, watched.site, fields_of(config))
                self._note("config", watched.site, configured(config, describer.by_name), MOST_CHANGES)

    def _describe_all(self) -> None:
        """Describes every module, and watches them all from now on."""
        self._is_stale = False
        self._modules.clear()
        self._configs.clear()
        configs: set[int] = set()
        for chain in self._chains():
            site = self._site(chain.inner)
            if site is not None:
                with self._reporting(f"what {site.name} is set to"):
                    self._describe(chain, site.name, configs)

    def _describe(self, chain: Chain, site: str, configs: set[int]) -> None:
        """Describes a module, and its configuration unless that is one of those that were already."""
        describer = self._describer
        self._note("module", site, describer.described(chain), MOST_CHANGES)
        self._modules.append(WatchedObject(chain.inner, site, describer.sources(chain.inner)))
        config = config_of(chain.inner, describer.kind)
        if config is not None and id(config) not in configs:
            configs.add(id(config))
            self._note("config", site, configured(config, describer.by_name), MOST_CHANGES)
            if hasattr(config, "__weakref__"):
                self._configs.append(WatchedObject(config, site, fields_of(config)))

    def _note(self, subject: str, site: str, values: dict[str, Any], most_changes: int | None = None) -> None:
        self._engine.setup.note(self._engine.step, subject, site, values, most_changes)

    @contextlib.contextmanager
    def _reporting(self, what: str = SUBJECT) -> Iterator[None]:
        """Keeps exceptions of its block out of the program, and what it reads out of recordings."""
        try:
            with self._unobserved():
                yield
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(what, error)


def note_scaler(engine: Engine, scaler: Any, settings: tuple[str, ...]) -> None:
    """A scaler of gradients scales a loss. Its initial scale is noted: reading the current one would wait."""
    try:
        own = vars(scaler)
        noted = {name.lstrip("_"): plain(own[name]) for name in settings if name in own}
        known = {name: value for name, value in noted.items() if value is not NOT_PLAIN}
        engine.setup.note(engine.step, "scaler", "", known)
    except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
        engine.failed(SUBJECT, error)
