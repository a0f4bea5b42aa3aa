"""What PyTorch and Paddle call the same things, and which weights they store transposed.

Data alone: drafts of mappings write into a file what two runs need of it, and `astray.load_from` pairs names by it. A
comparison applies nothing of this that is not in a mapping file.

A table has torch's word first. Several words of Paddle may stand for one of torch's, and the other way round; of these
a draft takes the one that the runs have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

TORCH, PADDLE = "torch", "paddle"

Words = tuple[tuple[str, str], ...]

CLASSES: Words = (
    ("ModuleList", "LayerList"), ("ModuleDict", "LayerDict"), ("MultiheadAttention", "MultiHeadAttention"),
    ("SiLU", "Silu"), ("SiLU", "Swish"), ("RNN", "SimpleRNN"), ("RNNCell", "SimpleRNNCell"),
    ("ConvTranspose1d", "Conv1DTranspose"), ("ConvTranspose2d", "Conv2DTranspose"),
    ("ConvTranspose3d", "Conv3DTranspose"), ("MaxUnpool1d", "MaxUnPool1D"), ("MaxUnpool2d", "MaxUnPool2D"),
    ("MaxUnpool3d", "MaxUnPool3D"), ("SGD", "Momentum"), ("RMSprop", "RMSProp"),
)  # fmt: skip
"""Classes of modules and optimizers; besides these, `BatchNorm2d` is `BatchNorm2D`, and so are all with dimensions."""

_DIMENSIONS = re.compile(r"(.*[123])d")

TENSORS: Words = (
    ("running_mean", "_mean"), ("running_var", "_variance"), ("weight", "scale"), ("weight", "_weight"),
    ("exp_avg", "moment1"), ("exp_avg_sq", "moment2"), ("max_exp_avg_sq", "moment2_max"),
    ("momentum_buffer", "velocity"), ("momentum_buffer", "momentum"), ("exp_avg", "moment"), ("sum", "moment"),
    ("exp_inf", "inf_norm"), ("square_avg", "mean_square"), ("grad_avg", "mean_grad"),
    ("square_avg", "_avg_squared_grad"), ("acc_delta", "_avg_squared_update"),
)  # fmt: skip
"""Parameters, buffers and states of optimizers, by the last part of their names."""

ONLY_IN = {
    TORCH: ("num_batches_tracked", "step"),
    PADDLE: ("beta1_pow_acc", "beta2_pow_acc"),
}
"""What one framework alone keeps: both count steps, torch as a number, Paddle as powers of the betas."""

ATTRIBUTES: Words = (
    ("eps", "epsilon"), ("dim", "axis"), ("kernel_size", "ksize"), ("start_dim", "start_axis"),
    ("end_dim", "stop_axis"), ("lr", "learning_rate"), ("betas.0", "beta1"), ("betas.1", "beta2"),
    ("nesterov", "use_nesterov"),
    ("weight_decay", "regularization_coeff"), ("alpha", "rho"),
)  # fmt: skip
"""What modules and optimizers are set to, where the names differ by more than the underscore that Paddle's layers put
before theirs."""

_NORMALISATIONS = (
    "BatchNorm1D", "BatchNorm2D", "BatchNorm3D", "SyncBatchNorm", "InstanceNorm1D", "InstanceNorm2D", "InstanceNorm3D",
)  # fmt: skip

ATTRIBUTES_OF_CLASSES: dict[str, dict[str, Any]] = {
    **{name: {"momentum": "1 - momentum"} for name in _NORMALISATIONS},
    "GELU": {"approximate": {"approximate": {False: "none", True: "tanh"}}},
    "Adadelta": {"rho": "rho"},
}
"""Those that mean something else in some classes of Paddle: its momentum is the share of the old running statistics,
and torch's that of the new ones."""

FUNCTIONS: Words = (
    ("mul", "multiply"), ("mul", "scale"), ("div", "scale"), ("sub", "subtract"), ("div", "divide"),
    ("truediv", "divide"), ("pow", "elementwise_pow"), ("cat", "concat"), ("permute", "transpose"),
    ("batch_norm", "batch_norm_"), ("conv2d", "depthwise_conv2d"),
    ("getitem", "slice"), ("to", "cast"), ("silu", "swish"), ("repeat", "tile"), ("clamp", "clip"),
    ("index_select", "gather"), ("max_pool2d", "pool2d"), ("avg_pool2d", "pool2d"), ("adaptive_avg_pool2d", "pool2d"),
    ("eq", "equal"), ("ne", "not_equal"), ("lt", "less_than"), ("gt", "greater_than"),
)  # fmt: skip
"""Functions, by the last part of their sites: those that take the same tensors, laid out alike. Attention is none of
them, for Paddle's has heads and positions the other way round; nor is the loss that also returns a softmax."""

