"""Two checkpoints compared: which tensors differ, how far, and whose names belong together."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

import astray
from astray.cli import main
from astray.comparison.pair.checkpoints import find_renaming
from astray.comparison.pair.mapping_draft import TensorSignature, pair_renamed
from astray.errors import CompareError
from saved_checkpoints import save_distributed

Tensors = dict[str, torch.Tensor]

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/comparison.schema.json").read_text(encoding="utf-8"))


@pytest.fixture
def weights() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    sizes = {"attn.weight": (8, 8), "mlp.up.weight": (16, 8), "mlp.down.weight": (8, 16), "ln.bias": (8,)}
    return {f"h.{i}.{name}": torch.randn(size, generator=generator) for i in range(3) for name, size in sizes.items()}


@pytest.fixture
def two(tmp_path: Path, weights: Tensors, monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """The reference is saved as a.safetensors; this is a copy to change and save."""
    monkeypatch.chdir(tmp_path)
    save_file(weights, "a.safetensors")
    return {name: tensor.clone() for name, tensor in weights.items()}


def test_equal_checkpoints_of_different_formats(two: Tensors) -> None:
    torch.save(two, "b.pt")
    found = astray.compare("a.safetensors", "b.pt")
    assert found.same
    assert found.counts["identical"] == 12
    assert str(found).splitlines() == [
        "a.safetensors  →  b.pt        12 tensors compared by fingerprint",
        "",
        "✓ No divergence: 12 tensors agree (12 identical).",
        "",
        "verdicts     identical 12",
    ]


def test_the_furthest_comes_first(two: Tensors) -> None:
    two["h.0.attn.weight"] += 1e-3
    two["h.1.mlp.up.weight"] *= 1.5
    two["h.2.ln.bias"] *= 1 + 1e-7
    save_file(two, "b.safetensors")
    found = astray.compare("a.safetensors", "b.safetensors")
    assert [one.site for one in (found.first, *found.others) if one] == ["h.1.mlp.up.weight", "h.0.attn.weight"]
    first = found.first
    assert first is not None
    assert (first.cause, first.verdict, first.victims) == ("parameter", "diverged", 1)
    assert first.error == pytest.approx(0.5)
    assert first.metrics["cosine"] == pytest.approx(1)
    assert "The candidate is 1.5 times the reference." in first.evidence
    assert found.counts | {"identical": 9, "rounding": 1, "diverged": 2} == found.counts
    assert repr(found) == "<Comparison of 12 tensors: 2 wrong, the largest at h.1.mlp.up.weight>"
    text = str(found)
    assert "✗ 2 of 12 tensors differ; furthest off: h.1.mlp.up.weight" in text
    assert "irst divergence" not in text
    assert "step 0" not in text
    lines = [line.split() for line in text.splitlines()]
    table = lines.index(["name", "verdict", "error", "largest", "cosine", "kind"])
    assert [line[:2] for line in lines[table + 1 : table + 3]] == [
        ["h.1.mlp.up.weight", "diverged"],
        ["h.0.attn.weight", "diverged"],
    ]


def test_limits_do_not_depend_on_the_place_in_the_file(two: Tensors) -> None:
    for tensor in two.values():
        tensor *= 1 + 1e-5
    save_file(two, "b.safetensors")
    found = astray.compare("a.safetensors", "b.safetensors")
    assert found.counts["diverged"] == 12
    assert set(found.pairs.numbers("limit").tolist()) == {32 * 2.0**-23}
    assert "Every tensor differs." in str(found)


def test_another_precision_is_rounding(two: Tensors) -> None:
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in two.items()}, "b.safetensors")
    found = astray.compare("a.safetensors", "b.safetensors")
    assert found.counts["rounding"] == 12
    assert found.same
    assert "begins" not in str(found)


def test_nan_shapes_and_lone_tensors(two: Tensors) -> None:
    two["h.0.ln.bias"][3] = float("nan")
    two["h.1.mlp.up.weight"] = two["h.1.mlp.up.weight"].t().contiguous()
    del two["h.2.attn.weight"]
    two["extra"] = torch.ones(2)
    save_file(two, "b.safetensors")
    found = astray.compare("a.safetensors", "b.safetensors")
    assert {found.first.site, found.others[0].site} == {"h.0.ln.bias", "h.1.mlp.up.weight"}  # type: ignore[union-attr]
    assert found.counts | {"non-finite": 1, "shape": 1, "only in reference": 1, "only in candidate": 1} == found.counts
    text = " ".join(str(found).split())
    assert "1 tensor is only in reference, first h.2.attn.weight." in text
    shape = next(one for one in (found.first, *found.others) if one and one.verdict == "shape")
    assert "One is the other transposed." in shape.evidence


def test_what_the_differing_have_in_common(two: Tensors) -> None:
    for name in ("h.1.mlp.up.weight", "h.1.mlp.down.weight"):
        two[name] += 1
    save_file(two, "b.safetensors")
    assert "All that differ are in h.1.mlp." in str(astray.compare("a.safetensors", "b.safetensors"))
    for name in ("h.0.ln.bias", "h.2.ln.bias"):
        two[name] += 1
    two["h.1.mlp.up.weight"] -= 1
    two["h.1.mlp.down.weight"] -= 1
    two["h.1.ln.bias"] += 1
    save_file({name: two[name] for name in two}, "c.safetensors")
    found = astray.compare("a.safetensors", "c.safetensors", sites="ln|attn")
    assert "All that differ are called bias." in str(found)


def test_tensors_are_compared_block_by_block(two: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    two["h.1.mlp.up.weight"] = two["h.1.mlp.up.weight"].double() * 1.25
    two["h.0.attn.weight"][7, 7] += 1
    torch.save({name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in two.items()}, "b.pt")
    torch.save(
        {name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in load("a.safetensors").items()}, "a.pt"
    )
    whole = astray.compare("a.pt", "b.pt")
    import astray.store.checkpoint_run as checkpoint

    original = checkpoint.Checkpoint.blocks
    monkeypatch.setattr(checkpoint.Checkpoint, "blocks", lambda self, name: original(self, name, 40))
    found = astray.compare("a.pt", "b.pt")
    assert found.counts == whole.counts
    for name in ("error", "cosine", "max_abs", "rel_l2", "different", "max_ulp"):
        one, other = found.pairs.numbers(name), whole.pairs.numbers(name)
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-12, nan_ok=True), name


def load(path: str) -> Tensors:
    with astray.checkpoints.open(path) as found:  # type: ignore[attr-defined]
        return dict(found)


def test_what_cannot_be_read_is_not_an_agreement(two: Tensors, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        save_distributed({"x": torch.ones(3), "y": torch.ones(4)}, Path(name))
    data = next(Path("b").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-700])
    assert main(["compare", "a", "b"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "≠ No divergence: 1 tensor agrees (1 identical). Some could not be read." in text
    assert "verdicts identical 1 · unknown 1" in text
    assert "In the candidate: b/__0_0.distcp ends after" in text


def test_reports(two: Tensors, capsys: pytest.CaptureFixture[str]) -> None:
    two["h.1.mlp.up.weight"] += 1
    two["h.0.ln.bias"] += 1e-2
    save_file(two, "b.safetensors")
    words = ["compare", "a.safetensors", "b.safetensors", "--csv", "out", "--json", "o.json", "--junit", "o.xml"]
    assert main([*words, "--xlsx", "o.xlsx", "--filter", "not agrees", "--sort", "-error"]) == 1
    assert "2 rows where not agrees" in capsys.readouterr().out
    assert len(Path("out/pairs.csv").read_text().splitlines()) == 3
    content = json.loads(Path("o.json").read_text())
    Draft202012Validator(SCHEMA).validate(content)
    assert content["first"]["site"] == "h.1.mlp.up.weight"
    assert [one["site"] for one in content["others"]] == ["h.0.ln.bias"]
    failed = [
        case.get("name") for case in ElementTree.parse("o.xml").iter("testcase") if case.find("failure") is not None
    ]
    assert failed == ["h.0.ln.bias", "h.1.mlp.up.weight"]
    assert "h.1.mlp.up.weight" in astray.compare("a.safetensors", "b.safetensors")._repr_html_()


def test_own_metrics_and_tolerances(two: Tensors) -> None:
    two["h.1.mlp.up.weight"] += 1e-3
    save_file(two, "b.safetensors")

    def gap(one: object, other: object) -> float:
        return float(abs(one - other).max())  # type: ignore[operator]

    found = astray.compare("a.safetensors", "b.safetensors", metrics=[gap], tolerances={"mlp": 0.1})
    assert found.same
    assert max(value for value in found.pairs.numbers("gap").tolist() if value == value) == pytest.approx(
        1e-3, rel=1e-2
    )


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda name: f"module.{name}", "without module. of the candidate"),
        (lambda name: f"_orig_mod.{name}", "without _orig_mod. of the candidate"),
        (
            lambda name: name.replace("mlp.", "mlp._fsdp_wrapped_module."),
            "without _fsdp_wrapped_module. of the candidate",
        ),
        (lambda name: f"_orig_mod.module.{name}", "without module. and _orig_mod. of the candidate"),
        (lambda name: f"model.{name}", "without the prefix model. of the candidate"),
        (lambda name: f"state_dict.model.{name}", "without the prefix state_dict.model. of the candidate"),
        (lambda name: f"state_dict.module.{name}", "without the prefix state_dict. of the candidate"),
    ],
)
def test_wrapped_names_are_paired(two: Tensors, wrap: object, said: str) -> None:
    assert callable(wrap)
    torch.save({wrap(name): tensor for name, tensor in two.items()}, "b.pt")
    found = astray.compare("a.safetensors", "b.pt")
    assert found.same
    assert any(said in problem for problem in found.problems), found.problems
    assert sorted(found.pairs["site"]) == sorted(two)
    back = astray.compare("b.pt", "a.safetensors")
    assert back.same
    assert any(said.replace("candidate", "reference") in problem for problem in back.problems)


def test_names_that_fit_are_left_alone() -> None:
    assert find_renaming(["module.a", "b"], ["module.a", "b"]).names == {}
    assert find_renaming(["a", "b"], ["c", "d"]).names == {}
    assert find_renaming(["a.x", "module.a.x"], ["module.module.a.x", "a.x"]).names == {
        "module.module.a.x": "module.a.x"
    }
    assert find_renaming(["a", "b", "c", "d"], ["a", "b", "m.c", "z"]).names == {"m.c": "c"}
    assert find_renaming(["w", "b"], ["model.w", "model.b", "optimizer.w"]).names == {"model.w": "w", "model.b": "b"}


def test_other_names_are_mapped(two: Tensors, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({name.replace("h.", "layers.").replace("mlp", "ffn"): two[name] for name in reversed(two)}, "b.pt")
    assert main(["compare", "a.safetensors", "b.pt"]) == 2
    assert "`astray map a.safetensors b.pt > map.yaml`, and give it with --map map.yaml." in capsys.readouterr().err
    assert main(["map", "a.safetensors", "b.pt"]) == 0
    draft = capsys.readouterr().out
    assert draft.startswith("# Tensors of the candidate that have a partner: 12 of 12.")
    Path("map.yaml").write_text(draft)
    assert main(["compare", "a.safetensors", "b.pt", "--map", "map.yaml"]) == 0


def test_tensors_of_other_values_are_paired_by_names() -> None:
    left = [
        TensorSignature(f"h.{i}.{name}", (4, 4), None) for i in range(2) for name in ("attn.q.weight", "attn.k.weight")
    ]
    right = [
        TensorSignature(f"l.{i}.{name}", (4, 4), None) for name in ("attn.k.weight", "attn.q.weight") for i in range(2)
    ]
    assert [(left[i].name[2:], right[j].name[2:]) for i, j in pair_renamed(left, right)] == [
        (one.name[2:], one.name[2:]) for one in left
    ]
    assert pair_renamed(
        [TensorSignature("a.0", (2,), 5)], [TensorSignature("x.1", (2,), 5), TensorSignature("a.0", (2,), 6)]
    ) == [(0, 0)]
    assert pair_renamed([TensorSignature("a.0.w", (2, 3), None)], [TensorSignature("b.0.w", (3, 2), None)]) == [(0, 0)]
    assert pair_renamed([TensorSignature("a.0.w", (2,), None)], [TensorSignature("a.1.w", (2,), None)]) == []


def test_a_checkpoint_and_a_run(two: Tensors, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model):
        model(torch.ones(1, 2))
    for sides in (("a.safetensors", "run"), ("run", "a.safetensors")):
        with pytest.raises(CompareError, match=r"a\.safetensors is a checkpoint and run is a recording"):
            astray.compare(*sides)
    with pytest.raises(CompareError, match="Checkpoints have no micro steps"):
        astray.compare("a.safetensors", "a.safetensors", micro="joined")
