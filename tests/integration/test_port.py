"""The guide to a port, end to end: examples/port_gpt.py beside examples/train_gpt.py, by a drafted mapping."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import astray
from astray.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
CLASSES = """
types:
  'Decoder': 'GPT'
  'Layer': 'Block'
  'SelfAttention': 'Attention'
  'FeedForward': 'MLP'
"""


def record(folder: Path, script: str, *arguments: str) -> Path:
    command = [sys.executable, "-m", "astray", "run", "-o", str(folder), "--steps", "0:3", str(EXAMPLES / script)]
    subprocess.run([*command, *arguments], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


@pytest.mark.slow
def test_a_port_is_followed_to_its_mistake(tmp_path: Path) -> None:
    reference = record(tmp_path / "good", "train_gpt.py")
    port = record(tmp_path / "port", "port_gpt.py")
    mapping = tmp_path / "map.yaml"
    assert main(["map", str(reference), str(port), "-o", str(mapping)]) == 0
    mapping.write_text(mapping.read_text() + CLASSES)
    first = astray.compare(reference, port, mapping=mapping).first
    assert first is not None
    assert (first.site, first.step, first.phase) == ("h.0.mlp.act", 0, "forward")
    assert "have approximate none in the reference and tanh in the candidate" in " ".join(first.evidence)

    assert astray.compare(reference, record(tmp_path / "mended", "port_gpt.py", "--exact-gelu"), mapping=mapping).same
    half = record(tmp_path / "half", "port_gpt.py", "--exact-gelu", "--dtype", "bfloat16")
    assert astray.compare(reference, half, mapping=mapping).same
