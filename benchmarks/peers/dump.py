"""One step of the GPT, dumped by msprobe at level mix: `dump.py FOLDER TASK FACTOR`. All weights are scaled by FACTOR.

A process of its own for each dump, since msprobe keeps the first configuration it sees.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import stand_ins
import torch

sys.path.append(str(Path(__file__).parents[1]))

from gpt import gpt


def main(folder: str, task: str, factor: str) -> None:
    stand_ins.install()
    from msprobe.pytorch import PrecisionDebugger

    torch.manual_seed(0)
    training = gpt("small", "cpu")
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(float(factor))
    path = Path(folder)
    path.mkdir(parents=True)
    of_task = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {"rank": [], "step": [], "dump_path": str(path / "dump"), "task": task, "level": "mix", task: of_task}
    (path / "config.json").write_text(json.dumps(config))
    debugger = PrecisionDebugger(config_path=str(path / "config.json"))
    debugger.start(training.model)
    training.step()
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
