"""Risks of real recordings, each number against plain float64 numpy over the very values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from torch import nn

import astray
from astray.errors import UsageError
from astray.headroom.dtype_limits import limits
from astray.headroom.risk import LEVELS, Risk, risk
from astray.stats import dtypes
from record_builders import Builder

Place = tuple[str, str, str, str, str]
KEY = ("site", "phase", "role", "path", "dtype")


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def record(
    path: Path,
    model: nn.Module,
    steps: int,
    batch: Callable[[int], torch.Tensor],
    rate: float | None = None,
    save: Callable[[int], dict[str, torch.Tensor]] | None = None,
    shrink: float = 1.0,
    **settings: Any,
) -> astray.Run:
    """Trains for some steps, recording every value; `save` gives what is saved besides."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0) if rate is not None else None
    with astray.record(path, model, **({"keep": "tensors"} | settings)) as rec:
        for step in range(steps):
            model.zero_grad()
            model(batch(step)).float().square().mean().mul(shrink).backward()
            if optimizer:
                optimizer.step()
            for name, tensor in (save(step) if save else {}).items():
                rec.save(name, tensor)
            rec.step()
    return astray.open(path)


def rows(found: Risk) -> dict[Place, dict[str, Any]]:
    """The places by their key, as a reader of Arrow gets them."""
    return {tuple(row[name] for name in KEY): row for row in pyarrow.table(found).to_pylist()}


def kept(run: astray.Run) -> dict[Place, list[tuple[int, int, np.ndarray]]]:
    """The values of every place that holds floats, as rank, step and float64."""
    found = defaultdict(list)
    for number, rank in run.ranks.items():
        for row in range(len(rank.tensors)):
            call, tensor = rank.calls.row(int(rank.call_rows[row])), rank.tensors.row(row)
            if limits(tensor["dtype"]) is None or not tensor["count"]:
                continue
            raw = rank.values(row)
            values = np.asarray(dtypes.decode(np.ascontiguousarray(raw), tensor["dtype"]), np.float64).reshape(-1)
            key = (call["site"], call["phase"], tensor["role"], tensor["path"], tensor["dtype"])
            found[key].append((number, call["step"], values))
    return found


def check(run: astray.Run, *targets: str) -> dict[Place, dict[str, Any]]:
    """Every exact number of every place equals numpy's, every bound holds; gives the places."""
    found, values = rows(run.risk(what_if=targets)), kept(run)
    assert found.keys() == values.keys()
    for key, row in found.items():
        end = limits(key[-1])
        finite = [(rank, step, x[np.isfinite(x)]) for rank, step, x in values[key]]
        sizes = [np.abs(x).max(initial=0) for _, _, x in finite]
        largest = max(sizes)
        everything = np.concatenate([x for _, _, x in finite])
        bad = [(step, int(np.isnan(x).sum()), int(np.isinf(x).sum())) for _, step, x in values[key]]
        bad = [one for one in bad if one[1] + one[2]]
        assert row["observations"] == len(finite)
        assert row["nonfinite"] == len(bad)
        assert row["absmax"] == largest
        if bad:
            assert (row["step"], row["nan"], row["inf"]) == min(bad, key=lambda one: one[0])
        elif largest:
            assert row["step"] in [step for (_, step, _), size in zip(finite, sizes, strict=True) if size == largest]
        if largest:
            assert row["headroom"] == end.largest / largest
            assert row["headroom_bits"] == pytest.approx(np.log2(end.largest / largest), abs=1e-9)
        else:
            assert row["headroom"] is None
        assert row["zeros"] == np.count_nonzero(everything == 0) / len(everything)
        assert_lost(row, "subnormal", "", finite, end.tiny)
        for target in map(limits, targets):
            name = f"_{target.name}"
            assert row[f"overflows{name}"] == bool(largest >= target.overflows)
            if largest:
                assert row[f"headroom_bits{name}"] == pytest.approx(
                    np.log2(target.largest) - np.log2(largest), abs=1e-9
                )
            assert_lost(row, "flushed", name, finite, np.nextafter(target.vanishes, 1))
            assert_lost(row, "subnormal", name, finite, target.tiny)
            scale = row[f"scale{name}"]
            if scale is not None:
                assert np.log2(scale) % 1 == 0
                assert largest * scale < target.overflows
                assert_lost(row, "scaled_flushed", name, finite, np.nextafter(target.vanishes, 1) / scale)
                if target.coarse:
                    assert largest * scale * 2 >= target.overflows
    return found


