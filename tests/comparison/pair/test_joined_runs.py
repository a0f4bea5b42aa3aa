"""Micro steps against a larger batch, on rows built by hand: which of them become one row, how, and what is said."""

from __future__ import annotations

import numpy as np
import pytest

from astray import compare
from astray.comparison.pair.joined_rank import JoinedRank, encode
from astray.comparison.pair.micro_groups import APART, NO_BATCH, JoinDimension, along
from astray.comparison.verdict import SENTENCES, Reason
from astray.errors import CompareError
from astray.records import Call, Tensor
from astray.stats import dtypes
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter

BATCH = np.random.default_rng(3).normal(1, 2, size=(8, 3)).astype(np.float32)
ALL = "stats,fingerprint,tensors"


def recorded(runs, tensors, micro_steps: int = 1, keep: str = ALL, **call):
    """A run of one step: `tensors` gives the rows (role, path, array) of each micro step."""
    builder = runs.Builder(keep=keep)
    for micro in range(micro_steps):
        seq = builder.call(**({"site": "fc", "micro": micro} | call))
        for role, path, array in tensors(micro):
            builder.tensor(seq, role, path, array)
    return builder.run


def batch_of(runs, cuts: list[int], array: np.ndarray = BATCH, keep: str = ALL, axis: int = 0, **call):
    parts = np.split(array, cuts, axis=axis)
    return recorded(runs, lambda micro: [("output", "out", parts[micro])], len(parts), keep, **call)


def shared(runs, arrays: list[np.ndarray], role: str = "output", keep: str = ALL, **call):
    """A run with one tensor, as each micro step has it."""
    return recorded(runs, lambda micro: [(role, "out", arrays[micro])], len(arrays), keep, **call)


def only(diff):
    """The one row of a comparison."""
    assert len(diff.pairs) == 1
    return diff.pairs.row(0)


@pytest.mark.parametrize(
    ("reference", "candidate", "found"),
    [
        ([(8, 3)], [(2, 3)] * 4, JoinDimension(0, True, True)),
        ([(3, 8)], [(3, 2), (3, 6)], JoinDimension(1, True, True, stacks=False)),
        ([(4, 3)] * 2, [(2, 3)] * 4, JoinDimension(0, True, True)),
        ([(8, 3)], [(2, 3)] * 3, JoinDimension(0, True, False)),
        ([(3, 3)], [(3, 3)] * 2, JoinDimension(NO_BATCH, False, True)),
        ([()], [()] * 2, JoinDimension(NO_BATCH, False, True, stacks=False)),
        ([(2, 3)] * 2, [(2, 3)] * 2, JoinDimension(NO_BATCH, False, True, same_cut=True)),
        ([(2, 3), (1, 3)], [(2, 3), (1, 3)], JoinDimension(0, True, True, same_cut=True)),
        ([(8, 8)], [(2, 2)] * 4, JoinDimension(APART, True, False)),
        ([(8, 3)], [(2, 3, 1)] * 4, JoinDimension(APART, True, False)),
        ([(8, 3)], [(2, 4), (2, 5)], JoinDimension(APART, True, False, stacks=False)),
        ([], [(2, 3), (1, 3)], JoinDimension(0, False, True)),
        ([], [(2, 3), (2, 1)], JoinDimension(APART, False, True, stacks=False)),
        ([()] * 2, [], JoinDimension(NO_BATCH, False, True, stacks=False)),
    ],
)
def test_shapes_tell_the_batch(reference, candidate, found):
    assert along(reference, candidate) == found


@pytest.mark.parametrize("keep", [ALL, "stats,fingerprint", "stats", "tensors"])
@pytest.mark.parametrize("cuts", [[], [4], [2, 4, 6], [3, 6], [1, 1, 5]], ids=str)
@pytest.mark.parametrize("other", [[], [4], [5, 7]], ids=str)
def test_parts_of_a_batch_are_laid_end_to_end(runs, keep, cuts, other):
    row = only(compare(batch_of(runs, cuts, keep=keep), batch_of(runs, other, keep=keep), micro="joined"))
    assert (row["shape_reference"], row["shape_candidate"], row["micro"]) == ((8, 3), (8, 3), 0)
    assert row["error"] == 0.0
    bits = "tensors" in keep or (cuts == other and "fingerprint" in keep) or not (cuts or other)
    assert row["verdict"] == ("identical" if bits else "rounding")


