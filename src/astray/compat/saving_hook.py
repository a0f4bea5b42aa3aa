"""For programs written for the saving hook: `from astray.compat.saving_hook import register_saving_hook`.

    model = register_saving_hook(model, path="./tmp_tensors", target_class_names=["Linear", "LayerNorm"])

`python -m astray.compat.saving_hook --pathA A --pathB B` is its checker. `astray help saving-hook` explains
the differences.
"""

from __future__ import annotations

from astray.foreign.saving_hook.registration import register_hook, register_saving_hook, remove_saving_hook

__all__ = ["register_hook", "register_saving_hook", "remove_saving_hook"]

if __name__ == "__main__":
    import sys

    from astray.foreign.saving_hook.checker import main

    sys.exit(main())