def assert_lost(row: dict[str, Any], name: str, suffix: str, finite: Any, threshold: float) -> None:
    """The bounds of a share hold the truth of the row they were taken from, and are not above the worst."""
    truths = []
    for _, _, x in finite:
        some = np.abs(x[x != 0])
        truths.append(np.count_nonzero(some < threshold) / len(some) if len(some) else 0.0)
    least, most, normal = (row[f"{name}_{kind}{suffix}"] for kind in ("least", "most", "normal"))
    assert 0 <= least <= normal <= most <= 1
    assert any(least <= truth <= most for truth in truths)
    assert least <= max(truths)


def test_a_calm_float32_model(tmp_path: Path) -> None:
    run = record(tmp_path / "run", mlp(), 4, lambda step: torch.randn(6, 12), rate=1e-3, optimizer=["weight", "update"])
    found = check(run, "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    assert {row["risk"] for row in found.values()} == {"calm"}
    assert {row["cause"] for row in found.values()} == {None}
    weight = found["0", "forward", "parameter", "weight", "float32"]
    assert weight["unmoved"] < 0.2
    assert weight["half_ulp"] == 2.0**-24
    assert weight["growth_bits"] is None


def test_float16_near_overflow_is_seen_before_it_overflows(tmp_path: Path) -> None:
    torch.manual_seed(1)
    noise = torch.randn(6, 12)
    run = record(tmp_path / "run", mlp(torch.float16), 10, lambda step: (noise * 2.0 ** (step + 4)).half())
    found = check(run, "bfloat16", "float8_e5m2")
    given = found["<root>", "forward", "input", "0", "float16"]
    assert (given["risk"], given["cause"], given["step"]) == ("overflow", "growth", 9)
    assert given["growth_bits"] == pytest.approx(1.0, abs=1e-3)
    assert given["gone_soonest"] == pytest.approx(given["headroom_bits"], rel=0.01)
    assert given["gone_latest"] == pytest.approx(given["headroom_bits"], rel=0.01)
    weight = found["0", "forward", "parameter", "weight", "float16"]
    assert (weight["growth_bits"], weight["gone_soonest"]) == (None, None)
    assert (weight["risk"], weight["still_steps"]) == ("stuck", 9)  # there is no optimizer


def test_what_has_overflowed_comes_first_with_the_step_it_began(tmp_path: Path) -> None:
    model = mlp(torch.float16)
    with torch.no_grad():
        model[2].weight.fill_(60.0)
    run = record(tmp_path / "run", model, 4, lambda step: torch.full((2, 12), 2000.0 if step >= 2 else 1.0).half())
    found = check(run)
    table = run.risk().table
    levels = table.coded("risk").codes
    assert (np.diff(levels) >= 0).all()
    assert table["risk"][0] == "non-finite"
    out = found["2", "forward", "output", "out", "float16"]
    assert (out["risk"], out["cause"], out["step"], out["nonfinite"], out["observations"]) == (
        "non-finite", "non-finite", 2, 2, 4,
    )  # fmt: skip
    assert out["inf"] > 0
    assert out["absmax"] < 65504  # of the finite values


@pytest.mark.parametrize("recorded", [["weight", "update"], ["gradient", "weight", "update"]])
def test_bfloat16_weights_that_no_longer_move(tmp_path: Path, recorded: list[str]) -> None:
    settings = {"optimizer": recorded}
    run = record(
        tmp_path / "run", mlp(torch.bfloat16), 4, lambda step: torch.randn(6, 12).bfloat16(), rate=1e-6, **settings
    )
    found, values = check(run), kept(run)
    for name in ("0.weight", "2.bias"):
        site, path = name.split(".")
        for key in (
            (site, "forward", "parameter", path, "bfloat16"),
            (name, "update", "parameter", "weight", "bfloat16"),
        ):
            row = found[key]
            assert (row["risk"], row["cause"]) == ("stuck", "unmoved")
            update = np.concatenate(
                [x for _, step, x in values[name, "update", "output", "update", "float32"] if step >= 2]
            )
            assert row["unmoved"] == np.mean(update == 0)
            last = {
                kind: values[name, "update", role, kind, dtype][-1][2]
                for role, kind, dtype in (("parameter", "weight", "bfloat16"), ("output", "update", "float32"))
            }
            assert row["update_ratio"] == np.linalg.norm(last["update"]) / np.linalg.norm(last["weight"])
            gradient = values[name, "backward", "gradient", "grad", "bfloat16"][-1][2]
            ratio = np.linalg.norm(gradient) / np.linalg.norm(last["weight"])
            assert row["gradient_ratio"] == pytest.approx(ratio, rel=1e-12)
            assert row["half_ulp"] == 2.0**-8
            assert (row["still_steps"], row["watched_steps"]) == (4, 4)


def test_how_much_of_a_weight_moves_is_exact(tmp_path: Path) -> None:
    settings = {"optimizer": ["gradient", "weight", "update"]}
    run = record(
        tmp_path / "run", mlp(torch.bfloat16), 5, lambda step: torch.randn(6, 12).bfloat16(), rate=3e-4, **settings
    )
    found, values = rows(run.risk()), kept(run)
    row = found["0.weight", "update", "parameter", "weight", "bfloat16"]
    updates, gradients = (
        [x for _, step, x in values[("0.weight", "update", *kind)] if step >= 2]
        for kind in (("output", "update", "float32"), ("input", "grad", "bfloat16"))
    )
    assert row["unmoved"] == np.mean(np.concatenate(updates) == 0)
    assert 0.1 < row["unmoved"] < 0.95
    pulled = sum(np.count_nonzero(x) for x in gradients)
    truth = sum(np.count_nonzero((u == 0) & (g != 0)) for u, g in zip(updates, gradients, strict=True)) / pulled
    assert 0 < row["unmoved_with_gradient"] <= truth + 1e-12
    assert row["still_steps"] == 0


def test_without_updates_only_weights_that_do_not_change_at_all_are_told(tmp_path: Path) -> None:
    still = record(tmp_path / "a", mlp(torch.bfloat16), 4, lambda step: torch.randn(6, 12).bfloat16(), rate=1e-8)
    row = rows(still.risk())["0", "forward", "parameter", "weight", "bfloat16"]
    assert (row["risk"], row["unmoved"], row["update_ratio"]) == ("stuck", 1.0, None)
    assert (row["still_steps"], row["watched_steps"]) == (3, 3)  # what came after the last step was not observed
    moving = record(tmp_path / "b", mlp(torch.bfloat16), 4, lambda step: torch.randn(6, 12).bfloat16(), rate=1e-2)
    row = rows(moving.risk())["0", "forward", "parameter", "weight", "bfloat16"]
    assert (row["risk"], row["unmoved"], row["still_steps"], row["watched_steps"]) == ("calm", None, 0, 3)
    assert row["gradient_ratio"] > 0


def test_updates_alone_tell_what_does_not_move_at_all(tmp_path: Path) -> None:
    settings = {"optimizer": ["update"], "phases": "update", "level": "module"}
    run = record(
        tmp_path / "run", mlp(torch.bfloat16), 2, lambda step: torch.randn(6, 12).bfloat16(), rate=1e-8, **settings
    )
    row = rows(run.risk())["0.weight", "update", "parameter", "weight", "bfloat16"]
    assert (row["risk"], row["unmoved"], row["unmoved_with_gradient"]) == ("stuck", 1.0, None)


def test_rows_of_an_embedding_that_were_not_looked_up_are_not_stuck(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 2))
    run = record(
        tmp_path / "run", model, 3, lambda step: torch.tensor([1, 2, 3]), rate=1e-2, optimizer=["weight", "update"]
    )
    row = check(run)["0.weight", "update", "parameter", "weight", "float32"]
    assert row["unmoved"] >= 0.9
    assert (row["risk"], row["unmoved_with_gradient"]) == ("calm", 0)


