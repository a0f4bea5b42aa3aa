"""Programs written for hooktools: the two of its document, every key of its YAML, and what it used to get wrong."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import astray
from astray.compat.hooktools import Tracer
from astray.errors import RecordError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]


class Detector(nn.Module):
    """Keyword arguments, a dict of results, a function between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, images: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        hidden = F.leaky_relu(self.norm(self.stem(images)), 0.1)
        return {"boxes": self.head(hidden) * scale, "parts": (hidden.mean(), hidden)}


def config(log_dir: Path, **more: Any) -> dict[str, Any]:
    return {"log_dir": str(log_dir), "tracer_name": "demo", "trace_mode": 3, "register_hooks": ["dump_pt_hook"]} | more


def train(tracer_config: Any, model: nn.Module, *, gradients: bool = False, epochs: int = 2) -> list[float]:
    """The second program of hooktools' document."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of = nn.BCEWithLogitsLoss()
    trace = None if tracer_config is None else Tracer(tracer_config, model)
    losses = []
    for epoch in range(epochs):
        for i in range(2):
            torch.manual_seed(10 * epoch + i)
            images = torch.randn(2, 3, 6, 6)
            if trace is not None:
                trace.trace(epoch=epoch, step=i)
            loss = loss_of(model(images, scale=torch.ones(1))["boxes"], torch.ones(2, 2, 6, 6))
            loss.backward()
            if trace is not None:
                trace.untrace()
            optimizer.step()
            if trace is not None and gradients:
                trace.trace_gradient(epoch, i)
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def detector() -> Detector:
    torch.manual_seed(0)
    return Detector()


def left_hooks(model: nn.Module) -> int:
    own = sum(len(getattr(module, name)) for module in model.modules() for name in HOOKS)
    return own + sum(len(getattr(nn.modules.module, name)) for name in GLOBAL_HOOKS)


def files(log_dir: Path, pattern: str = "*.pt") -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(log_dir.rglob(pattern))]


def names(log_dir: Path, pattern: str = "*.pt") -> list[str]:
    return [file["module_name"] for file in files(log_dir, pattern)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, list[float]]:
    home = tmp_path_factory.mktemp("trained")
    path = home / "tracer_demo.yaml"
    path.write_text(yaml.safe_dump(config(home / "log")))
    model = detector()
    return home / "log", model, train(str(path), model, gradients=True)


def test_the_training_program_of_the_document_runs(trained: tuple[Path, nn.Module, list[float]]) -> None:
    log, _, _ = trained
    (run,) = (entry for entry in log.iterdir() if entry.is_dir())
    assert run.name.startswith("demo_1")
    folders = {str(path.parent.relative_to(run)) for path in run.rglob("*.pt")}
    steps = ("epoch0/step0", "epoch0/step1", "epoch1/step0", "epoch1/step1")
    assert folders == {f"{phase}/{step}" for phase in ("forward", "backward", "gradient") for step in steps}
    assert names(run, "forward/epoch0/step0/*.pt") == ["stem", "norm", "head", "<root>", "BCEWithLogitsLoss"]
    index = json.loads(next(log.glob("module2path_*.json")).read_text())
    assert len(index["stem"]) == 8
    assert all(Path(path).exists() for paths in index.values() for path in paths)


def test_no_bit_of_the_training_changes_and_no_hook_remains(trained: tuple[Path, nn.Module, list[float]]) -> None:
    _, traced, losses = trained
    bare = detector()
    assert train(None, bare) == losses
    for (name, one), (_, other) in zip(traced.state_dict().items(), bare.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert left_hooks(traced) == 0


def test_dicts_and_keyword_arguments_are_captured(trained: tuple[Path, nn.Module, list[float]]) -> None:
    root = next(file for file in files(trained[0], "forward/epoch0/step0/*.pt") if file["module_name"] == "<root>")
    assert root["kwargs"]["scale"].tolist() == [1]
    assert root["output"]["boxes"].shape == (2, 2, 6, 6)
    assert [tensor.dim() for tensor in root["output"]["parts"]] == [0, 4]


def test_trace_gradient_has_every_parameter_and_its_gradient(trained: tuple[Path, nn.Module, list[float]]) -> None:
    log, _, _ = trained
    model = detector()
    saved = files(log, "gradient/epoch0/step0/*.pt")
    assert [file["module_name"] for file in saved] == [name for name, _ in model.named_parameters()]
    for file, (_, parameter) in zip(saved, model.named_parameters(), strict=True):
        stepped = parameter.detach() - 0.1 * file["gradient_grad"]
        torch.testing.assert_close(file["gradient"], stepped)  # as it is after the step
    key = astray.Key(0, 0, "head.bias", 0, "backward", "gradient", "grad")
    assert astray.open(log).tensor(key).tolist() == saved[-1]["gradient_grad"].tolist()


def test_it_pairs_with_a_native_recording_by_key(trained: tuple[Path, nn.Module, list[float]], tmp_path: Path) -> None:
    model = detector()
    loss_of = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with astray.record(tmp_path / "run", model, keep="tensors", roles=["input", "output"]) as rec:
        for seed in (0, 1, 10, 11):
            torch.manual_seed(seed)
            loss_of(model(torch.randn(2, 3, 6, 6), scale=torch.ones(1))["boxes"], torch.ones(2, 2, 6, 6)).backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step()
    diff = astray.compare(tmp_path / "run", trained[0])
    assert diff.counts["identical"] == len(astray.open(tmp_path / "run").ranks[0].tensors) == 4 * 18
    assert {diff.pairs["type"][row] for row in range(len(diff.pairs)) if not diff.matched[row]} == {
        "BCEWithLogitsLoss", "Parameter",
    }  # fmt: skip


def stream_generate(model: nn.Module, ids: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """One token after another, as chat models give them."""
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, F.softmax(logits, -1).argmax(-1, keepdim=True)], 1)
            yield ids


def test_the_generating_program_of_the_document_runs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 30, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.tensor([[1, 2]])
    bare = list(stream_generate(model, ids, 3))
    apis = {"torch.nn.functional": ["torch.nn.functional.softmax"]}
    trace = Tracer(
        config(tmp_path, trace_mode=1, hacker_non_nn_modules=True, hacker_options={"supported_apis": apis}), model
    )
    trace.trace()
    outputs = []
    for generate_step, output in enumerate(stream_generate(model, ids, 3)):
        trace.update_step(generate_step)
        outputs.append(output)
    trace.untrace()
    assert all(torch.equal(one, other) for one, other in zip(outputs, bare, strict=True))
    assert left_hooks(model) == 0
    folders = {path.parent.name: names(path.parent) for path in trace.folder.rglob("*.pt")}
    assert set(folders) == {"step-1", "step0", "step1"}  # the first token is there before the first update_step
    assert folders["step0"] == folders["step1"] == folders["step-1"]
    assert folders["step0"][-2:] == ["<root>", "/softmax"]  # the file before the softmax is that of the whole model
    run = astray.open(tmp_path)
    assert run.info.settings["steps"] == {"epoch-1": "step + 1"}
    assert run.steps == [0, 1, 2]


# -- keys ------------------------------------------------------------------------------------------------------------


def once(tracer_config: dict[str, Any], model: nn.Module | None = None) -> Tracer:
    model = detector() if model is None else model
    trace = Tracer(tracer_config, model)
    trace.trace(0, 0)
    nn.Sigmoid()(model(torch.ones(1, 3, 4, 4), scale=torch.ones(1))["boxes"]).sum().backward()
    trace.untrace()
    assert left_hooks(model) == 0
    return trace


@pytest.mark.parametrize(
    ("mode", "phases"), [(0, set()), (1, {"forward"}), (2, {"backward"}), (3, {"forward", "backward"})]
)
def test_trace_mode(tmp_path: Path, mode: int, phases: set[str]) -> None:
    trace = once(config(tmp_path / "log", trace_mode=mode))
    trace.trace_gradient(0, 0)
    found = {path.parents[2].name for path in trace.folder.rglob("*.pt")}
    assert found == (phases | {"gradient"} if phases else set())
    assert (tmp_path / "log").exists() is bool(phases)


@pytest.mark.parametrize(("granularity", "others"), [(0, {"Sigmoid"}), (1, set())])
def test_trace_granularity_leaks_nothing(tmp_path: Path, granularity: int, others: set[str]) -> None:
    once(config(tmp_path, trace_granularity=granularity, trace_mode=1))
    assert set(names(tmp_path)) == {"stem", "norm", "head", "<root>"} | others


@pytest.mark.parametrize("key", ["hook_specifiy_modules", "hook_specify_modules"])
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"starts_with": ["stem"]}, {"stem", "stem/conv2d", "stem.weight", "stem.bias"}),
        ({"starts_with": "Conv2d(4"}, {"head"}),  # a repr, as hooktools knew modules
        ({"starts_with": ["Detector"]}, {"<root>"}),
        ({"regular_expression": [r"^he.d$", "Batch"]}, {"head", "norm"}),
        ({"starts_with": ["torch.nn.functional.leaky"]}, {"<root>/leaky_relu"}),
        ({"starts_with": ["norm"], "regular_expression": ["bias$"]},
         {"norm", "norm/add_", "norm/batch_norm", "norm.weight", "norm.bias", "stem.bias", "head.bias"}),
    ],
)  # fmt: skip
def test_modules_are_chosen_by_name_repr_and_expression(
    tmp_path: Path, key: str, wanted: dict[str, Any], found: set[str]
) -> None:
    options = {"dump_pt_hook_options": {key: wanted}}
    once(config(tmp_path, trace_mode=1, hacker_non_nn_modules=True, **options)).trace_gradient(0, 0)
    assert set(names(tmp_path)) == found


def test_functions_are_those_that_are_listed(tmp_path: Path) -> None:
    apis = {"torch.nn.functional": ["torch.nn.functional.leaky_relu"], "torch.Tensor": ["torch.Tensor.mean"]}
    once(config(tmp_path / "some", trace_mode=1, hacker_non_nn_modules=True, hacker_options={"supported_apis": apis}))
    functions = {file["module_type"] for file in files(tmp_path / "some") if file["classify"] == "non nn.module"}
    assert functions == {"torch.nn.functional.leaky_relu", "torch.Tensor.mean"}
    once(config(tmp_path / "all", trace_mode=1, hacker_non_nn_modules=True))
    functions = {file["module_type"] for file in files(tmp_path / "all") if file["classify"] == "non nn.module"}
    assert functions >= {"torch.Tensor.mul", "torch.nn.functional.leaky_relu"}
    assert F.leaky_relu.__module__ == "torch.nn.functional"  # nothing was replaced


def test_verbose_tells_where_files_are_and_which_functions_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = config(tmp_path, trace_mode=1)
    once(quiet)
    assert capsys.readouterr().out == ""
    once(quiet | {"verbose": True, "hacker_non_nn_modules": True, "hacker_options": {"verbose": True}})
    said = capsys.readouterr().out
    assert "tracing epoch 0, step 0 into " in said
    assert "torch.nn.functional.leaky_relu: 1 call\n" in said


def test_only_inputs_or_outputs(tmp_path: Path) -> None:
    once(config(tmp_path / "in", trace_mode=1, only_input=True))
    once(config(tmp_path / "out", trace_mode=1, only_output=True))
    assert not any("output" in file for file in files(tmp_path / "in"))
    assert all(torch.is_tensor(file["output"]) or file["output"] for file in files(tmp_path / "out"))
    assert not any(torch.is_tensor(one) for file in files(tmp_path / "out") for one in file.get("input", ()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trace_mod": 1}, "There is no key trace_mod. Did you mean 'trace_mode'?"),
        ({"trace_mode": 4}, "trace_mode is 4; it can be 0, 1, 2, 3."),
        ({"trace_granularity": "1"}, "trace_granularity is '1'; it can be 0, 1."),
        ({"register_hooks": ["check_nan_hook"]}, "there is no hook 'check_nan_hook'; there is dump_pt_hook."),
        ({"tracer_name": "../out"}, "it becomes the name of a folder, and cannot lead into another."),
        ({"verbose": "very"}, "verbose is 'very'; it should be true or false."),
        ({"dump_pt_hook_options": {"hook_specifiy_modules": {"regular_expression": ["("]}}},
         "dump_pt_hook_options.hook_specifiy_modules.regular_expression is ['(']; '(' is not a regular expression"),
        ({"dump_pt_hook_options": {"hook_specifiy_modules": {"ends_with": "x"}}},
         "There is no key dump_pt_hook_options.hook_specifiy_modules.ends_with. Did you mean 'starts_with'?"),
        ({"dump_pt_hook_options": {"hook_specifiy_modules": {}, "hook_specify_modules": {}}}, "are the same key"),
        ({"hacker_options": 3}, "hacker_options. is 3. It should have keys with values."),
        ({"hacker_non_nn_modules": True, "hacker_options": {"supported_apis": {"f": ["torch.nn.functional.sofmax"]}}},
         "'torch.nn.functional.sofmax', which is not a function of torch. Did you mean 'torch.nn.functional.softmax'?"),
        ({"hacker_non_nn_modules": True, "hacker_options": {"supported_apis": {"f": ["os.system"]}}},
         "'os.system', which is not a function of torch."),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_a_sentence(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError) as error:
        Tracer(config(tmp_path) | wrong, detector())
    assert said in str(error.value)


def test_a_file_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "tracer.yaml"
    path.write_text("trace_mode: 9\n")
    with pytest.raises(RecordError, match=r"tracer\.yaml: trace_mode is 9"):
        Tracer(path, detector())
    with pytest.raises(RecordError, match=r"There is no file .*none\.yaml"):
        Tracer(str(tmp_path / "none.yaml"), detector())
    with pytest.raises(RecordError, match="A int was given, which cannot be recorded"):
        Tracer(config(tmp_path), 3)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="step='a' cannot be traced"):
        Tracer(config(tmp_path), detector()).trace(0, "a")  # type: ignore[arg-type]


def test_nothing_that_fits_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    once(config(tmp_path, trace_mode=1, dump_pt_hook_options={"hook_specifiy_modules": {"starts_with": ["none"]}}))
    assert "nothing was recorded" in caplog.text
    assert "such as <root>" in caplog.text


# -- the course of a trace ---------------------------------------------------------------------------------------------


def test_tracing_again_goes_on_under_the_new_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    trace = Tracer(config(tmp_path, trace_mode=1), model)
    trace.untrace()  # nothing was traced: no harm
    trace.trace(0, 0)
    model(torch.ones(1, 2))
    trace.trace(0, 1)
    model(torch.ones(1, 2))
    trace.update_epoch(1)
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    trace.untrace()
    model(torch.ones(1, 2))
    found = sorted(str(path.parent.relative_to(trace.folder / "forward")) for path in trace.folder.rglob("*.pt"))
    assert found == ["epoch0/step0", "epoch0/step1", "epoch1/step1", "epoch1/step1"]
    assert left_hooks(model) == 0


def test_the_same_step_traced_twice_keeps_both(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    trace = Tracer(config(tmp_path, trace_mode=1), model)
    for _ in range(3):
        trace.trace()
        model(torch.ones(1, 2))
        trace.untrace()
    calls = astray.open(tmp_path).ranks[0].calls
    assert calls.numbers("micro").tolist() == [0, 1, 2]
    assert calls.numbers("step").tolist() == [0, 0, 0]


def test_two_tracers_of_one_second_have_a_folder_each(tmp_path: Path) -> None:
    one = once(config(tmp_path, trace_mode=1))
    other = Tracer(config(tmp_path, trace_mode=1), copy.deepcopy(detector()))
    assert one.folder != other.folder


def test_gradients_may_be_saved_while_a_trace_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    trace = Tracer(config(tmp_path), model)
    trace.trace(0, 0)
    model(torch.ones(1, 2)).sum().backward()
    trace.trace_gradient(0, 0)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    trace.untrace()
    assert names(tmp_path, "gradient_*.pt") == ["weight", "bias"]
    assert names(tmp_path, "backward_*.pt") == ["<root>", "<root>"]
    assert [file["micro"] for file in files(tmp_path, "forward_*.pt")] == [0, 1]


def test_an_exception_in_the_model_leaves_whole_files(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"no such {self.fine(x).shape}")

    model = Broken()
    trace = Tracer(config(tmp_path, trace_mode=1), model)
    trace.trace()
    with pytest.raises(ValueError, match="no such"):
        model(torch.ones(1, 2))
    trace.untrace()
    assert names(tmp_path) == ["fine", "<root>"]
    assert "output" not in files(tmp_path)[1]
    assert left_hooks(model) == 0


def test_a_kill_leaves_whole_files(tmp_path: Path) -> None:
    program = f"""
    import os, signal, torch
    from astray.compat.hooktools import Tracer
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    trace = Tracer({config(tmp_path)!r}, model)
    for step in range(1000):
        trace.trace(0, step)
        model(torch.randn(256, 64)).sum().backward()
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        trace.untrace()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    found = files(tmp_path)  # each of them loads
    assert len([file for file in found if file["kind"] == "module"]) >= 3 * 10
    run = astray.open(tmp_path)
    assert run.problems == []
    assert run.steps[:3] == [0, 1, 2]


def test_what_could_not_be_traced_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.ones(2)
            self.many = [torch.ones(1) for _ in range(300)]  # more than are taken out of one object

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return x + cache.keys

    model = Model()
    trace = Tracer(config(tmp_path, trace_mode=1), model)
    for step in range(2):
        trace.trace(0, step)
        model(torch.ones(2), Cache())
        trace.untrace()
    assert caplog.text.count("Cache") == 1
