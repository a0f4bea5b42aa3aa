"""Scripts that know nothing of astray, and how the tests of the command line start them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TRAINING = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 0, 1, 0]))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(repr(loss.item()))
"""

MAY_OVERFLOW = """\
import sys
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, scale):
        h = torch.sigmoid(self.embed(x)) * scale
        return self.head(torch.log(h))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    loss = model(torch.randn(3, 4), 0.0 if step == {bad} else 1.0).square().mean()
    optimizer.zero_grad()
    loss.backward()
    {update}
    print(step, repr(loss.item()))
"""


def run_script(
    folder: Path, script: str, *options: str, arguments: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return command("run", "-o", str(folder / "run"), *options, str(path), *arguments, **environment)


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "astray", *words], capture_output=True, text=True, env={**os.environ, **environment}
    )