def test_one_step_without_a_change_is_not_a_proof(tmp_path: Path) -> None:
    run = record(tmp_path / "run", mlp(torch.bfloat16), 2, lambda step: torch.randn(6, 12).bfloat16(), rate=1e-8)
    row = rows(run.risk())["0", "forward", "parameter", "weight", "bfloat16"]
    assert (row["risk"], row["cause"], row["watched_steps"]) == ("tight", "unmoved", 1)


def test_frozen_weights_are_not_stuck(tmp_path: Path) -> None:
    model = mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    run = record(tmp_path / "run", model, 4, lambda step: torch.randn(6, 12), rate=1e-3)
    row = rows(run.risk())["0", "forward", "parameter", "weight", "float32"]
    assert (row["risk"], row["watched_steps"], row["unmoved"]) == ("calm", 0, None)


def test_gradients_that_fall_through_the_bottom_of_float16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = {"small": torch.randn(500).mul(1e-7).half(), "smaller": torch.full((9,), 1e-9).half()}
    run = record(tmp_path / "run", mlp(), 1, lambda step: torch.randn(6, 12), save=lambda step: saved)
    found = check(run)
    small = found["small", "forward", "output", "out", "float16"]
    assert (small["risk"], small["cause"]) == ("underflow", "subnormal")
    assert small["subnormal_least"] == small["subnormal_most"] == 1
    assert found["smaller", "forward", "output", "out", "float16"]["risk"] == "calm"  # zeros alone say nothing


