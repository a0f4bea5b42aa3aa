"""Exported scripts run where there is nothing but torch and give what replay says; nothing of a run becomes code."""

from __future__ import annotations

import ast
import json
import math
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.cli import main as astray_main
from astray.errors import RunError, RunExists, UsageError
from astray.replay.arguments import NotPlainError, Skeleton
from astray.replay.calls import RebuiltCall, RecordedCalls
from astray.replay.replay import Replay, ReplayedCall
from astray.replay.script import script
from astray.replay.scripted_call import ScriptedCall, scripted, stored_tensor
from astray.replay.source import Bracketed, formatted, write_function
from astray.replay.torch_settings import written_settings
from astray.results.run import Run
from replay import faults, programs


class Ran(NamedTuple):
    """A script: its text, its exit code, and what it printed."""

    text: str
    code: int
    printed: str


class Exported(NamedTuple):
    """Calls of runs by their names, as replay judges them, and as their scripts ran."""

    calls: dict[str, ReplayedCall]
    scripts: dict[str, Ran]


# -- calls of many kinds, where there is nothing but torch -------------------------------------------------------------


def many_kinds() -> None:
    torch.manual_seed(3)
    x, other = torch.randn(2, 16, 24, requires_grad=True), torch.randn(2, 16, 24)
    weight, bias = torch.randn(20, 24, requires_grad=True), torch.randn(20, requires_grad=True)
    images, kernel = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    ids = torch.randint(0, 20, (2, 16))
    y = F.linear(x, weight, bias)
    p = torch.softmax(torch.matmul(x, other.transpose(1, 2)), dim=-1)
    n = F.layer_norm(x, (24,), torch.ones(24), eps=1e-3)
    query, key, value = (n @ torch.randn(24, 72)).view(2, 16, 3, 24).unbind(2)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    c = F.conv2d(images.to(memory_format=torch.channels_last), kernel, padding="same", stride=1)
    e = F.embedding(ids, weight)
    e = e.add_(1.0, alpha=2)
    e[:, 1:3, ..., 0] = y.detach()[:, 1:3, 0]
    picked = p[:, [0, 2], None, :3]
    narrow = F.linear(x.detach().bfloat16(), weight.detach().bfloat16())
    narrow.mul_(0.5)
    squared = torch.matmul(x, x.transpose(1, 2)).float() + F.linear(y, y[0])
    wide = torch.cat([mixed, n], dim=-1).var(-1).expand(3, -1, -1)
    dropped = F.dropout(p, 0.25)
    top = torch.topk(y, 4)
    spectrum = torch.fft.irfft(torch.fft.rfft(x))
    loss = F.cross_entropy(y.flatten(0, 1), ids.flatten(), label_smoothing=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        cast = F.linear(x, weight)
    parts = (c.sum(), e.mean(), picked.sum(), wide.sum(), dropped.sum(), top.values.sum(), cast.sum(), squared.mean())
    (loss + sum(each.float() for each in parts) + spectrum.abs().sum() + (x > 0).sum()).backward()


KINDS = {
    "linear#0": "out = torch.nn.functional.linear(input, weight, bias)",
    "matmul#0": "out = torch.matmul(input, other)",
    "softmax#0": "out = torch.softmax(input, dim=-1)",
    "layer_norm#0": "(\n        input, (24,), weight=weight, bias=None, eps=0.001\n    )",
    "scaled_dot_product_attention#0": "(\n        query, key, value, is_causal=True\n    )",
    "conv2d#0": 'out = torch.nn.functional.conv2d(input, weight, padding="same", stride=1)',
    "embedding#0": "        input,\n        weight,\n        padding_idx=None,\n",
    "add_#0": "    overwritten = input.clone()\n    out = overwritten.add_(1.0, alpha=2)",
    "mul_#0": "    out = input.mul_(0.5)",
    "setitem#0": "    overwritten = input.clone()\n    overwritten[:, 1:3, ..., 0] = value\n    out = overwritten",
    "getitem#1": "out = input[:, [0, 2], None, :3]",
    "bfloat16#0": "out = input.double() if exact else input.bfloat16()",
    "cat#0": "out = torch.cat([tensors_0, tensors_1], dim=-1)",
    "dropout#0": '    torch.set_rng_state(given("generator"))\n',
    "topk#0": '    return {"out.0": out[0], "grad_input": grad_input}',
    "rfft#0": "torch.view_as_real(out.resolve_conj())",
    "cross_entropy#0": 'reduction="mean",\n        label_smoothing=0.1,',
    "gt#0": '"out": (torch.bool, 0.0, 0.0),',
    "randint#0": "out = torch.randint(0, 20, [2, 16])",
    "module scale#0 forward": 'module = torch.nn.LayerNorm((64,), eps=0.001, device="meta")',
    "module lstm#0 forward": "torch.nn.LSTM(64, 6, num_layers=2, batch_first=True",
    "module act#0 forward": "    module = torch.nn.LeakyReLU(negative_slope=0.2)\n    out = module(input)",
    "evaluated 0#0 forward": "module.eval()",
    "op aten.mm#0 forward": "out = torch.ops.aten.mm.default(input, mat2)",
}
"""What stands in the script of a call, by its function."""

DRIVER = """
import io, json, runpy, sys, contextlib
sys.path[:] = [each for each in sys.path if "site-packages" not in each] + [sys.argv[1]]
for name in ("astray", "numpy", "safetensors"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported here")
found, scripts = {}, sys.argv[2:]
for script in scripts:
    sys.argv, printed = [script], io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    found[script] = [code, printed.getvalue()]
print(json.dumps(found))
"""


def only_torch(folder: Path) -> Path:
    """A folder of packages that has torch and what torch requires, as `pip install torch` would make it."""
    folder.mkdir()
    wanted, seen = ["torch"], set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            files, requires = metadata.files(name), metadata.requires(name)
        except metadata.PackageNotFoundError:  # for another system
            continue
        wanted += [
            match[0] for each in requires or () if "extra ==" not in each and (match := re.match(r"[\w.-]+", each))
        ]
        for top in {each.parts[0] for each in files or () if each.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(metadata.distribution(name).locate_file(top)))
    return folder


def run_scripts(scripts: list[Path], folder: Path) -> list[Ran]:
    """Runs scripts one after the other in a Python that finds torch and nothing else."""
    command = [sys.executable, "-I", "-S", "-c", DRIVER, str(only_torch(folder)), *map(str, scripts)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    return [Ran(path.read_text(), *found[str(path)]) for path in scripts]


def export_all(runs: dict[str, Run], folder: Path) -> Exported:
    calls, paths = {}, []
    for name, run in runs.items():
        replay: Replay = run.replay()
        kinds = set()
        for call in sorted(replay.calls, key=lambda each: int(each.call["seq"])):
            if (kind := (call.call["type"], call.call["args"], call.worst.dtype)) in kinds:
                continue
            kinds.add(kind)
            calls[f"{name} {call.site.rpartition('/')[2]}#{call.call['call']} {call.call['phase']}"] = call
            paths.append(folder / f"{name}_{call.call['seq']}.py")
            run.export_call(call, paths[-1])
    return Exported(calls, dict(zip(calls, run_scripts(paths, folder / "packages"), strict=True)))


def recorded(folder: Path, program: Callable[[], Any], level: str = "function", model: nn.Module | None = None) -> Run:
    with astray.record(folder, model or nn.Identity(), level=level, keep="stats,tensors") as recorder:
        program()
        recorder.step()
    return astray.open(folder)


class Leaves(nn.Module):
    """Modules with parameters, with statistics that they update, of several layers, and some that only compute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.scale, self.lstm = nn.LayerNorm(64, eps=1e-3), nn.LSTM(64, 6, num_layers=2, batch_first=True)
        self.head, self.act = nn.Linear(6, 4, bias=False), nn.LeakyReLU(0.2, inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.scale(self.norm(self.conv(images)).flatten(2))
        return self.act(self.head(self.lstm(hidden)[0]))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Functions, modules and operators, each as a script that has run."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(5)
    model, evaluated = Leaves(), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
    images, rows = torch.randn(2, 3, 8, 8), torch.randn(5, 8)
    runs = {
        "function": recorded(folder / "function", many_kinds),
        "module": recorded(folder / "module", lambda: model(images).sum().backward(), "module", model),
        "evaluated": recorded(folder / "evaluated", lambda: evaluated(rows), "module", evaluated),
        "op": recorded(folder / "op", lambda: model.head(model.lstm.weight_hh_l0).mean().backward(), "op", model.head),
    }
    return export_all(runs, folder)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_is_written_as_a_person_would(name: str, exported: Exported) -> None:
    assert KINDS[name] in exported.scripts[name if " " in name else f"function {name} forward"].text


def test_every_script_gives_what_was_recorded(exported: Exported) -> None:
    assert len(exported.scripts) > 60
    for name, ran in exported.scripts.items():
        assert ran.code == 0, (name, ran.printed)
        assert "This device gives what was recorded, to the bit." in ran.printed, (name, ran.printed)
        assert "Recorded: as exact as rounding allows. Here: as exact as rounding allows." in ran.printed, name


def test_scripts_measure_as_replay_does(exported: Exported) -> None:
    for name, call in exported.calls.items():
        ran = exported.scripts[name]
        if "torch.set_rng_state" in ran.text:  # their exact results are those of the CPU
            continue
        judged = [each.judgement for each in call.tensors if each.judgement.size]
        expected = sorted(f"{each.ulps:.4g}" for each in judged if each.unequal is None)
        assert sorted(re.findall(r"  recorded  (\S+) ulps", ran.printed)) == expected, name
        assert ran.printed.count("  recorded  0 elements are wrong") == len(judged) - len(expected), name


def test_scripts_are_formatted(exported: Exported, tmp_path: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    for number, ran in enumerate(exported.scripts.values()):
        (tmp_path / f"{number}.py").write_text(ran.text)
        assert max(map(len, ran.text.splitlines()[1:])) <= 88
    for command in (["format", "--diff"], ["check", "--select", "F,I,W,UP"]):
        ended = subprocess.run([ruff, *command, "--isolated", "."], cwd=tmp_path, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stdout.decode()


def test_inputs_lie_as_they_did(exported: Exported) -> None:
    layouts = {
        name: re.findall(r'"(\w+)": \(\((.*)\), \((.*)\)\),', ran.text) for name, ran in exported.scripts.items()
    }
    assert layouts["function conv2d#0 forward"][0] == ("input", "2, 3, 8, 8", "192, 1, 24, 3")
    assert layouts["function matmul#0 forward"][0] == ("other", "2, 24, 16", "384, 1, 24")
    query, key, _ = layouts["function scaled_dot_product_attention#0 forward"][:3]
    assert query == ("query", "2, 16, 24", "1152, 72, 1")
    assert key[2] == "1152, 72, 1"
    assert layouts["function linear#0 forward"] == []


# -- a call that is wrong ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong_tile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("wrong")
    fault = faults.FIRST_HALF["wrong tile"]
    return programs.record(folder / "r", programs.FIRST_HALF[fault.program], fault=faults.Planted(fault))


def run_here(path: Path, *arguments: str) -> Ran:
    """Runs a script in this process."""
    printed, code = StringIO(), None
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(path), *arguments])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Ran(path.read_text(), code, printed.getvalue())


def test_a_wrong_tile_is_reported_with_its_place(wrong_tile: Run, tmp_path: Path) -> None:
    worst = wrong_tile.replay("h.0.expand").calls[0]
    wrong_tile.export_call(worst, tmp_path / "bug.py")
    ran = run_here(tmp_path / "bug.py")
    ulps = f"{worst.worst.judgement.ulps:.4g}"
    assert ran.text.startswith(
        '"""One call of torch.nn.functional.linear in bfloat16.\n\n'
        f"What was recorded is wrong: out is {float(ulps):.2g} ulps off, where rounding explains 2.0.\n"
    )
    assert "programs.py:" in ran.text
    assert str(Path(programs.__file__).parent) not in ran.text
    assert re.search(
        rf"recorded  {ulps} ulps off at most.*\n .*\n +\d+ elements beyond 2, in \[0:1, 16:32, 32:48\]", ran.printed
    )
    assert "here      0.5 ulps off at most" in ran.printed
    assert "Recorded: further off than rounding explains. Here: as exact as rounding allows." in ran.printed
    assert re.search(r"This device gives what was recorded, but for \d+ elements\.", ran.printed)
    assert ran.code == 0


def test_a_device_with_the_same_fault_gives_the_same_bits(wrong_tile: Run, tmp_path: Path) -> None:
    wrong_tile.export_call("h.0.expand", tmp_path / "bug.py")
    bad = faults.Fault("addmm.default", 1, faults.wrong_tile, "")  # the first is that in float64
    with faults.Planted(bad) as planted:
        ran = run_here(tmp_path / "bug.py")
    assert planted.done
    assert "Recorded: further off than rounding explains. Here: further off than rounding explains." in ran.printed
    assert "This device gives what was recorded, to the bit." in ran.printed
    assert ran.code == 1


def test_what_does_not_run_is_said(wrong_tile: Run, tmp_path: Path) -> None:
    wrong_tile.export_call("h.0.expand", tmp_path / "bug.py")
    ran = run_here(tmp_path / "bug.py", "--device", "vulkan")
    assert "It does not run on vulkan: " in ran.printed
    assert ran.code == 125


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in {**faults.FIRST_HALF, **faults.SECOND_HALF}]
)
def test_scripts_find_what_replay_finds(name: str, tmp_path: Path) -> None:
    fault = {**faults.FIRST_HALF, **faults.SECOND_HALF}[name]
    program = {**programs.FIRST_HALF, **programs.SECOND_HALF}[fault.program]
    run = programs.record(tmp_path / "r", program, fault=faults.Planted(fault))
    run.export_call(run.replay().stands_out[0], tmp_path / "bug.py")
    ran = run_here(tmp_path / "bug.py")
    assert "What was recorded is wrong: " in ran.text
    assert "Recorded: further off than rounding explains. Here: as exact as rounding allows." in ran.printed
    assert ran.code == 0


