"""The recordings behind `register_saving_hook`: one of the outputs of chosen layers, one of their gradients.

There are two, so that each ends when its limit is reached, and observes nothing that it does not save. Both are
ordinary recordings with a writer of another format; nothing here reads a tensor.
"""

from __future__ import annotations

import atexit
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from astray.capture.adapters import Adapter
from astray.capture.recorder import BaseRecorder
from astray.capture.settings import RecordingOptions
from astray.capture.sites import Named, site_name
from astray.errors import RecordError
from astray.foreign.live_writer import LiveWriter
from astray.foreign.saving_hook import Limit, SavingTranslator, translate
from astray.foreign.saving_hook.files import FolderName, list_rank
from astray.foreign.saving_hook.writer import ACCUMULATED, RECOMPUTED
from astray.log import logger
from astray.records import ANY_CALL, ROOT
from astray.store.run_info import RunInfo
from astray.wording import counted, did_you_mean


class Framework(Protocol):
    """What the hook needs of a framework."""

    def chains(self, model: Any, /) -> Iterable[Named]:
        """Every layer of a model with all that wraps it, in the framework's order."""

    def is_leaf(self, chain: Any, /) -> bool:
        """Whether it is a layer that can be called and has no other in it."""

    def type_name(self, layer: Any, /) -> str: ...

    def layer_name(self, layer: Any, /) -> str | None:
        """What a layer is called in the names of files; None where that is its site."""

    def parameter_name(self, parameter: Any, /) -> str | None:
        """The same for a parameter."""

    def adapter(self, model: Any, /) -> Adapter:
        """What records the model."""

    def on_forward(self, model: Any, is_due: Callable[[], bool], work: Callable[[], None], /) -> contextlib.ExitStack:
        """Has `work` done when a forward of the model finds that it is due, until the result is closed.

        The work removes hooks: it is done when the framework allows that.
        """


NOT_MEANT = ("the dtype ", "gradients that ")
"""How notes begin of what is not meant to be saved: types that numpy does not have, gradients of calls."""

_active: list[_ModelSaving] = []
"""What is being saved in this process."""


def save(
    model: Any,
    framework: Framework,
    path: Path,
    classes: Sequence[str] | None,
    limits: Mapping[FolderName, Limit],
) -> None:
    """Save the outputs of the leaf layers of these classes, and the gradients of their parameters, from now on."""
    layers = _Layers(framework, model)
    chosen = _choose(layers.leaves, classes, type(model).__name__)
    if not chosen:
        return
    other = next((saving for saving in _active if saving.path == path), None)
    if other is not None:
        raise RecordError(
            f"The tensors of a {type(other.model).__name__} are being saved in {path} already. Give each model a "
            "path of its own, or call remove_saving_hook first."
        )
    _ModelSaving(model, framework, path, layers.names).start(chosen, layers.shared(chosen), limits)


def remove(model: Any) -> None:
    """End everything that is being saved of a model."""
    for saving in [saving for saving in _active if saving.model is model]:
        saving.end()


class _Layers:
    """The layers of a model by their sites: which of them are leaves, and what is called how in the names of files."""

    def __init__(self, framework: Framework, model: Any) -> None:
        self.leaves: dict[str, str] = {}  # the class of each
        self.names: dict[str, str] = {}  # of layers and parameters, where they are not their sites
        self._owned: dict[str, list[str]] = {}  # the sites of a layer's parameters
        first: dict[int, str] = {}
        for chain in framework.chains(model):
            site = site_name("", chain.name)
            if framework.is_leaf(chain):
                self.leaves[site] = framework.type_name(chain.inner)
            self._name(site, framework.layer_name(chain.inner))
            for name, parameter in _parameters(chain):
                own = name if site == ROOT else f"{site}.{name}"
                at = first.setdefault(id(parameter), own)
                self._owned.setdefault(site, []).append(at)
                self._name(own, framework.parameter_name(parameter))

    def shared(self, sites: Sequence[str]) -> list[str]:
        """The sites of parameters of these layers that other layers have too, after which they are called."""
        owned = ((site, parameter) for site in sites for parameter in self._owned.get(site, ()))
        return [parameter for site, parameter in owned if site != ROOT and not parameter.startswith(f"{site}.")]

    def _name(self, site: str, name: str | None) -> None:
        if name is not None:
            self.names[site] = name


def _parameters(chain: Named) -> list[tuple[str, Any]]:
    """The parameters of a layer itself, which both frameworks keep alike."""
    found = [item for layer in chain.modules for item in layer._parameters.items()]
    return [(name, parameter) for name, parameter in found if parameter is not None]


