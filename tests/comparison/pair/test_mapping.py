"""Names of one model in the words of another: what wins, what is drafted, and what is said of a bad file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from astray.comparison.comparison import compare
from astray.comparison.pair.mapping import Mapping, read_mapping
from astray.comparison.pair.mapping_draft import draft
from astray.errors import CompareError

LAYERS = (r"layers\.(\d+)", r"h.\1")


@pytest.mark.parametrize(
    ("mapping", "name", "expected"),
    [
        (Mapping({"a": "x"}), "a", "x"),
        (Mapping({"a": "x"}), "a.b.weight", "x.b.weight"),
        (Mapping({"a": "x"}), "ab", "ab"),
        (Mapping({"a": "x", "a.b": "y.z"}), "a.b.weight", "y.z.weight"),
        (Mapping({"a": "<root>"}), "a.b", "b"),
        (Mapping({"a": "<root>"}), "a", "<root>"),
        (Mapping({"a": "<root>"}), "a/relu", "<root>/relu"),
        (Mapping({"<root>": "net"}), "<root>", "net"),
        (Mapping({"<root>": "net"}), "a.b/relu", "net.a.b/relu"),
        (Mapping({"<root>": "net"}), "/cross_entropy", "/cross_entropy"),
        (Mapping(patterns=[LAYERS]), "layers.12.attn/mm", "h.12.attn/mm"),
        (Mapping(patterns=[LAYERS]), "layers.12x", "layers.12x"),
        (Mapping({"layers.3": "tail"}, [LAYERS]), "layers.3.attn", "tail.attn"),
        (Mapping({"layers": "all"}, [LAYERS]), "layers.3.attn", "h.3.attn"),
        (Mapping(patterns=[LAYERS, (r"layers\.(\d+)\.attn", r"h.\1.self")]), "layers.3.attn", "h.3.self"),
        (Mapping(functions={"mm": "matmul"}), "a/mm", "a/matmul"),
        (Mapping(functions={"mm": "matmul"}), "mm", "mm"),
    ],
)
def test_what_covers_most_wins(mapping, name, expected):
    assert mapping.site(name) == expected


def test_a_file(tmp_path):
    file = tmp_path / "map.yaml"
    file.write_text(
        r"""
        sites: {encoder: model}
        patterns: {'layers\.(\d+)': 'h.\1'}
        types: {Conv1D: Linear}
        functions: {mm: matmul}
        """
    )
    assert read_mapping(file) == Mapping(
        {"encoder": "model"}, [(r"layers\.(\d+)", r"h.\1")], {"Conv1D": "Linear"}, {"mm": "matmul"}
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("- a", "is empty"),
        ("site: {a: b}", "only in reference, only in candidate. Did you mean 'sites'?"),
        ("sites: [a]", "sites of the mapping"),
        ("patterns: {'(': x}", "is wrong: missing )"),
        (r"patterns: {'a(\d)': '\2'}", "is wrong: invalid group reference 2"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_bad_file_is_told_in_a_sentence(tmp_path, content, said):
    file = tmp_path / "map.yaml"
    file.write_text(content)
    with pytest.raises(CompareError, match=said.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        read_mapping(file)
    with pytest.raises(CompareError, match="cannot be read: No such file"):
        read_mapping(tmp_path / "none.yaml")


def model(builder, names: dict[str, str], layers: int = 3, scale: float = 1.0, wrapped: str = "", extra: bool = False):
    """A model of which every module can have another name; the numbers are the same."""
    random = np.random.default_rng(0)

    def module(site: str, type: str, width: int, parameters: dict[str, tuple[int, ...]]) -> None:
        seq = builder.call(site or "<root>", type)
        for path, shape in parameters.items():
            builder.tensor(seq, "parameter", path, random.normal(size=shape))
        builder.tensor(seq, "output", "out", scale * random.normal(size=(2, width)))

    if wrapped:
        builder.tensor(builder.call("<root>", "Wrap"), "output", "out", np.ones((9, 9)))
    inside = f"{wrapped}." if wrapped else ""
    module(wrapped, "Net", 7, {})
    module(inside + names["embed"], "Embedding", 8, {"weight": (10, 8)})
    for layer in range(layers):
        at = f"{inside}{names['layers']}.{layer}"
        module(at, "Block", 8, {})
        module(f"{at}.{names['up']}", "Linear", 32, {"weight": (32, 8), "bias": (32,)})
        if extra:
            builder.tensor(builder.call(f"{at}.dropout", "Dropout"), "output", "out", np.ones((2, 32)))
        module(f"{at}.{names['down']}", "Linear", 8, {"weight": (8, 32), "bias": (8,)})
    module(inside + names["head"], "Linear", 10, {"weight": (10, 8)})


OURS = {"embed": "wte", "layers": "h", "up": "fc", "down": "proj", "head": "head"}
THEIRS = {"embed": "embed_tokens", "layers": "layers", "up": "up_proj", "down": "down_proj", "head": "head"}


def test_a_draft_has_few_rules_and_they_map_everything(runs):
    one, other = runs.Builder(), runs.Builder()
    model(one, OURS)
    model(other, THEIRS, wrapped="model", extra=True)
    found = draft(one.run, other.run)
    assert found.mapping == Mapping(
        {"model": "<root>", "model.embed_tokens": "wte"},
        [
            (r"model\.layers\.(\d+)", r"h.\1"),
            (r"model\.layers\.(\d+)\.up_proj", r"h.\1.fc"),
            (r"model\.layers\.(\d+)\.down_proj", r"h.\1.proj"),
        ],
    )
    assert found.only_reference == []
    assert [module.site for module in found.only_candidate] == [
        "<root>",
        *(f"model.layers.{i}.dropout" for i in range(3)),
    ]


def test_a_draft_written_down_pairs_the_runs(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    model(one, OURS)
    model(other, THEIRS)
    text = str(draft(one.run, other.run))
    assert yaml.safe_load(text).keys() == {"sites", "patterns"}
    (tmp_path / "map.yaml").write_text(text)
    assert compare(one.run, other.run, mapping=tmp_path / "map.yaml").same
    assert not compare(one.run, other.run, mapping=Mapping({"layers": "h"})).same


def test_a_draft_for_equal_names_says_so(runs):
    one, other = runs.Builder(), runs.Builder()
    model(one, OURS)
    model(other, OURS, scale=3.0)
    assert "# All names are the same." in str(draft(one.run, other.run))


def test_a_mapping_that_maps_nothing_is_refused(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    model(one, OURS)
    model(other, OURS)
    (tmp_path / "map.yaml").write_text("sites: {encoder: model}")
    with pytest.raises(
        CompareError, match=r"map.yaml maps nothing: no rule fits a site of the candidate, such as 'h.1"
    ):
        compare(one.run, other.run, mapping=tmp_path / "map.yaml")


def test_runs_without_modules_cannot_be_mapped(runs):
    one, other = runs.Builder(), runs.Builder()
    model(one, OURS)
    with pytest.raises(CompareError, match="holds no calls"):
        draft(one.run, other.run)
    other.call("/add", "add", kind="function")
    with pytest.raises(CompareError, match="no module calls, so there is nothing to map"):
        draft(one.run, other.run)


@pytest.mark.parametrize(
    "text",
    [
        "n0: &n0 [x]\n" + "".join(f"n{n}: &n{n} [{', '.join([f'*n{n - 1}'] * 10)}]\n" for n in range(1, 30)),
        "sites: " + "[" * 5000,
        "sites: {a: 2024-99-99}",
        "sites: {a: " + "9" * 6000 + "}",
    ],
    ids=["references", "nested", "no day", "no number"],
)
def test_yaml_without_end(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.yaml").write_text(text)
    with pytest.raises(CompareError, match=r"The mapping .*map\.yaml is not YAML"):
        read_mapping(tmp_path / "map.yaml")
