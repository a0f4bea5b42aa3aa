"""Runs the program of this folder under msprobe, in its environment: `dump.py FOLDER LEVEL TASK SUMMARY [FACTOR]`.

A process for each dump, since msprobe keeps the first configuration it sees. FACTOR scales a weight: a planted fault.
What msprobe imports for its plots and never needs here may be missing, see benchmarks/peers/stand_ins.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / "peers"), str(Path(__file__).parent)]

import stand_ins  # noqa: E402 - its folder had to be named first
from program import make, train  # noqa: E402


def main(folder: str, level: str, task: str, summary: str, factor: str = "1") -> None:
    stand_ins.install()
    from msprobe.pytorch import PrecisionDebugger

    path = Path(folder)
    path.mkdir(parents=True)
    net, ids, labels = make()
    with torch.no_grad():
        net.tail[0].weight.mul_(float(factor))
    settings = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    config = {"rank": [], "step": [], "dump_path": str(path / "dump"), "task": task, "level": level, task: settings}
    (path / "config.json").write_text(json.dumps(config))
    debugger = PrecisionDebugger(config_path=str(path / "config.json"))

    def end() -> None:
        debugger.stop()
        debugger.step()

    if level == "debug":
        logits = net(ids)["logits"]
        debugger.save({"logits": logits, "parts": [logits * 2, 3]}, "kept")
        debugger.save(logits, "kept")
        logits.sum().backward()
        debugger.step()
    else:
        train(net, ids, labels, lambda: debugger.start(net), end)


if __name__ == "__main__":
    main(*sys.argv[1:])
