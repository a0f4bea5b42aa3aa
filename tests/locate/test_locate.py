"""From a run that is right and a program that may be wrong to a proven culprit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import astray
from astray.errors import UsageError
from astray.locate.locate import locate
from astray.locate.located import Located
from astray.locate.programs import RecordingRequest
from locate import training
from locate.training import Training

STATISTICS = RecordingRequest()
VALUES = RecordingRequest(level="module,function", keep="stats,tensors")


def located(folder: Path, plant: Any, reference: RecordingRequest = STATISTICS, **options: Any) -> Located:
    Training().record(folder / "reference", reference)
    program = plant if isinstance(plant, Training) else Training(plant)
    return locate(astray.open(folder / "reference"), program, folder / "walk", **options)


def outcomes(found: Located) -> dict[str, str]:
    return {trial.name: trial.outcome for trial in found.faults[0].trials}


def test_a_program_that_agrees_is_run_once(tmp_path: Path) -> None:
    program = Training()
    found = located(tmp_path, program)
    assert found.verdict == "agrees"
    assert found.exit_code == 0
    assert program.recordings == ["candidate"]


def test_a_program_that_does_not_repeat_itself_tells_nothing(tmp_path: Path) -> None:
    found = located(tmp_path, Training(seed=None))
    assert found.verdict == "cannot tell"
    assert found.exit_code == 125
    assert "does not repeat itself" in found.doubt
    assert found.trials[0].outcome == "refutes"


def test_quick_says_that_it_differs_and_proves_nothing(tmp_path: Path) -> None:
    program = Training(training.silu_in_one_layer)
    found = located(tmp_path, program, prove=False)
    assert found.exit_code == 1
    assert program.recordings == ["candidate"]


@pytest.mark.parametrize("has_values", [True, False], ids=["values", "rerun"])
def test_a_wrong_function_is_proven_by_grafting(has_values: bool, tmp_path: Path) -> None:
    more: dict[str, Any] = {} if has_values else {"reference_program": Training()}
    found = located(tmp_path, training.silu_in_one_layer, VALUES if has_values else STATISTICS, **more)
    assert found.verdict == "proven"
    fault = found.faults[0]
    assert (fault.divergence.step, fault.divergence.phase) == (2, "forward")
    assert fault.divergence.site.startswith("h.1")
    assert fault.divergence.frame is not None
    assert "self.act(self.up" in fault.divergence.frame.code
    assert fault.rest is None
    assert outcomes(found)["graft"] == "proves"
    assert outcomes(found)["inputs"] == "supports"
    assert found.trials[0].text == "two runs of 2 steps are equal, bit for bit"


def test_the_same_fault_in_every_layer_is_one_fault(tmp_path: Path) -> None:
    found = located(tmp_path, training.silu_in_all_layers, VALUES)
    assert found.verdict == "proven"
    assert len(found.faults) == 1
    assert "in every layer" in found.faults[0].trials[-1].text


def test_two_faults_are_found_one_after_the_other(tmp_path: Path) -> None:
    found = located(tmp_path, training.two_faults, VALUES)
    assert [fault.proven for fault in found.faults] == [True, True]
    assert found.faults[0].divergence.site.startswith("h.0")
    assert found.faults[1].divergence.site.startswith("h.2.norm")
    assert found.faults[0].rest is not None
    assert found.faults[1].rest is None


def test_a_weight_that_was_changed_is_proven_by_the_references_weight(tmp_path: Path) -> None:
    found = located(tmp_path, training.scaled_weight, VALUES)
    assert found.verdict == "proven"
    fault = found.faults[0].divergence
    assert (fault.step, fault.cause) == (2, "parameter")
    assert fault.site.startswith("h.1.down")


def test_a_wrong_backward_is_proven_by_the_references_gradients(tmp_path: Path) -> None:
    found = located(tmp_path, training.wrong_backward, VALUES)
    assert found.verdict == "proven"
    assert (found.faults[0].divergence.step, found.faults[0].divergence.phase) == (1, "backward")
    assert found.faults[0].divergence.site.startswith("h.1")


def test_without_values_of_the_reference_it_says_how_to_get_them(tmp_path: Path) -> None:
    found = located(tmp_path, training.silu_in_one_layer)
    assert found.verdict == "not proven"
    assert found.exit_code == 1
    hint = " ".join(found.hints)
    assert "--steps 2 " in hint
    assert "--keep stats,tensors" in hint
    assert "--reference-command" in hint
    assert "swap" in outcomes(found)


def test_a_reference_program_that_gives_something_else_is_not_used(tmp_path: Path) -> None:
    other = Training(training.scaled_weight)
    found = located(tmp_path, training.silu_in_one_layer, reference_program=other)
    assert found.verdict == "not proven"
    assert any("Its values were not used" in hint for hint in found.hints)


def test_only_some_steps(tmp_path: Path) -> None:
    assert located(tmp_path, training.silu_in_one_layer, steps="0:2").verdict == "agrees"
    with pytest.raises(UsageError, match="has none of the steps 7:9; it has 0:4"):
        located(tmp_path, training.silu_in_one_layer, steps="7:9")


def test_what_was_found_as_text_and_as_json(tmp_path: Path) -> None:
    import json

    from astray.locate.report import as_json

    found = located(tmp_path, training.silu_in_one_layer, VALUES)
    text = str(found)
    assert "✗ Proven: step 2, forward" in text
    assert "    repeats      two runs of 2 steps are equal, bit for bit" in text
    assert all(len(line) <= 100 for line in text.splitlines() if str(tmp_path) not in line)
    document = json.loads(as_json(found))
    assert document["verdict"] == "proven"
    assert document["faults"][0]["proven"] is True
    assert {trial["name"] for trial in document["faults"][0]["trials"]} == {"replay", "inputs", "graft"}
