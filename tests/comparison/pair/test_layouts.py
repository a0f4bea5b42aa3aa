"""Tensors of the candidate that lie otherwise: what a rule does, where it holds, what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from astray.comparison.comparison import compare
from astray.comparison.pair.layouts import Layout, fitting_layout
from astray.comparison.pair.mapping import read_mapping
from astray.errors import CompareError

RULES = [
    ("transpose", (3, 8)),
    ({"transpose": [0, 2]}, (2, 3, 4)),
    ({"permute": [2, 0, 1]}, (2, 3, 4)),
    ({"reshape": [4, -1]}, (3, 8)),
    ([{"reshape": [2, 4, 3]}, {"permute": [1, 2, 0]}, {"reshape": [6, 4]}], (3, 8)),
]


@pytest.mark.parametrize(("rule", "shape"), RULES, ids=str)
def test_a_rule_lays_out_and_undoes_it(rule, shape):
    layout = Layout.parse(rule)
    values = np.arange(np.prod(shape)).reshape(shape)
    laid_out = layout.apply(values)
    assert laid_out.shape == layout.shape(shape)
    assert np.array_equal(layout.undo(laid_out, shape), values)
    assert layout.moves(shape) == (laid_out.reshape(-1).tolist() != values.reshape(-1).tolist())


def test_a_rule_says_what_numpy_says():
    values = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(Layout.parse("transpose").apply(values), values.swapaxes(-1, -2))
    assert np.array_equal(Layout.parse({"permute": [1, 2, 0]}).apply(values), values.transpose(1, 2, 0))


def test_dimensions_of_size_1_move_nothing():
    assert not Layout.parse("transpose").moves((1, 8))
    assert Layout.parse("transpose").moves((2, 8))


@pytest.mark.parametrize(
    "rule",
    ["transposed", {"permute": 3}, {"permute": []}, {"permute": [0.5]}, {"transpose": [0]}, {"reshape": [-1, -1]},
     {"reshape": [2], "permute": [0]}, [], None, {"reshape": [-2, 3]}],
    ids=str,
)  # fmt: skip
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(ValueError, match=r"layout|takes"):
        Layout.parse(rule)


def test_the_order_that_fits_is_found_where_there_is_one():
    assert str(fitting_layout((3, 8), (8, 3))) == "transpose"
    assert str(fitting_layout((5, 7, 3, 8), (8, 3, 5, 7))) == "{permute: [3, 2, 0, 1]}"
    assert fitting_layout((3, 3), (3, 3)) is None
    assert fitting_layout((3, 8), (8, 4)) is None
    assert fitting_layout((3, 3, 8), (8, 3, 3)) is None, "two orders fit"


def network(builder, other: bool = False, weight: float = 1.0, keep: str | None = None, order: bool = False):
    """A layer with everything that its weight is: a parameter, an argument, its gradients, and its optimizer's."""
    random = np.random.default_rng(0)
    builder.keep = set(keep.split(",")) if keep else builder.keep

    def laid_out(values: np.ndarray) -> np.ndarray:
        return values.T if other else values

    own = random.normal(size=(8, 3)).astype(np.float32) * np.float32(weight)
    gradient = random.normal(size=(8, 3)).astype(np.float32)
    given, made = random.normal(size=(2, 3)).astype(np.float32), random.normal(size=(2, 8)).astype(np.float32)
    layer = builder.call("fc", "Linear")
    builder.tensor(layer, "input", "0", given)
    builder.tensor(layer, "parameter", "weight", laid_out(own), value=7)
    function = builder.call("fc/linear", "linear", kind="function", parent=layer)
    builder.tensor(function, "input", "0", given, value=5)
    builder.tensor(function, "input", "1", laid_out(own), value=7)
    builder.tensor(function, "output", "out", made)
    builder.tensor(layer, "output", "out", made)
    back = builder.call("fc/linear", "linear", kind="function", phase="backward", parent=function)
    builder.tensor(back, "output", "1", laid_out(gradient))
    accumulated = builder.call("fc.weight", "Parameter", kind="parameter", phase="backward")
    builder.tensor(accumulated, "gradient", "grad", laid_out(gradient))
    update = builder.call("fc.weight", "Adam", kind="optimizer", phase="update")
    builder.tensor(update, "input", "grad", laid_out(gradient))
    builder.tensor(update, "output", "state.step", np.float32(1))
    builder.tensor(update, "output", "state.moment1" if other else "state.exp_avg", laid_out(gradient * 0.1))
    builder.tensor(update, "output", "update", laid_out(gradient * 2))
    return builder.run


def mapping(tmp_path: Path, text: str) -> Path:
    (tmp_path / "map.yaml").write_text(text)
    return tmp_path / "map.yaml"