@pytest.mark.parametrize(("dtype", "level"), [("float16", "tight"), ("float32", "calm")])
def test_a_gradient_of_zeros_is_suspicious_in_a_narrow_dtype(tmp_path: Path, dtype: str, level: str) -> None:
    kind = getattr(torch, dtype)
    run = record(tmp_path / "run", mlp(kind), 1, lambda step: torch.ones(2, 12, dtype=kind), shrink=1e-9)
    row = check(run)["2.weight", "backward", "gradient", "grad", dtype]
    assert (row["zeros"] == 1, row["risk"]) == (dtype == "float16", level)


def test_an_8_bit_float_that_is_scaled_to_fill_its_range_is_tight_and_no_more(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64)
    saved = {
        "plain": x.to(torch.float8_e4m3fn),
        "scaled": (x * 448 / x.abs().max()).to(torch.float8_e4m3fn),
        "wide": x.to(torch.float8_e5m2),
        "amd": (x * 200 / x.abs().max()).to(torch.float8_e4m3fnuz),
    }
    run = record(tmp_path / "run", mlp(), 1, lambda step: torch.randn(6, 12), save=lambda step: saved)
    found = {key[0]: row for key, row in check(run, "float8_e5m2fnuz").items() if key[0] in saved}
    assert {name: (row["risk"], row["cause"]) for name, row in found.items()} == {
        "plain": ("calm", None),
        "scaled": ("tight", "limit"),
        "wide": ("calm", None),
        "amd": ("tight", "head-room"),
    }
    assert found["scaled"]["headroom"] == 1


def test_a_mask_with_the_smallest_number_is_not_taken_for_an_overflow(tmp_path: Path) -> None:
    mask = torch.zeros(5).half()
    mask[2:] = torch.finfo(torch.float16).min
    run = record(tmp_path / "run", mlp(), 1, lambda step: torch.randn(6, 12), save=lambda step: {"mask": mask})
    row = check(run, "bfloat16")["mask", "forward", "output", "out", "float16"]
    assert (row["risk"], row["cause"], row["headroom_bits"]) == ("tight", "limit", 0)


