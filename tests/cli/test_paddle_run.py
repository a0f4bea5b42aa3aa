"""`astray run`, `check` and `compare` on unchanged Paddle scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

paddle = pytest.importorskip("paddle")

import astray  # noqa: E402
from recorded_rows import rows  # noqa: E402

pytestmark = pytest.mark.paddle

SCRIPT = """
import sys
if "torch" in sys.argv:
    import torch
import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16, epsilon=1e-3 if "epsilon" in sys.argv else 1e-5)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        hidden = F.gelu(self.norm(self.up(x)), approximate="tanh" in sys.argv)
        return self.down(hidden)

def main():
    paddle.seed(0)
    net = Net()
    rows = list(paddle.randn([12, 8]).numpy())
    loader = paddle.io.DataLoader(rows, batch_size=4, num_workers=int("workers" in sys.argv))
    if "weight" in sys.argv:
        net.down.weight.set_value(net.down.weight * 1.001)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=net.parameters())
    for step, x in enumerate(loader):
        if "nan" in sys.argv and step == 1:
            net.up.bias.set_value(np.full(16, np.nan, "float32"))
        loss = F.cross_entropy(net(x), paddle.arange(4))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        print(f"{float(loss):.6f}")

if __name__ == "__main__":
    main()
"""

RANKS = """
import paddle
import paddle.distributed as dist
from paddle import nn

def main():
    dist.init_parallel_env()
    paddle.seed(0)
    model = paddle.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    paddle.seed(10 + dist.get_rank())
    for _ in range(2):
        with model.no_sync():
            model(paddle.randn([3, 4])).square().mean().backward()
        loss = model(paddle.randn([3, 4])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        parts = []
        dist.all_gather(parts, loss.detach())

if __name__ == "__main__":
    SPAWN
"""


OWN_GRADIENTS = (("grad", 0), ("added", 1), ("grad", 1))
"""What a rank has computed itself in two micro steps, the second of which averages what both have brought."""


def command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    named = [sys.executable, "-m", "astray", *map(str, words)]
    environment = {**os.environ, "GLOG_minloglevel": "3", "FLAGS_call_stack_level": "0"}
    return subprocess.run(named, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_two_runs_of_a_script_agree_and_a_fault_is_named(script: Path, tmp_path: Path) -> None:
    level = ("--level", "module,function")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    done = command("run", "-o", "a", *level, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain  # not a bit of the loss
    assert "3 steps" in done.stderr
    command("run", "-o", "same", *level, script, cwd=tmp_path)
    assert "No divergence" in command("compare", "a", "same", "--exact", cwd=tmp_path).stdout
    for fault, site, line in (
        ("epsilon", "norm/layer_norm", "self.norm(self.up(x))"),
        ("tanh", "<root>/gelu", "F.gelu("),
        ("weight", "down.weight", ""),
    ):
        command("run", "-o", fault, *level, script, fault, cwd=tmp_path)
        diff = astray.compare(tmp_path / "a", tmp_path / fault)
        assert diff.first is not None
        assert (diff.first.step, diff.first.site) in ((0, site), (0, site.removesuffix(".weight"))), str(diff)
        assert line in str(diff)


def test_a_script_that_imports_torch_first(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = command("run", "-o", "a", script, "torch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = astray.open(tmp_path / "a")
    assert (run.info.framework, run.steps) == ("paddle", [0, 1, 2])
    assert {"<root>", "up", "norm", "down"} <= {row["site"] for row in rows(run)}


def test_workers_of_a_loader_are_not_recorded(script: Path, tmp_path: Path) -> None:
    done = command("run", "-o", "a", script, "workers", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert astray.open(tmp_path / "a").steps == [0, 1, 2]
    assert "was not recorded" not in done.stderr


def test_check_names_the_origin_of_nan(script: Path, tmp_path: Path) -> None:
    assert command("check", script, cwd=tmp_path).returncode == 0
    done = command("check", script, "nan", cwd=tmp_path)
    assert done.returncode == 1
    assert "from step 1, forward, call 0 of up/linear" in done.stderr
    assert "hidden = F.gelu(self.norm(self.up(x))" in done.stderr
    assert "bad weight" in done.stderr


@pytest.mark.parametrize("exact", [False, True])
def test_a_guard_stops_the_training(exact: bool, tmp_path: Path) -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    steps = []

    def train() -> None:
        with astray.guard(model, path=tmp_path / "guard", exact=exact):
            for step in range(4):
                steps.append(step)
                if step == 2:
                    model[1].weight.set_value(model[1].weight * float("nan"))
                model(paddle.ones([1, 2])).sum().backward()
                optimizer.step()
                optimizer.clear_grad()

    with pytest.raises(astray.Tripped, match="NaN"):
        train()
    assert steps == [0, 1, 2]


STATIC = """
import paddle
from paddle import nn

class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(4, 8)
        self.static = paddle.jit.to_static(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))

    def forward(self, x):
        return self.static(self.plain(x))

