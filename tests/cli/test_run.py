"""`astray run`: scripts that know nothing of astray, run as they are."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import astray
from astray.cli import main
from astray.records import Call
from astray.store import RunInfo, RunWriter
from cli.scripts import TRAINING, command, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def calls(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    table = astray.open(folder).ranks[rank].calls
    return [table.row(i) for i in range(len(table))]


def test_the_model_is_found_and_steps_are_counted(tmp_path: Path) -> None:
    done = run_script(tmp_path, TRAINING)
    assert done.returncode == 0, done.stderr
    bare = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert done.stdout == bare.stdout  # losses to the last digit
    found = calls(tmp_path / "run")
    assert {row["site"] for row in found if row["kind"] == "module"} == {"<root>", "0", "1", "2", "CrossEntropyLoss"}
    assert sorted({row["step"] for row in found}) == [0, 1, 2]
    assert {row["micro"] for row in found} == {0}
    outputs = [row for row in found if row["site"] == "0" and row["phase"] == "forward"]
    assert [row["step"] for row in outputs] == [0, 1, 2]
    assert "3 steps" in done.stderr


@pytest.mark.slow
def test_the_first_call_is_recorded_with_its_keywords(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import torch
        from torch import nn
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 3)
            def forward(self, *, ids, scale=1.0):
                return self.layer(ids) * scale
        model = Model()
        for _ in range(2):
            model(ids=torch.ones(2, 3), scale=2.0)
        """,
    )
    assert done.returncode == 0, done.stderr
    roots = [row for row in calls(tmp_path / "run") if row["site"] == "<root>"]
    assert [row["micro"] for row in roots] == [0, 1]
    assert all(json.loads(row["args"])["kwargs"] == {"ids": "<tensor>", "scale": 2.0} for row in roots)


@pytest.mark.slow
def test_several_optimizers_make_one_step_together_and_models_are_named_by_class(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import torch
        from torch import nn
        class Critic(nn.Linear): pass
        g, d, e = nn.Linear(2, 2), Critic(2, 1), Critic(2, 1)
        og, od = torch.optim.SGD(g.parameters(), lr=.1), torch.optim.Adam(d.parameters())
        for step in range(3):
            x = g(torch.randn(4, 2))
            (-d(x).mean() + e(x).mean()).backward(); og.step(); og.zero_grad()
            d(x.detach()).mean().backward(); od.step(); od.zero_grad()
            nn.MSELoss()(x, x)
        """,
    )
    assert done.returncode == 0, done.stderr
    found = calls(tmp_path / "run")
    sites = {row["site"] for row in found if row["kind"] == "module"}
    assert sites == {"<root>", "Critic", "Critic#2", "MSELoss"}
    assert max(row["step"] for row in found) == 3  # what follows the last step of the first optimizer
    assert len([row for row in found if row["site"] == "MSELoss" and row["phase"] == "forward"]) == 3


def test_arguments_main_and_path_are_those_of_a_plain_run(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import torch\nvalue = torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape\n")
    done = run_script(
        tmp_path,
        """
        import sys, pickle
        from neighbour import value
        class Here: pass
        pickle.loads(pickle.dumps(Here()))
        print(sys.argv[1:], __name__, __file__ == sys.argv[0], tuple(value))
        sys.exit(7)
        """,
        arguments=("--steps", "3", "-m", "x"),
    )
    assert done.stdout.strip() == "['--steps', '3', '-m', 'x'] __main__ True (1, 2)"
    assert done.returncode == 7
    assert astray.open(tmp_path / "run").ranks[0].end.ended == "exit: 7"


def test_a_module_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, "-m", "astray", "run", "-o", "run", "-m", "package"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(calls(tmp_path / "run")) > 10


def test_nothing_is_imported_before_the_script_does(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import os, sys
        print([name for name in ("numpy", "torch") if name in sys.modules])
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads(), torch.__spec__.loader.__class__.__name__)
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        """,
        OMP_NUM_THREADS="2",
    )
    assert done.stdout.split("\n")[:2] == ["[]", "1 SourceFileLoader"], done.stderr


def test_an_exception_is_shown_as_python_shows_it_and_written_down(tmp_path: Path) -> None:
    done = run_script(tmp_path, TRAINING + "\nraise ValueError('too bad')\n")
    assert done.returncode == 1
    assert "ValueError: too bad" in done.stderr
    assert "astray/cli" not in done.stderr
    assert astray.open(tmp_path / "run").ranks[0].end.ended == "ValueError: too bad"


def test_bad_input_gets_a_sentence(tmp_path: Path) -> None:
    script = str(tmp_path / "script.py")
    Path(script).write_text(TRAINING)
    with RunWriter(tmp_path / "run", info=RunInfo.of_process()) as writer:
        writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "plain.py").write_text("print('no framework')")
    for words, said in [
        (("-o", str(tmp_path / "run"), script), "already holds a run"),
        (("-o", str(tmp_path / "new"), str(tmp_path / "broken.py")), "is not a Python script"),
        (("-o", str(tmp_path / "new"), str(tmp_path / "plain.py")), "never imported torch"),
        (("-o", str(tmp_path / "mine"), "--force", script), "thesis.txt"),
        (("-o", str(tmp_path / "plain.py" / "run"), script), "plain.py"),
    ]:
        done = command("run", *words)
        assert done.returncode == 2, done
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    assert not (tmp_path / "new").exists()
    assert command("run", "-o", str(tmp_path / "run"), "--force", script).returncode == 0


