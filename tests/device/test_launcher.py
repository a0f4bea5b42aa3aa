"""Kernels are compiled once, launched with exactly the arguments given, and never into a user's graph.

Without a card: the native launcher talks to `fake_driver.c`, which writes down what it was asked, and the kernels are
really compiled, for a card that is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from astray.device import launcher
from astray.device.launcher import CAPTURING, FAILED, LAUNCHED, KernelSource, NoKernelsError, TritonKernel

_launch = pytest.importorskip("astray.device._launch", reason="The native launcher was not built: no C compiler?")

CONTEXT = 1000
"""The primary context of the fake driver's device 0."""


class Driver:
    """The fake driver: its variables as attributes, its calls as lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))

    def set(self, type: Any = ctypes.c_int, **values: Any) -> None:
        for name, value in values.items():
            type.in_dll(self.library, name).value = value

    def get(self, name: str, type: Any = ctypes.c_uint64) -> int:
        value: int = type.in_dll(self.library, name).value
        return value

    def fail(self, function: str, error: int = 700) -> None:
        self.set(ctypes.c_char * 64, failing=function.encode())
        self.set(failure=error)

    def calls(self) -> list[str]:
        """The calls since the last time."""
        log = (ctypes.c_char * (1 << 16)).in_dll(self.library, "calls")
        lines = log.value.decode().splitlines()
        log.value = b""
        return lines

    def reset(self) -> None:
        self.fail("")
        self.set(status=0, capture_answer=0, words=0, blocked=0, arrived=0, released=0, mode=0)
        self.set(ctypes.c_uint64, current=CONTEXT, pushed=0, loaded=0)
        self.calls()


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("There is no C compiler here to build the fake driver with.")

    def run(name: str, *flags: str) -> Path:
        library = tmp_path_factory.mktemp("driver") / name
        source = Path(__file__).with_name("fake_driver.c")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-Wl,-Bsymbolic", *flags, "-o", library, source], check=True
        )
        return library

    return run


@pytest.fixture(scope="session")
def library(build: Callable[..., Path]) -> Path:
    return build("libfake.so")


@pytest.fixture
def driver(library: Path) -> Iterator[Driver]:
    fake = Driver(library)
    fake.reset()
    _launch.open(str(library))
    yield fake
    with contextlib.suppress(OSError):  # where there is a real one, the tests that follow want it
        _launch.open(_launch.DRIVER)


def loaded(arguments: int = 2, hidden: int = 0, shared: int = 0, device: int = 0) -> Any:
    return _launch.load(b"binary", "measure", device, 128, shared, arguments, hidden)


# ---- the native launcher, against the fake driver --------------------------------------------------------------------


def test_a_kernel_is_loaded_into_the_primary_context(driver: Driver) -> None:
    loaded(device=3)
    assert driver.calls() == ["push 1030", "load binary mode 2", "function measure of 7", "pop"]
    assert driver.get("pushed") == 0
    assert driver.get("loaded") == 1


def test_loading_leaves_the_capture_mode_as_it_was(driver: Driver) -> None:
    driver.set(mode=1)
    loaded()
    assert driver.get("mode", ctypes.c_int) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere the driver has another name.")
def test_a_thread_relaxes_its_capture_mode_though_nothing_has_been_loaded_yet(library: Path, tmp_path: Path) -> None:
    shutil.copy(library, tmp_path / "libcuda.so.1")
    program = """if True:
        import ctypes
        from astray.device.launcher import relax_capture
        relax_capture()
        print(ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "mode").value)
        """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "2\n"


@pytest.mark.parametrize(("shared", "asks"), [(48 * 1024, []), (48 * 1024 + 1, ["attribute 8 of 8 = 49153"])])
def test_much_shared_memory_is_requested(driver: Driver, shared: int, asks: list[str]) -> None:
    loaded(shared=shared)
    assert [call for call in driver.calls() if call.startswith("attribute")] == asks


@pytest.mark.parametrize(
    ("function", "pops"),
    [
        ("cuInit", 0),
        ("cuDeviceGet", 0),
        ("cuDevicePrimaryCtxRetain", 0),
        ("cuCtxPushCurrent_v2", 0),
        ("cuModuleLoadData", 1),
        ("cuModuleGetFunction", 1),
        ("cuFuncSetAttribute", 1),
    ],
)
def test_a_failed_load_says_what_failed_and_leaves_nothing(driver: Driver, function: str, pops: int) -> None:
    driver.fail(function)
    message = rf"^{function} gave CUDA_ERROR_ILLEGAL_ADDRESS \(700\) for kernel measure on device 0\.$"
    with pytest.raises(RuntimeError, match=message):
        loaded(shared=1 << 17)
    assert driver.calls().count("pop") == pops
    assert driver.get("loaded") == driver.get("pushed") == 0


def test_arguments_are_packed_in_order_and_hidden_ones_are_null(driver: Driver) -> None:
    kernel = loaded(arguments=4, hidden=2, shared=64)
    driver.calls()
    driver.set(words=6)
    assert kernel.launch(5, 0xABC, 0xFFFF_8000_0000_0000, 0, -1, 2**63 - 1) == LAUNCHED
    assert driver.calls() == [
        "launch 8 grid 5 1 1 block 128 1 1 shared 64 stream abc extra 0: "
        "ffff800000000000 0 ffffffffffffffff 7fffffffffffffff 0 0"
    ]


def test_as_many_arguments_as_fit(driver: Driver) -> None:
    most = _launch.MAX_ARGUMENTS
    kernel = loaded(arguments=most - 2, hidden=2)
    driver.calls()
    driver.set(words=most)
    assert kernel.launch(1, 0, *range(1, most - 1)) == LAUNCHED
    words = driver.calls()[0].partition(": ")[2].split()
    assert [int(word, 16) for word in words] == [*range(1, most - 1), 0, 0]
    with pytest.raises(ValueError, match=rf"measure takes {most} \+ 1 arguments; .* at most {most}\."):
        loaded(arguments=most, hidden=1)


@pytest.mark.parametrize("given", [(), (1,), (1, 0, 1), (1, 0, 1, 2, 3)])
def test_a_wrong_number_of_arguments_launches_nothing(driver: Driver, given: tuple[int, ...]) -> None:
    kernel = loaded(arguments=2)
    driver.calls()
    with pytest.raises(TypeError, match=rf"takes 2 \+ 2 arguments, not {len(given)}\."):
        kernel.launch(*given)
    assert driver.calls() == []


@pytest.mark.parametrize("given", [(1.5, 0, 1, 2), (1, 0, "a", 2), (1, 0, 1, None)])
def test_only_integers_are_arguments(driver: Driver, given: tuple[Any, ...]) -> None:
    kernel = loaded(arguments=2)
    driver.calls()
    with pytest.raises(TypeError):
        kernel.launch(*given)
    assert driver.calls() == []


@pytest.mark.parametrize(("programs", "code"), [(0, LAUNCHED), (2**31, 1), (-1, 1)])
def test_grids_that_cannot_be(driver: Driver, programs: int, code: int) -> None:
    kernel = loaded()
    driver.calls()
    assert kernel.launch(programs, 0, 1, 2) == code
    assert driver.calls() == []


@pytest.mark.parametrize(
    "state", [{"status": 1}, {"status": 2}, {"capture_answer": 906}], ids=["active", "invalidated", "null stream"]
)
def test_nothing_is_launched_into_a_capture(driver: Driver, state: dict[str, int]) -> None:
    kernel = loaded()
    driver.calls()
    driver.set(**state)
    assert kernel.launch(1, 0, 1, 2) == CAPTURING
    assert driver.calls() == []
    assert kernel.explain(CAPTURING) == "not launched: the stream is being captured into a CUDA graph"


@pytest.mark.parametrize("other", [0, 55], ids=["no context", "another device"])
def test_the_threads_own_context_is_put_back(driver: Driver, other: int) -> None:
    kernel = loaded()
    driver.calls()
    driver.set(ctypes.c_uint64, current=other)
    assert kernel.launch(1, 0, 1, 2) == LAUNCHED
    first, launch, last = driver.calls()
    assert (first, last) == (f"push {CONTEXT}", "pop")
    assert launch.startswith("launch 8 ")
    driver.set(status=1)
    assert kernel.launch(1, 0, 1, 2) == CAPTURING
    assert driver.calls() == [f"push {CONTEXT}", "pop"]
    assert driver.get("pushed") == 0


@pytest.mark.parametrize("function", ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuLaunchKernel"])
def test_an_error_of_the_driver_is_a_number(driver: Driver, function: str) -> None:
    kernel = loaded()
    driver.set(ctypes.c_uint64, current=0)
    driver.fail(function)
    code = kernel.launch(1, 0, 1, 2)
    assert code == 700
    assert kernel.explain(code) == "the CUDA driver answered CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    assert driver.get("pushed") == 0


def test_other_numbers_are_explained(driver: Driver) -> None:
    kernel = loaded()
    driver.set(capture_answer=401)
    assert kernel.launch(1, 0, 1, 2) == 401
    assert kernel.explain(401) == "the CUDA driver answered an error the driver has no name for (401)"
    assert kernel.explain(LAUNCHED) == "launched"


def test_other_threads_run_while_a_launch_waits(driver: Driver) -> None:
    kernel = loaded()
    driver.set(blocked=1)
    waiting = threading.Thread(target=lambda: codes.append(kernel.launch(1, 0, 1, 2)))
    codes: list[int] = []
    waiting.start()
    while not driver.get("arrived", ctypes.c_int):
        pass
    assert codes == []
    driver.set(released=1)
    waiting.join()
    assert codes == [LAUNCHED]


def test_a_driver_is_taken_wholly_or_not_at_all(driver: Driver, build: Callable[..., Path], tmp_path: Path) -> None:
    half = build("libhalf.so", "-DWITHOUT_LAUNCH")
    with pytest.raises(OSError, match=rf"^The CUDA driver {half} has no function cuLaunchKernel\.$"):
        _launch.open(str(half))
    with pytest.raises(OSError, match=rf"^The CUDA driver {tmp_path}/none\.so cannot be opened\.$"):
        _launch.open(f"{tmp_path}/none.so")
    assert loaded().launch(1, 0, 1, 2) == LAUNCHED
    assert driver.calls()[-1].startswith("launch ")


def test_a_kernel_cannot_be_made_by_hand() -> None:
    with pytest.raises(TypeError, match="cannot create"):
        _launch.Kernel()


# ---- compiling, for a card that is not there -------------------------------------------------------------------------

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing that is compiled could be tested.")
tl = pytest.importorskip("triton.language")


@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0) * factor, mask=at < n)


@triton.jit
def narrow(x, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at, mask=at < n)


SCALE = KernelSource(
    scale, {"x": "*i64", "out": "*i64", "n": "i64", "factor": "i64"}, {"BLOCK": 256}, aligned=("x", "out")
)
HOPPER = triton.backends.compiler.GPUTarget("cuda", 90, 32)
HIDDEN = 2 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5) else 1
"""Addresses of scratch memory: a global one, and since Triton 3.5 a profiler's."""


