"""`astray run` of programs that train in processes of their own: ranks are recorded, and the others are told of."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import astray
from astray.capture.children import VARIABLE, ChildProcesses, prepare_child
from astray.cli import main
from astray.guarding.recording_guard import RecordingGuard

RANK = """\
import os, signal, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def train(rank, world, meeting, killed=None):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        if rank == killed and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model((rank + 1) * torch.ones(2, 4)).sum().backward()
        optimizer.step()
    with open(f"weight-{rank}", "w") as file:
        file.write(model.module[0].weight.double().sum().item().hex())
    dist.destroy_process_group()


MEETING = os.path.abspath("meeting")
"""

SPAWNING = (
    RANK
    + """
if __name__ == "__main__":
    mp.spawn(train, (2, MEETING), nprocs=2)
"""
)

# As Lightning's `ddp` does: the first rank is the program itself, which starts its command line again for the others.
AGAIN = (
    RANK
    + """
if __name__ == "__main__":
    import subprocess

    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:
        environment = {**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
        child = subprocess.Popen([sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]], env=environment)
    train(rank, 2, MEETING)
    if rank == 0:
        assert child.wait() == 0
"""
)

ALONE = """\
import torch
import torch.multiprocessing as mp


def train():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    process = mp.get_context("spawn").Process(target=train)
    process.start()
    process.join()
"""

FORKED = """\
import multiprocessing

import torch
from torch import nn

model = nn.Linear(3, 3)


def work():
    for _ in range(2):
        model(torch.ones(2, 3))


torch.set_num_threads(1)
model(torch.ones(2, 3))
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
"""

WORKERS = """\
import torch


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = torch.nn.Linear(3, 3)

    def __len__(self):
        return 4

    def __getitem__(self, at):
        return self.transform(torch.ones(3)).detach()


if __name__ == "__main__":
    model = torch.nn.Linear(3, 3)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
        model(batch)
