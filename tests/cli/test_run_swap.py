"""`astray run --swap` on scripts that know nothing of astray: the whole way in a few, the rest in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.capture.pytorch.experiments import active_swaps, swapped_calls
from astray.capture.pytorch.experiments.program_swaps import ProgramSwaps
from astray.capture.pytorch.experiments.swap_words import SwapOption, read_option
from astray.cli import main
from astray.errors import UsageError
from cli.scripts import run_script

SCRIPT = """
import sys
import torch
from torch import nn
from sampling import pick
import torch.nn.functional as F

def scaled(x):
    return torch.softmax(x @ x.T, -1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(30, 30)
        self.h = nn.ModuleList([nn.Linear(30, 30), nn.Linear(30, 30)])

    def forward(self, x):
        x = self.a(x)
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x

def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        y = pick(scaled(net(torch.randn(30, 30))))
        optimizer.zero_grad()
        y.square().sum().backward()
        optimizer.step()
        print(repr(y.sum().item()), *[p.double().sum().item().hex() for p in net.parameters()])

main()
if "raise" in sys.argv:
    raise ValueError("the script")
"""

SAMPLING = """
import torch

def pick(x):
    return (x * 3).exp().log()

def fixed(x, original):
    return original(x.double()).float()
"""


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts swaps as `astray run` does, and looks afterwards whether all is as before."""
    call, finders, all_swaps = nn.Module.__call__, list(sys.meta_path), []
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()

    def start(*options: str) -> ProgramSwaps:
        all_swaps.append(ProgramSwaps([read_option(option) for option in options]))
        return all_swaps[-1]

    yield start
    for swaps in all_swaps:
        swaps.end()
    assert nn.Module.__call__ is call
    assert sys.meta_path == finders
    assert modes == (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    assert not swapped_calls._filled
    assert not active_swaps._sites


class Seeing(nn.Module):
    """Keeps the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.layer(x)


X = torch.ones(2, 3)


def run(tmp_path: Path, *swaps: str, arguments: tuple[str, ...] = (), options: Sequence[str] = ()) -> Any:
    (tmp_path / "sampling.py").write_text(SAMPLING)
    words = [word for swap in swaps for word in ("--swap", swap)]
    return run_script(tmp_path, SCRIPT, *options, *words, arguments=arguments)


def test_a_script_with_parts_of_it_elsewhere_and_its_comparison(tmp_path: Path) -> None:
    """To their own dtype and device nothing changes a bit; elsewhere losses move, and a comparison says what was."""
    for name in ("plain", "same", "wide"):
        (tmp_path / name).mkdir()
    plain = run(tmp_path / "plain")
    own = [f"{what}=cpu,float32" for what in ("a", r"h\.\d/linear", "/softmax", "sampling.pick")]
    same = run(tmp_path / "same", *own)
    assert plain.stdout
    assert (same.stdout, same.returncode) == (plain.stdout, 0), same.stderr
    assert "--swap" not in same.stderr
    wide = run(
        tmp_path / "wide",
        r"h\.\d=float64",
        "__main__.scaled=float64",
        "sampling.pick=sampling.fixed",
        arguments=("raise",),
    )
    assert wide.stdout != plain.stdout
    assert wide.returncode == 1
    assert "ValueError: the script" in wide.stderr
    assert "--swap" not in wide.stderr
    compared = astray.compare(tmp_path / "plain" / "run", tmp_path / "wide" / "run")
    said = {difference.sentence for difference in compared.setup}
    assert said == {
        "3 parts (__main__.scaled, h.0, h.1) are as the program has it in the reference and swapped to float64 in the "
        "candidate.",
        "sampling.pick is as the program has it in the reference and swapped to sampling.fixed in the candidate.",
    }


def test_what_had_no_effect_is_printed_and_noted(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "h.7=cpu", "a/tan=cpu", "sampling.pikc=cpu", "sampling.pick=eager", "nowhere.f=cpu", "json.tool.main=cpu",
        "__main__.main=float64", "sampling.fixed=float64", "torch.is_tensor=cpu",
    )  # fmt: skip
    assert done.returncode == 0
    lines = [line.removeprefix("astray: --swap ") for line in done.stderr.splitlines() if "--swap" in line]
    called = "was not swapped: nothing called it meanwhile."
    starts = [
        "h.7=cpu: No module is called h.7. Did you mean h.1, h.0?",
        f"a/tan=cpu: a/tan {called}",
        "sampling.pikc=cpu: sampling has no pikc. Did you mean pick?",
        "nowhere.f=cpu: No module and no callable is called nowhere.f. There are <root>, a, h, h.0, h.1, for example.",
        "json.tool.main=cpu: json has no tool.",
        f"__main__.main=float64: __main__.main {called}",
        f"sampling.fixed=float64: sampling.fixed {called}",
        f"torch.is_tensor=cpu: torch.is_tensor {called}",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert lines[5].endswith("in a file of its own it is swapped as soon as that is imported.")
    end = astray.open(tmp_path / "run").ranks[0].end
    assert end is not None
    missed = {what: why for what, why, _ in end.missed}
    assert missed["the swap of h.7"] == "there is nothing of that name"
    assert missed["the swap of a/tan"] == "it was never called"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("h.2.attn", "--swap h.2.attn is not WHAT=TO"),
        ("=cpu", "--swap =cpu is not WHAT=TO"),
        ("a=flaot64", "--swap a=flaot64: flaot64 is neither a device nor a floating point dtype nor the dotted name"),
        ("a=int32", "int32 is neither a device nor a floating point dtype"),
        ("a=cpu,cuda", "is not one destination"),
        ("a(=cpu", "neither a name nor a regular expression"),
    ],
)
def test_wrong_options_are_refused_before_the_script_runs(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("raise AssertionError")
    assert main(["run", "-o", str(tmp_path / "run"), "--swap", option, str(tmp_path / "script.py")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_options_are_read_from_the_right() -> None:
    assert read_option(r"h(?=\.).*=cpu,float64") == SwapOption(r"h(?=\.).*", "cpu,float64")
    assert read_option("a=torch.float64").to == "torch.float64"
    with pytest.raises(UsageError, match="name one of these with to='eager'"):
        ProgramSwaps([SwapOption("a/softmax", "eager")])


def test_modules_are_found_as_they_are_first_called_and_named_as_a_recording_names_them(started: Any) -> None:
    swaps = started("<root>=float64", "Seeing#2=bfloat16", r"late\.0=bfloat16")
    first, second, third = Seeing(), Seeing(), Seeing()
    for model in (first, second, third, first):
        model(X)
    assert [model.seen[0] for model in (first, second, third)] == [torch.float64, torch.float32, torch.bfloat16]
    first.late = nn.ModuleList([Seeing()])  # put into a known model later on
    first.late[0](X)
    assert first.late[0].seen == [torch.bfloat16]
    assert swaps.end() == []
    first(X)
    assert first.seen[-1] == torch.float32


def test_modules_are_not_held(started: Any) -> None:
    import gc
    import weakref

    started("layer=float64")
    Seeing()(X)
    loss = nn.MSELoss()
    loss(X, X)
    reference = weakref.ref(loss)
    del loss
    gc.collect()
    assert reference() is None


def test_a_failure_of_ours_is_said_and_the_program_goes_on(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from astray.capture.pytorch.experiments import program_swaps

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    swaps = started("layer=float64")
    monkeypatch.setattr(program_swaps, "add_sites", fail)
    model = Seeing()
    model(X)
    model(X)
    assert model.seen == [torch.float32] * 2
    assert swaps.end() == ["--swap layer=float64: ZeroDivisionError: planted."]


def test_a_class_is_refused_as_it_is_imported(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swap_late.py").write_text("class Late:\n    pass\n\ndef scripted(x):\n    return x.dtype\n")
    monkeypatch.syspath_prepend(tmp_path)
    swaps = started("swap_late.Late=float64", "swap_late.scripted=float64", "swap_latest.f=cpu", "xmlrpc.f=cpu")
    import swap_late  # type: ignore[import-not-found]

    assert swap_late.scripted(X) == torch.float64
    problems = swaps.end()
    assert problems[0].startswith("--swap swap_late.Late=float64: swap_late.Late is a class. Name the method")
    assert problems[1].startswith("--swap swap_latest.f=cpu: There is no callable swap_latest.f")
    assert problems[2] == "--swap xmlrpc.f=cpu: xmlrpc.f was never imported."
    del sys.modules["swap_late"]


def test_a_callable_of_the_script_that_was_defined_too_late(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    swaps = started("__main__.f=cpu")
    sys.modules["__main__"].f = lambda x: x
    (problem,) = swaps.end()
    assert problem.startswith(
        "--swap __main__.f=cpu: __main__.f was defined too late. A callable of the script itself is"
    )


def test_threads_that_call_a_model_first_swap_it_once(started: Any) -> None:
    import threading
    from concurrent.futures import ThreadPoolExecutor

    calls: list[None] = []

    def counted(x: torch.Tensor, original: Any) -> torch.Tensor:
        calls.append(None)
        return original(x)

    sys.modules["swap_counting"] = module = type(sys)("swap_counting")
    module.counted = counted  # type: ignore[attr-defined]
    started("layer=swap_counting.counted")
    model, ready = Seeing(), threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: (ready.wait(), model(X)), range(4)))
    assert len(calls) == 4
    del sys.modules["swap_counting"]


@pytest.mark.slow
def test_compiled_code_stops_for_what_is_swapped(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import torch
        from torch import nn
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        compiled = torch.compile(net, backend="aot_eager")
        x = torch.randn(4, 30)
        with torch.no_grad():
            for _ in range(3):
                print(torch.equal(compiled(x), net[1]((x.double() @ net[0].weight.double().T + net[0].bias).float())))
        """,
        "--swap",
        "0=float64",
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr
    assert "--swap" not in done.stderr
