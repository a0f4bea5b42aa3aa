"""Compiles a Triton kernel once for a device and launches it: a `KernelSource` → a `Kernel` that costs 2–3 µs a launch.

A kernel is requested at the first tensor of a kind, inside the user's program and on any of its threads. So neither
compiling nor loading changes what the program can see: not the current device or stream, no random number, no flag.
Where the native launcher cannot be used, Triton's own is, at 13 µs a launch (`ASTRAY_LAUNCHER=triton` in the
environment forces it); where Triton cannot either, `NoKernelsError` says why. A kernel stays loaded for the life of the
process, since unloading would wait for the device.

`relax_capture` and `unobserved` are for threads and for torch operations of our own.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch._C import DisableTorchFunction

from astray.interrupts import pass_interrupt
from astray.log import logger

LAUNCHED = 0
"""What `Kernel.launch` returns when the kernel was launched."""

CAPTURING = -1
"""What it returns, without launching, when the stream is being captured into a CUDA graph: the kernel would become a
part of the user's graph, and run with it from then on."""

FAILED = -2
"""What it returns when Triton's launcher failed. The driver's own errors are positive."""


class NoKernelsError(Exception):
    """Triton kernels cannot run here. The message says why; the plain torch kernels are used instead."""


class KernelSource(NamedTuple):
    """A Triton kernel and everything it is compiled for.

    `signature` names the runtime arguments in the function's order, all of 64 bits: addresses ("*u8", "*i64", …) and
    "i64". `constants` holds every other argument. `aligned` names arguments that are always multiples of 16.
    `fp_fusion` allows a·b+c in one rounding; it is always passed, because Triton's default is about to change.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = ()
    fp_fusion: bool = True


class Kernel(Protocol):
    """A kernel compiled and loaded for one device. Any thread may launch it, whatever device is current there."""

    def launch(self, programs: int, stream: int, /, *arguments: int) -> int:
        """Puts `programs` programs on a raw stream of the kernel's device and returns at once.

        The arguments are the values of the signature, addresses as integers. LAUNCHED (0) is success and CAPTURING a
        refusal; any other number is an error for `explain`. Nothing is raised but TypeError, for arguments that do not
        fit the signature.
        """

    def explain(self, code: int, /) -> str:
        """What a number that `launch` returned means, in a few words."""


def relax_capture() -> None:
    """Sets the relaxed capture mode: this thread may wait for the device without breaking a capture on another thread.

    For threads of our own only: a thread of the program would lose the protection of the stricter mode.
    """
    if not getattr(_threads, "relaxed", False):
        _threads.relaxed = True
        with contextlib.suppress(ImportError):
            from astray.device import _launch

            _launch.relax()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hides torch operations of our own in the user's program from a recording and from autograd.

    The tensors made are ordinary ones even under inference mode, where they could not be written to later.
    """
    with (
        DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


_threads = threading.local()
_kernels: dict[object, Kernel | NoKernelsError] = {}
_lock = threading.RLock()  # reentrant: a compile hook of the user's may compute something that is recorded


def kernel(source: KernelSource, device: int) -> Kernel:
    """The kernel of a source on the CUDA device of that number.

    Compiled at the first request, which takes about a second, or milliseconds when Triton's disk cache has it. A later
    lookup takes microseconds: code that launches often keeps the kernel. Raises NoKernelsError, immediately from the
    second time on.
    """
    key = (
        source.function,
        tuple(source.signature.items()),
        tuple((name, type(value), value) for name, value in source.constants.items()),  # True is not 1
        source[3:],
        device,
    )
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _build(source, device)
    if isinstance(found, NoKernelsError):
        raise NoKernelsError(*found.args)
    return found


def _build(source: KernelSource, device: int) -> Kernel | NoKernelsError:
    name = getattr(source.function, "__name__", source.function)
    try:
        compiled = compile_for(source, _target(device))
        try:
            return load_native(compiled, source, device)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            pass_interrupt(error)
            logger.info("Kernel %s is launched by Triton, which is slower: %s", name, error)
        return TritonKernel(compiled, source, device)
    except ImportError as error:
        return NoKernelsError(f"Triton is not installed ({error}).")
    except Exception as error:  # noqa: BLE001 - whatever it is, there are the torch kernels to fall back on
        pass_interrupt(error)
        return NoKernelsError(f"Triton cannot build kernel {name} for device {device}: {type(error).__name__}: {error}")


def compile_for(source: KernelSource, target: Any) -> Any:
    """Compiles for one of Triton's targets, which need not be in this machine. Returns a CompiledKernel, not loaded."""
    import triton
    from triton.compiler import ASTSource

    function = source.function
    if not isinstance(function, triton.runtime.JITFunction):
        raise TypeError(f"{function!r} is not a kernel that can be compiled; is TRITON_INTERPRET set?")
    names = function.arg_names
    if [name for name in names if name not in source.constants] != list(source.signature):
        raise ValueError(
            f"its arguments are {names}, but the signature has {list(source.signature)} and the constants are "
            f"{list(source.constants)}"
        )
    ast = ASTSource(
        fn=function,
        signature={name: source.signature.get(name, "constexpr") for name in names},
        constexprs=dict(source.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned},
    )
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": source.fp_fusion}
    return triton.compile(ast, target=target, options=options)


def _target(device: int) -> Any:
    if torch.version.hip is None:
        from triton.backends.compiler import GPUTarget

        major, minor = torch.cuda.get_device_capability(device)
        return GPUTarget("cuda", 10 * major + minor, 32)
    from triton.runtime import driver

    with torch.cuda.device(device):
        return driver.active.get_current_target()


# ---- the native launcher --------------------------------------------------------------------------------------------


def load_native(compiled: Any, source: KernelSource, device: int) -> Kernel:
    """Loads a compiled kernel into the device's primary context, by the driver itself.

    Not by way of Triton, which would build its own launcher first, with a C compiler that may not be there, and which
    unloads a kernel when its object goes, while it may still run. ValueError where the native launcher does not know
    how to launch it.
    """
    if os.environ.get("ASTRAY_LAUNCHER") == "triton":
        raise ValueError("ASTRAY_LAUNCHER=triton")
    from astray.device import _launch

    _check_plain(compiled.metadata)
    name, threads = compiled.metadata.name, 32 * compiled.metadata.num_warps
    ptx = compiled.asm.get("ptx", "")  # not there under TRITON_STORE_BINARY_ONLY
    count, hidden = len(source.signature), hidden_arguments(ptx, name, threads, len(source.signature))
    return _launch.load(compiled.asm["cubin"], name, device, threads, compiled.metadata.shared, count, hidden)


def _check_plain(metadata: Any) -> None:
    """ValueError for a kernel that needs more than a grid, a block, shared memory and its arguments."""
    if metadata.target.backend != "cuda":
        raise ValueError(f"the native launcher is for CUDA, and this is {metadata.target.backend}")
    requirements = {
        "global scratch memory": getattr(metadata, "global_scratch_size", 0),
        "profiler scratch memory": getattr(metadata, "profile_scratch_size", 0),
        "clusters": getattr(metadata, "num_ctas", 1) != 1,
        "a cooperative launch": getattr(metadata, "launch_cooperative_grid", False),
        "a programmatic dependent launch": getattr(metadata, "launch_pdl", False),
    }
    if wanted := [what for what, needed in requirements.items() if needed]:
        raise ValueError(f"it asks for {', '.join(wanted)}")


def hidden_arguments(ptx: str, name: str, threads: int, given: int) -> int:
    """How many arguments Triton appended to the `given` ones: addresses of scratch memory, null when unused.

    Read from the code itself, since their number differs between versions. ValueError where the code is not what is
    expected: another number of threads, arguments that are not of 64 bits, or too many.
    """
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)\s*\.reqntid\s+(\d+)", ptx)
    if entry is None:
        raise ValueError(f"its PTX has no entry {name} with a number of threads")
    if int(entry[2]) != threads:
        raise ValueError(f"its PTX asks for {entry[2]} threads, not {threads}")
    types = re.findall(r"\.param\s+\.(\w+)", entry[1])
    if not set(types) <= {"u64", "s64", "b64"}:
        raise ValueError(f"its arguments are {', '.join(types)}, not all of 64 bits")
    if not 0 <= len(types) - given <= 2:
        raise ValueError(f"its PTX takes {len(types)} arguments, but {given} are given and Triton adds at most 2")
    return len(types) - given


