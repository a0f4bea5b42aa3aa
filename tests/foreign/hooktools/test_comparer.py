"""Two dumps compared in hooktools' words: what is compared, by which metrics, and what no filter may hide."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import astray
from astray.cli import main
from astray.compat.hooktools import Comparer, ComparerResult, Tracer
from astray.errors import CompareError, RunError
from astray.foreign.hooktools.config import NumberRange


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.broken = 0.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.one(x))
        return {"logits": self.two(hidden) + self.broken, "hidden": hidden}


def trace(log_dir: Path, fault: tuple[int, int] | None = None, broken: float = 0.0) -> Path:
    """Two epochs of three steps; from `fault` on one weight is off."""
    torch.manual_seed(0)
    model = Net()
    tracer = Tracer(
        {"log_dir": str(log_dir), "tracer_name": "demo", "trace_mode": 3, "hacker_non_nn_modules": True}, model
    )
    for epoch in range(2):
        for step in range(3):
            torch.manual_seed(10 * epoch + step)
            if (epoch, step) == fault:
                model.broken = broken
                with torch.no_grad():
                    model.two.weight.mul_(1.01)
            x = torch.randn(5, 4)
            tracer.trace(epoch, step)
            model(x)["logits"].sum().backward()
            tracer.untrace()
            tracer.trace_gradient(epoch, step)
            model.zero_grad()
    return tracer.folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("dumps")
    return trace(home / "a"), trace(home / "b", fault=(1, 1))


def config(first: Path, second: Path, *, directory: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    options = {"compared_directory_1": str(first), "compared_directory_2": str(second)}
    return {"compare_mode": 0, "compare_directory_options": options | (directory or {})} | more


def sites(findings: ComparerResult) -> set[tuple[str, str]]:
    return {(row.site, row.part) for row in findings.shown}


def test_a_planted_fault_is_found_and_the_worst_are_printed(
    dumps: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "comparer_demo.yaml"
    path.write_text(
        yaml.safe_dump(
            config(*dumps, directory={"compare_folder_name": ["forward"]}, evaluation_metrics=["L1", "CS"], top_k=2)
        )
    )
    findings = Comparer(str(path)).compare()
    said = capsys.readouterr().out
    assert findings.comparison.first is not None
    assert findings.comparison.first.site == "two"
    assert len(findings.worst) == 2
    assert {row.label for row in findings.shown} == {(1, 1), (1, 2)}
    assert sites(findings) == {
        ("two/linear", "input 1"), ("two/linear", "output out"), ("two", "output out"), ("<root>/add", "input 0"),
        ("<root>/add", "output out"), ("<root>", "output out.logits"), ("/sum", "input 0"), ("/sum", "output out"),
    }  # fmt: skip
    assert "The worst 2:" in said
    assert "Look first at epoch1/step1: step 4, forward, two (Linear)" in said
    assert f"{findings.worst[0].files[0].name} | {findings.worst[0].files[1].name}" in said  # type: ignore[union-attr]


def reference(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Every metric once more, from its formula."""
    d = np.abs(a - b)
    dot = float((a * b).sum() / math.sqrt((a * a).sum()) / math.sqrt((b * b).sum()))
    return {
        "l1_error": d.mean(),
        "rel_error": d.mean() / np.abs(a).mean(),
        "AE": d.max(),
        "MAE": d.mean(),
        "MSE": (d * d).mean(),
        "RMSE": math.sqrt((d * d).mean()),
        "MAPE": 100 * (d / np.abs(a)).mean(),
        "CS": dot,
    }


def test_every_metric_is_that_of_float64_over_the_whole_tensor(dumps: tuple[Path, Path]) -> None:
    metrics = ["L1", "AE", "MAE", "MSE", "RMSE", "MAPE", "CS"]
    findings = Comparer(config(*dumps, evaluation_metrics=metrics, compare_folder_name="forward")).find()
    (row,) = (row for row in findings.shown if row.site == "two" and row.part == "output out" and row.label == (1, 2))
    a, b = (torch.load(file, weights_only=True)["output"].double().numpy() for file in row.files if file is not None)
    expected = reference(a, b)
    assert list(row.metrics) == list(expected)
    for name, value in row.metrics.items():
        assert value == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("metrics", "filters", "count"),
    [
        (["AE"], {}, 16),
        (["AE"], {"global_filter": "1e9"}, 0),
        (["AE"], {"global_filter": 1e9, "AE_filter": 0}, 16),
        (["AE"], {"L1_filter": 1e9}, 16),
        ({"AE": 1e9}, {}, 0),
        (["CS"], {"CS_filter": 0.5}, 0),
        (["CS", "AE"], {"CS_filter": 0.5}, 16),
        (["MAPE"], {"MAPE_filter": 0.5}, 16),  # percent, of the first folder: the weight is off by one
    ],
)
def test_filters(dumps: tuple[Path, Path], metrics: Any, filters: dict[str, Any], count: int) -> None:
    given = config(*dumps, compare_folder_name="forward", evaluation_metrics=metrics, filter=filters)
    assert len(Comparer(given).find().shown) == count