# -- which call, and what is refused -----------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.shared = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.proj(x)).view(-1).as_strided((4,), (2,))


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, in each of which a layer is called twice."""
    folder, model = tmp_path_factory.mktemp("twice") / "r", Twice()
    with astray.record(folder, model, level="function", keep="tensors") as recorder:
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
            recorder.step()
    return astray.open(folder)


def test_one_call_is_chosen(twice: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        twice.export_call("proj", tmp_path / "a.py")
    assert str(caught.value) == (
        f"{twice.path} has 4 calls of 'proj', and one is exported. Choose one: proj/linear#0 --steps 0, "
        "proj/linear#1 --steps 0, proj/linear#0 --steps 1, proj/linear#1 --steps 1."
    )
    with pytest.raises(UsageError, match=r"has 2 calls of 'proj', .* Choose one: proj/linear#0, proj/linear#1\.$"):
        twice.export_call("proj", tmp_path / "a.py", steps=0)
    exported = twice.export_call("proj/linear#1", tmp_path / "a.py", steps=0)
    assert exported.what == "torch.nn.functional.linear of proj/linear#1 in step 0"
    assert exported.values == tmp_path / "a.safetensors"
    assert "call 1 of step 0." in exported.script.read_text()
    with pytest.raises(UsageError, match=r"has no call 'prj'\."):
        twice.export_call("prj", tmp_path / "a.py", force=True)
    with pytest.raises(UsageError, match=r"has no rank 3; it has 0\.$"):
        twice.export_call("proj", tmp_path / "a.py", rank=3, force=True)


def test_operators_are_chosen_by_phase(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    run = recorded(tmp_path / "r", lambda: model(torch.randn(2, 4)).sum().backward(), "op", model)
    with pytest.raises(UsageError, match=r"aten\.t#0 --phase forward, <root>/aten\.t#0 --phase backward\.$"):
        run.export_call("<root>/aten.t#0", tmp_path / "a.py")
    run.export_call("<root>/aten.t#0", tmp_path / "a.py", phase="backward")


def test_nothing_is_overwritten_unless_asked(twice: Run, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(
        RunExists, match=r"a\.safetensors is there already\. Choose another name, or overwrite it with --force\."
    ):
        twice.export_call("sum", tmp_path / "a.py")
    assert not (tmp_path / "a.py").exists()
    with pytest.raises(UsageError, match=r"a\.txt is not a name for a script\. Give one that ends in \.py\."):
        twice.export_call("sum", tmp_path / "a.txt")
    with pytest.raises(UsageError, match=r"nowhere is not a folder"):
        twice.export_call("sum", tmp_path / "nowhere" / "a.py")


def test_what_replay_refuses_is_refused_for_the_same_reason(twice: Run, tmp_path: Path) -> None:
    (reason,) = [reason for reason, types in twice.replay().left_out.items() if "torch.Tensor.as_strided" in types]
    with pytest.raises(RunError) as caught:
        twice.export_call("<root>/as_strided", tmp_path / "a.py", steps=1)
    assert str(caught.value) == f"<root>/as_strided#0 in step 1 cannot be exported: {reason}."
    assert not list(tmp_path.iterdir())


def test_from_the_command_line(twice: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a.py"
    command = ["replay", str(twice.path), "proj/linear#0", "--steps", "0"]
    assert astray_main([*command, "--export", str(target)]) == 0
    assert re.fullmatch(
        rf"Wrote {target} \(\d\.\d kB\) and {target.with_suffix('.safetensors')} \(\d\.\d kB\): "
        rf"torch\.nn\.functional\.linear of proj/linear#0 in step 0\.\nRun it with: python {target}\n",
        capsys.readouterr().out,
    )
    for wrong, message in (
        ([*command, "--export", str(target)], "is there already"),
        ([*command, "--export", str(target), "--json"], "--json is for a replay"),
        ([*command, "--force"], "--force is for a call that is exported"),
        (["replay", str(twice.path), "--export", str(target)], "--export needs the call to export"),
    ):
        assert astray_main(wrong) == 2
        assert message in capsys.readouterr().err


# -- nothing of a run becomes code -------------------------------------------------------------------------------------

HOSTILE = [
    '"',
    "'",
    '"""',
    "\n",
    "\r",
    "\\",
    "\x00",
    "\u2028",
    "{",
    "}",
    "#",
    ";",
    "import os",
    "\\N{DIGIT ONE}",
    "é",
    "\udc80",
]