@pytest.fixture
def hopper(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with the fake driver's card in it, where nothing has been compiled yet."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launcher, "_kernels", {})
    monkeypatch.delenv("ASTRAY_LAUNCHER", raising=False)
    return driver


class Stand:
    """In place of Triton's launcher, which needs a card."""

    def __init__(self, compiled: Any, source: KernelSource, device: int) -> None:
        self.made_for = compiled.metadata.name, source, device


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_hidden_arguments_are_counted_in_the_code(capability: int) -> None:
    compiled = launcher.compile_for(SCALE, triton.backends.compiler.GPUTarget("cuda", capability, 32))
    assert launcher.hidden_arguments(compiled.asm["ptx"], "scale", 128, 4) == HIDDEN


def test_code_that_is_not_as_expected_is_refused() -> None:
    ptx = launcher.compile_for(SCALE, HOPPER).asm["ptx"]
    with pytest.raises(ValueError, match="no entry other"):
        launcher.hidden_arguments(ptx, "other", 128, 4)
    with pytest.raises(ValueError, match="asks for 128 threads, not 256"):
        launcher.hidden_arguments(ptx, "scale", 256, 4)
    with pytest.raises(ValueError, match=f"takes {4 + HIDDEN} arguments, but 1 are given"):
        launcher.hidden_arguments(ptx, "scale", 128, 1)
    with pytest.raises(ValueError, match=f"takes {4 + HIDDEN} arguments, but 7 are given"):
        launcher.hidden_arguments(ptx, "scale", 128, 7)
    short = launcher.compile_for(KernelSource(narrow, {"x": "*i32", "n": "i32"}, {"BLOCK": 64}), HOPPER).asm["ptx"]
    with pytest.raises(ValueError, match=r"its arguments are u64, u32, u64.*, not all of 64 bits"):
        launcher.hidden_arguments(short, "narrow", 128, 2)


def test_a_kernel_from_source_to_launch(hopper: Driver) -> None:
    kernel = launcher.kernel(SCALE._replace(num_warps=8), 0)
    _, load, function, _ = hopper.calls()
    assert load.startswith("load \x7fELF")
    assert function == "function scale of 7"
    hopper.set(words=4 + HIDDEN)
    assert kernel.launch(3, 0, 0x10, 0x20, 700, 5) == LAUNCHED
    launched, words = hopper.calls()[0].split(": ")
    assert launched.startswith("launch 8 grid 3 1 1 block 256 1 1 shared ")
    assert words.split() == ["10", "20", "2bc", "5"] + ["0"] * HIDDEN


def test_what_is_aligned_changes_the_code() -> None:
    def ptx(*aligned: str) -> str:
        text: str = launcher.compile_for(SCALE._replace(aligned=aligned), HOPPER).asm["ptx"]
        return text

    assert "ld.global.v2.b64" in ptx("x", "out", "n")
    assert "ld.global.v2.b64" not in ptx("out", "n")


def test_a_kernel_is_compiled_once_for_each_device(hopper: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for, compiled = launcher.compile_for, []

    def counting(source: KernelSource, target: Any) -> Any:
        compiled.append(source)
        return compile_for(source, target)

    monkeypatch.setattr(launcher, "compile_for", counting)
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda _: launcher.kernel(SCALE, 0), range(32)))
    assert len(compiled) == 1
    assert set(map(id, kernels)) == {id(kernels[0])}
    assert launcher.kernel(SCALE, 1) is not kernels[0]
    assert launcher.kernel(SCALE._replace(constants={"BLOCK": 128}), 0) is not kernels[0]
    assert launcher.kernel(SCALE._replace(fp_fusion=False), 0) is not kernels[0]
    assert len(compiled) == 4


