"""astray: where did it go astray?

Records the tensors of a running program, compares two recordings, and names the first call whose result is wrong while
its inputs were still right.

    with astray.record("runs/a", model) as rec: ...     record; `Recorder` is what it returns
    astray.open("runs/a")                               a `Run`; a `Key` names one of its tensors
    astray.compare("runs/a", "runs/b")                  a `Comparison`; its `first` is a `Divergence`
    astray.load_from("runs/a", model)                   weights of a run into a model, also of another framework
    with astray.guard(model): ...                       NaN and infinity, named at their origin; `Tripped` is raised

The rest is in three modules, which need no import of their own:

    astray.state.from_weight(model)                     weights, gradients … to compute with: `astray help state`
    astray.experiment.seed_all()                        one thing changed, and once more: `astray help experiments`
    astray.errors.RunError                              what astray raises; `AstrayError` is the base of all

Importing astray imports no framework, patches nothing, and loads the parts when they are first used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from astray.errors import AstrayError
from astray.records import Key

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from astray import errors as errors
    from astray import experiment as experiment
    from astray import state as state
    from astray.capture.settings import RecordingOptions
    from astray.comparison.divergence import Divergence
    from astray.comparison.pair.matching import MatchingOptions
    from astray.guarding.guard import Guard
    from astray.guarding.options import Condition, Gradients, GuardSetting
    from astray.guarding.trip import On, Tripped
    from astray.loading.load import load_from
    from astray.recorder import Recorder
    from astray.results.comparison import Comparison
    from astray.results.run import Run
    from astray.store.convert import convert

__all__ = [
    "AstrayError",
    "Comparison",
    "Divergence",
    "Guard",
    "Key",
    "Recorder",
    "Run",
    "Tripped",
    "compare",
    "convert",
    "guard",
    "load_from",
    "open",
    "record",
]

_MODULES = {
    "Comparison": "astray.results.comparison",
    "Divergence": "astray.comparison.divergence",
    "Guard": "astray.guarding.guard",
    "Recorder": "astray.recorder",
    "Run": "astray.results.run",
    "Tripped": "astray.guarding.trip",
    "convert": "astray.store.convert",
    "load_from": "astray.loading.load",
}

_GROUPS = {"errors": "errors.py", "experiment": "experiment.py", "state": "state/__init__.py"}
"""Modules that are loaded when they are first used, as `astray.state`, and their files."""

Path = str | os.PathLike[str]


def record(
    path: Path,
    model: Any,
    *,
    overwrite: bool = False,
    guard: GuardSetting | None = None,
    **settings: Unpack[RecordingOptions],
) -> Recorder:
    """Starts recording `model` into the run at `path`; use it in a `with`, or call `.stop()` at the end.

    >>> with astray.record("runs/a", model, keep="tensors", steps="0:3") as rec:
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         rec.step()

    The settings are those of `Recorder`, which lists them; `astray help settings` explains each with examples. They
    may come from a YAML, JSON or TOML file too:

    >>> astray.record("runs/a", model, config="astray.yaml", level="function")

    A recording can be watched for NaN and infinity as it is made; `astray help guard` has more:

    >>> astray.record("runs/a", model, guard="raise")
    """
    from astray.recorder import Recorder

    return Recorder(path, model, overwrite=overwrite, guard=guard, **settings).start()


def guard(
    model: Any,
    *,
    on: On = "raise",
    gradients: Gradients | None = None,
    exact: bool = False,
    remember: int = 5,
    path: Path | None = None,
    spike: float | None = None,
    when: Condition | None = None,
    max_memory: int | str = 512 << 20,
    **settings: Unpack[RecordingOptions],
) -> Guard:
    """Watches `model` for NaN and infinity, and names the call they come from.

    >>> with astray.guard(model):
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()

    `Guard` explains every argument; `astray help guard` has examples. The last steps stay in memory and are written
    as a run only when something is wrong.
    """
    from astray.guarding.guard import Guard

    return Guard(
        model,
        on=on,
        gradients=gradients,
        exact=exact,
        remember=remember,
        path=path,
        spike=spike,
        when=when,
        max_memory=max_memory,
        **settings,
    ).start()


def open(path: Path) -> Run:
    """Opens a run, finished or not. Its format is recognised by looking.

    >>> run = astray.open("runs/a")
    >>> run.complete, run.steps
    (True, [0, 1, 2])
    """
    from astray.results.run import Run
    from astray.store import open_run

    return Run.of(open_run(path))


def compare(
    reference: Path | Run,
    candidate: Path | Run,
    *,
    noise: Path | Run | None = None,
    tolerances: dict[str, float] | None = None,
    exact: bool = False,
    metrics: Sequence[str | Callable[..., float]] | None = None,
    allow_missing: bool = False,
    progress: Callable[[int, int], None] | None = None,
    processes: int | None = None,
    replay: bool = True,
    **matching: Unpack[MatchingOptions],
) -> Comparison:
    """Compares two runs and finds the first divergence.

    >>> diff = astray.compare("runs/a", "runs/b")
    >>> print(diff)                     # the first divergence, then a summary
    >>> diff.first.site, diff.first.step
    ('h.2.mlp.proj', 3)

    reference, candidate: paths, or open runs.
    steps, ranks, sites: compare only these: steps="0:10:2", ranks=[0, 3], sites="attn".
    mapping, by, shapes, micro, offset: how tensors are paired when two models differ: `astray help alignment`.
    noise: a second recording of the reference: how far apart two correct runs are.
    tolerances: the largest relative errors to allow, by a regular expression for sites or by dtype: {"attn": 1e-3}.
    exact: the runs should be bit-identical, and whatever is not has diverged.
    metrics: what to measure besides, of kept values: "kl", "file.py:function", or a function of two arrays.
    allow_missing: runs agree even if some tensors are only in one of them; `astray help reports`.
    progress: called now and then with (done, total) while values are read.
    processes: how many ranks to compare at once; one for each core by default, where that saves time.
    replay: whether calls that look wrong are executed again in both runs of PyTorch, where these kept values.
    """
    from astray.comparison.comparison import compare
    from astray.results.comparison import REPLAYER, Comparison

    data = compare(
        reference,
        candidate,
        noise=noise,
        tolerances=tolerances,
        exact=exact,
        metrics=metrics,
        allow_missing=allow_missing,
        progress=progress,
        processes=processes,
        replayer=REPLAYER if replay else None,
        **matching,
    )
    return Comparison.of(data)


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("astray")
    if name in _GROUPS:
        return import_module(f"astray.{name}")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if group := _group_of(name):
        raise AttributeError(f"astray has no {name!r}. It is astray.{group}.{name}.")
    groups = ", ".join(f"astray.{group}" for group in _GROUPS)
    raise AttributeError(f"astray has no {name!r}. It offers {', '.join(__all__)}, and more in {groups}.")


def _group_of(name: str) -> str | None:
    """The group whose `__all__` has this name. Its source is searched, so that a missing name imports nothing, least of
    all torch: `from astray import stats` looks the attribute up before it imports the module."""
    from pkgutil import get_data

    for group, file in _GROUPS.items():
        with suppress(OSError):  # installed without sources
            if f'\n    "{name}",\n'.encode() in (get_data("astray", file) or b""):
                return group
    return None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_GROUPS})
