"""Where torch's own code lies. A folder ends in a separator: torchvision's name begins like torch's, too."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def torch_folder(*names: str) -> str:
    """A folder of torch's, as the names of the files in it begin."""
    return f"{Path(torch.__file__).parent.joinpath(*names)}{os.sep}"


TORCH = torch_folder()