def test_constants_that_are_equal_but_not_alike_are_two_kernels(hopper: Driver) -> None:
    launcher.kernel(SCALE, 0)
    with pytest.raises(NoKernelsError):  # a block of 256.0 elements
        launcher.kernel(SCALE._replace(constants={"BLOCK": 256.0}), 0)


def test_compiling_leaves_no_trace_in_the_program(hopper: Driver, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # so that it is really compiled

    def state() -> tuple[Any, ...]:
        numpy = np.random.get_state()
        flags = torch.backends.cuda.matmul.allow_tf32, torch.is_grad_enabled(), torch.get_default_dtype()
        return random.getstate(), numpy[1].tolist(), torch.get_rng_state().tolist(), flags, dict(os.environ), Path.cwd()

    before = state()
    launcher.kernel(SCALE, 0)
    assert state() == before
    assert list((tmp_path / "cache").rglob("scale.cubin"))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("global_scratch_size", 128, "it asks for global scratch memory"),
        ("profile_scratch_size", 8, "it asks for profiler scratch memory"),
        ("num_ctas", 2, "it asks for clusters"),
        ("launch_cooperative_grid", True, "it asks for a cooperative launch"),
        ("launch_pdl", True, "it asks for a programmatic dependent launch"),
        ("num_warps", 2, "its PTX asks for 128 threads, not 64"),
        ("target", triton.backends.compiler.GPUTarget("hip", "gfx942", 64), "is for CUDA, and this is hip"),
    ],
)
def test_kernels_that_need_more_go_to_tritons_launcher(
    hopper: Driver, monkeypatch: Any, caplog: Any, field: str, value: Any, why: str
) -> None:
    compile_for = launcher.compile_for

    def altered(source: KernelSource, target: Any) -> Any:
        compiled = compile_for(source, target)
        compiled.metadata = SimpleNamespace(**compiled.metadata._asdict() | {field: value})
        return compiled

    monkeypatch.setattr(launcher, "compile_for", altered)
    monkeypatch.setattr(launcher, "TritonKernel", Stand)
    with caplog.at_level(logging.INFO, "astray"):
        kernel = launcher.kernel(SCALE, 0)
    assert isinstance(kernel, Stand)
    assert kernel.made_for == ("scale", SCALE, 0)
    assert [why in message for message in caplog.messages] == [True]
    assert caplog.messages[0].startswith("Kernel scale is launched by Triton, which is slower: ")
    assert hopper.calls() == []