def test_integers_booleans_and_empty_tensors_are_left_out_and_counted(tmp_path: Path) -> None:
    saved = {"i": torch.arange(4), "b": torch.ones(2, dtype=torch.bool), "e": torch.empty(0), "c": torch.ones(3) * 1j}
    run = record(tmp_path / "run", mlp(), 2, lambda step: torch.randn(6, 12), save=lambda step: saved)
    found = run.risk()
    sites = set(found.table["site"])
    assert "c" in sites
    assert not sites & {"i", "b", "e"}
    assert (found.left_out.whole, found.left_out.empty, found.left_out.unmeasured) == (4, 2, 0)


def test_a_run_without_statistics(tmp_path: Path) -> None:
    run = record(tmp_path / "run", mlp(), 1, lambda step: torch.randn(6, 12), keep="fingerprint")
    found = run.risk()
    assert len(found) == 0
    assert found.left_out.unmeasured == found.left_out.total > 0
    assert pyarrow.table(found).num_rows == 0


def test_a_tensor_without_any_finite_value(tmp_path: Path) -> None:
    saved = {"nan": torch.full((3,), torch.nan), "inf": torch.full((2,), -torch.inf)}
    run = record(tmp_path / "run", mlp(), 1, lambda step: torch.randn(6, 12), save=lambda step: saved)
    found = rows(run.risk(what_if="float16"))
    for site, counts in (("nan", (3, 0)), ("inf", (0, 2))):
        row = found[site, "forward", "output", "out", "float32"]
        assert (row["nan"], row["inf"]) == counts
        assert [row[name] for name in ("risk", "absmax", "headroom", "zeros", "scale_float16")] == [
            "non-finite",
            *4 * [None],
        ]


def test_an_empty_run(runs: Any) -> None:
    found = risk(runs.Builder().run)
    assert (len(found), repr(found)) == (0, "<Risk of runs/good: no tensor>")
    assert found.counts == dict.fromkeys(LEVELS, 0)


def test_several_ranks_are_one_place_and_the_worst_of_them_is_named(runs: Any) -> None:
    builder = runs.Builder(world_size=3)
    for number in range(3):
        rank = builder.rank(number)
        for step in range(2):
            size = 1000.0 * (number + 1) if step == 1 or number < 2 else 40000.0
            rank.tensor(rank.call("layer", step=step), "output", "out", np.array([1, -size], np.float16))
    (row,) = pyarrow.table(risk(builder.run)).to_pylist()
    assert (row["rank"], row["step"], row["absmax"], row["observations"]) == (2, 0, 40000, 6)
    assert (row["risk"], row["headroom"]) == ("overflow", 65504 / 40000)
    (row,) = pyarrow.table(risk(builder.run, ranks=[0, 1], steps="1")).to_pylist()
    assert (row["rank"], row["step"], row["absmax"], row["observations"]) == (1, 1, 2000, 2)
    with pytest.raises(UsageError, match=r"runs/good has no rank 7\. It has 0, 1, 2\."):
        risk(builder.run, ranks=[7])


def test_ranks_of_a_real_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        record(tmp_path / "run", mlp(), 2, lambda step, rank=rank: torch.full((2, 12), 10.0 ** (rank + 1) + step))
    run = astray.open(tmp_path / "run")
    assert list(run.ranks) == [0, 1]
    given = check(run, "float16")["<root>", "forward", "input", "0", "float32"]
    assert (given["rank"], given["step"], given["absmax"], given["observations"]) == (1, 1, 101, 4)