"""


def run(
    folder: Path, script: str, *options: str, astray: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    (folder / "meeting").unlink(missing_ok=True)
    command = ["-m", "astray", "run", "-o", "run", *options] if astray else []
    given = [sys.executable, *command, "script.py"]
    env = {**os.environ, **environment}
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, timeout=300, env=env)


def weights(folder: Path) -> list[str]:
    """What each rank has come to."""
    return [(folder / f"weight-{rank}").read_text() for rank in (0, 1)]


def check_ranks(folder: Path, script: str) -> None:
    done = run(folder, script)
    assert done.returncode == 0, done.stderr
    expected = "astray: 2 steps, 20 calls, 36 tensors in run (on rank 0; 2 ranks, in child processes)"
    assert done.stderr.splitlines()[-1] == expected
    assert sorted(entry.name for entry in folder.iterdir() if "run" in entry.name) == ["run"]
    recorded = astray.open(folder / "run")
    assert recorded.complete
    assert recorded.problems == []
    assert list(recorded.ranks) == [0, 1]
    assert recorded.info.world_size == 2
    first, second = (rank.calls for rank in recorded.ranks.values())
    assert len(first) == len(second)
    assert recorded.steps == [0, 1]


def test_every_rank_is_recorded(tmp_path: Path) -> None:
    check_ranks(tmp_path, SPAWNING)


@pytest.mark.slow
def test_ranks_end_after_the_step_that_was_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, SPAWNING, "--until", "0")
    assert done.returncode == 0, done.stderr
    recorded = astray.open(tmp_path / "run")
    assert recorded.steps == [0]
    assert list(recorded.ranks) == [0, 1]
    assert not list(tmp_path.glob("weight-*"))  # what the ranks write after their last step


@pytest.mark.slow
@pytest.mark.parametrize("script", [SPAWNING, AGAIN], ids=["mp.spawn", "its command line again"])
def test_ranks_compute_what_they_do_without_astray(tmp_path: Path, script: str) -> None:
    run(tmp_path, script, astray=False)
    bare = weights(tmp_path)
    check_ranks(tmp_path, script)
    assert weights(tmp_path) == bare


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    done = run(tmp_path, SPAWNING.replace("(2, MEETING)", "(2, MEETING, 1)"))
    assert done.returncode == 1
    recorded = astray.open(tmp_path / "run")
    assert list(recorded.ranks) == [0, 1]
    assert not recorded.complete
    assert any("rank1" in problem for problem in recorded.problems)


def test_a_child_that_is_not_a_rank_is_told_of(tmp_path: Path) -> None:
    done = run(tmp_path, ALONE)
    assert done.returncode == 0
    told = done.stderr.splitlines()
    assert told[-2].startswith("astray: process ")
    assert told[-2].endswith(" called modules and was not recorded: it is not a rank of torch.distributed.")
    assert told[-1] == "astray: nothing was recorded in run: the modules were called in child processes"
    assert not (tmp_path / "run.ranks").exists()
    assert list(astray.open(tmp_path / "run").ranks) == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_child_that_was_forked_is_told_of(tmp_path: Path) -> None:
    """Also where the model was called before, and is known to the recording."""
    done = run(tmp_path, FORKED)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("astray: process ")]
    assert len(told) == 1
    assert "called modules and was not recorded: it was forked, where no recording follows;" in told[0]
    assert done.stderr.splitlines()[-1] == "astray: 1 step, 1 call, 4 tensors in run"
    assert not (tmp_path / "run.ranks").exists()


@pytest.mark.slow
def test_workers_of_a_loader_record_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, WORKERS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "astray: 1 step, 2 calls, 6 tensors in run"
    assert "process" not in done.stderr
    assert not (tmp_path / "run.ranks").exists()


@pytest.mark.slow
def test_a_program_that_is_rank_0_twice_keeps_both(tmp_path: Path) -> None:
    first = 'if __name__ == "__main__":\n    nn.Linear(3, 3)(torch.ones(2, 3))\n'
    done = run(tmp_path, SPAWNING.replace('if __name__ == "__main__":\n', first))
    assert done.returncode == 0
    told = "astray: 2 ranks in child processes are a run of their own, run.ranks, since the process that started them"
    assert told in done.stderr
    assert list(astray.open(tmp_path / "run").ranks) == [0]
    assert list(astray.open(tmp_path / "run.ranks").ranks) == [0, 1]
    again = run(tmp_path, SPAWNING, "--force")
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "run.ranks").exists()
    assert list(astray.open(tmp_path / "run").ranks) == [0, 1]


@pytest.mark.slow
def test_a_second_launch_does_not_write_over_the_first(tmp_path: Path) -> None:
    twice = SPAWNING + '    mp.spawn(train, (2, MEETING + "-2"), nprocs=2)\n'
    done = run(tmp_path, twice)
    assert done.returncode == 0, done.stderr
    assert "was not recorded: " in done.stderr
    assert "already holds a run" in done.stderr
    assert astray.open(tmp_path / "run").steps == [0, 1]


def test_the_users_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.own = __file__\n")
    script = (
        "import subprocess, sys\n"
        "code = 'import sys, sitecustomize; print(sys.own, sitecustomize.__file__, sys.path[1:3], "
        '"astray" in sys.modules)\'\n'
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    done = run(tmp_path, script, PYTHONPATH=str(own))
    file = str(own / "sitecustomize.py")
    assert done.stdout.startswith(f"{file} {file} ")
    assert "child_startup" not in done.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `main` runs scripts in this very process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_nothing_is_left_in_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (here / "script.py").write_text("import os, torch\nprint(os.environ['PYTHONPATH'], 'ASTRAY_RUN' in os.environ)")
    main(["run", "-o", "run", "script.py"])
    assert capsys.readouterr().out.endswith(f"child_startup{os.pathsep}/somewhere True\n")
    assert os.environ["PYTHONPATH"] == "/somewhere"
    assert VARIABLE not in os.environ


def test_a_word_that_cannot_be_read_is_not_a_failure_of_the_child(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_child({VARIABLE: "{"}, RecordingGuard)
    assert "astray: this process is not recorded (JSONDecodeError" in capsys.readouterr().err


def test_notes_that_were_cut_are_passed_over(tmp_path: Path) -> None:
    children = ChildProcesses(tmp_path / "run", {}, None, tmp_path)
    children.folder.mkdir()
    (children.folder / "process-1.json").write_text('[1, "')
    assert children.notes() == []


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        (
            "import torch\n",
            [],
            "script.py called no module in its own process; functions alone, and forked children, are not recorded",
        ),
        (
            "import torch\nraise ValueError('no data')\n",
            [],
            "script.py ended before it called a module (ValueError: no data)",
        ),
        (
            "import torch\ntorch.nn.Linear(3, 3)(torch.ones(2, 3))\n",
            ["--steps", "5:7"],
            "steps 5:7 were asked for, and the program ended in step 0",
        ),
        (
            "import torch\ntorch.nn.Linear(3, 3)(torch.ones(2, 3))\n",
            ["--phases", "update"],
            "only updates were asked for, and no optimizer stepped",
        ),
    ],
)
def test_a_run_without_a_step_says_why(
    here: Path, capsys: pytest.CaptureFixture[str], script: str, options: list[str], expected: str
) -> None:
    (here / "script.py").write_text(script)
    main(["run", "-o", "run", *options, "script.py"])
    assert capsys.readouterr().err.splitlines()[-1] == f"astray: nothing was recorded in run: {expected}"
    with pytest.raises(astray.errors.CompareError) as raised:
        astray.compare("run", "run")
    assert expected in str(raised.value) or "ValueError: no data" in str(raised.value)


LIGHTNING = """\
import sys
import lightning
import torch
from torch import nn


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=STRATEGY, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="MISSING: lightning is not installed here")
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_lightning(tmp_path: Path, strategy: str) -> None:
    done = run(tmp_path, LIGHTNING.replace("STRATEGY", repr(strategy)))
    assert done.returncode == 0, done.stderr
    recorded = astray.open(tmp_path / "run")
    assert list(recorded.ranks) == [0, 1]
    assert recorded.complete
    assert recorded.steps[:2] == [0, 1]