TRANSPOSED = "tensors: {moment1: exp_avg}\nlayouts: {'fc.weight': transpose}"


@pytest.mark.parametrize("keep", ["stats,fingerprint", "fingerprint,stats,tensors"])
def test_one_rule_holds_wherever_a_weight_occurs(runs, tmp_path, keep):
    file = mapping(tmp_path, TRANSPOSED)
    found = compare(network(runs.Builder(), keep=keep), network(runs.Builder(), True, keep=keep), mapping=file)
    assert found.same
    laid_out = [reason for reason in found.pairs["reason"].values if reason]
    assert len(laid_out) == 1
    assert ("after it was laid out" if "tensors" in keep else "do not show the order") in laid_out[0]
    pairs = found.pairs
    rows = [row for row in range(len(pairs)) if "laid out" in (pairs["reason"][row] or "")]
    assert sorted((pairs["site"][row], pairs["path"][row]) for row in rows) == [
        ("fc", "weight"), ("fc.weight", "grad"), ("fc.weight", "grad"), ("fc.weight", "state.exp_avg"),
        ("fc.weight", "update"), ("fc/linear", "1"), ("fc/linear", "1"),
    ]  # fmt: skip
    assert {pairs["verdict"][row] for row in rows} == {"identical" if "tensors" in keep else "rounding"}


@pytest.mark.parametrize("keep", ["stats,fingerprint", "fingerprint,stats,tensors"])
def test_what_is_wrong_in_a_weight_that_is_laid_out_is_found(runs, tmp_path, keep):
    file = mapping(tmp_path, TRANSPOSED)
    candidate = network(runs.Builder(), True, weight=1.001, keep=keep)
    found = compare(network(runs.Builder(), keep=keep), candidate, mapping=file)
    assert (found.first.site, found.first.cause, found.first.place.path) == ("fc", "parameter", "weight")
    assert found.first.place.error == pytest.approx(1e-3, rel=0.1)


def test_a_transposed_weight_without_a_rule_is_not_the_same_and_the_rule_is_named(runs, tmp_path):
    file = mapping(tmp_path, "tensors: {moment1: exp_avg}")
    found = compare(network(runs.Builder()), network(runs.Builder(), True), mapping=file)
    assert not found.same
    assert any("layouts: {'fc.weight': transpose}" in problem for problem in found.problems)
    other = compare(network(runs.Builder()), network(runs.Builder(), True, weight=2.0), mapping=file)
    assert not any("layouts" in problem for problem in other.problems), "its numbers are others"


