"""`PrecisionDebugger` and `seed_all` as msprobe has them: a name for a `Session`, with methods callable on the class.

msprobe has one debugger in a program, and a second one with another configuration is ignored in silence. Here each
folder has its own; the same folder with another configuration is refused.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from astray.errors import RecordError, UsageError
from astray.experiment import seed_all as seed_everything
from astray.foreign.msprobe.configuration import Configuration
from astray.foreign.msprobe.session import Session

P = ParamSpec("P")
R = TypeVar("R")


class _OnClassToo(Generic[P, R]):
    """A method that may be called on the class as well: there it is that of the only debugger there is."""

    def __init__(self, method: Callable[Concatenate[PrecisionDebugger, P], R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, debugger: PrecisionDebugger | None, owner: type[PrecisionDebugger]) -> Callable[P, R]:
        @functools.wraps(self._method)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._method(owner.only() if debugger is None else debugger, *args, **kwargs)

        return bound


class PrecisionDebugger:
    """Dumps the tensors of a training in msprobe's layout.

    >>> debugger = PrecisionDebugger("config.json", dump_path="./dump")
    >>> for data, label in loader:
    ...     debugger.start(model)
    ...     loss = criterion(model(data), label)
    ...     loss.backward()
    ...     debugger.stop()
    ...     debugger.step()

    config_path: a config.json. The other arguments win over it; `astray help moving-from-msprobe` has every key.
    model: a module or a list of modules, here or in `start`. Levels L0 and mix need one.
    step: which steps, such as [0, "4-6"]; [] for all.
    support_wrap_ops: your own list of functions, in place of the file inside of msprobe that people edit.
    overwrite: replace a dump that is in the folder already.
    """

    _sessions: ClassVar[dict[str, Session]] = {}

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        model: Any = None,
        step: Any = None,
        *,
        support_wrap_ops: Any = None,
        overwrite: bool = False,
    ) -> None:
        asked = Configuration.check(config_path, task, dump_path, level, step, support_wrap_ops)
        self._place = os.path.realpath(asked.dump_path)
        there = self._sessions.get(self._place)
        if there is None:
            there = self._sessions[self._place] = Session(asked, model, overwrite)
        elif differences := asked.differences(there.configuration):
            raise RecordError(
                f"A debugger dumps into {asked.dump_path} already, by another configuration: {'; '.join(differences)}. "
                "Give this one another dump_path, or close() the first."
            )
        self._session = there

    @classmethod
    def only(cls) -> PrecisionDebugger:
        """The debugger that is meant when a method is called on the class."""
        if len(cls._sessions) == 1:
            debugger = cls.__new__(cls)
            ((debugger._place, debugger._session),) = cls._sessions.items()
            return debugger
        if not cls._sessions:
            raise RecordError("There is no debugger yet. Make one: PrecisionDebugger('config.json').")
        raise RecordError(
            f"There are {len(cls._sessions)} debuggers, for {', '.join(cls._sessions)}, and it was not said which one "
            "is meant. Call the method on the debugger itself."
        )

    @_OnClassToo
    def start(
        self, model: Any = None, token_range: Any = None, rank_id: int | None = None, scheduled_tokens: Any = None
    ) -> None:
        """Record from here on. rank_id: which rank this is, where torch.distributed does not know."""
        for name, given in (("token_range", token_range), ("scheduled_tokens", scheduled_tokens)):
            if given is not None:
                raise RecordError(
                    f"start() was given {name}={given!r}, but tokens are not counted here. Call start() and stop() "
                    "around those that are meant."
                )
        self._session.start(model, rank_id)

    @_OnClassToo
    def stop(self) -> None:
        """Record nothing until the next `start`. When it returns, the files tell of everything before."""
        self._session.stop()

    @_OnClassToo
    def step(self) -> None:
        """A step is over, and its files are complete."""
        self._session.step()

    @_OnClassToo
    def forward_backward_dump_end(self) -> None:
        """Record only what has run since `start`, and the backward of that: nothing else until the step is over."""
        self._session.end_forward()

    @_OnClassToo
    def save(self, variable: Any, name: str, save_backward: bool = True) -> None:
        """Record a value of your own under a name, and the gradients that arrive at it: into debug.json."""
        self._session.save(variable, name, save_backward)

    @_OnClassToo
    def set_init_step(self, step: int) -> None:
        """The number of the first step, for a program that goes on where another one stopped."""
        self._session.begin_at(step)

    @_OnClassToo
    def close(self) -> None:
        """Remove every hook and end the dump. A program that ends does it by itself."""
        self._session.close()
        self._sessions.pop(self._place, None)


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False) -> None:
    """Give every source of random numbers the same seed, as `astray.experiment.seed_all` does.

    mode: also ask torch for the same bits each time.
    rm_dropout: no dropout drops anything from here on, on this thread. `astray.experiment.without_dropout` does it for
        a block.
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
            f"{type(inside[-1]).__name__}. Call seed_all before it, or use "
            "`with astray.experiment.without_dropout():` in it."
        )
    WithoutDropout().__enter__()  # type: ignore[no-untyped-call]