@pytest.mark.parametrize("keep", [ALL, "stats"])
def test_a_wrong_part_makes_the_whole_wrong(runs, keep):
    wrong = BATCH.copy()
    wrong[3] *= np.float32(1.5)
    diff = compare(batch_of(runs, [], keep=keep), batch_of(runs, [2, 4, 6], wrong, keep=keep), micro="joined")
    assert only(diff)["verdict"] == "diverged"
    assert diff.first.site == "fc"
    where = "Of the 4 micro steps of the candidate only micro 1 is off."
    assert (where in diff.first.evidence) == (keep == ALL)


@pytest.mark.parametrize("keep", [ALL, "tensors"])
def test_values_of_parts_give_the_metrics_of_the_whole(runs, keep):
    other = BATCH + np.float32(0.25)
    paired = only(compare(batch_of(runs, [], keep=keep), batch_of(runs, [], other, keep), micro="paired"))
    joined = only(compare(batch_of(runs, [3], keep=keep), batch_of(runs, [2, 4, 6], other, keep), micro="joined"))
    for name in ("cosine", "rel_l2", "max_abs", "rmse", "mape", "within_1e3", "mean_ulp", "std_candidate", "error"):
        assert joined[name] == pytest.approx(paired[name], rel=1e-6), name


def test_nothing_finite_anywhere(runs):
    nothing = np.full((4, 2), np.nan, np.float32)
    row = only(compare(batch_of(runs, [], nothing, "tensors"), batch_of(runs, [2], nothing, "tensors"), micro="joined"))
    assert (row["verdict"], row["reason"]) == ("identical", SENTENCES[Reason.NONFINITE_BOTH])


def test_a_metric_of_ones_own_is_given_the_whole(runs):
    def rows(reference, candidate):
        return float(len(reference) + len(candidate))

    other = BATCH * np.float32(1.1)
    diff = compare(batch_of(runs, []), batch_of(runs, [2, 4], other), micro="joined", metrics=[rows])
    assert only(diff)["rows"] == 16.0


@pytest.mark.parametrize("axis", [0, 1])
def test_the_batch_may_be_any_dimension(runs, axis):
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    row = only(compare(batch_of(runs, [], square), batch_of(runs, [1, 3], square, axis=axis), micro="joined"))
    assert (row["shape_candidate"], row["verdict"]) == ((4, 4), "identical")


def test_parts_that_do_not_add_up_are_a_wrong_shape(runs):
    row = only(compare(batch_of(runs, []), batch_of(runs, [2, 4], BATCH[:6]), micro="joined"))
    assert (row["shape_candidate"], row["verdict"]) == ((6, 3), "shape")


def test_what_is_cut_outside_of_the_model_is_not_judged(runs):
    def cut(cuts):
        builder = runs.Builder()
        for micro, part in enumerate(np.split(BATCH, cuts)):
            if not micro:  # the first of several parts, but those are all the batch
                builder.tensor(builder.call("/chunk", kind="function"), "output", "out.0", part)
            builder.tensor(builder.call("fc", micro=micro), "output", "out", part)
        return builder.run

    diff = compare(cut([]), cut([2, 4]), micro="joined")
    assert diff.pairs["verdict"].tolist() == ["unknown", "rounding"]
    assert diff.pairs["reason"].tolist() == [SENTENCES[Reason.NO_BATCH], None]
    assert diff.pairs["shape_candidate"].tolist() == [(2, 3), (8, 3)]


def test_a_tensor_with_the_batch_in_two_dimensions_is_not_judged(runs):
    whole = np.ones((4, 4), np.float32)
    halves = [np.ones((2, 2), np.float32)] * 2
    with pytest.raises(CompareError, match="nothing to compare"):
        compare(shared(runs, [whole]), shared(runs, halves), micro="joined")
    builders = [runs.Builder(), runs.Builder()]
    for builder, arrays in zip(builders, ([whole], halves), strict=True):
        for micro, array in enumerate(arrays):
            seq = builder.call("similarity", micro=micro)
            builder.tensor(seq, "parameter", "weight", BATCH)
            builder.tensor(seq, "output", "out", array)
    diff = compare(builders[0].run, builders[1].run, micro="joined")
    assert diff.pairs["verdict"].tolist() == ["identical", "unknown"]
    assert diff.same