LABELS: Words = (("target", "label"), ("targets", "labels"))
"""The arguments by which losses take labels, which are recorded also where only modules are."""

TRANSPOSED: dict[tuple[str, str], str] = {
    ("Linear", "weight"): "paddle.nn.Linear keeps its weight as [in, out], torch.nn.Linear as [out, in]",
}
"""Parameters that the frameworks store transposed, by the class of their module and the last part of their names."""


_VARIANCES = "torch keeps the variance over n - 1 elements in training, Paddle the one over n"

UNLIKE = {"running_var": _VARIANCES, "_variance": _VARIANCES}
"""Tensors that each framework computes in its own way, by either name, and what that is."""


class Equivalents(NamedTuple):
    """What a run of one framework calls the things of another, in one direction."""

    reference: str
    candidate: str

    def types(self, name: str) -> list[str]:
        """What the reference may call a class of the candidate."""
        found = self._words(CLASSES, name)
        if self.candidate == PADDLE and re.fullmatch(r".*[123]D", name):
            found.append(f"{name[:-1]}d")
        elif self.candidate == TORCH and (dimensions := _DIMENSIONS.fullmatch(name)):
            found.append(f"{dimensions[1]}D")
        return found

    def tensors(self, name: str) -> list[str]:
        """What the reference may call a parameter, a buffer or a state."""
        return self._words(TENSORS, name)

    def functions(self, name: str) -> list[str]:
        """What the reference may call a function."""
        return self._words(FUNCTIONS, name)

    def labels(self, name: str) -> list[str]:
        """What the reference may call the argument by which a loss takes its labels."""
        return self._words(LABELS, name)

    def attribute(self, type: str, name: str) -> Any:
        """What the reference calls something that a class of the candidate is set to; None where it has no word for it.

        It is a name, "1 - name", or a name with the values that stand for each other.
        """
        if self.candidate == PADDLE:
            bare = name.lstrip("_")
            return ATTRIBUTES_OF_CLASSES.get(type, {}).get(bare) or next(iter(self._words(ATTRIBUTES, bare)), None)
        for paddle_type in self.types(type) or [type]:
            for theirs, rule in ATTRIBUTES_OF_CLASSES.get(paddle_type, {}).items():
                if found := _turned(theirs, rule, name):
                    return found
        return next(iter(self._words(ATTRIBUTES, name)), None)

    def is_transposed(self, type: str, name: str) -> str:
        """Why a parameter of a class is stored transposed; empty where it is not."""
        return TRANSPOSED.get((type, name), "")

    def only_in(self, side: str) -> tuple[str, ...]:
        """The tensors that the framework of one side alone has."""
        return ONLY_IN[self.reference if side == "reference" else self.candidate]

    def _words(self, table: Words, name: str) -> list[str]:
        return list(_lookup(table, name, from_torch=self.candidate == TORCH))


def equivalents(reference: str | None, candidate: str | None) -> Equivalents | None:
    """What runs of two frameworks call the same things; None where both are of one, or of one that is not known."""
    if {reference, candidate} != {TORCH, PADDLE}:
        return None
    return Equivalents(str(reference), str(candidate))


def _lookup(table: Iterable[tuple[str, str]], name: str, *, from_torch: bool) -> Iterator[str]:
    for of_torch, of_paddle in table:
        if name == (of_torch if from_torch else of_paddle):
            yield of_paddle if from_torch else of_torch


def _turned(theirs: str, rule: Any, name: str) -> Any:
    """A rule for Paddle's attribute, as one for torch's."""
    if isinstance(rule, dict):
        (ours, values), *_ = rule.items()
        return {theirs: {new: old for old, new in values.items()}} if ours == name else None
    bare = rule.removeprefix("1 - ")
    return rule.replace(bare, theirs) if bare == name else None
