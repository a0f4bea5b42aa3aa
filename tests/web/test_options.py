"""What comes from a browser is checked, whatever it is."""

from __future__ import annotations

import pytest

from astray.errors import UsageError
from astray.web.options import arguments_of


def test_all_options():
    given = {
        "steps": "0:10:2", "ranks": "0,3", "sites": "mlp", "tolerance": ["bfloat16=0.02", "a,b=1e-3"], "exact": True,
        "by": "order", "shapes": "same", "micro": "joined", "offset": -2,
    }  # fmt: skip
    assert arguments_of(given) == {
        "steps": "0:10:2", "ranks": [0, 3], "sites": "mlp", "tolerances": {"bfloat16": 0.02, "a,b": 1e-3},
        "exact": True, "by": "order", "shapes": "same", "micro": "joined", "offset": -2,
    }  # fmt: skip


def test_what_is_empty_says_nothing():
    assert arguments_of({"steps": "", "ranks": None, "tolerance": []}) == {}


def test_a_text_of_several_tolerances():
    assert arguments_of({"tolerance": "mlp=1e-3, float16=0.1"}) == {"tolerances": {"mlp": 1e-3, "float16": 0.1}}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "The options are an object"),
        ({"mapping": "/etc/passwd"}, "There is no option 'mapping'"),
        ({"metrics": ["x.py:f"]}, "There is no option 'metrics'"),
        ({"noise": "/tmp"}, "There is no option 'noise'"),
        ({"step": "1"}, "Did you mean 'steps'?"),
        ({"x" * 10_000: 1}, "There is no option"),
        ({"steps": 3}, "steps is a text"),
        ({"sites": "x" * 1001}, "at most 1,000 characters"),
        ({"ranks": "0,a"}, "ranks is '0,a'"),
        ({"exact": "yes"}, "exact is true or false"),
        ({"offset": 1.5}, "offset is a whole number"),
        ({"offset": True}, "offset is a whole number"),
        ({"offset": 1 << 80}, "offset is a whole number"),
        ({"tolerance": "bfloat16"}, "tolerance is 'bfloat16'"),
        ({"tolerance": [["a=1"]]}, "tolerance is a text"),
        ({"tolerance": {"a": 1}}, "tolerance is a text"),
    ],
)
def test_what_cannot_be_taken(options: object, why: str):
    with pytest.raises(UsageError) as caught:
        arguments_of(options)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300
