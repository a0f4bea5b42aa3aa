"""The models of the grid: how each is built, what it is given, and where the parts are that faults are planted in.

Two are plain torch (`llama`, `resnet`) and run wherever torch does; the others are of transformers. All weights are
drawn by one seed. Biases and the weights of norms are drawn too, as training leaves them: a model fresh from its
constructor has zeros and ones there, and a fault that drops them would change nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from faults.grid.llama import Llama
from faults.grid.resnet import ResNet18
from faults.grid.variants import Half, Kernels

VOCABULARY, BATCH, LENGTH = 512, 4, 64
IMAGES, SIZE, CLASSES = 16, 48, 100
WIDTH, HEADS = 128, 4


class Batch(NamedTuple):
    """What the model is called with, and what it should answer."""

    inputs: dict[str, Tensor]
    targets: Tensor


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model are.

    blocks: the sites of its layers, in the order in which they run.
    parts: the names inside a block of what faults are planted in; "" is the block itself. `norm`, `act` and so on mean
        the same in every model that has them.
    residual: how a block adds its input to its result, which `residuals.py` knows how to change.
    """

    blocks: tuple[str, ...]
    parts: dict[str, str]
    residual: str = "skip"
    embedding: str | None = None

    def site(self, part: str, layer: int) -> str:
        """The site of a part in one layer. Layers beyond the last are counted from the first again."""
        block, name = self.blocks[layer % len(self.blocks)], self.parts[part]
        return f"{block}.{name}" if name else block

    def sites(self, part: str) -> list[str]:
        """The sites of a part in all layers."""
        return [self.site(part, layer) for layer in range(len(self.blocks))]


@dataclass(frozen=True)
class Model:
    """One model of the grid.

    build: makes it with eager (False) or SDPA attention (True), before any seed matters.
    kernels: what it has another implementation of.
    """

    name: str
    what: str
    half: Half
    build: Callable[[bool], nn.Module]
    layout: Layout
    kernels: Kernels
    batch: Callable[[], Batch]
    optimizer: str = "AdamW"
    plain_torch: bool = False
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def available(self) -> bool:
        return self.plain_torch or importlib.util.find_spec("transformers") is not None


MODELS: dict[str, Model] = {}


def _declare(model: Model) -> None:
    MODELS[model.name] = model


def numbered(text: str, count: int) -> tuple[str, ...]:
    return tuple(text.format(number) for number in range(count))


# -- what they are given ---------------------------------------------------------------------------------------------


def next_tokens() -> Batch:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    return Batch({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous())


def placed_tokens() -> Batch:
    """Tokens with their positions, for models that learn an embedding of each."""
    batch = next_tokens()
    return Batch(batch.inputs | {"position_ids": torch.arange(LENGTH).expand(BATCH, -1).contiguous()}, batch.targets)


def two_sequences() -> Batch:
    source = torch.randint(VOCABULARY, (BATCH, LENGTH))
    target = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    inputs = {"input_ids": source, "decoder_input_ids": target[:, :-1].contiguous()}
    return Batch(inputs, target[:, 1:].contiguous())


def images() -> Batch:
    return Batch({"pixel_values": torch.randn(IMAGES, 3, SIZE, SIZE)}, torch.randint(CLASSES, (IMAGES,)))


# -- in plain torch --------------------------------------------------------------------------------------------------

LLAMA_PARTS = {
    "block": "", "attn": "attn", "q": "attn.q", "k": "attn.k", "v": "attn.v", "o": "attn.o", "norm": "norm_2",
    "mlp": "mlp", "up": "mlp.up", "down": "mlp.down", "act": "mlp.act",
}  # fmt: skip


def llama(name: str, layers: int, half: Half) -> Model:
    return Model(
        name,
        f"a llama-like model of {layers} layers, grouped-query attention",
        half,
        lambda sdpa: Llama(layers, "sdpa" if sdpa else "eager"),
        Layout(numbered("layers.{}", layers), LLAMA_PARTS, embedding="tokens"),
        "attention",
        next_tokens,
        plain_torch=True,
        features=frozenset({"causal", "rotary", "grouped"}),
    )


_declare(llama("llama", 16, "seen"))
_declare(
    Model(
        "resnet",
        "ResNet-18 of half the usual width, with batch norms",
        "seen",
        lambda _: ResNet18(),
        Layout(
            numbered("blocks.{}", 8),
            {"block": "", "conv": "conv_2", "bn": "bn_2", "norm": "bn_2", "act": "act_1"},
        ),
        "convolution",
        images,
        optimizer="SGD",
        plain_torch=True,
    )
)


# -- of transformers -------------------------------------------------------------------------------------------------


def _of(model: str, config: str, **settings: Any) -> Callable[[bool], nn.Module]:
    """Makes a model of transformers."""

    def build(sdpa: bool) -> nn.Module:
        import transformers

        attention = {} if model.startswith(("ConvNext", "MobileNet", "RegNet")) else {
            "attn_implementation": "sdpa" if sdpa else "eager"
        }  # fmt: skip
        return getattr(transformers, model)(getattr(transformers, config)(**settings, **attention))

    return build


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 320, "num_hidden_layers": 12,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "initializer_range": WIDTH**-0.5, "use_cache": False,
}  # fmt: skip
DECODER_PARTS = {
    "block": "", "attn": "self_attn", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "norm_1": "input_layernorm", "norm": "post_attention_layernorm", "mlp": "mlp",
    "up": "mlp.up_proj", "down": "mlp.down_proj", "act": "mlp.act_fn",
}  # fmt: skip
DECODER_FEATURES = frozenset({"causal", "rotary", "grouped"})

