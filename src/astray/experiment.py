"""`astray.experiment`: run the program again with one thing changed, and see whether the error goes away.

    astray.experiment.seed_all()                               the same random numbers each time
    with astray.experiment.without_dropout(): ...              no random numbers at all
    with astray.experiment.elsewhere(model, site, ...): ...    one module on another device, or in another dtype

`astray help experiments` has more.
"""

from __future__ import annotations

from astray.capture.experiments import elsewhere, seed_all, without_dropout

__all__ = [
    "elsewhere",
    "seed_all",
    "without_dropout",
]