def test_tritons_launcher_serves_where_the_native_one_is_missing(hopper: Driver, monkeypatch: Any) -> None:
    monkeypatch.setattr(launcher, "TritonKernel", Stand)
    monkeypatch.delattr("astray.device._launch")
    monkeypatch.setitem(sys.modules, "astray.device._launch", None)
    assert isinstance(launcher.kernel(SCALE, 0), Stand)


def test_tritons_launcher_is_used_on_request_or_when_loading_fails(hopper: Driver, monkeypatch: Any) -> None:
    monkeypatch.setattr(launcher, "TritonKernel", Stand)
    hopper.fail("cuModuleLoadData")
    assert isinstance(launcher.kernel(SCALE, 0), Stand)
    hopper.reset()
    monkeypatch.setenv("ASTRAY_LAUNCHER", "triton")
    assert isinstance(launcher.kernel(SCALE, 1), Stand)
    assert hopper.calls() == []


def test_a_machine_without_triton_says_so(hopper: Driver, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NoKernelsError, match=r"^Triton is not installed \(.*\)\.$"):
        launcher.kernel(SCALE, 0)


def test_a_kernel_that_cannot_be_built_is_tried_once(hopper: Driver, monkeypatch: Any) -> None:
    compile_for, tried = launcher.compile_for, []

    def counting(source: KernelSource, target: Any) -> Any:
        tried.append(source)
        return compile_for(source, target)

    monkeypatch.setattr(launcher, "compile_for", counting)
    wrong = SCALE._replace(constants={})
    for _ in range(3):
        with pytest.raises(
            NoKernelsError, match=r"cannot build kernel scale for device 0: ValueError: its arguments are"
        ):
            launcher.kernel(wrong, 0)
    assert tried == [wrong]