def test_a_wrong_option_gets_a_sentence_before_the_script_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, new, config = (str(tmp_path / name) for name in ("script.py", "new", "a.yaml"))
    Path(script).write_text("raise AssertionError('it was started')")
    Path(config).write_text("kepp: stats")
    for words, said in [
        (("-o", new, str(tmp_path / "nowhere.py")), "There is no script"),
        (("-o", new, "--keep", "stat", script), "Did you mean 'stats'?"),
        (("-o", new, "--steps", "3:1", script), "selects no step"),
        (("-o", new, "--ranks", "x", script), "ranks='x' is not a selection of ranks"),
        (("-o", new, "--match", "a", "--match", "(", script), "match='(' is not a regular expression"),
        (("-o", new, "--max-bytes", "2 XB", script), "max_bytes='2 XB' is not a size"),
        (("-o", new, "--phases", "backwards", script), "Did you mean 'backward'?"),
        (("-o", new, "--functions", "no.yaml", script), "There is no file no.yaml"),
        (("-o", new, "--config", config, script), "a.yaml: kepp='stats' is not a setting"),
        (("-o", new, "--until", "-1", script), "--until -1 is before the first step"),
        (("-o", new, "-m", "no.such.module"), "There is no module no.such.module"),
    ]:
        assert main(["run", *words]) == 2
        assert said in capsys.readouterr().err
    assert not Path(new).exists()


@pytest.mark.slow
def test_an_error_of_astray_that_the_script_raises_is_the_scripts_own(tmp_path: Path) -> None:
    done = run_script(tmp_path, TRAINING + "\nimport astray\nastray.open('/nowhere')\n")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert astray.open(tmp_path / "run").ranks[0].end.ended.startswith("RunError: ")


@pytest.mark.slow
def test_a_forked_child_that_runs_to_the_end_says_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, TRAINING + "\nimport os\nif os.fork():\n    os.wait()\n")
    assert done.returncode == 0
    assert done.stderr.count("astray:") == 1
    assert astray.open(tmp_path / "run").complete


def test_steps_and_keep_are_passed_on(tmp_path: Path) -> None:
    done = run_script(tmp_path, TRAINING, "--keep", "tensors", "--steps", "1:")
    assert done.returncode == 0, done.stderr
    run = astray.open(tmp_path / "run")
    assert run.steps == [1, 2]
    assert run.values(0, 0) is not None
    assert "2 steps, 28 calls, 54 tensors, 2.6 kB of values" in done.stderr


