"""Records what cases need, in several processes. Runs that are there already are not recorded again."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import astray
from faults.grid.cases import LEVELS, Case, Recording
from faults.grid.catalogue import KINDS
from faults.grid.consequences import consequences
from faults.grid.models import MODELS
from faults.grid.training import Training

INDEX = "index.json"
T = TypeVar("T")


def record_all(folder: Path, needed: Sequence[tuple[Case, list[Recording]]], processes: int) -> list[str]:
    """Record the runs of these cases, and write the index of those that can be judged, now and then and at the end.

    Returns a line for each run whose program failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recordings = list(dict.fromkeys(one for _, runs in needed for one in runs))
    missing = [one for one in recordings if not (folder / one.path).exists()]
    begin = told = time.perf_counter()
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # threads that wait for each other leave the cores to the others
    failures = []
    for number, failure in enumerate(in_processes(processes, attempt, [folder] * len(missing), missing), 1):
        failures += [] if failure is None else [failure]
        if time.perf_counter() - told > 10:
            told = time.perf_counter()
            print(f"{number} of {len(missing)} runs, {told - begin:.0f} s", file=sys.stderr, flush=True)
            write_index(folder, needed)
    write_index(folder, needed)
    return failures


def attempt(folder: Path, recording: Recording) -> str | None:
    """Record a run; what went wrong if its program fails, for the others are wanted all the same."""
    try:
        record(folder, recording)
    except Exception as error:  # noqa: BLE001 - a fault may do anything to the program that it is planted in
        return f"{recording.path}: {type(error).__name__}: {error}"
    return None


def in_processes(count: int, function: Callable[..., T], *arguments: Sequence[object]) -> Iterator[T]:
    """What a function gives for each of its arguments, in their order, from so many processes; 1 is this one."""
    if count == 1:
        yield from map(function, *arguments)
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin) as pool:
        yield from pool.map(function, *arguments, chunksize=4)


def record(folder: Path, recording: Recording) -> None:
    """Train the program of a recording, with what is planted in it, and record it."""
    model = MODELS[recording.model]
    training = Training(model, recording.variant, recording.steps)
    if recording.kind is not None:
        KINDS[recording.kind].planted(model).plant(training)  # type: ignore[arg-type]
    options: dict[str, Any] = {"level": LEVELS[recording.level], "keep": recording.keep, "optimizer": "calls"}
    if recording.perturb is not None:
        options["perturb"] = recording.perturb
    path = folder / recording.path
    unfinished = path.with_name(path.name + ".unfinished")
    record_training(training, unfinished, **options)
    unfinished.rename(path)


def record_training(training: Training, path: Path, **options: Any) -> None:
    """Run a training, and record it as a user would."""
    training.prepare()
    with astray.record(path, training.model, overwrite=True, **options) as recorder:
        training.run(recorder.step)


def write_index(folder: Path, needed: Sequence[tuple[Case, list[Recording]]]) -> None:
    """Write down all cases whose runs are there, also those of earlier commands."""
    there = {case.name: case for case in read_index(folder) if case.is_in(folder)}
    opened: dict[str, astray.Run] = {}
    for case, runs in needed:
        if not all((folder / run.path).exists() for run in runs):
            continue
        if case.level == "function" and case.culprit is not None and case.culprit.phase != "update":
            path = next(run.path for run in runs if run.level == "module+function")
            if path not in opened:
                opened[path] = astray.open(folder / path)
            case = replace(case, also=(*case.also, *consequences(opened[path], case.culprit)))
        there[case.name] = case
    draft = folder / f"{INDEX}.draft"
    draft.write_text(json.dumps([case.as_dict() for case in there.values()], indent=1) + "\n")
    draft.rename(folder / INDEX)


def read_index(folder: Path, halves: Collection[str] = ("seen", "unseen")) -> list[Case]:
    """The cases that can be judged."""
    if not (folder / INDEX).exists():
        return []
    cases = [Case.from_dict(one) for one in json.loads((folder / INDEX).read_text())]
    return [case for case in cases if case.half in halves]


def _begin() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