@pytest.mark.parametrize(
    "signature", [{"out": "*i64", "x": "*i64", "n": "i64", "factor": "i64"}, {"x": "*i64", "out": "*i64", "n": "i64"}]
)
def test_a_signature_has_the_functions_order_and_all_of_it(signature: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="but the signature has"):
        launcher.compile_for(SCALE._replace(signature=signature), HOPPER)


def test_an_interpreted_function_is_not_a_kernel() -> None:
    with pytest.raises(TypeError, match="is TRITON_INTERPRET set"):
        launcher.compile_for(SCALE._replace(function=lambda x: x), HOPPER)


class Compiled:
    """In place of Triton's CompiledKernel, which needs a card to be launched."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.error: Exception | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*values: Any, stream: int) -> None:
            if self.error:
                raise self.error
            self.launches.append((grid, values, stream))

        return run


def test_tritons_launcher_gets_constants_and_arguments_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "default_stream", "stream", "ExternalStream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    capturing = [False, True, False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.pop(0))
    compiled = Compiled()
    source = SCALE._replace(signature={"x": "*i64", "n": "i64"}, constants={"BLOCK": 256, "out": None, "factor": 3})
    kernel = TritonKernel(compiled, source, 0)
    assert kernel.launch(0, 9, 16, 100) == LAUNCHED
    assert kernel.launch(5, 9, 16, 100) == LAUNCHED
    assert kernel.launch(5, 0, 16, 100) == CAPTURING
    assert compiled.launches == [((5, 1, 1), (16, None, 100, 3, 256), 9)]
    with pytest.raises(TypeError, match=r"takes 2 \+ 2 arguments, not 5\."):
        kernel.launch(1, 0, 1, 2, 3)
    compiled.error = RuntimeError("out of luck")
    assert kernel.launch(1, 0, 1, 2) == FAILED
    assert kernel.explain(FAILED) == "Triton's launcher failed (RuntimeError: out of luck)"


# ---- on a card -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["native", "triton"])
def on_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel on this machine's first card, by each of the launchers."""
    if request.param == "triton" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("There is no C compiler here, which Triton's own launcher needs.")
    monkeypatch.setenv("ASTRAY_LAUNCHER", request.param)
    monkeypatch.setattr(launcher, "_kernels", {})
    kernel = launcher.kernel(SCALE, 0)
    assert isinstance(kernel, TritonKernel) == (request.param == "triton")
    return kernel