def test_weights_are_compared_once(runs):
    row = only(compare(shared(runs, [BATCH], "parameter"), shared(runs, [BATCH] * 4, "parameter"), micro="joined"))
    assert (row["shape_candidate"], row["verdict"], row["reason"]) == ((8, 3), "identical", None)


def test_a_buffer_that_changes_between_micro_steps_says_so(runs):
    row = only(compare(shared(runs, [BATCH], "state"), shared(runs, [BATCH, BATCH + 1], "state"), micro="joined"))
    assert (row["verdict"], row["reason"]) == ("identical", SENTENCES[Reason.VARIES])


def test_a_mask_given_to_every_micro_step_is_compared_once(runs):
    mask = np.tril(np.ones((3, 3), np.float32))
    row = only(compare(shared(runs, [mask], "input"), shared(runs, [mask] * 4, "input"), micro="joined"))
    assert (row["shape_candidate"], row["verdict"]) == ((3, 3), "identical")
    row = only(compare(shared(runs, [mask], "input"), shared(runs, [mask + 1] * 4, "input"), micro="joined"))
    assert row["verdict"] == "diverged"


def test_of_an_accumulated_gradient_the_last_counts(runs):
    call = {"site": "fc.weight", "kind": "parameter", "phase": "backward"}
    parts = [BATCH * np.float32(share) for share in (0.25, 0.5, 1.0)]

    def accumulated(micro):
        added = [("gradient", "added", parts[micro] - parts[micro - 1])] if micro else []
        return [*added, ("gradient", "grad", parts[micro])]

    whole = recorded(runs, lambda _: [("gradient", "grad", BATCH)], 1, **call)
    diff = compare(whole, recorded(runs, accumulated, 3, **call), micro="joined")
    assert only(diff)["verdict"] == "identical"
    assert diff.problems == (
        "Micro steps were joined along the batch: the reference has 1 in a step, the candidate 3.",
        "What single micro steps of the candidate added to the gradients of parameters was not compared by "
        "itself: it is part of the accumulated gradients.",
    )


def linear(runs, micro_steps: int, keep: str, weight=BATCH, wrong: float = 1.0, dtype=None):
    """A function of a batch and a weight that all micro steps have; in backward each has its share of its gradient."""
    builder = runs.Builder(keep=keep)
    for micro in range(micro_steps):
        forward = builder.call("fc/linear", "linear", kind="function", micro=micro)
        builder.tensor(forward, "input", "1", weight)
        backward = builder.call("fc/linear", "linear", kind="function", micro=micro, phase="backward", parent=forward)
        share = BATCH * np.float32(wrong if micro == 1 else 1) / np.float32(micro_steps)
        bits = None if dtype is None else encode(share, dtype)
        builder.tensor(backward, "output", "1", share if bits is None else bits, dtype)
    return builder.run


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_shares_of_a_gradient_are_added_up(runs, dtype):
    diff = compare(linear(runs, 1, ALL, dtype=dtype), linear(runs, 4, ALL, dtype=dtype), micro="joined")
    assert diff.pairs["verdict"].tolist() == ["identical", "identical"]
    assert diff.pairs["reason"][1] == SENTENCES[Reason.ADDED]
    diff = compare(linear(runs, 2, ALL, dtype=dtype), linear(runs, 4, ALL, wrong=3, dtype=dtype), micro="joined")
    assert diff.pairs["verdict"].tolist() == ["identical", "diverged"]
    assert diff.pairs["error"][1] == pytest.approx(0.5, rel=1e-2)


def test_statistics_do_not_tell_the_sum_of_shares(runs):
    keep = "stats,fingerprint"
    diff = compare(linear(runs, 1, keep), linear(runs, 4, keep, wrong=3), micro="joined")
    assert diff.pairs["verdict"].tolist() == ["identical", "unknown"]
    assert diff.pairs["reason"][1] == SENTENCES[Reason.NO_SUM]
    assert diff.same