_declare(
    Model(
        "gpt2",
        "GPT-2 of 12 layers",
        "seen",
        _of(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=LENGTH + 1, n_embd=WIDTH, n_layer=12,
            n_head=HEADS, initializer_range=WIDTH**-0.5, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        ),
        Layout(
            numbered("transformer.h.{}", 12),
            {
                "block": "", "attn": "attn", "o": "attn.c_proj", "norm_1": "ln_1", "norm": "ln_2", "mlp": "mlp",
                "up": "mlp.c_fc", "down": "mlp.c_proj", "act": "mlp.act", "drop": "mlp.dropout",
            },
            residual="pre-norm",
            embedding="transformer.wte",
        ),
        "attention",
        placed_tokens,
        features=frozenset({"causal", "learned positions"}),
    )
)  # fmt: skip
_declare(
    Model(
        "bert",
        "BERT of 12 layers, which norms after adding",
        "seen",
        _of(
            "BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=12,
            num_attention_heads=HEADS, intermediate_size=384, initializer_range=WIDTH**-0.5, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, max_position_embeddings=LENGTH + 1,
        ),
        Layout(
            numbered("bert.encoder.layer.{}", 12),
            {
                "block": "output", "attn": "attention.self", "q": "attention.self.query", "k": "attention.self.key",
                "v": "attention.self.value", "o": "attention.output.dense", "norm": "output.LayerNorm",
                "mlp": "intermediate", "up": "intermediate.dense", "down": "output.dense",
                "act": "intermediate.intermediate_act_fn", "drop": "output.dropout",
            },
            residual="post-norm",
            embedding="bert.embeddings.word_embeddings",
        ),
        "attention",
        placed_tokens,
        features=frozenset({"learned positions"}),
    )
)  # fmt: skip
_declare(
    Model(
        "convnext",
        "ConvNeXt of 12 blocks",
        "seen",
        _of(
            "ConvNextForImageClassification", "ConvNextConfig", num_labels=CLASSES, image_size=SIZE, patch_size=4,
            depths=[3, 3, 6], hidden_sizes=[32, 64, 128], num_stages=3, layer_scale_init_value=0.3,
            initializer_range=0.1,
        ),
        Layout(
            tuple(
                f"convnext.encoder.stages.{stage}.layers.{layer}"
                for stage, depth in enumerate((3, 3, 6))
                for layer in range(depth)
            ),
            {
                "block": "", "conv": "dwconv", "norm": "layernorm", "up": "pwconv1", "down": "pwconv2", "act": "act",
            },
            residual="convnext",
        ),
        "convolution",
        images,
    )
)  # fmt: skip
_declare(
    Model(
        "qwen3",
        "Qwen3 of 12 layers, which norms queries and keys",
        "unseen",
        _of("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=WIDTH // HEADS),
        Layout(numbered("model.layers.{}", 12), DECODER_PARTS, residual="pre-norm", embedding="model.embed_tokens"),
        "attention",
        next_tokens,
        features=DECODER_FEATURES,
    )
)
_declare(
    Model(
        "mixtral",
        "Mixtral of 12 layers: 4 experts, 2 for each token",
        "seen",
        _of(
            "MixtralForCausalLM", "MixtralConfig",
            **DECODER | {"intermediate_size": 160}, num_local_experts=4, num_experts_per_tok=2,
        ),
        Layout(
            numbered("model.layers.{}", 12),
            {name: part for name, part in DECODER_PARTS.items() if name not in ("up", "down", "act")}
            | {"router": "mlp.gate", "experts": "mlp.experts"},
            residual="pre-norm",
            embedding="model.embed_tokens",
        ),
        "attention",
        next_tokens,
        features=DECODER_FEATURES,
    )
)  # fmt: skip
_declare(
    Model(
        "t5",
        "T5: 6 layers of an encoder, 12 of a decoder",
        "seen",
        _of(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS,
            d_ff=320, num_layers=6, num_decoder_layers=12, num_heads=HEADS, dropout_rate=0.0, use_cache=False,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        ),
        Layout(
            numbered("decoder.block.{}", 12),
            {
                "block": "layer.2", "attn": "layer.0.SelfAttention", "q": "layer.0.SelfAttention.q",
                "k": "layer.0.SelfAttention.k", "v": "layer.0.SelfAttention.v", "o": "layer.0.SelfAttention.o",
                "cross": "layer.1.EncDecAttention", "norm": "layer.2.layer_norm", "mlp": "layer.2.DenseReluDense",
                "up": "layer.2.DenseReluDense.wi_1", "down": "layer.2.DenseReluDense.wo",
                "act": "layer.2.DenseReluDense.act", "drop": "layer.2.dropout",
            },
            residual="t5",
            embedding="shared",
        ),
        "attention",
        two_sequences,
        features=frozenset({"relative positions"}),
    )
)  # fmt: skip
_declare(
    Model(
        "mobilenet",
        "MobileNetV2 of 16 inverted residuals, with batch norms",
        "seen",
        _of(
            "MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=CLASSES, image_size=SIZE,
            depth_multiplier=0.5, output_stride=8, tf_padding=False, classifier_dropout_prob=0.0,
        ),
        Layout(
            numbered("mobilenet_v2.layer.{}", 16),
            {
                "block": "", "conv": "conv_3x3.convolution", "bn": "conv_3x3.normalization",
                "norm": "conv_3x3.normalization", "act": "conv_3x3.activation",
            },
            residual="mobilenet",
        ),
        "convolution",
        images,
        optimizer="SGD",
    )
)  # fmt: skip
_declare(
    Model(
        "vit",
        "ViT of 12 layers",
        "seen",
        _of(
            "ViTForImageClassification", "ViTConfig", num_labels=CLASSES, image_size=SIZE, patch_size=8,
            hidden_size=WIDTH, num_hidden_layers=12, num_attention_heads=HEADS, intermediate_size=384,
            initializer_range=WIDTH**-0.5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        Layout(
            numbered("vit.layers.{}", 12),
            {
                "block": "", "attn": "attention", "q": "attention.q_proj", "k": "attention.k_proj",
                "v": "attention.v_proj", "o": "attention.o_proj", "norm_1": "layernorm_before",
                "norm": "layernorm_after", "mlp": "mlp", "up": "mlp.fc1", "down": "mlp.fc2",
                "act": "mlp.activation_fn", "drop": "dropout",
            },
            residual="pre-norm",
        ),
        "attention",
        images,
    )
)  # fmt: skip

_declare(
    Model(
        "neox",
        "GPT-NeoX of 12 layers: attention and MLP side by side, one product for queries, keys and values",
        "unseen",
        _of(
            "GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=12,
            num_attention_heads=HEADS, intermediate_size=384, initializer_range=WIDTH**-0.5, hidden_dropout=0.0,
            attention_dropout=0.0, use_cache=False, tie_word_embeddings=False,
        ),
        Layout(
            numbered("gpt_neox.layers.{}", 12),
            {
                "block": "", "attn": "attention", "o": "attention.dense", "norm_1": "input_layernorm",
                "norm": "post_attention_layernorm", "mlp": "mlp", "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h", "act": "mlp.act", "drop": "post_mlp_dropout",
            },
            residual="parallel",
            embedding="gpt_neox.embed_in",
        ),
        "attention",
        next_tokens,
        features=frozenset({"causal", "rotary"}),
    )
)  # fmt: skip
_declare(
    Model(
        "opt",
        "OPT of 12 layers, with ReLU",
        "unseen",
        _of(
            "OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=12,
            num_attention_heads=HEADS, ffn_dim=384, word_embed_proj_dim=WIDTH, max_position_embeddings=LENGTH + 1,
            init_std=WIDTH**-0.5, dropout=0.0, attention_dropout=0.0, use_cache=False,
        ),
        Layout(
            numbered("model.decoder.layers.{}", 12),
            {
                "block": "", "attn": "self_attn", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
                "v": "self_attn.v_proj", "o": "self_attn.out_proj", "norm_1": "self_attn_layer_norm",
                "norm": "final_layer_norm", "up": "fc1", "down": "fc2", "act": "activation_fn",
            },
            residual="opt",
            embedding="model.decoder.embed_tokens",
        ),
        "attention",
        next_tokens,
        features=frozenset({"causal"}),
    )
)  # fmt: skip
_declare(
    Model(
        "gemma",
        "Gemma 3 of 12 layers: norms before and after each part, windows of 16 in five of six layers",
        "seen",
        _of(
            "Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, head_dim=WIDTH // HEADS, sliding_window=16,
            tie_word_embeddings=False,
        ),
        Layout(
            numbered("model.layers.{}", 12),
            DECODER_PARTS | {"norm": "pre_feedforward_layernorm"},
            residual="sandwich",
            embedding="model.embed_tokens",
        ),
        "attention",
        next_tokens,
        features=DECODER_FEATURES,
    )
)  # fmt: skip
_declare(
    Model(
        "qwen3-moe",
        "Qwen3 of 12 layers with 8 experts, 2 for each token",
        "unseen",
        _of(
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **DECODER, head_dim=WIDTH // HEADS, moe_intermediate_size=96,
            num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        ),
        Layout(
            numbered("model.layers.{}", 12),
            {name: part for name, part in DECODER_PARTS.items() if name not in ("up", "down", "act")}
            | {"router": "mlp.gate", "experts": "mlp.experts"},
            residual="pre-norm",
            embedding="model.embed_tokens",
        ),
        "attention",
        next_tokens,
        features=DECODER_FEATURES,
    )
)  # fmt: skip
_declare(
    Model(
        "regnet",
        "RegNet of 12 blocks, with groups, batch norms and squeeze-and-excitation",
        "unseen",
        _of(
            "RegNetForImageClassification", "RegNetConfig", num_labels=CLASSES, embedding_size=16,
            hidden_sizes=[32, 64, 96], depths=[3, 5, 4], groups_width=16, layer_type="y",
        ),
        Layout(
            tuple(
                f"regnet.encoder.stages.{stage}.layers.{layer}"
                for stage, depth in enumerate((3, 5, 4))
                for layer in range(depth)
            ),
            {
                "block": "", "conv": "layer.1.convolution", "bn": "layer.1.normalization",
                "norm": "layer.1.normalization", "act": "layer.1.activation",
            },
            residual="regnet",
        ),
        "convolution",
        images,
        optimizer="SGD",
    )
)  # fmt: skip


def build(model: Model, sdpa: bool, seed: int = 0) -> nn.Module:
    """The model with its weights, the same bits whatever its attention."""
    torch.manual_seed(seed)
    made = model.build(sdpa).train()
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for module in made.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias":
                    parameter.normal_(std=0.1)
                elif name == "weight" and parameter.dim() == 1:
                    parameter.normal_(1.0, 0.1)
    return made