def test_the_program_ends_after_the_step_that_was_asked_for(tmp_path: Path) -> None:
    script = TRAINING + "\nprint('the end')\n"
    done = run_script(tmp_path, script, "--until", "1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # the optimizer's second step ends it, before the loss is printed
    run = astray.open(tmp_path / "run")
    assert run.steps == [0, 1]
    assert run.complete
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.ended == "normally"
    assert run.problems == []


def test_every_setting_has_an_option_and_no_option_a_default() -> None:
    from astray.capture.settings import CHECKS, Settings
    from astray.cli import parser
    from astray.cli.program import settings_of

    plain = parser().parse_args(["run", "-o", "runs/a", "script.py", "--keep", "mine"])
    assert settings_of(plain) == dict.fromkeys([*CHECKS, "config"])
    assert plain.arguments == ["--keep", "mine"]
    words = (
        "--level module,function --keep tensors --samples 9 --slice 0,...,:64 --optimizer weight --compiled "
        "modules --steps 1:3 --ranks 0 --match a,b --match c --ignore d --classes Linear,gelu --scope h.0 h.1 "
        "--phases forward --roles output --max-tensors 5 --max-tensors-per-step 4 --max-bytes 1GB --queue-bytes "
        "2MiB "
    )
    options = parser().parse_args(["run", "-o", "runs/a", *words.split(), "script.py"])
    assert options.script == "script.py"
    assert Settings.check(**settings_of(options)) == Settings.check(
        level=["module", "function"], keep="tensors", samples=9, slice="0, ..., :64", optimizer="weight",
        compiled="modules", steps="1:3", ranks=0, match=["a,b", "c"], ignore="d", classes=["Linear", "gelu"],
        scope=("h.0", "h.1"), phases="forward",
        roles="output", max_tensors=5, max_tensors_per_step=4, max_bytes=10**9, queue_bytes=2 << 20,
    )  # fmt: skip


@pytest.mark.slow
def test_a_file_of_settings_is_used_and_options_win_over_it(tmp_path: Path) -> None:
    (tmp_path / "astray.toml").write_text('keep = "tensors"\nsteps = "0"\n')
    done = run_script(tmp_path, TRAINING, "--config", str(tmp_path / "astray.toml"), "--steps", "1:")
    assert done.returncode == 0, done.stderr
    run = astray.open(tmp_path / "run")
    assert run.steps == [1, 2]
    assert run.values(0, 0) is not None
    assert {name: run.info.settings[name] for name in ("keep", "steps")} == {"keep": ["tensors"], "steps": "1:"}


def test_a_killed_script_leaves_a_run_that_opens_and_compares(tmp_path: Path) -> None:
    whole = run_script(tmp_path, TRAINING.replace("range(3)", "range(40)"))
    assert whole.returncode == 0
    slow = tmp_path / "slow.py"
    slow.write_text(TRAINING.replace("range(3)", "range(40)").replace("print(", "import time; time.sleep(.05); print("))
    process = subprocess.Popen(
        [sys.executable, "-m", "astray", "run", "-o", str(tmp_path / "killed"), str(slow)], stdout=subprocess.PIPE
    )
    for _ in range(20):
        process.stdout.readline()
    time.sleep(0.7)  # the writer puts rows into the file within half a second
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    run = astray.open(tmp_path / "killed")
    assert not run.complete
    assert len(run.steps) >= 20
    shared = f"0:{max(run.steps)}"
    assert command("compare", str(tmp_path / "run"), str(tmp_path / "killed"), "--steps", shared).returncode == 0
    assert command("compare", str(tmp_path / "run"), str(tmp_path / "killed")).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_under_torchrun_each_rank_has_its_folder(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
            optimizer.step(); optimizer.zero_grad()
        dist.destroy_process_group()
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         "-m", "astray", "run", "-o", str(tmp_path / "run"), str(script)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = astray.open(tmp_path / "run")
    assert sorted(run.ranks) == list(range(ranks))
    assert run.complete
    assert run.info.world_size == ranks
    for rank in range(ranks):
        sites = {row["site"] for row in calls(tmp_path / "run", rank) if row["kind"] == "module"}
        assert sites == {"<root>"}


def test_without_a_folder_a_new_one_is_chosen_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "runs" / "train-1").mkdir(parents=True)
    done = command("run", "train.py")
    assert done.returncode == 0
    assert "astray: recording into runs/train-2." in done.stderr
    assert astray.open(tmp_path / "runs" / "train-2").complete


def test_ranks_need_a_folder_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    done = command("run", str(tmp_path / "train.py"), RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "Give -o RUN" in done.stderr


def test_options_behind_the_script_are_the_programs_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys, torch\nprint(sys.argv[1:])\nsys.exit(int(sys.argv[-1]))")
    done = command("run", "train.py", "-o", "x", "0")
    assert done.stdout == "['-o', 'x', '0']\n"
    said = "-o stands behind train.py, and was given to the program; astray's own stand in front of it."
    assert f"astray: recording into runs/train-1. {said}" in done.stderr
    done = command("run", "-o", "y", "train.py", "--keep=tensors", "2")
    assert (done.returncode, "astray: --keep=tensors stands behind train.py" in done.stderr) == (2, True)


@pytest.mark.slow
def test_options_behind_a_script_that_takes_them_are_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch")
    assert "stands behind" not in command("run", "-o", "z", "train.py", "--keep=tensors", "0").stderr


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (
            ["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"],
            "torchrun --nproc-per-node 2 -m astray run [options] -o RUN train.py --lr 1",
        ),
        (
            ["-m", "torch.distributed.run", "a.py"],
            "python -m torch.distributed.run -m astray run [options] -o RUN a.py",
        ),
        (
            ["accelerate", "launch", "-m", "pkg.train"],
            "accelerate launch -m astray run [options] -o RUN -m pkg.train",
        ),
        (
            ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "a.py"],
            "python -m paddle.distributed.launch --nproc_per_node 2 $(command -v astray) run [options] -o RUN a.py",
        ),
        (["python", "train.py"], "Say: astray run [options] -o RUN train.py"),
        (["python3.12", "-m", "pkg.train"], "Say: astray run [options] -o RUN -m pkg.train"),
        (
            ["python3", "-m", "torch.distributed.run", "--nproc-per-node", "2", "a.py"],
            "python3 -m torch.distributed.run --nproc-per-node 2 -m astray run [options] -o RUN a.py",
        ),
    ],
)
def test_a_launcher_is_told_to_start_astray(words: list[str], instead: str) -> None:
    done = command("run", "-o", "x", *words)
    assert done.returncode == 2
    assert done.stderr.endswith(f"{instead}\n")


def test_a_run_of_nothing_asks_for_the_script_alone() -> None:
    assert command("run").stderr.endswith("the following arguments are required: SCRIPT\n")


def test_one_line_sums_up_all_ranks(tmp_path: Path) -> None:
    said = [run_script(tmp_path, TRAINING, RANK=str(rank), WORLD_SIZE="2").stderr for rank in (0, 1)]
    assert "tensors in " in said[0]
    assert "(on rank 0; 2 ranks)" in said[0]
    assert said[1] == ""


def test_astray_alone_is_help() -> None:
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: astray" in done.stdout