def losses(runs, *values: float, sizes: list[int], keep: str = "stats"):
    """Micro steps of these sizes, and a number that each of them gives."""
    builder = runs.Builder(keep=keep)
    parts = np.split(BATCH[: sum(sizes)], np.cumsum(sizes)[:-1])
    for micro, (value, part) in enumerate(zip(values, parts, strict=True)):
        seq = builder.call("loss", micro=micro)
        builder.tensor(seq, "input", "0", part)
        builder.tensor(seq, "output", "out", np.array(value, np.float32))
    return builder.run


@pytest.mark.parametrize("keep", ["stats", ALL])
@pytest.mark.parametrize(
    ("values", "sizes", "verdict", "reason"),
    [
        ([2.0, 4.0], [4, 4], "identical", Reason.MEAN),
        ([2.0, 6.0], [6, 2], "identical", Reason.MEAN),  # by the size of each micro step
        ([1.0, 2.0], [4, 4], "identical", Reason.SUM),
        ([1.0, 3.0], [4, 4], "unknown", Reason.MEAN | Reason.NO_BATCH),
        ([np.nan, 3.0], [4, 4], "unknown", Reason.NO_BATCH),
    ],
)
def test_numbers_are_taken_for_means_or_sums(runs, keep, values, sizes, verdict, reason):
    diff = compare(
        losses(runs, 3.0, sizes=[8], keep=keep), losses(runs, *values, sizes=sizes, keep=keep), micro="joined"
    )
    assert diff.pairs["verdict"][1] == verdict
    assert diff.pairs["reason"][1] == "; ".join(text for flag, text in SENTENCES.items() if flag & reason)
    assert diff.same


def test_a_number_that_no_micro_step_changes_is_judged(runs):
    one, four = losses(runs, 0.5, sizes=[8]), losses(runs, *[0.51] * 4, sizes=[2] * 4)
    assert compare(one, four, micro="joined").pairs["verdict"].tolist()[1] == "diverged"


def test_as_many_micro_steps_are_compared_one_by_one(runs):
    one, other = losses(runs, 1.0, 2.0, sizes=[4, 4]), losses(runs, 2.0, 1.0, sizes=[4, 4])
    diff = compare(one, other, micro="joined")
    assert diff.pairs["shape_reference"][1] == (2,)
    assert compare(one, one, micro="joined").counts["rounding"] == 2
    bits = "stats,fingerprint"
    one, other = (losses(runs, *values, sizes=[4, 4], keep=bits) for values in ((1.0, 2.0), (2.0, 1.0)))
    assert compare(one, one, micro="joined").counts["identical"] == 2
    assert compare(one, other, micro="joined").pairs["verdict"].tolist() == ["identical", "diverged"]


def test_integers_agree_by_statistics(runs):
    tokens = np.random.default_rng(0).integers(0, 50_000, size=(8, 64))
    row = only(compare(batch_of(runs, [], tokens, "stats"), batch_of(runs, [2, 4, 6], tokens, "stats"), micro="joined"))
    assert (row["verdict"], row["error"]) == ("rounding", 0.0)
    other = tokens.copy()
    other[0, 0] += 1
    row = only(compare(batch_of(runs, [], tokens, "stats"), batch_of(runs, [2], other, "stats"), micro="joined"))
    assert row["verdict"] == "diverged"


@pytest.mark.parametrize(("part", "source"), [("..., :2", "values of the slice ..., :2"), ("0:1", "statistics")])
def test_slices_are_joined_where_they_leave_the_batch_whole(runs, part, source):
    def sliced(cuts):
        builder = runs.Builder(keep=ALL)
        for micro, array in enumerate(np.split(BATCH * np.float32(1 + len(cuts)), cuts)):
            builder.tensor(builder.call("fc", micro=micro), "output", "out", array, part=part)
        return builder.run

    row = only(compare(sliced([]), sliced([2, 4]), micro="joined"))
    assert (row["source"], row["verdict"]) == (source, "diverged")
    assert (row["reason"] == SENTENCES[Reason.OTHER_PART]) == (source == "statistics")


