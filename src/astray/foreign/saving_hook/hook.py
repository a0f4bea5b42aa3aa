"""Puts the saving hook in place: a recording of the outputs of chosen layers, and one of the gradients of theirs.

They are two, so that each ends when it has enough, and sees nothing that it does not save. Both are ordinary recordings
with a writer of another format; nothing here looks at a tensor.
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

from astray.capture.pytorch.calls.wrappers import Chain, can_be_called, chains, site_name, type_name
from astray.capture.pytorch.compiled.dynamo import never_compiled
from astray.capture.pytorch.hooks import TransparentHook
from astray.capture.recorder import BaseRecorder
from astray.capture.settings import RecordingOptions
from astray.errors import RecordError
from astray.foreign.live_writer import LiveWriter
from astray.foreign.saving_hook import Limit, SavingTranslator, translate
from astray.foreign.saving_hook.files import Folder, list_rank
from astray.foreign.saving_hook.writer import ACCUMULATED, AGAIN
from astray.log import logger
from astray.records import NOTHING, ROOT
from astray.store.run_info import RunInfo
from astray.wording import counted, did_you_mean

PARAMETRIZED = "parametrizations"

_savings: list[_Saving] = []
"""What is being saved in this process."""


def save(model: Any, path: Path, classes: Sequence[str] | None, limits: Mapping[Folder, Limit]) -> None:
    """Save what the leaf layers of these classes give from now on, and the gradients of their parameters."""
    names = _choose(model, classes)
    if not names:
        return
    taken = next((saving for saving in _savings if saving.path == path), None)
    if taken is not None:
        raise RecordError(
            f"The tensors of a {type(taken.model).__name__} are being saved in {path} already. Give each model a "
            "path of its own, or call remove_saving_hook first."
        )
    _Saving(model, path).start(names, limits)


def remove(model: Any) -> None:
    """End all that is being saved of a model."""
    for saving in [saving for saving in _savings if saving.model is model]:
        saving.end()


def _choose(model: nn.Module, classes: Sequence[str] | None) -> list[str]:
    """The sites of the leaf layers of these classes."""
    leaves = {
        site_name("", chain.name): type_name(chain.inner)
        for chain in chains(model)
        if _is_leaf(chain) and can_be_called(chain.inner)
    }
    there = Counter(leaves.values())
    for name in classes or ():
        if name not in there:
            known = ", ".join(f"{kind} ({count})" for kind, count in there.most_common())
            hint = did_you_mean(name, there) or f" Its leaf layers are: {known or 'none'}."
            logger.warning("No leaf layer of the %s is of the class %r.%s", type(model).__name__, name, hint)
    return [site for site, kind in leaves.items() if classes is None or kind in classes]


def _is_leaf(chain: Chain) -> bool:
    """Whether it is a layer with no other in it. What torch puts into one whose weights are parametrized is none."""
    children = [name for name, child in chain.inner._modules.items() if child is not None]
    return children in ([], [PARAMETRIZED]) and PARAMETRIZED not in chain.name.split(".")


class _Saving:
    """What is being saved of one model."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        self.model = model
        self.path = path
        self._going: list[_FolderRecorder] = []
        self._handle: Any = None

    def start(self, names: Sequence[str], limits: Mapping[Folder, Limit]) -> None:
        """Begin. Nothing is left of it when it cannot."""
        _savings.append(self)
        # Before the recorders' own hooks: a recording that has enough ends before it sees the call.
        self._handle = self.model.register_forward_pre_hook(_LimitReached(self))
        layers = "|".join(map(re.escape, names))
        parameters = "|".join("[^.]+" if name == ROOT else rf"{re.escape(name)}\..+" for name in names)
        match = rf"\A(?:{layers})\Z"
        outputs: RecordingOptions = {"keep": "tensors", "phases": "forward", "roles": "output", "match": match}
        # The layers too: their backward tells to which micro step a gradient belongs.
        match = rf"\A(?:{layers}|{parameters})\Z"
        gradients: RecordingOptions = {"keep": "tensors", "phases": "backward", "roles": "gradient", "match": match}
        try:
            self._going.append(_FolderRecorder(self, "tensors", limits["tensors"], outputs))
            self._going.append(_FolderRecorder(self, "grads", limits["grads"], gradients))
        except BaseException:  # an interrupt too must leave no hook; it goes on its way below
            self.end()
            raise
        atexit.register(self.end)

    def end_what_is_full(self) -> None:
        """End the recordings that have enough."""
        for recording in [recording for recording in self._going if recording.translator.is_full]:
            self._going.remove(recording)
            recording.end()
        if not self._going:
            self.end()

    def end(self) -> None:
        """End all of it."""
        atexit.unregister(self.end)
        while self._going:
            self._going.pop().end()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self in _savings:
            _savings.remove(self)


class _FolderRecorder:
    """A recording of one folder."""

    translator: SavingTranslator
    _writer: LiveWriter

    def __init__(self, saving: _Saving, folder: Folder, limit: Limit, settings: RecordingOptions) -> None:
        self._folder: Folder = folder
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
        """Stop, and say what was not seen: the files have no place for it."""
        self._recorder.stop()
        for missed in self._writer.end.missed if self._writer.end is not None else ():
            if missed.what in (ACCUMULATED, AGAIN, NOTHING) or missed.what.startswith("the dtype"):
                continue  # which is as it should be
            times = "" if missed.count == 1 else f", {missed.count:,} times"
            logger.warning("Not saved in %s: %s (%s)%s.", self._writer.path, missed.what, missed.why, times)


class _LimitReached(TransparentHook):
    """Looks, before each forward of the model, whether enough has been saved."""

    __slots__ = ("saving",)

    def __init__(self, saving: _Saving) -> None:
        self.saving = saving

    @never_compiled
    def __call__(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        if not is_compiling():
            self.saving.end_what_is_full()
