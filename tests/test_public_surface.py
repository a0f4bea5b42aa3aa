"""What astray offers, and what importing it does not do."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import astray
from astray import errors

GROUPS: dict[str, ModuleType] = {"errors": astray.errors, "experiment": astray.experiment, "state": astray.state}


def test_all_is_pinned() -> None:
    assert astray.__all__ == [
        "AstrayError",
        "Comparison",
        "Divergence",
        "Guard",
        "Key",
        "Recorder",
        "Run",
        "Tripped",
        "compare",
        "convert",
        "guard",
        "load_from",
        "open",
        "record",
    ]
    assert {name: module.__all__ for name, module in GROUPS.items()} == {
        "errors": [
            "AstrayError",
            "CheckpointError",
            "CompareError",
            "RecordError",
            "RunError",
            "RunExists",
            "RunVersionError",
            "StateError",
            "UsageError",
        ],
        "experiment": ["seed_all", "swap", "without_dropout"],
        "state": [
            "ActivationGradients",
            "Activations",
            "Monitor",
            "NoiseScale",
            "StateDict",
            "StatisticsTable",
            "check_updates",
            "cosine",
            "diff",
            "from_activation",
            "from_activation_grad",
            "from_grad",
            "from_optimizer_state",
            "from_state_dict",
            "from_together",
            "from_weight",
            "gradient_noise_scale",
            "load_state",
            "register_reduction",
            "trust_ratio",
        ],
    }


def test_every_public_name_is_there_and_documented() -> None:
    for module in (astray, *GROUPS.values()):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name


def test_dir_has_every_name_and_the_modules_of_the_others() -> None:
    assert {*astray.__all__, *GROUPS} <= set(dir(astray))


def test_a_star_import_gives_the_names_at_the_top() -> None:
    given: dict[str, object] = {}
    exec("from astray import *", given)
    assert set(given) - {"__builtins__"} == set(astray.__all__)


def test_functions_stay_functions_when_the_modules_of_their_names_are_loaded() -> None:
    import astray.comparison.pair.alignment
    import astray.records

    assert callable(astray.compare)
    assert callable(astray.record)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no 'rekord'.*record"):
        astray.rekord  # noqa: B018


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, module in GROUPS.items() for name in module.__all__]
)
def test_a_name_of_a_group_is_answered_with_its_place(group: str, name: str) -> None:
    if name in astray.__all__:
        assert getattr(astray, name) is getattr(GROUPS[group], name)
        return
    with pytest.raises(AttributeError, match=rf"^astray has no '{name}'\. It is astray\.{group}\.{name}\.$"):
        getattr(astray, name)


def test_groups_need_no_import_of_their_own_and_a_missing_name_loads_nothing() -> None:
    code = (
        "import sys, astray; before = set(sys.modules); "
        "found = hasattr(astray, 'from_weight'), hasattr(astray, 'rekord'); "
        "print(*found, any('astray' in name for name in set(sys.modules) - before), "
        "astray.experiment.seed_all.__name__, astray.errors.StateError.__name__, 'torch' in sys.modules, "
        "astray.state.StateDict.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "seed_all", "StateError", "False", "StateDict"]


def test_every_error_is_an_astray_error_and_in_the_drawn_tree() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, errors.AstrayError)
            assert name in (errors.__doc__ or "")
            assert name in errors.__all__


def test_importing_astray_imports_no_framework_and_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.meta_path); import astray, astray.cli; loaded = set(sys.modules); "
        "print(loaded & {'torch', 'paddle', 'numpy', 'nanoarrow'}, before == set(sys.meta_path))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "set() True"
