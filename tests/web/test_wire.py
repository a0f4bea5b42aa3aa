"""How documents travel."""

from __future__ import annotations

import json
import math

import numpy as np

from astray.store import DictionaryColumn
from astray.web.wire import encode, pack, plain
from page_documents import HOSTILE, unpack


def test_numbers_that_are_not_finite_are_texts():
    document = {"nan": math.nan, "inf": math.inf, "low": np.float32(-np.inf), "list": [1.5, math.nan], "n": np.int64(3)}
    assert json.loads(encode(document)) == {"nan": "nan", "inf": "inf", "low": "-inf", "list": [1.5, "nan"], "n": 3}


def test_documents_are_ascii_and_give_back_every_text():
    for text in [*HOSTILE, "lone \udc80 surrogate"]:
        found = encode({"name": text})
        assert found.isascii()
        assert json.loads(found) == {"name": text}


def test_what_json_does_not_know_becomes_a_text():
    assert plain({1: (object, None, True)}) == {"1": [str(object), None, True]}


def test_columns_come_back_as_they_were():
    columns = {
        "site": DictionaryColumn.of(["a", None, "</script>", "a", "b"]),
        "shape": DictionaryColumn.of([(2, 3), (), (7,), None, (2, 3)]),
        "error": np.array([1e-300, math.nan, math.inf, -0.0, 5.0]),
        "step": np.array([0, 1, 2, 3, 4]),
        "again": np.array([True, False, True, False, True]),
        "seq": np.array([0, 1, 2, 3, 1 << 40]),
    }
    found = unpack(pack(columns))
    assert found["site"] == ["a", None, "</script>", "a", "b"]
    assert found["shape"] == ["2×3", "scalar", "7", None, "2×3"]
    assert found["error"][0] == 1e-300
    assert math.isnan(found["error"][1])
    assert found["error"][2:] == [math.inf, 0.0, 5.0]
    assert found["step"] == [0, 1, 2, 3, 4]
    assert found["again"] == [1, 0, 1, 0, 1]
    assert found["seq"] == [0, 1, 2, 3, 1 << 40]


def test_a_table_without_rows():
    assert unpack(pack({"step": np.empty(0, np.int64), "site": DictionaryColumn.of([])})) == {"step": [], "site": []}
