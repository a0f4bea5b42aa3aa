"""The public `Recorder`: the recorder of `capture`, whose `guard=` takes the options of `guarding`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from astray.capture.recorder import BaseRecorder, WriterFactory
from astray.store import RunWriter

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from astray.capture.settings import RecordingOptions
    from astray.guarding.options import GuardSetting
    from astray.guarding.recording_guard import RecordingGuard


class Recorder(BaseRecorder):
    """Records the tensors of a model's calls into a run.

    >>> with astray.record("runs/a", model) as rec:
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         rec.step()

    path: the folder of the run. In a distributed program every rank gives the same one.
    model: a module, or a dict of modules whose names come in front of their sites.
    overwrite: replace a run that is there already.
    guard: also watch for NaN and infinity, as `astray.guard` does: "raise" `Tripped` at the end of the step, "warn", or
        a function that is given the `Trip`; or a dict of "on", which is one of these, "spike" and "when".
    writer: what takes the rows; by default they are written into the run as they come.

    What is recorded (`astray help settings` explains all settings with examples):

    level: the calls that are observed, "module" (default), "function", "op", or several.
    keep: "stats" (default: statistics and fingerprint), "fingerprint", "sample", "tensors", or several.
    samples: how many values `keep="sample"` keeps of each tensor; 1,024 by default.
    slice: keep the values of this part only: "0:1, ..., :64". The statistics stay those of the whole tensor.
    optimizer: after `optimizer.step()`, of each parameter: "gradient", "weight", "state", "update", or several.
    compiled: "modules" shows the calls inside what torch.compile has compiled; its price: `astray help compile`.
    perturb: True, or a seed: change the model's inputs by roundings, for `compare --noise`: `astray help verdict`.
    graft: "runs/a:h.2.mlp", or several: what another run recorded takes the place of what the program computes:
        `astray help experiments`.

    Which part of it, everything by default:

    steps: these steps: "0:10:2", a list, a range.
    ranks: these ranks, in the same way. The others run bare.
    match: the sites in whose name a regular expression is found, or one of several.
    ignore: leave these sites out, in the same way. It wins over `match`.
    classes: the calls of these classes or functions: "Linear", ["softmax", "LayerNorm"].
    scope: two sites: what runs from the start of the first to the end of the second.
    phases: "forward", "backward", "update", or several.
    roles: "input", "output", "parameter", "gradient", "state", or several.
    functions: your own list of functions: a YAML file, a dict of categories, or a list of names.

    How much of it at most:

    max_tensors: so many tensors in all; what comes later is counted and listed as missed.
    max_tensors_per_step: so many tensors in each step, likewise.
    max_bytes: so many bytes of values in all, likewise: 10_000_000, "2 GB", "500 MiB".
    queue_bytes: how much may wait for the disk before the program is made to wait; 256 MiB by default.

    config: a YAML, JSON or TOML file with these settings, which may be edited while the program runs. What is given
        here wins over it.
    """

    guard: RecordingGuard | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any,
        *,
        overwrite: bool = False,
        guard: GuardSetting | None = None,
        writer: WriterFactory = RunWriter,
        **settings: Unpack[RecordingOptions],
    ) -> None:
        watcher = None
        if guard is not None:
            from astray.guarding.recording_guard import RecordingGuard  # wanted by few

            watcher = RecordingGuard(guard)
        super().__init__(path, model, overwrite=overwrite, guard=watcher, writer=writer, **settings)
