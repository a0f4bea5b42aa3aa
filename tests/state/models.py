"""Models whose states the tests look at: ResNet-18 and GPT-2 by their shapes alone, and a small GPT that trains."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        if inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """The parameters of a ResNet-18, with their names, shapes and initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        for number, (inside, outside) in enumerate(pairwise([64, 64, 128, 256, 512]), 1):
            self.add_module(f"layer{number}", nn.Sequential(BasicBlock(inside, outside), BasicBlock(outside, outside)))
        self.fc = nn.Linear(512, 1000)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.attn = Attention(width)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT with the names of nanoGPT; its head is the embedding."""

    def __init__(self, vocabulary: int = 29, context: int = 16, width: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList(Block(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width, bias=False),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        for name in ("wte", "wpe"):
            nn.init.normal_(self.transformer[name].weight, std=0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))

    def loss(self, seed: int) -> torch.Tensor:
        tokens = torch.randint(29, (4, 9), generator=torch.Generator().manual_seed(seed))
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class DistributedDataParallel(nn.Module):
    """Has the class name and the `module.` of the real one, and needs no other processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
