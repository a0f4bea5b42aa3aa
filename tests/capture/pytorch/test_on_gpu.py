"""Recording on a CUDA device: no bit changes, nothing waits, and streams, threads and graphs are kept apart."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.device.staging import DEVICE_BYTES
from astray.device.tickets import CAPTURED
from astray.stats import Strided, measure
from recorded_rows import rows

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), nn.Dropout(0.1), Block()).cuda()


def train(model: nn.Module, steps: int, rec: Any = None) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(steps):
        data = torch.randn(4, 16, 32, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rec is not None:
            rec.step()
    return losses


def fingerprint(tensor: torch.Tensor) -> int | None:
    host = tensor.detach().cpu()
    name = str(host.dtype).removeprefix("torch.")
    return measure(Strided(host.data_ptr(), name, tuple(host.shape), host.stride())).fingerprint


@pytest.mark.parametrize("level", ["module", "function", "op", ["module", "function", "op"]])
@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_no_bit_changes(level: Any, keep: str, tmp_path: Path) -> None:
    bare, recorded = make(), make()
    expected = train(bare, 4)
    with astray.record(tmp_path / "run", recorded, level=level, keep=keep) as rec:
        assert train(recorded, 4, rec) == expected
    for one, other in zip(bare.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(one, other)
    run = astray.open(tmp_path / "run")
    assert all(row["count"] is not None for row in rows(run) if row["note"] is None)
    if keep == "tensors":
        for row in rows(run, step=1, phase="forward"):
            values = run.ranks[0].values(row["row"])
            if values is not None and values.dtype.kind == "f":
                assert values.size == 0 or float(abs(values.astype("f8")).max()) == row["absmax"]


def test_nothing_waits_for_the_device(tmp_path: Path) -> None:
    """The device is kept busy; a whole recorded step has to be launched before it is done."""
    model = make()
    data = torch.randn(4, 16, 32, device="cuda")
    with astray.record(tmp_path / "run", model) as rec:
        for _ in range(2):  # kernels are compiled and memory is pinned
            model(data).sum().backward()
            rec.step()
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        done.record()
        model(data).sum().backward()
        rec.step()
        assert not done.query()


@pytest.mark.parametrize(("keep", "most"), [("stats", 0), ("tensors", DEVICE_BYTES)])
def test_device_memory_does_not_grow(keep: str, most: int, tmp_path: Path) -> None:
    """Values have a bounded share of it, which is taken bit by bit, as much as a slow disk asks for."""
    model, data = make(), torch.randn(4, 16, 32, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seen = []
    with astray.record(tmp_path / "run", model, level=["module", "function"], keep=keep) as rec:
        for _ in range(50):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            rec.step()
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
    assert max(seen[5:]) - min(seen[5:]) <= most, seen
    assert keep == "tensors" or len(set(seen[40:])) == 1, seen


def test_side_streams_and_threads(tmp_path: Path) -> None:
    models = {"a": make(1), "b": make(2)}
    expected = {name: model.eval()(torch.ones(4, 16, 32, device="cuda")) for name, model in models.items()}

    def work(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                models[name](torch.ones(4, 16, 32, device="cuda"))

    torch.cuda.synchronize()
    with astray.record(tmp_path / "run", models, phases="forward") as rec:
        threads = [threading.Thread(target=work, args=(name,)) for name in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rec.step()
    run = astray.open(tmp_path / "run")
    for name, output in expected.items():
        outputs = [row for row in rows(run, role="output", kind="module") if row["site"] == name]
        assert len(outputs) == 20
        assert {row["fingerprint"] for row in outputs} == {fingerprint(output)}


def test_a_graph_is_captured_as_without_recording_and_its_replays_are_seen_from_outside(tmp_path: Path) -> None:
    model = make().eval()
    static = torch.zeros(4, 16, 32, device="cuda")
    with torch.no_grad():
        expected = [model(torch.full_like(static, float(number))) for number in range(3)]
        with astray.record(tmp_path / "run", model, phases="forward") as rec:
            model(static)
            rec.step()  # from here on, a stream that is new waits for what was sent for
            model(static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = model(static)
            for number in range(3):
                static.fill_(float(number))
                graph.replay()
                rec.save("output", output)
                assert torch.equal(output, expected[number])
            rec.step()
    run = astray.open(tmp_path / "run")
    saved = rows(run, site="output")
    assert [row["fingerprint"] for row in saved] == [fingerprint(output) for output in expected]
    notes = {row["note"] for row in rows(run, step=1, micro=1, kind="module", role="output")}
    assert notes == {CAPTURED}
    missed = {item.what for item in run.ranks[0].end.missed}
    assert "calls inside a CUDA graph" in missed


def test_the_writer_may_wait_while_a_graph_is_captured(tmp_path: Path) -> None:
    model = make().eval()
    static = torch.zeros(4, 16, 32, device="cuda")
    with torch.no_grad(), astray.record(tmp_path / "run", model, phases="forward", keep=["stats", "tensors"]) as rec:
        for _ in range(5):
            model(static)
            torch.cuda._sleep(100_000_000)
            rec.step()  # the writer's thread now waits for the device
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = static * 2
            graph.replay()
    assert torch.equal(output, static * 2)
    assert astray.open(tmp_path / "run").ranks[0].end.complete


def test_memory_on_both_sides_in_one_program(tmp_path: Path) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6).cuda()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).cuda()).cpu()

    model = Split()
    with astray.record(tmp_path / "run", model) as rec:
        for _ in range(2):
            model(torch.randn(3, 6)).sum().backward()
            rec.step()
    found = rows(astray.open(tmp_path / "run"))
    assert {row["device"] for row in found} == {"cpu", "cuda:0"}
    assert all(row["count"] and row["fingerprint"] is not None for row in found)


def test_float8(tmp_path: Path) -> None:
    values = torch.randn(5, 7, device="cuda").to(torch.float8_e4m3fn)
    with astray.record(tmp_path / "run", nn.Identity()) as rec:
        rec.save("t", values.T)
        rec.step()
    (row,) = rows(astray.open(tmp_path / "run"), site="t")
    assert row["fingerprint"] == fingerprint(values.T.contiguous())
    assert row["absmax"] == float(values.float().abs().max())


@pytest.mark.filterwarnings("ignore")  # torch has much to say when it compiles
def test_a_compiled_model(tmp_path: Path) -> None:
    bare, recorded = make().eval(), make().eval()
    data = torch.randn(4, 16, 32, device="cuda")
    expected = torch.compile(bare)(data)
    fast = torch.compile(recorded)
    with astray.record(tmp_path / "run", fast) as rec:
        for _ in range(2):
            output = fast(data)
            rec.step()
    assert torch.equal(output, expected)
    (row,) = rows(astray.open(tmp_path / "run"), step=1, site="<root>", role="output")
    assert row["fingerprint"] == fingerprint(expected)


def test_the_first_recording_of_a_process_launches_natively(tmp_path: Path) -> None:
    program = """if True:
        import sys, astray, torch
        from astray.device.cuda_measurer import CudaMeasurer
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40))).cuda()
        slowly, measure = [], CudaMeasurer.measure
        CudaMeasurer.measure = lambda *given: slowly.append(1) or measure(*given)
        with astray.record(sys.argv[1], model) as rec:
            for _ in range(3):
                slowly.clear()
                model(torch.ones(2, 8, device="cuda")).sum().backward()
                rec.step()
        print(len(slowly))
        """
    command = [sys.executable, "-c", program, tmp_path / "run"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # Python measures the first of a step, and every 64th; the parameters have a kernel to themselves.
    assert 1 <= int(done.stdout) < 10
    assert len([row for row in rows(astray.open(tmp_path / "run")) if row["step"] == 2]) > 200


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_inputs_are_perturbed_as_they_are_on_the_cpu_and_no_random_number_is_drawn(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0

    data = torch.linspace(-3, 3, 1000, dtype=torch.float64).to(dtype).view(50, 20)
    before = torch.cuda.get_rng_state()
    results = []
    for device in ("cpu", "cuda"):
        model = Identity()
        with astray.record(tmp_path / device, model, perturb=True):
            results.append(model(data.to(device)).cpu())
    assert torch.equal(results[0].view(torch.uint8), results[1].view(torch.uint8))
    assert not torch.equal(results[0], data)
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_bad_element_is_told_without_its_values(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(64, 3, 48, device="cuda", dtype=dtype)
    x[40, 1, 7], x[63, 2, 47], x[2, 2, 30] = float("nan"), float("inf"), float("-inf")
    model = nn.Identity()
    with astray.record(tmp_path / "run", model, keep="stats") as rec:
        for view in (x, x.transpose(0, 2), x[3:, :, ::2], x[41:60]):
            model(view)
            rec.step()
    found = [(row["first_bad"], row["first_bad_value"]) for row in rows(astray.open(tmp_path / "run"), role="output")]
    shapes = [(64, 3, 48), (48, 3, 64), (61, 3, 24), (19, 3, 48)]
    wanted = [((2, 2, 30), float("-inf")), ((7, 1, 40), None), None, None]  # None: it is NaN, or all is finite
    for (first, value), shape, want in zip(found, shapes, wanted, strict=True):
        if want is None:
            assert (first, value) == (None, None)
            continue
        at, expected = want
        assert first == (at[0] * shape[1] + at[1]) * shape[2] + at[2]
        assert math.isnan(value) if expected is None else value == expected
