"""Setups built by hand: timelines, what follows from what, arguments, and runs that have recorded none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astray.comparison.pair.matching import Matching
from astray.comparison.setup.arguments import flattened
from astray.comparison.setup.differences import setup_differences
from astray.comparison.setup.timelines import at, first_difference
from astray.records import Call, Setup, Tensor
from astray.store import RunInfo, RunWriter, open_run


def test_the_value_in_a_step_is_the_last_that_was_set() -> None:
    history = [(0, "a"), (3, "b")]
    assert [at(history, step) for step in (0, 2, 3, 9)] == ["a", "a", "b", "b"]
    assert repr(at([(2, "a")], 1)) == repr(at(None, 0)) == "absent"


@pytest.mark.parametrize(
    ("reference", "candidate", "steps", "found"),
    [
        ([(0, 1)], [(0, 1)], [0, 1], None),
        ([(0, 1)], [(0, 2)], [0, 1], (None, 1, 2)),
        ([(0, 1), (4, 3)], [(0, 1)], [0, 2, 5], (5, 3, 1)),
        ([(0, 1), (4, 3)], [(0, 1)], [0, 1, 2], None),  # the candidate never came so far
        ([(0, 1), (2, 3), (4, 1)], [(0, 1)], [0, 5], None),
        ([(3, 1)], [(0, 2)], [0, 3], (3, 1, 2)),  # not known before
        ([(0, 1)], [(0, 1.0)], [0], None),
    ],
)
def test_the_first_step_in_which_two_differ(reference: Any, candidate: Any, steps: list[int], found: Any) -> None:
    assert first_difference(reference, candidate, steps) == found


def test_arguments_have_their_names() -> None:
    text = '{"args":["<tensor>",[8],"<tensor>","<tensor>",1e-05],"kwargs":{"out":{"a":1,"b":[{"c":2}]}}}'
    assert flattened(text, "layer_norm")["eps"] == 1e-05
    assert flattened(text)["4"] == 1e-05
    assert flattened(text)["out.b.0.c"] == 2
    assert flattened("not JSON") == flattened("[1]") == flattened('{"args":3,"kwargs":[]}') == {}


def write(
    path: Path,
    args: list[str | None],
    setup: list[Setup] = (),
    site: str = "h/softmax",
    **info: Any,  # type: ignore[assignment]
) -> Path:
    """A run of one site, called once a step with these arguments."""
    with RunWriter(path, info=RunInfo.of_process(**info)) as writer:
        for row in setup:
            writer.setup(row)
        for step, text in enumerate(args):
            writer.call(Call(step, step, 0, "function", site, "softmax", 0, "forward", args=text))
            writer.tensor(Tensor(step, "output", "out", "float32", (2,), (1,), "cpu", False, fingerprint=1))
            writer.step_done()
    return path


def told(left: Path, right: Path, **asked: Any) -> list[tuple[str, Any, Any, int | None]]:
    found = setup_differences(open_run(left), open_run(right), Matching.check(**asked))
    return [(one.name, one.reference, one.candidate, one.step) for one in found]


def arguments(*values: Any) -> list[str]:
    return [f'{{"args":["<tensor>"],"kwargs":{{"scale":{value}}}}}' for value in values]


def test_an_argument_is_a_setting_where_it_is_not_another_in_every_call(tmp_path: Path) -> None:
    same = write(tmp_path / "a", arguments(0.5, 0.5, 0.5, 0.5, 0.5))
    assert told(same, write(tmp_path / "b", arguments(0.25, 0.25, 0.25, 0.25, 0.25))) == [("scale", 0.5, 0.25, None)]
    assert told(same, write(tmp_path / "c", arguments(0.5, 0.5, 0.25, 0.25, 0.25))) == [("scale", 0.5, 0.25, 2)]
    data = write(tmp_path / "d", arguments(0.1, 0.2, 0.3, 0.4, 0.5))
    assert told(data, write(tmp_path / "e", arguments(0.1, 0.2, 0.3, 0.4, 0.6))) == []


def test_a_number_that_was_computed_from_data_is_not_a_setting(tmp_path: Path) -> None:
    left = write(tmp_path / "a", arguments(0.123456789012))
    assert told(left, write(tmp_path / "b", arguments(0.123456789345))) == []
    assert told(left, write(tmp_path / "c", arguments(0.456456789345))) == [
        ("scale", 0.123456789012, 0.456456789345, None)
    ]


def test_an_argument_that_only_one_run_gives(tmp_path: Path) -> None:
    left = write(tmp_path / "a", ['{"args":["<tensor>"],"kwargs":{"approximate":"tanh"}}'], site="h/gelu")
    right = write(tmp_path / "b", ['{"args":["<tensor>"]}'], site="h/gelu")
    assert told(left, right) == [("approximate", "tanh", None, None)]


def test_an_argument_by_position_and_by_name_is_the_same(tmp_path: Path) -> None:
    left = write(tmp_path / "a", ['{"args":["<tensor>",-1]}'], site="h/own")
    right = write(tmp_path / "b", ['{"args":["<tensor>"],"kwargs":{"dim":-1}}'], site="h/own")
    assert told(left, right) == []


def test_a_mask_that_is_left_out(tmp_path: Path) -> None:
    left = write(tmp_path / "a", ['{"args":["<tensor>"],"kwargs":{"mask":"<tensor>"}}'])
    right = write(tmp_path / "b", ['{"args":["<tensor>"],"kwargs":{"mask":null}}'])
    (found,) = setup_differences(open_run(left), open_run(right))
    assert found.sentence == "h/softmax is called with mask a tensor in the reference and None in the candidate."


def test_steps_are_counted_as_the_reference_does(tmp_path: Path) -> None:
    rows = [Setup(0, "torch", "", {"threads": 2}), Setup(2, "torch", "", {"threads": 4})]
    left = write(tmp_path / "a", [None] * 4, rows)
    right = write(tmp_path / "b", [None] * 4, [rows[0], rows[1]._replace(step=1)])
    assert told(left, right) == [("threads", 2, 4, 1)]
    assert told(left, right, offset=1) == []
    assert told(left, right, steps="2:") == []


def test_a_rank_by_itself_and_all_of_them(tmp_path: Path) -> None:
    for name, numbers in (("a", (1, 1)), ("b", (2, 2)), ("c", (1, 2))):
        for rank, number in enumerate(numbers):
            with RunWriter(tmp_path / name, rank, info=RunInfo.of_process(world_size=2)) as writer:
                writer.setup(Setup(0, "torch", "", {"threads": number}))
                writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
    (found,) = setup_differences(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert (found.rank, found.ranks) == (0, (0, 1))
    (found,) = setup_differences(open_run(tmp_path / "a"), open_run(tmp_path / "c"))
    assert (found.rank, found.ranks) == (1, (1,))


def test_an_older_run_tells_what_its_tables_and_its_description_do(tmp_path: Path) -> None:
    def older(path: Path, dtype: str, lr: float, **info: Any) -> Path:
        with RunWriter(path, info=RunInfo.of_process(framework="torch", **info)) as writer:
            writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward", args='{"args":["<tensor>"]}'))
            writer.tensor(Tensor(0, "parameter", "weight", dtype, (2,), (1,), "cpu", True, fingerprint=1))
            groups = f'{{"param_groups":[{{"lr":{lr}}}]}}'
            writer.call(Call(1, 0, 0, "optimizer", "SGD", "SGD", 0, "update", args=groups))
        return path

    left = older(tmp_path / "a", "float32", 0.1, versions={"torch": "2.11"}, seed=1, devices=["cpu"])
    right = older(tmp_path / "b", "float16", 0.2, versions={"torch": "2.12", "numpy": "2"}, seed=2, devices=["H200"])
    assert told(left, right) == [
        ("lr", 0.1, 0.2, None),
        ("torch", 1, 2, None),
        ("dtype", "float32", "float16", None),
        ("devices", ["cpu"], ["H200"], None),
        ("torch", "2.11", "2.12", None),
    ]


def test_of_an_older_run_only_that_is_compared_with_a_newer_one(tmp_path: Path) -> None:
    def write_one(path: Path, *rows: Setup) -> Path:
        with RunWriter(path, info=RunInfo.of_process()) as writer:
            for row in rows:
                writer.setup(row)
            writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
            writer.tensor(Tensor(0, "parameter", "weight", "float32", (2,), (1,), "cpu", True, fingerprint=1))
        return path

    newer = Setup(0, "module", "fc", {"class": "Linear", "in_features": 2, "weight.dtype": "bfloat16", "device": "cpu"})
    other = Setup(0, "module", "fc.extra", {"class": "ReLU", "inplace": False})
    found = told(
        write_one(tmp_path / "a"), write_one(tmp_path / "b", newer, other, Setup(0, "torch", "", {"threads": 9}))
    )
    assert found == [("dtype", "float32", "bfloat16", None)]


def test_modules_that_only_one_run_has(tmp_path: Path) -> None:
    def write_one(path: Path, *sites: str) -> Path:
        rows = [Setup(0, "module", site, {"class": "Linear" if "." in site else "Block"}) for site in sites]
        return write(path, [None], rows)

    left = write_one(tmp_path / "a", "h", "h.fc", "g", "g.fc")
    right = write_one(tmp_path / "b", "h", "h.fc", "g", "g.fc", "k", "k.fc", "k.own")
    (found,) = setup_differences(open_run(left), open_run(right))
    assert found.sentence == "k is only in the candidate."
    assert setup_differences(open_run(left), open_run(write_one(tmp_path / "c", "x", "x.fc", "h"))) == ()


def test_a_seed_that_nobody_has_set(tmp_path: Path) -> None:
    def seeded(name: str, seed: int) -> Path:
        return write(tmp_path / name, [None], [Setup(0, "seed", "", {"torch": seed})])

    drawn, again, own = seeded("a", 8903494782883977616), seeded("b", 1392729424952410840), seeded("c", 3)
    (found,) = setup_differences(open_run(drawn), open_run(again))
    assert found.sentence == "No seed of torch is set in either run, so their random numbers differ."
    (found,) = setup_differences(open_run(own), open_run(drawn))
    assert found.sentence == "The seed of torch is 3 in the reference and not set in the candidate."
