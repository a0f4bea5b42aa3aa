"""The state of a model (weights, gradients, optimizer states, activations) as an algebra with statistics.

    weight = astray.state.from_weight(model)
    before = weight.clone()
    ...
    (weight - before).describe(lw=True)

state_dict.py   `StateDict`: mapping.py with the methods of algebra.py, reductions.py and plots.py; its files
mapping.py      the mapping from names to values, which may be loaded or computed on demand; tensors in bounded blocks
algebra.py      operators and functions of torch, one name at a time
reductions.py   statistics: of all elements, of each parameter, of groups
describe.py     the table of a state
plots.py        histograms, distribution functions, heat maps, lines by layer
naming.py       patterns, groups, the parts of names that wrappers add; warnings that point at the user's line
measuring.py    values → moments, on a CPU, on a device, over processes
differences.py  two states compared: a table, the cosine, the trust ratio, the noise scale of gradients
models.py       what a state needs of a framework's models; torch_models.py and paddle_models.py have it
sources.py      where states come from: models, optimizers, checkpoints, activations
monitor.py      weights, gradients and updates every few steps, as a run
updates/        was each weight updated as its optimizer says?

Every name is loaded when it is first used. A state computes with torch, whatever its model is of, and a `Monitor` of a
training of Paddle needs none. `Monitor` imports the recorder, whose native code is built on first use.
"""

from typing import TYPE_CHECKING

from astray.errors import StateError

if TYPE_CHECKING:
    from astray.state.describe import StatisticsTable
    from astray.state.differences import NoiseScale, cosine, diff, gradient_noise_scale, trust_ratio
    from astray.state.monitor import Monitor
    from astray.state.reductions import register_reduction
    from astray.state.sources import (
        ActivationGradients,
        Activations,
        from_activation,
        from_activation_grad,
        from_grad,
        from_optimizer_state,
        from_state_dict,
        from_together,
        from_weight,
    )
    from astray.state.state_dict import StateDict, load_state
    from astray.state.updates import check_updates

__all__ = [
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
]

_MODULES = {
    "describe": ("StatisticsTable",),
    "differences": ("NoiseScale", "cosine", "diff", "gradient_noise_scale", "trust_ratio"),
    "monitor": ("Monitor",),
    "reductions": ("register_reduction",),
    "sources": (
        "ActivationGradients",
        "Activations",
        "from_activation",
        "from_activation_grad",
        "from_grad",
        "from_optimizer_state",
        "from_state_dict",
        "from_together",
        "from_weight",
    ),
    "state_dict": ("StateDict", "load_state"),
    "updates": ("check_updates",),
}
"""The names that a module has."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"astray.state has no {name!r}. It offers {', '.join(__all__)}.")
    try:
        found: object = getattr(import_module(f"astray.state.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise StateError(
            f"astray.state.{name} computes with torch, which is not installed. Install it, beside Paddle too: Paddle's "
            "tensors are computed with where they are, without a copy."
        ) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
