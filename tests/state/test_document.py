"""The examples of the tool whose users astray serves here: what they do, and what they print, to the digit.

The document's numbers come from random weights that cannot be had again, so weights with these very norms are made.
"""

from __future__ import annotations

import math

import pytest
import torch

from astray import state
from astray.compat import nnstat
from astray.state import StateDict
from state.models import GPT, DistributedDataParallel, ResNet

KNOWN = {  # name: norm1, norm2, mean
    "conv1.weight": (188.483765, 2.434446, -0.000200),
    "layer1.0.conv1.weight": (1720.965454, 11.248564, 0.000027),
    "layer1.0.conv2.weight": (1737.153442, 11.347944, 0.000487),
    "layer1.1.conv1.weight": (1725.072632, 11.237497, 0.0),
}


def tensor_with(shape: tuple[int, ...], norm1: float, norm2: float, mean: float = 0.0) -> torch.Tensor:
    """Of four values, each for a quarter of the elements, that have these norms and this mean."""
    count = math.prod(shape)
    size = norm1 / count
    spread = math.sqrt((norm2**2 - count * mean**2) / count - size**2)
    values = torch.tensor([size + spread, size - spread, -size - spread, -size + spread], dtype=torch.float64) + mean
    return values.repeat(count // 4).reshape(shape)


@pytest.fixture(scope="module")
def resnet() -> ResNet:
    torch.manual_seed(0)
    model = ResNet().double()
    with torch.no_grad():
        for name, norms in KNOWN.items():
            parameter = model.get_parameter(name)
            parameter.copy_(tensor_with(tuple(parameter.shape), *norms))
        rest = nnstat.from_weight(model, pattern="(?!fc.weight)")
        norm2 = math.sqrt(113.1194**2 - rest.norm2() ** 2)
        model.fc.weight.copy_(tensor_with((1000, 512), 235797.859375 - rest.norm1(), norm2))
    return model


def test_the_weights_are_listed(resnet: ResNet) -> None:
    state_dict = nnstat.from_weight(resnet)
    assert str(state_dict).splitlines()[:8] == [
        "ResNet_weights[L2=113.1, Numel=11,689,512, device=cpu, dtype=None]",
        "(",
        "        00: conv1.weight                    (64, 3, 7, 7)",
        "        01: bn1.weight                              (64,)",
        "        02: bn1.bias                                (64,)",
        "        03: layer1.0.conv1.weight          (64, 64, 3, 3)",
        "        04: layer1.0.bn1.weight                     (64,)",
        "        05: layer1.0.bn1.bias                       (64,)",
    ]
    assert len(state_dict) == 62
    assert str(state_dict).splitlines()[-2:] == ["        61: fc.bias                               (1000,)", ")"]


def test_a_raw_state_dict_has_the_buffers_too(resnet: ResNet) -> None:
    state_dict = nnstat.from_state_dict(resnet.state_dict())
    assert len(state_dict) == 122
    assert "bn1.running_mean" in state_dict
    assert "bn1.running_mean" not in nnstat.from_weight(resnet)


def test_all_of_it_is_described(resnet: ResNet, capsys: pytest.CaptureFixture[str]) -> None:
    nnstat.from_weight(resnet).describe()
    assert capsys.readouterr().out.splitlines() == [
        "[============================= Stats ResNet_weights ==============================]",
        "   no name            shape         numel     norm1          norm1_mean  norm2   ",
        "0  62  ResNet_weights  (11689512,)  11689512  235797.859375  0.020172    113.1194",
    ]


def test_its_convolutions_are_described(resnet: ResNet, capsys: pytest.CaptureFixture[str]) -> None:
    nnstat.from_weight(resnet).describe(lw=True, pattern=".*conv.*")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "[=================================== Stats ResNet_weights ====================================]",
        "    no name                   shape              numel    norm1         norm1_mean  norm2    ",
        "0    0  conv1.weight              (64, 3, 7, 7)     9408    188.483765  0.020034     2.434446",
        "1    3  layer1.0.conv1.weight    (64, 64, 3, 3)    36864   1720.965454  0.046684    11.248564",
        "2    6  layer1.0.conv2.weight    (64, 64, 3, 3)    36864   1737.153442  0.047123    11.347944",
        "3    9  layer1.1.conv1.weight    (64, 64, 3, 3)    36864   1725.072632  0.046796    11.237497",
    ]
    assert len(lines) == 2 + 17  # two convolutions in each of eight blocks, and the first


def test_columns_are_chosen(resnet: ResNet, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["name", "shape", "numel", "mean", "std", "norm2"]
    nnstat.from_weight(resnet).describe(lw=True, pattern=".*conv.*", include_keys=keys)
    assert capsys.readouterr().out.splitlines()[:5] == [
        "[============================== Stats ResNet_weights ===============================]",
        "   name                   shape              numel    mean      std       norm2    ",
        "0   conv1.weight              (64, 3, 7, 7)     9408 -0.000200  0.025099   2.434446",
        "1   layer1.0.conv1.weight    (64, 64, 3, 3)    36864  0.000027  0.058587  11.248564",
        "2   layer1.0.conv2.weight    (64, 64, 3, 3)    36864  0.000487  0.059103  11.347944",
    ]


LR = 1e-3


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    # With these betas the bias correction is nothing after 20 steps, as it is after 50,000 with the usual ones.
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.3, 0.4), weight_decay=0.0)