def shape_of(text: str) -> str:
    """The syntax tree of a script, without what its texts say."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def test_texts_of_a_run_stay_texts(twice: Run) -> None:
    calls = RecordedCalls(twice.ranks[0])
    row = next(row for row in calls.rows() if calls.call(row)["type"].endswith("linear"))
    content, draw = scripted(calls, twice.ranks[0], row), random.Random(11)
    expected = shape_of(script(content, "a.py", "a.safetensors"))
    for _ in range(150):
        text = "".join(draw.choices(HOSTILE, k=draw.randint(1, 12)))
        changed = hostile_content(content, twice, calls, row, text)
        assert shape_of(script(changed, f"{text}.py", f"{text}.safetensors")) == expected, text


def hostile_content(content: ScriptedCall, run: Run, calls: RecordedCalls, row: int, text: str) -> ScriptedCall:
    """The same call, in a run whose names, lines, versions and devices are a text."""
    with pytest.MonkeyPatch.context() as patch:
        rank = run.ranks[0]
        setups = [setup._replace(values=dict.fromkeys(setup.values, text)) for setup in rank.setup]
        patch.setattr(type(rank), "setup", property(lambda _: setups))
        patch.setattr(type(rank), "stack", lambda *_: [astray.records.Frame(text, 3, text, text)])
        call = calls.rebuild(row)._replace(lost=[text], devices=frozenset([text]))
        call = call._replace(call={**call.call, "site": text, "stack": 0})
        patch.setattr(RecordedCalls, "rebuild", lambda *_: call)
        changed = scripted(RecordedCalls(rank), rank, row)
    return changed._replace(settings=content.settings)


def called_with(skeleton: Skeleton, kind: str = "torch.nn.functional.pad") -> RebuiltCall:
    call = {"type": kind, "kind": "function", "phase": "forward"}
    x = torch.zeros(3)
    return RebuiltCall(
        call,
        "pad",
        lambda _: F.pad,
        False,
        skeleton,
        {"0": x},
        {},
        {},
        {"out": x},
        frozenset(),
        frozenset({"cpu"}),
        [],
        [],
    )


def test_texts_among_arguments_stay_texts() -> None:
    draw = random.Random(12)
    for _ in range(300):
        text = "".join(draw.choices(HOSTILE, k=draw.randint(1, 12)))
        skeleton = Skeleton(["<tensor>", [1, 1], text], {"value": {text: [text]}})
        lines = "\n".join(each.formatted(0) for each in write_function(called_with(skeleton), True).statements)
        assert shape_of(lines) == shape_of('out = torch.nn.functional.pad(input, (1, 1), "", value={"": [""]})')
        call = ast.parse(lines).body[0].value  # type: ignore[attr-defined]
        assert ast.literal_eval(call.args[2]) == text
        with pytest.raises(NotPlainError, match="a keyword among its arguments that is not a name"):
            write_function(called_with(Skeleton(["<tensor>"], {f"{text}=1": 1})), True)


def test_settings_of_a_run_are_those_that_are_known() -> None:
    call = called_with(Skeleton([], {}))._replace(name="scaled_dot_product_attention")
    flags = {"float32_matmul_precision": "high", "sdpa.flash": False, "deterministic_algorithms": True, "threads": 8}
    assert written_settings(call, flags) == [
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        'torch.set_float32_matmul_precision("high")',
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.set_num_threads(8)  # sums are divided among them",
    ]
    assert written_settings(call._replace(name="conv2d"), {"cudnn.conv.fp32_precision": "tf32"}) == [
        "torch.backends.cudnn.allow_tf32 = False"  # it was made on the CPU
    ]
    on_a_gpu = call._replace(name="conv2d", devices=frozenset({"cuda"}))
    assert not written_settings(on_a_gpu, {"cudnn.conv.fp32_precision": "tf32"})
    for hostile in ("1)\nimport os", True, -1, 10**9, [8], None, 2.5):
        assert written_settings(call, dict.fromkeys(flags, hostile)) in (
            [], ["torch.use_deterministic_algorithms(True, warn_only=True)"],
        )  # fmt: skip


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_the_file_is_one_that_others_read(twice: Run, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    twice.export_call("proj/linear#0", tmp_path / "a.py", steps=0)
    tensors = load_file(tmp_path / "a.safetensors")
    assert set(tensors) >= {"input", "weight", "bias", "grad_out", "recorded.out", "recorded.grad_weight"}
    given = [tensors[name] for name in ("input", "weight", "bias")]
    assert torch.equal(F.linear(*given), tensors["recorded.out"])


@pytest.mark.parametrize(
    ("shape", "stride", "stored"),
    [
        ((4, 6), (6, 1), None),
        ((4, 6), (1, 4), (4, 6)),
        ((4, 6), (18, 1), (4, 6)),  # a slice of queries, keys and values
        ((4, 6), (0, 1), (1, 6)),  # expanded
        ((4, 6), (1000, 1), None),  # memory that is mostly gaps
        ((4, 6), (1, 1), None),  # windows that share elements
        ((1, 6), (99, 1), (1, 6)),
    ],
)
def test_layouts(shape: tuple[int, ...], stride: tuple[int, ...], stored: tuple[int, ...] | None) -> None:
    tensor = stored_tensor(torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape), stride)
    assert tensor.stride == (None if stored is None else stride)
    assert tensor.values.shape == (stored or shape)
    assert tensor.values.is_contiguous()


def test_long_lines_are_broken_as_formatters_do() -> None:
    arguments: list[Bracketed | str] = ["x" * 30, Bracketed("dims=[", ["1", "2"], "]")]
    assert formatted(Bracketed("f(", arguments, ")"), 4, "out = ") == f"    out = f({'x' * 30}, dims=[1, 2])"
    arguments.append("y" * 37)
    inside = f"{'x' * 30}, dims=[1, 2], {'y' * 37}"
    assert formatted(Bracketed("foreach(", arguments, ")"), 0) == f"foreach(\n    {inside}\n)"
    arguments.append("z" * 40)
    assert formatted(Bracketed("f(", arguments, ")"), 0).splitlines()[1:3] == [f"    {'x' * 30},", "    dims=[1, 2],"]
    assert formatted(Bracketed("{", ["a" * 50, "b" * 50], "}"), 0).count("\n") == 3