paddle.seed(0)
net = Net()
optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
for _ in range(3):
    loss = net(paddle.randn([3, 4])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    print(loss.numpy().tobytes().hex(), net.static[0].weight.numpy().tobytes().hex())
"""


def test_programs_of_to_static_keep_their_bits(tmp_path: Path) -> None:
    """Though the call of layers is replaced too, where models are found as they run."""
    path = tmp_path / "static.py"
    path.write_text(STATIC)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout
    done = command("run", "-o", "a", "--level", "module,function", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain
    sites = {row["site"] for row in rows(astray.open(tmp_path / "a"), kind="module")}
    assert sites == {"<root>", "plain", "static"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawned", "launched"])
def test_ranks(how: str, tmp_path: Path) -> None:
    start = 'dist.spawn(main, nprocs=2, backend="gloo")' if how == "spawned" else "main()"
    path = tmp_path / "ranks.py"
    path.write_text(RANKS.replace("SPAWN", start))
    options = ("-o", str(tmp_path / "run"), "--level", "module,function", "--optimizer", "gradient,weight")
    if how == "spawned":
        done = command("run", *options, path, cwd=tmp_path)
    else:
        (tmp_path / "start").write_text(f"#!{sys.executable}\nfrom astray.cli import main\nraise SystemExit(main())\n")
        (tmp_path / "start").chmod(0o755)
        launch = ("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo", "--log_dir", "log")
        words = [sys.executable, *launch, str(tmp_path / "start"), "run", *options, str(path)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = astray.open(tmp_path / "run")
    assert (sorted(run.ranks), run.steps[:2]) == ([0, 1], [0, 1])
    assert {"0", "2", "/all_reduce", "/all_gather"} <= {row["site"] for row in rows(run)}
    by_rank = []
    for rank in run.ranks.values():
        found = {}
        for index, call in enumerate(rank.call_rows.tolist()):
            row = {**rank.calls.row(call), **rank.tensors.row(index)}
            if row["step"] == 0 and row["path"] in ("grad", "added", "weight") and row["site"] == "0.weight":
                found[row["phase"], row["role"], row["path"], row["micro"]] = row
        by_rank.append(found)
        own = [found["backward", "gradient", path, micro]["mean"] for path, micro in OWN_GRADIENTS]
        assert own[0] + own[1] == pytest.approx(own[2])  # added up on this rank, not averaged
    one, other = ({key: row["fingerprint"] for key, row in found.items()} for found in by_rank)
    for path, micro in OWN_GRADIENTS:
        assert one["backward", "gradient", path, micro] != other["backward", "gradient", path, micro]
    assert one["update", "input", "grad", 0] == other["update", "input", "grad", 0]  # averaged
    assert one["update", "output", "weight", 0] == other["update", "output", "weight", 0]