def test_the_update_by_difference_is_the_update_of_adam() -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = adamw(model)
    for step in range(20):
        weight_0 = nnstat.from_weight(model, clone=True)
        model.loss(step).backward()
        optimizer.step()
        update = nnstat.from_weight(model) - weight_0
        optimizer.zero_grad()
    with pytest.warns(UserWarning, match="None of 15 parameters has a gradient.*zero_grad.*between backward"):
        weight, grad, (m, v) = nnstat.from_together(model, optimizer, ["exp_avg", "exp_avg_sq"])
    update_adam = -LR * m / (torch.sqrt(v) + 1e-8)
    assert len(grad) == 0
    assert torch.allclose(update.at(0), update_adam.at(0), atol=1e-7)
    assert not torch.allclose(update.at(0), update_adam.at(0), atol=1e-8)
    assert torch.allclose(update, update_adam, atol=1e-6)  # all parameters, those around 1 are coarser

    trust_ratio = update.norm(2, lw=True) / weight.norm(2, lw=True)
    assert trust_ratio == nnstat.trust_ratio(update, weight)
    mlp = nnstat.trust_ratio(update, weight, pattern=".*mlp.*")
    assert list(mlp) == [f"transformer.h.{layer}.mlp.{part}.weight" for layer in (0, 1) for part in ("c_fc", "c_proj")]
    for name, ratio in mlp.items():
        exact = update[name].double().norm() / weight[name].double().norm()
        assert ratio == pytest.approx(exact.item(), rel=1e-12)


def test_a_state_without_clone_follows_the_training() -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = adamw(model)
    weight = nnstat.from_weight(model)
    weight_0 = weight.clone()
    assert (weight - weight_0).abs_max() == 0.0
    model.loss(0).backward()
    optimizer.step()
    update = weight - weight_0
    assert update.abs_max() == pytest.approx(LR, rel=1e-3)  # nothing is cached
    assert update == nnstat.from_weight(model) - weight_0


def test_a_wrapped_model_is_listed_with_its_prefix() -> None:
    with torch.device("meta"):
        model = DistributedDataParallel(GPT(50304, 1024, 768, 12))
    lines = repr(nnstat.from_weight(model)).splitlines()
    assert lines[:5] == [
        "DistributedDataParallel_weights[L2=unread, Numel=124,373,760, device=meta, dtype=None]",
        "(",
        "        00: module.transformer.wte.weight              (50304, 768)",
        "        01: module.transformer.wpe.weight               (1024, 768)",
        "        02: module.transformer.h.0.ln_1.weight               (768,)",
    ]


def test_trust_ratios_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = [1064, 1172, 1089, 974, 1014, 1087, 1020, 1065, 1040, 1049, 1067, 1017, *[1001] * 12]
    names = [f"module.transformer.h.{i}.mlp.{part}.weight" for i in range(12) for part in ("c_fc", "c_proj")]
    weight = StateDict({name: torch.tensor([0.6, 0.8]) for name in names}, name="weights")
    update = StateDict(
        {name: torch.tensor([ratio * 1e-6, 0.0]) for name, ratio in zip(names, ratios, strict=True)}, name="update"
    )
    extra = {"module.transformer.wte.weight": torch.ones(2)}
    weight, update = StateDict({**extra, **weight}), StateDict({**extra, **update})
    trust_ratio_mlp = nnstat.trust_ratio(update, weight, pattern=".*mlp.*")
    trust_ratio_mlp.describe(lw=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines[:14]] == [
        "[===================== Stats StateDict =====================]",
        "    no name                                        value",
        "0    0  module.transformer.h.0.mlp.c_fc.weight     0.001064",
        "1    1  module.transformer.h.0.mlp.c_proj.weight   0.001172",
        "2    2  module.transformer.h.1.mlp.c_fc.weight     0.001089",
        "3    3  module.transformer.h.1.mlp.c_proj.weight   0.000974",
        "4    4  module.transformer.h.2.mlp.c_fc.weight     0.001014",
        "5    5  module.transformer.h.2.mlp.c_proj.weight   0.001087",
        "6    6  module.transformer.h.3.mlp.c_fc.weight     0.001020",
        "7    7  module.transformer.h.3.mlp.c_proj.weight   0.001065",
        "8    8  module.transformer.h.4.mlp.c_fc.weight     0.001040",
        "9    9  module.transformer.h.4.mlp.c_proj.weight   0.001049",
        "10  10  module.transformer.h.5.mlp.c_fc.weight     0.001067",
        "11  11  module.transformer.h.5.mlp.c_proj.weight   0.001017",
    ]


def test_the_same_names_are_astrays_own() -> None:
    for name in ("from_weight", "from_grad", "from_optimizer_state", "from_together", "StateDict", "trust_ratio"):
        assert getattr(nnstat, name) is getattr(state, name)