def _choose(leaves: Mapping[str, str], classes: Sequence[str] | None, model: str) -> list[str]:
    """The sites of the leaf layers of these classes."""
    counts = Counter(leaves.values())
    for name in classes or ():
        if name not in counts:
            known = ", ".join(f"{kind} ({count})" for kind, count in counts.most_common())
            hint = did_you_mean(name, counts) or f" Its leaf layers are: {known or 'none'}."
            logger.warning("No leaf layer of the %s is of the class %r.%s", model, name, hint)
    return [site for site, kind in leaves.items() if classes is None or kind in classes]


class _ModelSaving:
    """What is being saved of one model."""

    def __init__(self, model: Any, framework: Framework, path: Path, names: Mapping[str, str]) -> None:
        self.model = model
        self.framework = framework
        self.path = path
        self.names = names
        self._recorders: list[_FolderRecorder] = []
        self._hooks: contextlib.ExitStack | None = None

    def start(self, layers: Sequence[str], shared: Sequence[str], limits: Mapping[FolderName, Limit]) -> None:
        """Begin. Removes everything again where it fails.

        layers: their sites. shared: those of parameters that have the name of another layer.
        """
        _active.append(self)
        # Before the recorders' own hooks: a recording that is full ends before it observes the call.
        self._hooks = self.framework.on_forward(self.model, self.has_full, self.end_full)
        named = "|".join(map(re.escape, layers))
        parameters = ["[^.]+" if name == ROOT else rf"{re.escape(name)}\..+" for name in layers]
        with_parameters = "|".join([named, *parameters, *map(re.escape, shared)])
        match = rf"\A(?:{named})\Z"
        outputs: RecordingOptions = {"keep": "tensors", "phases": "forward", "roles": "output", "match": match}
        # The layers too: their backward calls determine the micro step of a gradient.
        match = rf"\A(?:{with_parameters})\Z"
        gradients: RecordingOptions = {"keep": "tensors", "phases": "backward", "roles": "gradient", "match": match}
        try:
            self._recorders.append(_FolderRecorder(self, "tensors", limits["tensors"], outputs))
            self._recorders.append(_FolderRecorder(self, "grads", limits["grads"], gradients))
        except BaseException:  # an interrupt must not leave a hook either
            self.end()
            raise
        atexit.register(self.end)

    def has_full(self) -> bool:
        """Whether the limit of a recording is reached."""
        return any(recorder.translator.is_full for recorder in self._recorders)

    def end_full(self) -> None:
        """End the recordings whose limit is reached."""
        for recorder in [recorder for recorder in self._recorders if recorder.translator.is_full]:
            self._recorders.remove(recorder)
            recorder.end()
        if not self._recorders:
            self.end()

    def end(self) -> None:
        """End both recordings, and remove every hook."""
        atexit.unregister(self.end)
        while self._recorders:
            self._recorders.pop().end()
        if self._hooks is not None:
            self._hooks.close()
        if self in _active:
            _active.remove(self)


class _FolderRecorder:
    """The recording that fills one folder."""

    translator: SavingTranslator
    _writer: LiveWriter

    def __init__(self, saving: _ModelSaving, folder: FolderName, limit: Limit, settings: RecordingOptions) -> None:
        self._folder: FolderName = folder
        self._limit = limit
        self._names = saving.names
        adapter = saving.framework.adapter(saving.model)
        self._recorder = BaseRecorder.discovering(saving.path, adapter, overwrite=True, writer=self._open, **settings)
        self._recorder.start()

    def _open(self, path: Path, rank: int, **options: Any) -> LiveWriter:
        self._writer = LiveWriter(path, rank, make=self._make, **options)
        return self._writer

    def _make(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> SavingTranslator:
        home = path / self._folder / f"rank_{rank}"
        older = len(list_rank(home, self._folder).files) if home.is_dir() else 0
        if older:
            logger.warning("%s held %s of an earlier recording, which are replaced.", home, counted(older, "file"))
        limits = {self._folder: self._limit}
        self.translator = translate(path, rank, info, overwrite=overwrite, limits=limits, names=self._names)
        return self.translator

    def end(self) -> None:
        """Stop, and log what was missed, which the files cannot express."""
        self._recorder.stop()
        for missed in self._writer.end.missed if self._writer.end is not None else ():
            if missed.what in (ACCUMULATED, RECOMPUTED, ANY_CALL) or missed.what.startswith(NOT_MEANT):
                continue
            times = "" if missed.count == 1 else f", {missed.count:,} times"
            logger.warning("Not saved in %s: %s (%s)%s.", self._writer.path, missed.what, missed.why, times)
