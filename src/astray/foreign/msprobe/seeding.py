"""msprobe's `seed_all`, over `astray.seed_all` and `astray.without_dropout`."""

from __future__ import annotations

from astray.capture.seeding import seed_all as seed_everything
from astray.errors import UsageError


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False) -> None:
    """Give every source of random numbers the same seed.

    mode: also ask torch for the same bits each time.
    rm_dropout: no dropout drops anything from here on, on this thread. `astray.without_dropout` does it for a block.
    is_enhanced: not there. Record both programs instead, and compare: random numbers that differ are seen.
    """
    for name, given in (("mode", mode), ("rm_dropout", rm_dropout)):
        if not isinstance(given, bool):
            raise UsageError(f"{name}={given!r} is not possible. It is True or False.")
    if is_enhanced:
        raise UsageError(
            "is_enhanced=True is not there: random numbers are drawn as the program draws them. Leave it out."
        )
    seed_everything(seed, deterministic=mode)
    if rm_dropout:
        _remove_dropout()


def _remove_dropout() -> None:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    from astray.capture.pytorch.experiments.determinism import WithoutDropout

    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    inside = [mode for mode in stack if not isinstance(mode, DeviceContext)]
    if any(isinstance(mode, WithoutDropout) for mode in inside):
        return
    if inside:  # which would take ours away in the place of its own when it ends
        raise UsageError(
            "rm_dropout=True lasts until the program ends, and this is inside of a block of "
            f"{type(inside[-1]).__name__}. Call seed_all before it, or use `with astray.without_dropout():` in it."
        )
    WithoutDropout().__enter__()  # type: ignore[no-untyped-call]