def test_a_small_gpt_in_float32_is_calm_at_every_level(tmp_path: Path) -> None:
    from train_gpt import CONTEXT, GPT

    torch.manual_seed(0)
    model = GPT(20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    settings = {"level": ["module", "function"], "optimizer": ["gradient", "weight", "state", "update"]}
    with astray.record(tmp_path / "run", model, **settings) as rec:
        for _ in range(7):
            ids = torch.randint(20, (2, CONTEXT))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rec.step()
    found = astray.open(tmp_path / "run").risk(what_if="float16")
    assert {level for level, count in found.counts.items() if count} == {"calm"}
    assert not found.table.numbers("overflows_float16").any()
    assert found.left_out.whole > 0  # the indices of letters and positions


def test_a_tensor_that_many_calls_see_has_one_number(tmp_path: Path) -> None:
    run = record(tmp_path / "run", mlp(), 2, lambda step: torch.randn(6, 12))
    found = rows(run.risk())
    made, taken = found["0", "forward", "output", "out", "float32"], found["1", "forward", "input", "0", "float32"]
    assert made["tensor"] == taken["tensor"]
    assert made["tensor"] != found["1", "forward", "output", "out", "float32"]["tensor"]


def test_the_loss_scale_is_the_largest_power_of_two_that_fits_all_gradients(tmp_path: Path) -> None:
    run = record(tmp_path / "run", mlp(), 3, lambda step: torch.randn(6, 12), shrink=1e-8)
    found = run.risk(what_if=["float16", "float8_e4m3fn"])
    largest = max(np.abs(x).max() for key, all_ in kept(run).items() if key[1] == "backward" for _, _, x in all_)
    scale = found.loss_scales["float16"]
    assert largest * scale < 65520 <= largest * scale * 2
    assert np.log2(scale) % 1 == 0
    places = rows(found)
    assert {row["scale_float16"] for key, row in places.items() if key[1] == "backward"} == {scale}
    assert {row["scale_float16"] for key, row in places.items() if key[1] == "forward"} == {None}
    gradient = places["0.weight", "backward", "gradient", "grad", "float32"]
    truth = [np.abs(x[x != 0]) for _, _, x in kept(run)["0.weight", "backward", "gradient", "grad", "float32"]]
    assert 0.9 < gradient["flushed_least_float16"] <= max(np.mean(x <= 2.0**-25) for x in truth)
    assert gradient["scaled_flushed_least_float16"] == 0


def test_which_weights_would_stop_moving_in_a_coarser_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 200), nn.Linear(200, 4))
    run = record(tmp_path / "run", model, 3, lambda step: torch.randn(6, 12), rate=1e-4, optimizer=["weight", "update"])
    found, values = rows(run.risk(what_if=["bfloat16", "float64"])), kept(run)
    for name in ("0.weight", "1.weight", "1.bias"):
        row = found[name, "update", "parameter", "weight", "float32"]
        weight, update = (
            torch.tensor(values[(name, "update", *kind, "float32")][-1][2])
            for kind in (("parameter", "weight"), ("output", "update"))
        )
        before = weight.bfloat16()
        truth = float((before.double() + update).bfloat16().eq(before).double().mean())
        assert row["unmoved_least_bfloat16"] <= truth
        assert row["unmoved_estimate_bfloat16"] == pytest.approx(truth, abs=0.25)
        assert row["unmoved_estimate_float64"] is None  # finer than what was recorded
    assert found["0.weight", "update", "parameter", "weight", "float32"]["unmoved_least_bfloat16"] == 1


def test_the_command_and_python_have_one_list_of_orders() -> None:
    from astray.cli.show import RISKS
    from astray.headroom.report import SORTS

    assert tuple(SORTS) == RISKS


def test_parameters_of_which_no_row_is_the_weight() -> None:
    run = Builder()
    run.tensor(run.call("h.w", "AdamW", kind="optimizer", phase="update"), "parameter", "other", np.ones(4, np.float32))
    assert [row["path"] for row in rows(risk(run.run)).values()] == ["other"]


def test_an_update_of_a_weight_that_is_next_to_nothing() -> None:
    """The ratio of their norms is beyond float64."""
    run = Builder()
    seq = run.call("h.w", "AdamW", kind="optimizer", phase="update")
    run.tensor(seq, "parameter", "weight", np.full(4, 1e-300))
    run.tensor(seq, "output", "update", np.full(4, 1e100))
    assert any(row["update_ratio"] == np.inf for row in rows(risk(run.run)).values())