def test_values_that_are_lost_fall_back_on_statistics(runs):
    builder = runs.Builder(keep=ALL)
    for micro, array in enumerate(np.split(BATCH, 2)):
        builder.tensor(builder.call("fc", micro=micro), "output", "out", array)
    builder.rank().unreadable.add(1)
    row = only(compare(batch_of(runs, []), builder.run, micro="joined"))
    assert (row["source"], row["verdict"], row["reason"]) == ("statistics", "rounding", SENTENCES[Reason.UNREADABLE])


def test_names_steps_and_ranks_are_mapped_first(runs):
    from astray.comparison.pair.mapping import Mapping

    sides = []
    for site, cuts, first in (("fc", [], 0), ("model.fc", [2, 4, 6], 10)):
        builder = runs.Builder(keep="stats", world_size=2)
        for rank in (0, 1):
            for step in (0, 1):
                for micro, array in enumerate(np.split(BATCH * np.float32(1 + step + rank), cuts)):
                    seq = builder.rank(rank).call(site, micro=micro, step=first + step)
                    builder.rank(rank).tensor(seq, "output", "out", array)
        sides.append(builder.run)
    diff = compare(*sides, micro="joined", offset=-10, mapping=Mapping(sites={"model.fc": "fc"}), steps="1:")
    assert diff.pairs["verdict"].tolist() == ["rounding", "rounding"]
    assert diff.pairs["rank"].tolist() == [0, 1]
    assert diff.steps == [1]
    assert all(isinstance(rank, JoinedRank) for rank in diff.candidate.ranks.values())
    assert diff.columns["l2_candidate"].column == pytest.approx(diff.columns["l2_reference"].column)


def test_noise_is_that_of_the_parts(runs):
    again, off = BATCH * np.float32(1 + 1e-3), BATCH * np.float32(1 + 2e-3)
    reference, candidate = batch_of(runs, [2, 4, 6]), batch_of(runs, [], off)
    assert only(compare(reference, candidate, micro="joined"))["verdict"] == "diverged"
    row = only(compare(reference, candidate, noise=batch_of(runs, [2, 4, 6], again), micro="joined"))
    assert (row["verdict"], row["rule"]) == ("drifting", "noise run")
    assert only(compare(reference, candidate, tolerances={"fc": 1e-2}, micro="joined"))["rule"] == "tolerance"


def test_a_report_names_the_option(runs):
    hint = (
        "In step 0 the reference has 1 micro step and the candidate 4, whose batches add up to the same size. To "
        "compare whole steps, join them with --micro joined."
    )
    assert hint in compare(batch_of(runs, []), batch_of(runs, [2, 4, 6])).problems
    assert hint not in compare(batch_of(runs, []), batch_of(runs, [2, 4, 6]), micro="joined").problems
    fewer = compare(batch_of(runs, []), batch_of(runs, [2, 4], BATCH[:6]))
    assert not any("--micro" in text for text in fewer.problems)
    assert compare(batch_of(runs, [2]), batch_of(runs, [2])).problems == ()


def test_what_cannot_be_asked_for(runs):
    one = batch_of(runs, [])
    with pytest.raises(CompareError, match=r"micro is 'join'; it is one of paired, joined\. Did you mean 'joined'"):
        compare(one, one, micro="join")
    with pytest.raises(CompareError, match="names of their calls"):
        compare(one, one, micro="joined", by="order")
    with pytest.raises(CompareError, match="--exact needs --micro paired"):
        compare(one, one, micro="joined", exact=True)


def test_the_order_of_a_step_is_that_of_its_first_micro_step(runs):
    builder = runs.Builder(keep="stats")
    for micro, part in enumerate(np.split(BATCH, 2)):
        outer = builder.call("<root>", "Net", micro=micro)
        inner = builder.call("fc", micro=micro, parent=outer)
        builder.tensor(inner, "output", "out", part)
        builder.tensor(outer, "output", "out", part)
        back = builder.call("fc", micro=micro, phase="backward", parent=inner)
        builder.tensor(back, "input", "out", part)
    update = builder.call("fc.weight", "SGD", kind="optimizer", phase="update")
    builder.tensor(update, "output", "weight", BATCH)
    diff = compare(builder.run, builder.run, micro="joined")
    assert diff.pairs["site"].tolist() == ["fc", "<root>", "fc", "fc.weight"]
    assert diff.calls == 4
    rank = diff.reference.ranks[0]
    assert rank.calls["seq"].tolist() == [0, 1, 2, 3]
    assert rank.calls["parent"].tolist() == [-1, 0, 1, -1]


