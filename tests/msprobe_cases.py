"""msprobe's dumps in tests/cases/msprobe, the program they are of, and the same program recorded by astray."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import astray
from astray.foreign.msprobe.translator import MsprobeTranslator, translate
from astray.store import RankRun, RunData
from astray.store.convert import StepBatches
from astray.store.run_info import End

CASES = Path(__file__).parent / "cases" / "msprobe"
ENVIRONMENT = Path(__file__).parents[1] / ".venv-msprobe" / "bin"

Row = tuple[Any, ...]


def program() -> Any:
    """The module `program.py` of the cases."""
    name = "msprobe_program"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, CASES / "program.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def record(path: Path, factor: float = 1.0, **settings: Any) -> RunData:
    """The program recorded: forward and backward, as msprobe is told to dump them."""
    import torch

    net, ids, labels = program().make()
    with torch.no_grad():
        net.tail[0].weight.mul_(factor)
    with astray.record(path, net, phases=["forward", "backward"], **settings) as recorder:
        program().train(net, ids, labels, lambda: None, recorder.step)
    return astray.open(path)


def write(run: RunData, path: Path, **options: Any) -> MsprobeTranslator:
    """A run as a dump, without `convert`, for the options that it does not have."""
    for rank in run.ranks.values():
        translator = translate(path, rank.rank, run.info, **options)
        whole = StepBatches(rank)
        for step in rank.summary.steps:
            translator.take(step, whole.of(step))
            translator.end_step(step)
        translator.close(End(complete=True))
    return translator


def keyed(rank: RankRun) -> dict[Row, dict[str, Any]]:
    """The tensors of a rank by all that identifies them."""
    calls, tensors = rank.calls, rank.tensors
    found: dict[Row, dict[str, Any]] = {}
    for at, call in enumerate(rank.call_rows.tolist()):
        of, row = calls.row(call), tensors.row(at)
        key = (
            *(of[name] for name in ("step", "micro", "kind", "site", "type", "call", "phase")),
            row["role"],
            row["path"],
        )
        assert key not in found, key
        found[key] = row
    return found
