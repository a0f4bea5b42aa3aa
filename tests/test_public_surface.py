"""What astray offers, and what importing it does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import astray
from astray import errors


def test_all_is_pinned() -> None:
    assert astray.__all__ == [
        "AstrayError",
        "CompareError",
        "Comparison",
        "Divergence",
        "Guard",
        "Key",
        "Monitor",
        "RecordError",
        "Recorder",
        "Run",
        "RunError",
        "RunExists",
        "StateDict",
        "Trip",
        "Tripped",
        "check_updates",
        "compare",
        "convert",
        "cosine",
        "diff",
        "elsewhere",
        "from_activation",
        "from_activation_grad",
        "from_grad",
        "from_optimizer_state",
        "from_state_dict",
        "from_together",
        "from_weight",
        "gradient_noise_scale",
        "guard",
        "load_state",
        "open",
        "record",
        "register_reduction",
        "seed_all",
        "trust_ratio",
        "without_dropout",
    ]


def test_every_public_name_is_there_and_documented() -> None:
    for name in astray.__all__:
        assert getattr(astray, name).__doc__, name


def test_functions_stay_functions_when_the_modules_of_their_names_are_loaded() -> None:
    import astray.comparison.pair.alignment
    import astray.records

    assert callable(astray.compare)
    assert callable(astray.record)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no 'rekord'.*record"):
        astray.rekord  # noqa: B018


def test_every_error_is_an_astray_error_and_in_the_drawn_tree() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, errors.AstrayError)
            assert name in (errors.__doc__ or "")


def test_importing_astray_imports_no_framework_and_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.meta_path); import astray, astray.cli; loaded = set(sys.modules); "
        "print(loaded & {'torch', 'paddle', 'numpy', 'nanoarrow'}, before == set(sys.meta_path))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "set() True"