def test_bfloat16_is_rounded_to_the_nearest_even():
    exact = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-9), np.inf, np.nan, 0.0])
    found = dtypes.decode(encode(exact, "bfloat16"), "bfloat16")
    assert found[:5].tolist() == [1.0, 1.0, 1 + 2.0**-6, -1.0, np.inf]
    assert np.isnan(found[5])


def written(path, cuts, off: float = 1.0) -> str:
    """A run of two ranks on the disk; rank 1 is off in its second micro step."""
    for rank in (0, 1):
        with RunWriter(path, rank, info=RunInfo.of_process(world_size=2)) as writer:
            for micro, part in enumerate(np.split(BATCH, cuts)):
                writer.call(Call(micro, 0, micro, "module", "fc", "Linear", 0, "forward"))
                array = np.ascontiguousarray(part * np.float32(off if rank and micro == 1 else 1))
                memory = Strided.from_numpy(array)
                row = Tensor(micro, "output", "out", "float32", memory.shape, memory.stride, "cpu", False)
                writer.tensor(row._replace(**measure(memory)._asdict()), array)
    return str(path)


def test_ranks_are_joined_in_processes_of_their_own(tmp_path):
    reference, candidate = written(tmp_path / "a", []), written(tmp_path / "b", [2, 4], off=1.5)
    found = [compare(reference, candidate, micro="joined", processes=count) for count in (1, 2)]
    for diff in found:
        assert diff.pairs["verdict"].tolist() == ["identical", "diverged"]
        assert (diff.first.rank, diff.first.evidence[-1]) == (
            1,
            "Of the 3 micro steps of the candidate only micro 1 is off.",
        )
        assert diff.columns["l2_candidate"].column[0] == pytest.approx(np.linalg.norm(BATCH))
    assert str(found[0]) == str(found[1])


def test_a_rank_of_one_run_only_and_steps_that_are_not_there(runs):
    builder = runs.Builder(world_size=2)
    for rank in (0, 1):
        for micro, part in enumerate(np.split(BATCH, 2)):
            builder.rank(rank).tensor(builder.rank(rank).call("fc", micro=micro), "output", "out", part)
    diff = compare(batch_of(runs, [], keep="stats"), builder.run, micro="joined")
    assert diff.pairs["verdict"].tolist() == ["rounding", "only in candidate"]
    assert diff.pairs["shape_candidate"].tolist() == [(8, 3), (8, 3)]
    with pytest.raises(CompareError, match="They share no step among --steps 7"):
        compare(batch_of(runs, []), builder.run, micro="joined", steps=7)


def test_more_calls_on_one_side_are_still_paired_in_order(runs):
    """A function that one run calls once more in every micro step leaves a gap, as it does without micro steps."""

    def program(cuts, extra: bool):
        builder = runs.Builder(keep="stats")
        for micro, part in enumerate(np.split(BATCH, cuts)):
            root = builder.call("<root>", "Net", micro=micro)
            arrays = [part, *([part[:, :1]] if extra else []), part * np.float32(3)]
            for number, array in enumerate(arrays):
                seq = builder.call("<root>/mul", "mul", kind="function", micro=micro, call=number, parent=root)
                builder.tensor(seq, "input", "0", array)
                builder.tensor(seq, "output", "out", array * np.float32(2))
            builder.tensor(root, "output", "out", arrays[-1])
        return builder.run

    diff = compare(program([], extra=False), program([2, 4, 6], extra=True), micro="joined")
    assert diff.first is None
    assert {label: count for label, count in diff.counts.items() if count} == {"rounding": 5, "only in candidate": 2}


def test_a_joined_row_does_not_tell_the_first_bad_element_of_one_of_its_parts(runs):
    bad = BATCH.copy()
    bad[5, 1] = np.inf
    first = compare(batch_of(runs, []), batch_of(runs, [4], bad), micro="joined").first
    assert (first.candidate.statistics.inf, first.candidate.statistics.first_bad) == (1, None)
    first = compare(batch_of(runs, [4]), batch_of(runs, [], bad), micro="joined").first
    assert first.candidate.statistics[-2:] == (16, np.inf)