def tensors(n: int = 100_001) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """What is read, what is written, and the launch's arguments after programs and stream."""
    x = torch.arange(n, device="cuda:0")
    out = torch.zeros_like(x)
    return x, out, (x.data_ptr(), out.data_ptr(), n, -3)


PROGRAMS = -(-100_001 // 256)


@pytest.mark.gpu
def test_it_computes_on_the_card(on_card: Any) -> None:
    x, out, arguments = tensors()
    stream = torch.cuda.current_stream().cuda_stream
    assert on_card.launch(PROGRAMS, stream, *arguments) == LAUNCHED
    assert torch.equal(out, x * -3)
    assert on_card.launch(0, stream, *arguments) == LAUNCHED


@pytest.mark.gpu
def test_it_computes_in_the_order_of_a_side_stream(on_card: Any) -> None:
    x, out, arguments = tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.add_(1)
        assert on_card.launch(PROGRAMS, side.cuda_stream, *arguments) == LAUNCHED
        x.zero_()
    side.synchronize()
    assert torch.equal(out, (torch.arange(100_001, device="cuda:0") + 1) * -3)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
def test_it_computes_from_a_thread_that_has_never_used_the_card(on_card: Any) -> None:
    x, out, arguments = tensors()
    stream = torch.cuda.current_stream().cuda_stream
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(on_card.launch, PROGRAMS, stream, *arguments).result() == LAUNCHED
    assert torch.equal(out, x * -3)


@pytest.mark.gpu
def test_a_capture_is_refused_and_goes_on(on_card: Any) -> None:
    x, out, arguments = tensors()
    total = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(x)
        assert on_card.launch(PROGRAMS, torch.cuda.current_stream().cuda_stream, *arguments) == CAPTURING
    graph.replay()
    graph.replay()
    assert torch.equal(total, x * 2)
    assert not out.any()
    assert on_card.launch(PROGRAMS, torch.cuda.current_stream().cuda_stream, *arguments) == LAUNCHED
    assert torch.equal(out, x * -3)


@pytest.mark.gpu
def test_a_kernel_can_be_loaded_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out, arguments = tensors()
    total = torch.zeros_like(x)
    stream = torch.cuda.current_stream().cuda_stream
    monkeypatch.setattr(launcher, "_kernels", {})
    launcher.kernel(SCALE, 0)  # compiled by now; in the capture it is only loaded
    launcher._kernels.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ThreadPoolExecutor(1) as pool:
        total.add_(x)
        kernel = pool.submit(launcher.kernel, SCALE, 0).result()
        code = pool.submit(kernel.launch, PROGRAMS, stream, *arguments).result()
    assert code == LAUNCHED
    graph.replay()
    assert torch.equal(total, x)
    assert torch.equal(out, x * -3)


@pytest.mark.gpu
def test_an_impossible_launch_is_a_number_and_harms_nothing(on_card: Any) -> None:
    x, out, arguments = tensors()
    stream = torch.cuda.current_stream().cuda_stream
    code = on_card.launch(2**31, stream, *arguments)
    assert code in (1, FAILED)
    assert on_card.explain(code) != on_card.explain(LAUNCHED)
    torch.cuda.synchronize()
    assert on_card.launch(PROGRAMS, stream, *arguments) == LAUNCHED
    assert torch.equal(out, x * -3)


@pytest.mark.gpu
def test_another_current_device_is_left_alone(on_card: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("This machine has one card.")
    x, out, arguments = tensors()
    stream = torch.cuda.current_stream(0).cuda_stream
    with torch.cuda.device(1):
        assert on_card.launch(PROGRAMS, stream, *arguments) == LAUNCHED
        assert torch.cuda.current_device() == 1
    torch.cuda.synchronize(0)
    assert torch.equal(out, x * -3)


@pytest.mark.gpu
def test_loading_leaves_device_stream_and_memory_as_they_were(on_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_kernels", {})
    before = torch.cuda.current_device(), torch.cuda.current_stream(), torch.cuda.memory_allocated()
    random_state = torch.cuda.get_rng_state()
    launcher.kernel(SCALE, 0)
    assert (torch.cuda.current_device(), torch.cuda.current_stream(), torch.cuda.memory_allocated()) == before
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
