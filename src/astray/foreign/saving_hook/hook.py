"""The recordings behind `register_saving_hook`: one of the outputs of chosen layers, one of their gradients.

There are two, so that each ends when its limit is reached, and observes nothing that it does not save. Both are
ordinary recordings with a writer of another format; nothing here reads a tensor.
"""

from __future__ import annotations

import atexit
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from astray.capture.pytorch.calls.wrappers import Chain, can_be_called, chains, type_name
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.hooks import TransparentHook
from astray.capture.recorder import BaseRecorder
from astray.capture.settings import RecordingOptions
from astray.capture.sites import site_name
from astray.errors import RecordError
from astray.foreign.live_writer import LiveWriter
from astray.foreign.saving_hook import Limit, SavingTranslator, translate
from astray.foreign.saving_hook.files import FolderName, list_rank
from astray.foreign.saving_hook.writer import ACCUMULATED, RECOMPUTED
from astray.log import logger
from astray.records import ANY_CALL, ROOT
from astray.store.run_info import RunInfo
from astray.wording import counted, did_you_mean

PARAMETRIZED = "parametrizations"

_active: list[_ModelSaving] = []
"""What is being saved in this process."""


def save(model: Any, path: Path, classes: Sequence[str] | None, limits: Mapping[FolderName, Limit]) -> None:
    """Save the outputs of the leaf layers of these classes, and the gradients of their parameters, from now on."""
    names = _choose(model, classes)
    if not names:
        return
    other = next((saving for saving in _active if saving.path == path), None)
    if other is not None:
        raise RecordError(
            f"The tensors of a {type(other.model).__name__} are being saved in {path} already. Give each model a "
            "path of its own, or call remove_saving_hook first."
        )
    _ModelSaving(model, path).start(names, limits)


def remove(model: Any) -> None:
    """End everything that is being saved of a model."""
    for saving in [saving for saving in _active if saving.model is model]:
        saving.end()


def _choose(model: nn.Module, classes: Sequence[str] | None) -> list[str]:
    """The sites of the leaf layers of these classes."""
    leaves = {
        site_name("", chain.name): type_name(chain.inner)
        for chain in chains(model)
        if _is_leaf(chain) and can_be_called(chain.inner)
    }
    counts = Counter(leaves.values())
    for name in classes or ():
        if name not in counts:
            known = ", ".join(f"{kind} ({count})" for kind, count in counts.most_common())
            hint = did_you_mean(name, counts) or f" Its leaf layers are: {known or 'none'}."
            logger.warning("No leaf layer of the %s is of the class %r.%s", type(model).__name__, name, hint)
    return [site for site, kind in leaves.items() if classes is None or kind in classes]


def _is_leaf(chain: Chain) -> bool:
    """Whether a layer has no other in it; the modules of torch's parametrizations do not count, and are not layers."""
    children = [name for name, child in chain.inner._modules.items() if child is not None]
    return children in ([], [PARAMETRIZED]) and PARAMETRIZED not in chain.name.split(".")


class _ModelSaving:
    """What is being saved of one model."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        self.model = model
        self.path = path
        self._recorders: list[_FolderRecorder] = []
        self._handle: Any = None

    def start(self, names: Sequence[str], limits: Mapping[FolderName, Limit]) -> None:
        """Begin. Removes everything again where it fails."""
        _active.append(self)
        # Before the recorders' own hooks: a recording that is full ends before it observes the call.
        self._handle = self.model.register_forward_pre_hook(_LimitReached(self))
        layers = "|".join(map(re.escape, names))
        parameters = "|".join("[^.]+" if name == ROOT else rf"{re.escape(name)}\..+" for name in names)
        match = rf"\A(?:{layers})\Z"
        outputs: RecordingOptions = {"keep": "tensors", "phases": "forward", "roles": "output", "match": match}
        # The layers too: their backward calls determine the micro step of a gradient.
        match = rf"\A(?:{layers}|{parameters})\Z"
        gradients: RecordingOptions = {"keep": "tensors", "phases": "backward", "roles": "gradient", "match": match}
        try:
            self._recorders.append(_FolderRecorder(self, "tensors", limits["tensors"], outputs))
            self._recorders.append(_FolderRecorder(self, "grads", limits["grads"], gradients))
        except BaseException:  # an interrupt must not leave a hook either
            self.end()
            raise
        atexit.register(self.end)

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
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self in _active:
            _active.remove(self)


class _FolderRecorder:
    """The recording that fills one folder."""

    translator: SavingTranslator
    _writer: LiveWriter

    def __init__(self, saving: _ModelSaving, folder: FolderName, limit: Limit, settings: RecordingOptions) -> None:
        self._folder: FolderName = folder
        self._limit = limit
        self._recorder = BaseRecorder(saving.path, saving.model, overwrite=True, writer=self._open, **settings)
        self._recorder.start()

    def _open(self, path: Path, rank: int, **options: Any) -> LiveWriter:
        self._writer = LiveWriter(path, rank, make=self._make, **options)
        return self._writer

    def _make(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> SavingTranslator:
        home = path / self._folder / f"rank_{rank}"
        older = len(list_rank(home, self._folder).files) if home.is_dir() else 0
        if older:
            logger.warning("%s held %s of an earlier recording, which are replaced.", home, counted(older, "file"))
        self.translator = translate(path, rank, info, overwrite=overwrite, limits={self._folder: self._limit})
        return self.translator

    def end(self) -> None:
        """Stop, and log what was missed, which the files cannot express."""
        self._recorder.stop()
        for missed in self._writer.end.missed if self._writer.end is not None else ():
            if missed.what in (ACCUMULATED, RECOMPUTED, ANY_CALL) or missed.what.startswith("the dtype"):
                continue  # as intended
            times = "" if missed.count == 1 else f", {missed.count:,} times"
            logger.warning("Not saved in %s: %s (%s)%s.", self._writer.path, missed.what, missed.why, times)


class _LimitReached(TransparentHook):
    """Before each forward of the model, ends the recordings whose limit is reached."""

    __slots__ = ("saving",)

    def __init__(self, saving: _ModelSaving) -> None:
        self.saving = saving

    @never_compiled
    def __call__(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        if not is_compiling():
            self.saving.end_full()
