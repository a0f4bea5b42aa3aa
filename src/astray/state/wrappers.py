"""The names that wrappers put in front of a model's own: DDP, FSDP, torch.compile, activation checkpointing.

The same weight is `module.h.0.weight` under DDP and `_orig_mod.h.0.weight` when compiled. Names are left as the model
has them, unless asked: then states of differently wrapped models have the same names, and combine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PREFIXES = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that only wrappers make, wherever in a name they stand."""

OUTERMOST = "module"
"""What DDP and DataParallel call the model inside them: also a name that a model may have further inside, so that it
counts only where every name begins with it."""


def unwrapped(name: str) -> str:
    """A name without the parts that FSDP, torch.compile and activation checkpointing put into it.

    >>> unwrapped("_orig_mod.h.0._checkpoint_wrapped_module.weight")
    'h.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in PREFIXES)


def unwrapped_names(names: Iterable[str]) -> Mapping[str, str]:
    """The names as the model itself has them → the names as they are, in order.

    >>> unwrapped_names(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    {'fc.weight': 'module._orig_mod.fc.weight', 'fc.bias': 'module._orig_mod.fc.bias'}
    """
    originals = list(names)
    plain = [unwrapped(name) for name in originals]
    # A compiled DDP and a DDP of something compiled: `module` comes to the front when the others are gone.
    while plain and all(name.startswith(f"{OUTERMOST}.") for name in plain):
        plain = [name.removeprefix(f"{OUTERMOST}.") for name in plain]
    found: dict[str, str] = {}
    for original, name in zip(originals, plain, strict=True):
        if name in found:
            raise ValueError(
                f"Without the names of wrappers, {found[name]!r} and {original!r} would both be {name!r}. "
                "Keep the names as they are."
            )
        found[name] = original
    return found
