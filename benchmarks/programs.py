"""What `gpu.py` records beside the GPT: a Llama, a ResNet-50 with in-place operations, and a `generate` loop.

Each is what a user has: a model of the usual size with random weights, and a loop that reads its loss in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpt import Training, gpt
from torch import Tensor, nn


class Program(NamedTuple):
    """A program by name: how it is described, and what makes it for a device."""

    what: str
    make: Callable[[torch.device, bool], Training]


def llama(device: torch.device, small: bool) -> Training:
    """A Llama of 1.1 billion parameters in bfloat16, trained by fused AdamW."""
    model, vocabulary = _llama(device, small)
    tokens = torch.randint(0, vocabulary, (2, 16) if small else (4, 2048), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def step() -> Tensor:
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step, device)


def generate(device: torch.device, small: bool) -> Training:
    """The same Llama writing 16 tokens, one after another."""
    model, vocabulary = _llama(device, small)
    model.eval()
    tokens = torch.randint(3, vocabulary, (1, 16), device=device)

    def step() -> Tensor:
        with torch.no_grad():
            written = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, min_new_tokens=16, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        return written.float().sum()

    return Training(model, step, device)


def _llama(device: torch.device, small: bool) -> tuple[nn.Module, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width, layers, vocabulary = (64, 2, 128) if small else (2048, 22, 32000)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers, vocab_size=vocabulary,
        num_attention_heads=width // 64 or 1, num_key_value_heads=max(width // 512, 1), attn_implementation="sdpa",
    )  # fmt: skip
    with device:
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16), vocabulary


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut; activations and the sum are in place."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or before != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


def resnet(device: torch.device, small: bool) -> Training:
    """A ResNet-50 in channels_last by autocast, trained by SGD with momentum."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    before = 64
    for number, count in enumerate((1, 1, 1, 1) if small else (3, 4, 6, 3)):
        for block in range(count):
            layers.append(Bottleneck(before, 64 << number, 2 if number and not block else 1))
            before = 4 * (64 << number)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)]
    model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch, size = (2, 32) if small else (128, 224)
    images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step, device)


PROGRAMS = {
    "gpt": Program(
        "GPT-2-medium, T 1024, B 8, autocast to bfloat16, fused AdamW",
        lambda device, small: gpt("tiny" if small else "medium", str(device), mixed=True),
    ),
    "llama": Program("Llama 1.1B in bfloat16, T 2048, B 4, fused AdamW", llama),
    "resnet": Program("ResNet-50, channels_last, B 128, autocast, in-place activations and sums, SGD", resnet),
    "generate": Program("the Llama, `generate` of 16 tokens", generate),
}
