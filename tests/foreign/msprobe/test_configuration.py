"""Every key of config.json is taken as msprobe means it, and what cannot be taken is answered in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astray.errors import RecordError
from astray.foreign.msprobe.configuration import IDLE, Configuration, EntryFilter, numbers
from astray.foreign.msprobe.debugger import recording_options
from astray.process import absolute
from msprobe_parts import configured


def checked(folder: Path, **keys: Any) -> Configuration:
    return Configuration.check(configured(folder, **keys))


def test_what_nobody_says_is_as_in_msprobe() -> None:
    assert Configuration.check(dump_path="d") == Configuration(absolute("d"), task="statistics", level="L1")
    assert Configuration.check(dump_path="d", task="structure").level == "mix"


def test_the_file_that_comes_with_msprobe_is_taken(tmp_path: Path) -> None:
    whole = {
        "task": "statistics", "dump_path": "./dump_path", "rank": [], "step": [], "level": "L1", "extra_info": True,
        "async_dump": False,
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
        "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert Configuration.check(tmp_path / "config.json") == Configuration(absolute("dump_path"))


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    config = configured(
        tmp_path, task="statistics", level="L1", step=[0], statistics={"list": ["a"]}, tensor={"list": ["b"]}
    )
    found = Configuration.check(config, task="tensor", dump_path="there", level="mix", step=["2-4"])
    assert found == Configuration(absolute("there"), "tensor", "mix", steps=(2, 3, 4), names=("b",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ([], ()),
        ([3, 1], (1, 3)),
        (["4-6"], (4, 5, 6)),
        ([0, "2", "4-5", 4], (0, 2, 4, 5)),
        (range(2), (0, 1)),
    ],
)
def test_steps_and_ranks(given: Any, expected: tuple[int, ...]) -> None:
    assert numbers("step", given) == expected


def test_what_the_recorder_is_told(tmp_path: Path) -> None:
    def told(**keys: Any) -> dict[str, Any]:
        return dict(recording_options(checked(tmp_path, **keys)))

    assert told(rank=[1, "3-4"], step=["0-1"]) == {
        "level": ["function"], "keep": "stats", "steps": [0, 1], "ranks": [1, 3, 4],
        "phases": ["backward", "forward", "update"], "optimizer": "calls", "roles": ["input", "output"],
        "functions": None,
    }  # fmt: skip
    assert told(level="L0")["level"] == ["module"]
    assert told(level="L0")["roles"] == ["gradient", "input", "output", "parameter"]
    assert told(level="mix")["level"] == ["module", "function"]
    assert [told(task=task)["keep"] for task in ("tensor", "overflow_check", "structure", "acc_check")] == [
        "tensors", "tensors", "fingerprint", "stats"
    ]  # fmt: skip
    assert told(statistics={"summary_mode": "md5"})["keep"] == "tensors"
    assert told(statistics={"data_mode": ["forward", "input"]})["phases"] == ["forward", "update"]


def test_keys_that_mean_nothing_here_are_taken(tmp_path: Path) -> None:
    keys = {
        "async_dump": True, "precision": "high", "risk_level": "CORE", "custom_op_namespaces": ["mine"],
        "enable_dataloader": False, "acl_config": "",
    }  # fmt: skip
    assert checked(tmp_path, **keys) == Configuration(tmp_path / "dump")
    assert checked(tmp_path, tensor={"file_format": "pt", "backward_input": []}, task="tensor").task == "tensor"
    section = {"check_mode": "all", "overflow_nums": 3}
    assert checked(tmp_path, task="overflow_check", overflow_check=section).overflows == 3
    assert checked(tmp_path, task="acc_check", acc_check={"error_data_path": "./"}).task == "acc_check"
    assert set(keys) | {"file_format", "backward_input", "check_mode", "error_data_path"} == set(IDLE)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tsak": "tensor"}, "tsak='tensor' is not a key. Did you mean 'task'?"),
        ({"task": "statistic"}, "task is 'statistic'. It is one of statistics, tensor, .*. Did you mean 'statistics'?"),
        ({"task": ["tensor"]}, r"task is \['tensor'\]. It is one of"),
        (
            {"task": "nan_check"},
            "task is 'nan_check', which is not supported. .* 'overflow_check' looks at",
        ),
        ({"task": "free_benchmark"}, "Use astray.experiment.swap"),
        ({"level": "L3"}, "level is 'L3'. It is one of L0, L1, mix, debug."),
        ({"level": "L2"}, r"kernels of an NPU. .* astray.record\(level='op'\)"),
        ({"dump_path": ""}, "dump_path is ''. Say in which folder"),
        ({"dump_path": 3}, "dump_path is 3."),
        ({"step": 3}, r"step is 3. It is a list such as \[0, \"4-6\"\]; \[\] means all."),
        ({"step": ["6-4"]}, "step has '6-4'. Its numbers go from 0 to 1,000,000, the smaller one first."),
        ({"step": [True]}, "step has True."),
        ({"rank": [-1]}, "rank has -1."),
        ({"rank": ["0:4"]}, "rank has '0:4'. It holds whole numbers, or spans such as \"4-6\"."),
        ({"extra_info": 1}, "extra_info is 1. It is true or false."),
        ({"load": {"path": "x"}}, "load is {'path': 'x'}, which is not possible here: putting recorded inputs"),
        ({"statistics": []}, None),
        ({"statistics": ["relu"]}, r"statistics is \['relu'\]. It is an object"),
        ({"statistics": {"lists": []}}, r"statistics: lists=\[\] is not a key. Did you mean 'list'?"),
        ({"statistics": {"list": "relu"}}, r"list is 'relu'. It is a list of names, or of parts of names"),
        ({"statistics": {"data_mode": ["in"]}}, "data_mode has 'in'. It holds all, input, output, forward, backward."),
        ({"statistics": {"data_mode": ["all", "input"]}}, "'all' is already everything"),
        ({"statistics": {"summary_mode": "md4"}}, "summary_mode is 'md4'. .* Did you mean 'md5'?"),
        ({"statistics": {"summary_mode": "xor"}}, "does not see two rows swapped: use 'md5'"),
        ({"statistics": {"slice": [{"dim": 0}]}}, "statistics: slice is .* Leave it out, or keep a slice with"),
        ({"statistics": {"slice": []}}, None),
        ({"statistics": {"request_id": "7"}}, "requests of a server are not told apart"),
        ({"task": "tensor", "tensor": {"bench_path": "x"}}, r"Leave it out, and call compare\(…\) afterwards"),
        ({"statistics": {"scope": ["a"]}}, "scope is \\['a'\\]. It is two names"),
        (
            {"statistics": {"scope": ["Module.a.A.forward.0"] * 2}},
            "not a name of level L1. They look like Functional.linear",
        ),
        (
            {"level": "L0", "statistics": {"scope": ["Torch.add.0.forward"] * 2}},
            "not a name of level L0. .* Module.fc.Linear",
        ),
        ({"level": "debug", "statistics": {"scope": ["Torch.add.0.forward"] * 2}}, "scope is given at level 'debug'"),
        ({"task": "structure", "level": "L1"}, "task is 'structure' at level 'L1', where there are no modules."),
        ({"task": "acc_check", "level": "L0"}, "task is 'acc_check' at level 'L0'. It is about functions"),
        ({"task": "overflow_check", "level": "debug"}, "only what you save is recorded"),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": 0}}, "overflow_nums is 0. .* or -1 for all."),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, keys: dict[str, Any], said: str | None) -> None:
    if said is None:
        checked(tmp_path, **keys)
        return
    with pytest.raises(RecordError, match=said) as caught:
        checked(tmp_path, **keys)
    assert str(caught.value).startswith(f"In {tmp_path / 'config.json'}: ")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="There is no file"):
        Configuration.check(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"task": "tensor",')
    with pytest.raises(RecordError, match="is not valid JSON"):
        Configuration.check(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RecordError, match=r"holds \[\]. It is a JSON object"):
        Configuration.check(tmp_path / "config.json")
    with pytest.raises(RecordError, match=r"^dump_path is None. Say in which folder"):
        Configuration.check()


def test_a_scope_stays_open_for_what_is_inside_its_last_entry() -> None:
    begin, end = "Module.a.A.forward.0", "Module.b.B.forward.0"
    wanted = EntryFilter(Configuration(absolute("d"), level="mix", scope=(begin, end)))
    asked = [
        ("Functional.relu.0.forward", []), (begin, []), ("Functional.relu.1.forward", [begin]),
        ("Torch.add.0.forward", []), (end, []), ("Module.b.c.C.forward.0", [end]),
        ("Functional.relu.2.forward", ["Module.b.c.C.forward.0", end]), ("Functional.relu.3.forward", []),
        (begin.replace(".0", ".1"), []),
    ]  # fmt: skip
    assert [wanted(*one) for one in asked] == [False, True, True, True, True, True, True, False, False]


def test_only_the_backward() -> None:
    wanted = EntryFilter(Configuration(absolute("d"), phases=frozenset({"backward"})))
    asked = ["Torch.add.0.forward", "Module.a.A.forward.0", "Torch.add.0.backward", "Module.a.A.parameters_grad.0"]
    assert [wanted(name) for name in asked] == [False, False, True, True]
