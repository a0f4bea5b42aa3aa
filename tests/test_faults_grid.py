"""The grid of faults beside honest differences: what it declares is in the recordings; a part of it is judged."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import astray

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PLAIN_TORCH = ("llama", "resnet")
TRANSFORMERS = (
    "gpt2", "bert", "convnext", "qwen3", "mixtral", "t5", "mobilenet", "vit", "neox", "opt", "gemma", "qwen3-moe",
    "regnet",
)  # fmt: skip
FAULTS = ("control", "weight-off-by-5-percent", "activation-other", "residual-off-by-2-percent")

EXACT_AT_LEAST = {"none": 6, "bf16-sdpa": 3, "bf16-channels-last": 3}
"""Of 6 and twice 3 faults, by statistics and without a noise run. Raise a number when the comparison gets better."""
WIDE = ("llama", "resnet", "gpt2", "bert", "convnext")
WIDE_AT_LEAST = {"none": 230, "bf16-sdpa": 130, "bf16-channels-last": 75}
"""The same for all faults of the seen half in these models: some 240, 150 and 88 of them."""
SEEDED = (*WIDE, "qwen3", "mixtral", "t5", "mobilenet", "vit")
ALARMS_AT_MOST = {"none": 0, "bf16-sdpa": 0, "bf16-channels-last": 0}
"""Of 4 and twice 1 controls."""


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def part(name: str) -> ModuleType:
    return importlib.import_module(f"faults.grid.{name}")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "faults"), "grid", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def recorded(
    folder: Path,
    models: Collection[str],
    noises: Collection[str],
    faults: Collection[str] | None = None,
    half: str = "all",
    processes: int = 1,
) -> list[Any]:
    """The cases of a part of the grid at the level of modules by statistics without a noise run, recorded."""
    needed = [
        (case, runs)
        for cell in part("cases").cells(models, noises, faults, half)
        for case, runs in part("cases").cases_of(*cell, ["module"], ())
        if not case.noise_runs
    ]
    assert part("recording").record_all(folder, needed, processes) == []
    return [case for case, _ in needed]


# -- what is declared ------------------------------------------------------------------------------------------------


def test_the_grid_is_large_enough() -> None:
    models, kinds, differences = part("models").MODELS, part("catalogue").KINDS, part("variants").DIFFERENCES
    faults = [(model, kind) for model in models.values() for kind in kinds.values() if kind.applies(model)]
    assert len(models) >= 10
    assert len(kinds) >= 60
    assert len(faults) >= 400
    assert {kind.name for _, kind in faults} == set(kinds)
    on_the_cpu = [one for one in differences.values() if "cuda" not in (one.reference.device, one.candidate.device)]
    controls = [(m, d) for m in models.values() for d in on_the_cpu if d.kernels in (None, m.kernels)]
    assert len(controls) >= 40
    assert all(len(model.layout.blocks) >= 12 for model in models.values() if model.kernels == "attention")


def test_halves() -> None:
    models, kinds, half_of = part("models").MODELS, part("catalogue").KINDS, part("cases").half_of
    differences = part("variants").DIFFERENCES
    halves = [
        half_of(model, difference, kind, 0)
        for model in models.values()
        for difference in differences.values()
        for kind in kinds.values()
        if difference.kernels in (None, model.kernels) and kind.applies(model)
    ]
    assert halves.count("unseen") >= halves.count("seen")
    assert sum(one.half == "unseen" for one in models.values()) >= 5
    assert sum(one.half == "unseen" for one in kinds.values()) >= 20
    assert half_of(models["llama"], differences["none"], kinds["activation-other"], 1) == "seen"
    assert half_of(models["llama"], differences["none"], kinds["keys-shifted"], 1) == "unseen"
    assert half_of(models["opt"], differences["none"], kinds["activation-other"], 1) == "unseen"
    assert half_of(models["llama"], differences["batch-split"], kinds["activation-other"], 1) == "unseen"
    assert half_of(models["llama"], differences["none"], None, 0) == "seen"
    assert half_of(models["llama"], differences["none"], None, 1) == "unseen"


def missing(folder: Path, model_name: str, level: str) -> list[str]:
    """The faults whose expected culprit is not in the reference recording."""
    cases, recording, is_recorded = (
        part("cases"),
        part("recording"),
        importlib.import_module("faults.running").is_recorded,
    )
    model, difference = part("models").MODELS[model_name], part("variants").DIFFERENCES["none"]
    wanted = cases.Recording(model_name, difference.reference, None, 3, level)
    recording.record(folder, wanted)
    reference = astray.open(folder / wanted.path)
    found = [
        (case, is_recorded(case.culprit, case.setting, reference))
        for kind in part("catalogue").KINDS.values()
        if kind.applies(model)
        for case, _ in list(cases.cases_of(model, difference, kind, "seen", [level], ()))[:1]
    ]
    assert len(found) > 30
    return [case.name for case, there in found if not there]


@pytest.mark.parametrize("level", ["module", "module+function"])
@pytest.mark.parametrize("model", PLAIN_TORCH)
def test_every_declared_culprit_is_in_the_reference(tmp_path: Path, model: str, level: str) -> None:
    assert missing(tmp_path, model, level) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("level", ["module", "module+function"])
@pytest.mark.parametrize("model", TRANSFORMERS)
def test_every_declared_culprit_is_in_the_reference_of_transformers(tmp_path: Path, model: str, level: str) -> None:
    assert missing(tmp_path, model, level) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", [*PLAIN_TORCH, *TRANSFORMERS])
def test_every_fault_changes_something(tmp_path: Path, model: str) -> None:
    """In float32 with equal kernels, where nothing else does: not before the fault, and not later than declared."""
    declared, kinds = part("models").MODELS[model], part("catalogue").KINDS
    for case in recorded(tmp_path, [model], ["none"]):
        comparison = astray.compare(tmp_path / case.reference, tmp_path / case.candidate)
        rows = zip(comparison.pairs["step"], comparison.pairs["verdict"], strict=True)
        differs = {int(step) for step, verdict in rows if verdict != "identical"}
        if case.fault is None:
            assert not differs
        else:
            planted = kinds[case.fault].planted(declared).culprit.step
            assert planted <= min(differs, default=99) <= case.culprit.step, case.name


# -- judging ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Any]:
    """Two models with three faults and their controls, beside equal kernels and beside other ones in bfloat16."""
    folder = tmp_path_factory.mktemp("grid")
    cases = recorded(folder, PLAIN_TORCH, EXACT_AT_LEAST, FAULTS)
    assert part("recording").read_index(folder) == cases
    return [part("judging").judge(folder, case) for case in cases]


@pytest.mark.slow
def test_faults_of_a_small_part_are_named(small: Sequence[Any]) -> None:
    for noise, least in EXACT_AT_LEAST.items():
        results = [one.result for one in small if one.case.noise == noise and one.case.fault]
        assert len(results) == (6 if noise == "none" else 3)
        assert results.count("exact") >= least, noise


@pytest.mark.slow
def test_controls_of_a_small_part_are_quiet(small: Sequence[Any]) -> None:
    for noise, most in ALARMS_AT_MOST.items():
        results = [one.result for one in small if one.case.noise == noise and not one.case.fault]
        assert len(results) == (2 if noise == "none" else 1)
        assert len(results) - results.count("silent") <= most, noise


@pytest.mark.gpu
@pytest.mark.parametrize("noise", ["gpu", "gpu-bf16-sdpa", "gpu-channels-last"])
def test_runs_on_a_gpu_are_recorded_and_judged(tmp_path: Path, noise: str) -> None:
    cases = recorded(tmp_path, PLAIN_TORCH, [noise], ["control", "weight-off-by-5-percent"])
    assert len(cases) == (4 if noise == "gpu" else 2)
    for case in cases:
        candidate = astray.open(tmp_path / case.candidate)
        assert "cuda:0" in set(candidate.ranks[0].tensors["device"])
        assert "Error" not in part("judging").judge(tmp_path, case).found


@pytest.mark.slow
def test_the_seen_half(tmp_path: Path) -> None:
    noises = ",".join(WIDE_AT_LEAST)
    chosen = ("--half", "seen", "--models", ",".join(WIDE), "--noise", noises, "--values", "")
    done = run("record", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stderr
    done = run("judge", str(tmp_path), "--only", "stats$", "--json", str(tmp_path / "judged.json"))
    assert done.returncode == 0, done.stderr
    judged = json.loads((tmp_path / "judged.json").read_text())
    for noise, least in WIDE_AT_LEAST.items():
        results = [one["result"] for one in judged if one["noise"] == noise and one["fault"]]
        assert len(results) >= 45
        assert results.count("exact") >= least, noise


LEVELS = ("module", "function", "module+function")
PLACE = ["step", "micro", "site", "call", "phase", "recompute", "role", "path"]


def _by_place(table: Any) -> dict[tuple[Any, ...], str]:
    """The verdict of each pair; the first of several at the same place. What only one run has was not judged."""
    found: dict[tuple[Any, ...], str] = {}
    for *place, verdict in zip(*(table[name] for name in (*PLACE, "verdict")), strict=True):
        found.setdefault(tuple(place), verdict)
    return {place: verdict for place, verdict in found.items() if not verdict.startswith("only in")}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", SEEDED)
def test_a_verdict_is_the_same_whatever_else_was_recorded(tmp_path: Path, model: str) -> None:
    """Modules alone, functions alone, and both together."""
    cases, kernels = part("cases"), part("models").MODELS[model].kernels
    noises = ["none", "bf16-sdpa" if kernels == "attention" else "bf16-channels-last"]
    needed = [
        (case, runs)
        for cell in cases.cells([model], noises, [*FAULTS, "gradient-off-by-5-percent", "learning-rate"], "all")
        for case, runs in cases.cases_of(*cell, LEVELS, ())
        if not case.noise_runs
    ]
    assert part("recording").record_all(tmp_path, needed, 1) == []
    found: dict[tuple[str, str | None, str], dict[str, dict[tuple[Any, ...], str]]] = {}
    for case, _ in needed:
        table = astray.compare(tmp_path / case.reference, tmp_path / case.candidate).pairs
        key = (case.noise, case.fault, case.half)
        found.setdefault(key, {})[case.level] = _by_place(table)
    assert len(found) >= 10
    for key, verdicts in found.items():
        both = verdicts["module+function"]
        for level in ("module", "function"):
            alone = verdicts[level]
            if level == "function":  # beside modules, those say what a parameter's gradient has come of
                alone = {place: verdict for place, verdict in alone.items() if "gradient" not in place}
            assert len(alone.keys() & both.keys()) > len(alone) / 2
            differs = {place: (alone[place], both[place]) for place in alone.keys() & both.keys()}
            assert {place: pair for place, pair in differs.items() if pair[0] != pair[1]} == {}, (key, level)


SUSPECT = {"step": 0, "phase": "forward", "cause": "computation"}


@pytest.mark.parametrize(
    ("suspects", "first", "result", "top_3"),
    [
        (["layers.3.mlp.act"], "layers.3.mlp.act", "exact", True),
        (["layers.2", "layers.4.attn", "layers.3.mlp.act"], "layers.2", "wrong", True),
        (["layers.2", "layers.4.attn", "layers.5", "layers.3.mlp.act"], "layers.2", "wrong", False),
        (["layers.3.mlp.act"], None, "silent", True),
        (None, "layers.3.mlp.act", "exact", True),
        (None, None, "silent", False),
    ],
)
def test_results(
    monkeypatch: pytest.MonkeyPatch, suspects: list[str] | None, first: str | None, result: str, top_3: bool
) -> None:
    def named(site: str) -> Any:
        numbers = {"error": 1.0, "limit": 0.1, "verdict": "diverged", "seen": None, "onset": None, "evidence": ()}
        numbers |= {"surprise": 9.0, "measure": "norm", "rule": "siblings"}
        return SimpleNamespace(site=site, rank=0, role="output", path="out", **SUSPECT, **numbers)

    comparison = SimpleNamespace(first=None if first is None else named(first))
    if suspects is not None:
        comparison.suspects = [named(site) for site in suspects]
    monkeypatch.setattr(astray, "compare", lambda *_, **__: comparison)
    culprit = importlib.import_module("faults.declared").Culprit(0, "layers.3.mlp.act", "forward", "computation")
    case = part("cases").Case("x", "llama", "none", "x", "seen", "module", "stats", "a", "b", culprit=culprit)
    judged = part("judging").judge(Path("somewhere"), case)
    assert (judged.result, judged.top_3) == (result, top_3)


@pytest.mark.parametrize(
    ("name", "kind", "sites", "named"),
    [
        ("variance_epsilon", "module", ("layers.3.norm",), True),
        ("eps", "module", ("layers.2.norm", "layers.3.norm"), True),
        ("eps", "module", ("layers.2.norm",), False),
        ("p", "module", ("layers.3.norm",), False),
        ("eps", "optimizer", (), False),
    ],
)
def test_the_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, sites: tuple[str, ...], named: bool
) -> None:
    different = SimpleNamespace(name=name, kind=kind, site=sites[0] if sites else "", sites=sites)
    monkeypatch.setattr(astray, "compare", lambda *_, **__: SimpleNamespace(first=None, setup=(different,)))
    culprit = importlib.import_module("faults.declared").Culprit
    place = culprit(0, "layers.3.norm", "forward", "computation", setting="eps")
    case = part("cases").Case("x", "llama", "none", "x", "seen", "module", "stats", "a", "b", culprit=place)
    assert part("judging").judge(Path("somewhere"), case).setting_named is named


def test_a_case_survives_the_index() -> None:
    cases, models, kinds = part("cases"), part("models").MODELS, part("catalogue").KINDS
    difference = part("variants").DIFFERENCES["bf16-sdpa"]
    for name in ("learning-rate", "clipping-left-out"):
        for case, _ in cases.cases_of(models["llama"], difference, kinds[name], "seen", ["module"], ["bf16-sdpa"]):
            assert cases.Case.from_dict(json.loads(json.dumps(case.as_dict()))) == case


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    chosen = ("--models", "resnet", "--noise", "none", "--faults", "control,weight-row-zeroed", "--processes", "1")
    done = run("record", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stderr
    done = run("judge", str(tmp_path), "--processes", "1", "--json", str(tmp_path / "judged.json"))
    assert done.returncode == 0, done.stderr
    assert "### module level, by statistics, without a noise run" in done.stdout
    assert "| none: the same kernels | 1 | 1 | 1 | 0 | 0 |" in done.stdout
    judged = json.loads((tmp_path / "judged.json").read_text())
    assert [one["result"] for one in judged] == ["silent", "silent", "exact", "exact"]


@pytest.mark.slow
def test_the_smallest_error_that_is_named(tmp_path: Path) -> None:
    sensitivity, differences = part("sensitivity"), part("variants").DIFFERENCES
    exponent = sensitivity.smallest(tmp_path, differences["none"], 2, "stats")
    assert exponent >= 17
    table = sensitivity.curve_table([sensitivity.Point("none", 2, "stats", exponent)])
    assert f"| none: the same kernels | by statistics | 2^-{exponent} (" in table


def test_an_unknown_name(tmp_path: Path) -> None:
    done = run("record", str(tmp_path), "--models", "lama")
    assert done.returncode == 2
    assert "'lama' is not known. There are: llama, " in done.stderr


@pytest.mark.slow
def test_right_runs_with_other_seeds_are_quiet(tmp_path: Path) -> None:
    noises = "bf16-sdpa,bf16-channels-last,autocast,bf16-weights,sdpa,channels-last,threads"
    done = run("controls", str(tmp_path), "--seeds", "31:33", "--models", ",".join(SEEDED), "--noise", noises)
    assert done.returncode == 0, done.stderr
    assert "0 of 100 right pairs are called wrong." in done.stdout