# ---- Triton's launcher ----------------------------------------------------------------------------------------------


class TritonKernel:
    """The same kernel by Triton's launcher: for ROCm, and for whatever the native one does not know."""

    failure: ClassVar[str] = ""
    """The last failure of any of them: any kernel explains the number of any other, as with the native ones."""

    def __init__(self, compiled: Any, source: KernelSource, device: int) -> None:
        names = source.function.arg_names
        self._compiled = compiled
        self._device = device
        self._values = [source.constants.get(name) for name in names]
        self._given = [names.index(name) for name in source.signature]
        with torch.cuda.device(device):
            compiled[(1, 1, 1)]  # loads it

    def launch(self, programs: int, stream: int, /, *arguments: int) -> int:
        """See `Kernel.launch`."""
        if len(arguments) != len(self._given):
            raise TypeError(
                f"A launch of this kernel takes 2 + {len(self._given)} arguments, not {2 + len(arguments)}."
            )
        if programs == 0:
            return LAUNCHED
        values = list(self._values)
        for at, argument in zip(self._given, arguments, strict=True):
            values[at] = argument
        try:
            # Triton launches on the current device, and torch can say only of the current stream that it is captured.
            with torch.cuda.stream(self._stream(stream)):
                if torch.cuda.is_current_stream_capturing():
                    return CAPTURING
                self._compiled[(programs, 1, 1)](*values, stream=stream)
        except Exception as error:  # noqa: BLE001 - the caller gets a number, as from the native launcher
            pass_interrupt(error)
            TritonKernel.failure = f"{type(error).__name__}: {error}"
            return FAILED
        return LAUNCHED

    def explain(self, code: int, /) -> str:
        """See `Kernel.explain`."""
        if code == FAILED:
            return f"Triton's launcher failed ({self.failure})"
        return "launched" if code == LAUNCHED else "not launched: the stream is being captured into a CUDA graph"

    def _stream(self, raw: int) -> torch.cuda.Stream:
        # torch treats the address 0 as none, and creates a new stream.
        if raw:
            return torch.cuda.ExternalStream(raw, self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.default_stream(self._device)
