from collections.abc import Callable
from typing import Any

from astray.record import Role

class Taker:
    """Observes the plain tensors of one recording. See `astray.capture.reading.Taker` and `TorchReader.taker`.

    `examples` has a tensor of every dtype with the name of it, `devices` the names of devices, `rings` the rings of
    CUDA devices. `stream` says which stream of a device is current, `together` measures tensors of a device by one
    launch, `measure` measures memory of this process: its twin does where that is None. ImportError or AttributeError
    where torch is not as it has to be.
    """

    def __new__(
        cls,
        examples: list[tuple[Any, str]],
        parameter_type: type,
        devices: dict[Any, str],
        rings: dict[Any, Any],
        stream: Callable[[int], int] | None,
        together: Callable[..., list[int] | None],
        measure: Callable[..., Any] | None,
        identity: Callable[..., Any],
        unfilled: dict[int, Any],
        writer: Any,
        lane: Any,
        batch: int,
        observe: Callable[..., bool | None],
        observe_unread: Callable[..., bool | None],
        written: Callable[..., None],
        changed: Callable[..., None],
        first: Callable[..., tuple[Any, ...]],
        /,
    ) -> Taker: ...
    def observe(self, seq: int, role: Role, path: str, tensor: Any, /) -> bool | None: ...
    def observe_unread(self, seq: int, role: Role, path: str, tensor: Any, /) -> bool | None: ...
    def observe_inputs(self, seq: int, inputs: list[tuple[str, Any]], unread: list[Any], /) -> None: ...
    def apply(self, on: bool, roles: frozenset[str], statistics: bool, values: bool, /) -> None: ...
    def catch(self, on: bool, /) -> None: ...
    def written(self, tensor: Any, /) -> None: ...
    def changed(self, tensor: Any, /) -> None: ...
    def forget(self, owner: Any, /) -> None: ...
    def clear(self) -> None: ...
    def next_step(self) -> None: ...
    def counted(self) -> int: ...
