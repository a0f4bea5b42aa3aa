"""What the names of the saving hook's files say.

    tensors/rank_0/tensor_idx_7_layer_class_Linear_layer_name_mlp.fc_micro_step_2.npy
    grads/rank_0/grad_idx_3_of_param_name_mlp.fc.weight_micro_step_2.npy

A layer that gives several tensors has a file for each, `layer_name_lstm@1.0`: what comes behind the `@` is its place in
the output. The layer that is the model itself has an empty name. What no file name may hold is written as in a URL.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from astray.records import ROOT
from astray.store.file_names import file_name

NAME = "saving_hook"

Folder = Literal["tensors", "grads"]
FOLDERS: tuple[Folder, ...] = ("tensors", "grads")
RESULTS = "compare_rst"
"""Where the checker puts its results, beside the folders of ranks."""

RANK_FOLDER = re.compile(r"rank_(\d{1,9})")

# A class has no `_layer_name_` in its name, and a layer may; numbers are short enough for the columns of a run.
_OF_LAYER = r"tensor_idx_(\d{1,9})_layer_class_(.+?)_layer_name_(.*)_micro_step_(\d{1,9})\.npy"
_OF_PARAMETER = r"(?:grad|tensor)_idx_(\d{1,9})_of_param_name_(.+)_micro_step_(\d{1,9})\.npy"
_TENSOR = re.compile(_OF_LAYER, re.DOTALL)
_GRAD = re.compile(_OF_PARAMETER, re.DOTALL)
_DRAFT = re.compile(r"\..*\.npy\.\d+", re.DOTALL)

_FORBIDDEN = re.compile(r"[/%@\x00]")
_ESCAPED = re.compile(r"%(2F|25|40|00)")


class Saved(NamedTuple):
    """What the name of a file says. `type` is the class of a layer; `path` the place of a tensor in the output."""

    idx: int
    site: str
    type: str
    micro: int
    path: str


def parse(folder: Folder, name: str) -> Saved | None:
    """What the name of a file in this folder says; None when it is of another form.

    >>> parse("grads", "grad_idx_3_of_param_name_linear_0.w_0_micro_step_2.npy")
    Saved(idx=3, site='linear_0.w_0', type='Parameter', micro=2, path='grad')
    """
    if any("\ud800" <= sign <= "\udfff" for sign in name):  # bytes that are no text, which no table could hold
        return None
    match = _GRAD.fullmatch(name) if folder == "grads" else None
    if match is not None:
        return Saved(int(match[1]), _plain(match[2]), "Parameter", int(match[3]), "grad")
    match = _TENSOR.fullmatch(name)  # the document of the format shows names of this form among the gradients too
    if match is None:
        return None
    if folder == "grads":
        return Saved(int(match[1]), _plain(match[3]), _plain(match[2]), int(match[4]), "grad")
    site, at, place = match[3].partition("@")
    path = f"out.{_plain(place)}" if at else "out"
    return Saved(int(match[1]), _plain(site) or ROOT, _plain(match[2]), int(match[4]), path)


def compose(folder: Folder, saved: Saved) -> str | None:
    """The name of a file; None when it would be longer than a name can be."""
    site = _FORBIDDEN.sub(_escape, "" if saved.site == ROOT else saved.site)
    if folder == "tensors":
        place = "" if saved.path == "out" else f"@{_FORBIDDEN.sub(_escape, saved.path.removeprefix('out.'))}"
        middle = f"tensor_idx_{saved.idx}_layer_class_{_FORBIDDEN.sub(_escape, saved.type)}_layer_name_{site}{place}"
    else:
        middle = f"grad_idx_{saved.idx}_of_param_name_{site}"
    return file_name(f"{middle}_micro_step_{saved.micro}", ".npy")


def is_draft(name: str) -> bool:
    """Whether it is a file that a kill has kept from being finished."""
    return _DRAFT.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """The rank whose folder is called so; None for any other folder."""
    match = RANK_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])


def _escape(sign: re.Match[str]) -> str:
    return f"%{ord(sign[0]):02X}"


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
