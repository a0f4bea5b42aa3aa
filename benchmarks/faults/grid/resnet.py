"""ResNet-18 in plain torch, of half the usual width."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS, CLASSES = (32, 64, 128, 256), 100


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn_1, self.act_1 = nn.BatchNorm2d(width), nn.ReLU()
        self.conv_2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn_2, self.act_2 = nn.BatchNorm2d(width), nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn_2(self.conv_2(self.act_1(self.bn_1(self.conv_1(x)))))
        return self.act_2(y + self.skip(x))

    def skip(self, x: Tensor) -> Tensor:
        """What of the block's input is added to the result of its convolutions."""
        return x if self.downsample is None else self.downsample(x)


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = (
            nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False),
            nn.BatchNorm2d(WIDTHS[0]),
            nn.ReLU(),
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks = []
        for width_in, width in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False):
            blocks += [Block(width_in, width, 1 if width == width_in else 2), Block(width, width, 1)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.pool(self.act(self.bn(self.conv(pixel_values))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