def square(builder, transposed: bool):
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    layer = builder.call("fc", "Linear")
    builder.tensor(layer, "parameter", "weight", weight.T if transposed else weight)
    builder.tensor(layer, "output", "out", np.ones((2, 4), np.float32))
    return builder.run


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,fingerprint,tensors"])
def test_a_square_weight_shows_by_its_bits_or_values(runs, tmp_path, keep):
    reference = square(runs.Builder(keep=keep), False)
    found = compare(reference, square(runs.Builder(keep=keep), True))
    assert found.first.cause == "parameter"
    assert any("layouts: {'fc.weight': transpose}" in problem for problem in found.problems)
    file = mapping(tmp_path, "layouts: {'fc.weight': transpose}")
    assert compare(reference, square(runs.Builder(keep=keep), True), mapping=file).same
    if "tensors" in keep:  # statistics alone do not show it, which the reason says
        found = compare(reference, square(runs.Builder(keep=keep), False), mapping=file)
        assert found.first.cause == "parameter"
        assert any("loaded without being transposed" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{'fc.weight': {permute: [0, 2, 1]}}", r"permutes 3 dimensions and the tensor has 2: \[3, 8\]. What fits"),
        ("{'fc.weight': {reshape: [8, 4]}}", "does not have the tensor's 24 elements"),
        ("{'fc.weight': {reshape: [4, 6]}}", r"makes \[4, 6\] of \[3, 8\], and the reference has \[8, 3\]. What"),
        ("{'fc.weigth': transpose}", "fits no tensor of the candidate; the nearest name is 'fc.weight'"),
        ("{'fc.weight': turn}", "The layout of 'fc.weight' in the mapping .* is wrong: 'turn' is not a layout"),
        ("{'(': transpose}", "The name '\\(' in layouts of the mapping .* is wrong: missing"),
        ("[fc.weight]", "it maps names of the candidate's tensors"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_told_in_a_sentence(runs, tmp_path, rule, said):
    file = mapping(tmp_path, f"layouts: {rule}")
    with pytest.raises(CompareError, match=said):
        compare(network(runs.Builder()), network(runs.Builder(), True), mapping=file)


def test_a_rule_for_what_needs_none_is_refused(runs, tmp_path):
    file = mapping(tmp_path, "layouts: {'fc.weight': transpose}")
    with pytest.raises(CompareError, match="It has the reference's shape without a rule: leave the rule out"):
        compare(network(runs.Builder()), network(runs.Builder()), mapping=file)


def channels(builder, last: bool):
    random = np.random.default_rng(0)
    given, made = random.normal(size=(2, 3, 5, 4)), random.normal(size=(2, 6, 5, 4))
    order = (0, 2, 3, 1) if last else (0, 1, 2, 3)
    layer = builder.call("conv", "Conv2d")
    builder.tensor(layer, "input", "0", given.transpose(order))
    builder.tensor(layer, "output", "out", made.transpose(order))
    builder.tensor(layer, "output", "loss", np.float32(1))
    return builder.run


@pytest.mark.parametrize("name", ["conv", "co.*"])
def test_a_rule_for_a_site_is_for_all_its_tensors_that_it_fits(runs, tmp_path, name):
    file = mapping(tmp_path, f"layouts: {{'{name}': {{permute: [0, 3, 1, 2]}}}}")
    keep = "stats,fingerprint,tensors"
    found = compare(channels(runs.Builder(keep=keep), False), channels(runs.Builder(keep=keep), True), mapping=file)
    assert found.counts["identical"] == 3


def test_a_rule_for_one_tensor_of_a_site(runs, tmp_path):
    file = mapping(tmp_path, "layouts: {'conv:out': {permute: [0, 3, 1, 2]}}")
    found = compare(channels(runs.Builder(), False), channels(runs.Builder(), True), mapping=file)
    assert found.counts["shape"] == 1


def test_a_reshape_keeps_the_order_and_its_fingerprint(runs, tmp_path):
    def run(shape):
        builder = runs.Builder()
        builder.tensor(builder.call("fc"), "parameter", "weight", np.arange(24.0).reshape(shape))
        return builder.run

    file = mapping(tmp_path, "layouts: {'fc.weight': {reshape: [4, 6]}}")
    assert compare(run((4, 6)), run((3, 8)), mapping=file).counts["identical"] == 1


def test_a_slice_of_another_layout_is_not_compared_by_values(runs, tmp_path):
    def run(transposed):
        builder = runs.Builder(keep="stats,tensors")
        weight = np.arange(24.0).reshape(4, 6)
        builder.tensor(builder.call("fc"), "parameter", "weight", weight.T if transposed else weight, part=":2, ...")
        return builder.run

    file = mapping(tmp_path, "layouts: {'fc.weight': transpose}")
    found = compare(run(False), run(True), mapping=file)
    assert found.same
    assert found.sources == {"statistics": 1}


def test_names_of_tensors_and_what_only_one_side_has(runs, tmp_path):
    def run(mean, extra):
        builder = runs.Builder()
        layer = builder.call("bn", "BatchNorm2d")
        builder.tensor(layer, "state", mean, np.arange(4.0))
        builder.tensor(layer, "state", extra, np.arange(2.0))
        builder.tensor(layer, "output", "out", np.ones((2, 4)))
        return builder.run

    names = "tensors: {_mean: running_mean}\n"
    sides = run("running_mean", "num_batches_tracked"), run("_mean", "flag")
    assert not compare(*sides, mapping=mapping(tmp_path, names)).same
    lists = "only in reference: [num_batches_tracked]\nonly in candidate: [flag]"
    found = compare(*sides, mapping=mapping(tmp_path, names + lists))
    assert found.same
    assert (found.counts["only in reference"], found.counts["only in candidate"]) == (1, 1), "they stay in the report"
    assert compare(*sides, mapping=mapping(tmp_path, "sites: {bn._mean: bn.running_mean}\n" + lists)).same


def test_paths_of_a_function_whose_arguments_stand_elsewhere(runs, tmp_path):
    def run(name, path):
        builder = runs.Builder()
        function = builder.call(f"ln/{name}", name, kind="function")
        builder.tensor(function, "input", path, np.arange(4.0))
        builder.tensor(function, "output", "out", np.ones((2, 4)))
        return builder.run

    file = mapping(tmp_path, "functions: {norm: layer_norm}\npaths: {norm: {'1': kwargs.weight}}")
    found = compare(run("layer_norm", "kwargs.weight"), run("norm", "1"), mapping=file)
    assert found.counts["identical"] == 2


def test_a_matrix_against_a_row_of_numbers_is_another_shape(runs):
    def run(weight):
        builder = runs.Builder()
        layer = builder.call("fc", "Linear")
        builder.tensor(layer, "parameter", "weight", weight)
        builder.tensor(layer, "output", "out", np.ones((2, 4)))
        return builder.run

    assert compare(run(np.arange(12.0).reshape(3, 4)), run(np.arange(12.0))).counts["shape"] == 1


def test_every_section_of_a_file_is_read(tmp_path):
    found = read_mapping(
        mapping(
            tmp_path,
            "tensors: {a: b}\nattributes: {_momentum: 1 - momentum}\npaths: {f: {'1': '2'}}\nlayouts: {x: transpose}\n"
            "only in reference: [c]\nonly in candidate: [d]",
        )
    )
    assert found.attribute("_momentum", 0.9) == ("momentum", 0.1)
    assert (found.only_in_reference, found.only_in_candidate) == (("c",), ("d",))
    assert not found.is_of_sites


def test_what_is_not_compared_is_said_and_does_not_count(runs, tmp_path):
    """Wherever it occurs: as a buffer, and as an argument of the function that takes it."""

    def run(variance):
        builder = runs.Builder()
        layer = builder.call("bn", "BatchNorm2d")
        builder.tensor(layer, "state", "running_var", variance, value=3)
        function = builder.call("bn/batch_norm", "batch_norm", kind="function", parent=layer)
        builder.tensor(function, "input", "2", variance, value=3)
        builder.tensor(function, "output", "out", np.ones((2, 4)))
        builder.tensor(layer, "output", "out", np.ones((2, 4)))
        return builder.run

    sides = run(np.arange(1.0, 5.0)), run(np.arange(1.0, 5.0) * 1.1)
    assert compare(*sides).first is not None
    found = compare(*sides, mapping=mapping(tmp_path, "not compared: [running_var]"))
    assert found.same
    assert found.counts["unknown"] == 2
    assert any("in ways of their own" in (reason or "") for reason in found.pairs["reason"].values)


def test_a_parameter_of_one_run_may_be_a_buffer_of_the_other(runs):
    def run(role, value=1.0):
        builder = runs.Builder()
        layer = builder.call("bn", "BatchNorm2d")
        builder.tensor(layer, role, "running_mean", value * np.arange(1.0, 5.0))
        builder.tensor(layer, "output", "out", np.ones((2, 4)))
        return builder.run

    assert compare(run("state"), run("parameter")).counts["identical"] == 2
    assert compare(run("state"), run("parameter", 1.1)).first.place.path == "running_mean"


@pytest.mark.parametrize(
    "ways", [{"micro": "joined"}, {"by": "order"}, {"shapes": "same"}, {"shapes": "loose"}], ids=str
)
def test_layouts_go_with_other_ways_of_pairing(runs, tmp_path, ways):
    file = mapping(tmp_path, TRANSPOSED)
    keep = "fingerprint,stats,tensors"
    found = compare(network(runs.Builder(), keep=keep), network(runs.Builder(), True, keep=keep), mapping=file, **ways)
    assert found.counts["identical"] == 12
    assert found.same


def test_layouts_reach_the_processes_that_compare_ranks(tmp_path):
    import pickle

    from astray.comparison.pair.matching import Matching
    from astray.comparison.ranks.worker import ComparisonJob

    matching = Matching.check(mapping=mapping(tmp_path, TRANSPOSED))
    assert matching.mapping.layout_rule("fc.weight") == 0
    job = ComparisonJob("a", "b", (), matching, None, False, ())
    assert pickle.loads(pickle.dumps(job)).matching.mapping == matching.mapping


def test_checkpoints_are_laid_out_too(tmp_path):
    import torch

    from astray.comparison.pair.mapping_draft import draft
    from astray.store import open_run

    weights = {"fc.weight": torch.randn(300, 200), "fc.bias": torch.randn(300), "table": torch.randn(20, 20)}
    turned = weights | {"fc.weight": weights["fc.weight"].T.contiguous()}
    torch.save(weights, tmp_path / "a.pt")
    torch.save(turned, tmp_path / "b.pt")
    plain = compare(tmp_path / "a.pt", tmp_path / "b.pt")
    assert any("layouts: {'fc.weight': transpose}" in problem for problem in plain.problems)
    text = str(draft(open_run(tmp_path / "a.pt"), open_run(tmp_path / "b.pt")))
    assert "'fc.weight': transpose  # [200, 300] here and [300, 200] in the reference" in text
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt", mapping=mapping(tmp_path, text))
    assert (found.same, found.counts["identical"]) == (True, 3)
    turned["fc.weight"][7, 9] += 1
    torch.save(turned, tmp_path / "b.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt", mapping=mapping(tmp_path, text))
    assert (found.first.site, found.first.magnitude) == ("fc.weight", pytest.approx(1.0, rel=1e-5))