def test_nan_on_one_side_passes_every_filter_and_comes_first(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    broken = trace(tmp_path, fault=(1, 1), broken=math.nan)
    for metric in ("L1", "AE", "MAE", "MSE", "RMSE", "MAPE", "CS"):
        given = config(
            dumps[0], broken, compare_folder_name="forward", evaluation_metrics=[metric], filter={"global_filter": 1e9}
        )
        findings = Comparer(given).find()
        assert ("<root>", "output out.logits") in sites(findings)
        assert ("two", "output out") not in sites(findings)
        assert findings.worst[0].verdict == "non-finite"
        assert all(map(math.isnan, findings.worst[0].metrics.values()))  # not those of what is finite, which agrees


@pytest.mark.parametrize(
    ("directory", "labels", "phases"),
    [
        ({"compare_steps": 1}, {(1, 1)}, {"forward", "backward", "gradient"}),
        ({"compare_steps": -1, "compare_epochs": [1]}, {(1, 1), (1, 2)}, {"forward", "backward", "gradient"}),
        ({"compare_steps": "[0,2)"}, {(1, 1)}, {"forward", "backward", "gradient"}),
        ({"compare_steps": "[0,2]"}, {(1, 2)}, {"forward", "backward", "gradient"}),
        ({"compare_steps": [2], "compare_folder_name": ["backward"]}, {(1, 2)}, {"backward"}),
        ({"compare_epochs": "0"}, set(), set()),
    ],
)
def test_folders_epochs_and_steps(
    dumps: tuple[Path, Path], directory: dict[str, Any], labels: set[Any], phases: set[str]
) -> None:
    findings = Comparer(config(*dumps, directory=directory)).find()
    assert {row.label for row in findings.shown} == labels
    assert {row.phase for row in findings.shown} == phases


@pytest.mark.parametrize(
    ("given", "inside", "outside"),
    [
        (8, [8], [7, -1]),
        (-1, [-1, 0, 99], []),
        ("[0,8)", [0, 7], [8, -1]),
        ("(0,8]", [1, 8], [0, 9]),
        ("[1,3]", [1, 3], [2]),
        ([1, 3], [1, 3], [2]),
        ([], [5], []),
        ("[-1, 2]", [-1, 2], [0]),
        (" 4 ", [4], [5]),
    ],
)
def test_a_selection_of_steps(given: Any, inside: list[int], outside: list[int]) -> None:
    chosen = NumberRange.parse(given)
    assert all(step in chosen for step in inside)
    assert not any(step in chosen for step in outside)


def test_kinds_and_parts_can_be_left_out(dumps: tuple[Path, Path]) -> None:
    modules = Comparer(config(*dumps, evaluation_metrics=["L1", "skip_non_nn_module"])).find()
    functions = Comparer(config(*dumps, skip_nn_module=True, compare_folder_name=["forward"])).find()
    assert {row.type for row in modules.shown} == {"Linear", "Net", "Parameter"}
    assert not {"Linear", "Net"} & {row.type for row in functions.shown}
    only = Comparer(config(*dumps, directory={"only_compare_output": True, "compare_folder_name": ["forward"]})).find()
    assert {row.part.split()[0] for row in only.shown} == {"output"}


def test_two_files_and_two_lists_of_files(dumps: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    step, other = (sorted((dump / "forward/epoch1/step1").iterdir()) for dump in dumps)
    index = next(
        place for place, path in enumerate(step) if torch.load(path, weights_only=True)["module_name"] == "two"
    )
    files = {"compared_file_1": str(step[index]), "compared_file_2": str(other[index])}
    alone = Comparer({"compare_mode": 1, "compare_file_options": files, "evaluation_metrics": ["AE"]}).find()
    assert [(row.site, row.part) for row in alone.shown] == [("two", "output out")]
    assert alone.compared == 2
    later = sorted((dumps[1] / "forward/epoch0/step2").iterdir())[index]
    files["compared_file_2"] = str(later)  # of another step
    assert Comparer({"compare_mode": 1, "compare_file_options": files}).find().compared == 2
    lists = {"compared_filelist_1": str(step[0].parent), "compared_filelist_2": [str(path) for path in other]}
    given = {"compare_mode": 2, "compare_filelist_options": lists, "compare_by_order": True, "verbose": True}
    assert len(Comparer(given).compare().shown) == 8
    assert capsys.readouterr().out.count("[forward][epoch1/step1] two (Linear) output out") == 2


def test_what_only_one_has_is_told(dumps: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    lists = {"compared_filelist_1": str(dumps[0] / "forward/epoch0/step0"), "compared_filelist_2": []}
    lists["compared_filelist_2"] = [str(path) for path in sorted((dumps[1] / "forward/epoch0/step0").iterdir())[:3]]  # type: ignore[assignment]
    Comparer({"compare_mode": 2, "compare_filelist_options": lists}).compare()
    assert "13 tensors are only in the first, such as input 0 of <root>." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"evaluation_metrics": ["L2"]}, "it can be L1, AE, MAE, MSE, RMSE, MAPE, CS, verbose, skip_nn_module"),
        ({"filter": {"L1_filtre": 1}}, "There is no key filter.L1_filtre. Did you mean 'L1_filter'?"),
        ({"filter": {"global_filter": "__import__('os')"}}, "it should be a number, such as 1e-5."),
        ({"compare_mode": 3}, "compare_mode is 3; it can be 0, 1, 2."),
        ({"file_type": "pb"}, "file_type is 'pb'; it can be pt."),
        ({"compare_steps": "[0:8)"}, "write one number, -1 for all, a list such as [1, 3], or '[0,8)' for 0 to 7."),
        ({"compare_folder_name": ["sideways"]}, "it can be forward, backward, gradient."),
        ({"top_k": 0}, "top_k is 0; it should be a whole number from 1 on."),
        ({"compare_mode": 1}, "compare_file_options needs compared_file_1 and compared_file_2."),
        ({"compar_mode": 1}, "There is no key compar_mode. Did you mean 'compare_mode'?"),
        ({"compare_steps": 77}, "no file of forward, backward, gradient in epoch all, step 77. It has backward/epoch0"),
        ({"filter": {"CS_filter": 1.5}}, "filter.CS_filter is 1.5; a similarity is no larger than 1."),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_a_sentence(dumps: tuple[Path, Path], wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(CompareError) as error:
        Comparer(config(*dumps) | wrong).find()
    assert said in str(error.value)


def test_a_folder_that_is_not_there_is_a_sentence(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        Comparer(config(dumps[0], tmp_path / "none")).find()
    with pytest.raises(CompareError, match=r"There is no file .*none\.yaml"):
        Comparer(tmp_path / "none.yaml")
    odd = tmp_path / "odd.pt"
    odd.write_bytes(b"")
    files = {"compared_file_1": str(odd), "compared_file_2": str(odd)}
    with pytest.raises(CompareError, match="is not named as hooktools' files are"):
        Comparer({"compare_mode": 1, "compare_file_options": files}).find()


def test_the_demo_files_of_hooktools_are_understood(dumps: tuple[Path, Path]) -> None:
    """With every key that its own demo has, also those that never had an effect."""
    demo = config(*dumps, comparer_name="comparer_demo", compare_non_nn_module=False, compare_nn_module=True)
    demo |= {"file_type": "pt", "compare_by_order": True, "compare_both_file": False, "show_max_error_only": True}
    demo["compare_directory_options"] |= {"compare_epochs": None, "compare_steps": [1], "verbose": False}
    assert Comparer(demo).find().compared > 50


def test_the_command_line_compares_dumps_too(dumps: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(dumps[0].parent), str(dumps[1])]) == 1
    assert "First divergence: step 4, forward, call 0 of two (Linear), output" in capsys.readouterr().out
    assert astray.compare(dumps[0], dumps[0]).same
