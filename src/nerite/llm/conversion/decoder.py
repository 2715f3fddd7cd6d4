"""Recognizes decoders whose network Nerite writes itself, from config.json, and says what its tensors are.

A setting that is not known here could change the network, and a mistake there makes texts only a little worse. So
config.json is read strictly: each key is known, or the checkpoint is left to OpenVINO's exporter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.core.errors import Unsupported
from nerite.core.tensor import Array
from nerite.llm import checkpoint


class DecoderFamily(NamedTuple):
    """What the checkpoints of an architecture have in common."""

    model_type: str
    query_bias: bool = False
    """Whether query, key and value always have a bias."""
    head_norms: bool = False
    """Whether the heads of query and key are normalized."""
    window: str = ""
    """Setting without which ``sliding_window`` has no effect; empty if it always has one."""
    needed: Sequence[str] = ()
    """Settings whose defaults differ from those of the other families."""
    fused: bool = False
    """Whether query, key and value are one layer, and the two that begin a gated layer."""
    more: Sequence[str] = ()
    """Settings that only this family has. Those that are not read here have no effect."""
    theta: float = 10000.0
    """Base of the frequencies of rotary positions if none is given."""


_MULTIPLIERS: Final = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_STILL: Final = "no_rope_layers"
FAMILIES: Final[Mapping[str, DecoderFamily]] = {
    "LlamaForCausalLM": DecoderFamily("llama"),
    "MistralForCausalLM": DecoderFamily("mistral", needed=("num_key_value_heads", "sliding_window")),
    "Qwen2ForCausalLM": DecoderFamily(
        "qwen2", query_bias=True, window="use_sliding_window", needed=("num_key_value_heads",)
    ),
    "Qwen3ForCausalLM": DecoderFamily(
        "qwen3", head_norms=True, window="use_sliding_window", needed=("num_key_value_heads", "head_dim")
    ),
    "GraniteForCausalLM": DecoderFamily("granite", more=_MULTIPLIERS),
    "Phi3ForCausalLM": DecoderFamily(
        "phi3", fused=True, more=("embd_pdrop", "original_max_position_embeddings", "resid_pdrop")
    ),
    "SmolLM3ForCausalLM": DecoderFamily(
        "smollm3",
        window="use_sliding_window",
        needed=("num_key_value_heads", _STILL, "tie_word_embeddings"),
        more=(_STILL, "no_rope_layer_interval"),
        theta=2000000.0,
    ),
}
"""By the name of the architecture. Each is compared with transformers by tests/unit/llm/test_llm_decoders.py."""

_WITHOUT_EFFECT: Final = frozenset(
    {
        *("_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "dtype"),
        *("initializer_range", "is_llama_config", "max_position_embeddings", "max_window_layers", "model_type"),
        *("pretraining_tp", "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    }
)
_FIXED: Final[Mapping[str, Sequence[Any]]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "use_sliding_window": (None, False),
}
"""Settings that may have these values only."""
_SIZES: Final = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"),
    *("head_dim", "num_key_value_heads"),
)
_OTHERS: Final = ("attention_bias", "layer_types", "mlp_bias", "rms_norm_eps", "rope_parameters", "rope_scaling")
_READ: Final = frozenset({*_SIZES, *_OTHERS, "rope_theta", "sliding_window", "tie_word_embeddings", *_FIXED})
_ROTARY: Final[Mapping[str, Sequence[str]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of rotary positions, with their settings."""
_MOST: Final = 1 << 24
"""The largest size that is believed."""


@dataclass(frozen=True)
class Decoder:
    """Dimensions and variations of a decoder."""

    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    head: int
    """Width of a head."""
    vocabulary: int
    epsilon: float
    frequencies: Array
    """Radians per position, for each pair of a head's elements."""
    tied: bool
    """Whether the embeddings are the weights of the last layer, too."""
    query_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    fused: bool
    """Query, key and value are one layer, and the two that begin a gated layer."""
    rotated: Sequence[bool]
    """The layers whose heads are rotated."""
    embedding_scale: float
    residual_scale: float
    """Of what attention and gated layers add."""
    attention_scale: float
    """0 for the usual one, which depends on the width of a head."""
    logits_divisor: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the checkpoint's tensors, by their names."""
        named: dict[str, tuple[int, ...]] = {
            f"{EMBEDDINGS}.weight": (self.vocabulary, self.width),
            f"{NORM}.weight": (self.width,),
        }
        if not self.tied:
            named[f"{HEAD}.weight"] = (self.vocabulary, self.width)
        for layer in range(self.layers):
            named.update((f"model.layers.{layer}.{name}", shape) for name, shape in self._layer())
        return named

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head, self.groups * self.head
        apart = (
            ("self_attn.q_proj", queries, self.width, self.query_bias),
            ("self_attn.k_proj", keys, self.width, self.query_bias),
            ("self_attn.v_proj", keys, self.width, self.query_bias),
            ("mlp.gate_proj", self.inner, self.width, self.mlp_bias),
            ("mlp.up_proj", self.inner, self.width, self.mlp_bias),
        )
        fused = (
            ("self_attn.qkv_proj", queries + 2 * keys, self.width, False),
            ("mlp.gate_up_proj", 2 * self.inner, self.width, False),
        )
        for name, rows, columns, bias in (
            *(fused if self.fused else apart),
            ("self_attn.o_proj", self.width, queries, self.output_bias),
            ("mlp.down_proj", self.width, self.inner, self.mlp_bias),
        ):
            yield f"{name}.weight", (rows, columns)
            if bias:
                yield f"{name}.bias", (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.weight", (self.width,)
        if self.head_norms:
            yield "self_attn.q_norm.weight", (self.head,)
            yield "self_attn.k_norm.weight", (self.head,)


EMBEDDINGS: Final = "model.embed_tokens"
NORM: Final = "model.norm"
HEAD: Final = "lm_head"


def read_decoder(directory: Path) -> Decoder:
    """Return the decoder that a checkpoint's config.json describes. Raises ``Unsupported`` if it is not known here."""
    config = checkpoint.describe_content(directory)
    names = checkpoint.architectures(directory)
    family = FAMILIES.get(names[0]) if len(names) == 1 else None
    if family is None:
        raise Unsupported(f"its architecture is not known: {', '.join(names) or 'config.json names none'}")
    if config.get("model_type") != family.model_type:
        raise Unsupported(f"config.json has no 'model_type': '{family.model_type}'")
    _check(config, family)
    sizes = {name: _size(config, name) for name in _SIZES[:5]}
    heads = sizes["num_attention_heads"]
    width = sizes["hidden_size"]
    groups = _size(config, "num_key_value_heads", heads)
    head = _size(config, "head_dim", width // heads)
    if heads % groups or head % 2:
        raise Unsupported(f"{heads} heads of {head} elements cannot share those of {groups} keys")
    epsilon: Any = config.get("rms_norm_eps")
    if not _is_number(epsilon):
        raise Unsupported("config.json has no 'rms_norm_eps'")
    bias = config.get("attention_bias") is True
    embedding, residual, attention, logits = (_multiplier(config, family, name) for name in _MULTIPLIERS)
    return Decoder(
        width,
        sizes["intermediate_size"],
        sizes["num_hidden_layers"],
        heads,
        groups,
        head,
        sizes["vocab_size"],
        float(epsilon),
        _frequencies(config, head, family.theta),
        config.get("tie_word_embeddings") is True,
        bias or family.query_bias,
        bias,
        config.get("mlp_bias") is True,
        family.head_norms,
        family.fused,
        _rotated(config, family, sizes["num_hidden_layers"]),
        embedding,
        residual,
        attention if family.more == _MULTIPLIERS else 0.0,
        logits,
    )


def _multiplier(config: Mapping[str, Any], family: DecoderFamily, name: str) -> float:
    value = config.get(name, 1.0) if name in family.more else 1.0
    if not _is_number(value):
        raise Unsupported(f"config.json has '{name}': {value!r}, where a number above 0 is expected")
    return float(value)


def _rotated(config: Mapping[str, Any], family: DecoderFamily, layers: int) -> Sequence[bool]:
    """Return for each layer whether its heads are rotated: where the setting, which is named the wrong way, is 1."""
    if _STILL not in family.more:
        return [True] * layers
    given = config[_STILL]
    if not isinstance(given, list) or len(given) != layers or any(each not in (0, 1) for each in given):
        raise Unsupported(f"config.json has '{_STILL}', which is not a list of 0 or 1 for each layer")
    return [each == 1 for each in given]


def _check(config: Mapping[str, Any], family: DecoderFamily) -> None:
    """Raise ``Unsupported`` for a setting that is unknown, or has a value that is not known here."""
    if config.get("quantization_config"):
        raise Unsupported("its weights are quantized")
    for name in family.needed:
        if name not in config:
            raise Unsupported(f"config.json has no '{name}'")
    for name, value in config.items():
        if name not in _READ and name not in (*_WITHOUT_EFFECT, *family.more) and value is not None:
            raise Unsupported(f"config.json has '{name}', which is not known")
        if name in _FIXED and value not in _FIXED[name]:
            raise Unsupported(f"config.json has '{name}': {value!r}, which is not known")
    if config.get("sliding_window") is not None and not family.window:
        raise Unsupported("its attention has a sliding window")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise Unsupported("its layers are of several kinds")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name) not in (None, False) and family.model_type not in _BIASED[name]:
            raise Unsupported(f"config.json has '{name}', which this architecture is not known to have")


_BIASED: Final = {
    "attention_bias": ("granite", "llama", "qwen3", "smollm3"),
    "mlp_bias": ("granite", "llama", "smollm3"),
}
"""Types of models that have these settings."""


def _size(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    size = config.get(name)
    if size is None and default:
        return default
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MOST:
        raise Unsupported(f"config.json has '{name}': {size!r}, where a number above 0 is expected")
    return size


def _frequencies(config: Mapping[str, Any], head: int, theta: float) -> Array:
    """Return the radians per position, in 32 bits like those of transformers."""
    theta = config.get("rope_theta", theta)
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given is not None and not isinstance(given, dict):
            raise Unsupported(f"config.json has a '{name}' that is not known")
        scaling |= given or {}
    theta = scaling.pop("rope_theta", theta)
    kinds = {scaling.pop(name) for name in ("rope_type", "type") if name in scaling} or {"default"}
    kind = kinds.pop()
    if kinds or kind not in _ROTARY:
        raise Unsupported(f"its rotary positions are of the kind '{kind}', which is not known")
    if scaling.pop("partial_rotary_factor", 1) != 1 or scaling.keys() != set(_ROTARY[kind]):
        raise Unsupported(f"its rotary positions have the settings {', '.join(sorted(scaling))}, which are not known")
    if not _is_number(theta) or not all(map(_is_number, scaling.values())):
        raise Unsupported("the settings of its rotary positions are not numbers above 0")
    exponents = np.arange(0, head, 2, dtype=np.int64).astype(np.float32) / np.float32(head)
    plain: Array = np.float32(1) / np.float32(theta) ** exponents
    if kind == "default":
        return plain
    slow: Array = plain / np.float32(scaling["factor"])
    if kind == "linear":
        return slow
    # Llama 3 slows down what turns less than once in the original context, and nothing that turns often in it.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if high <= low:
        raise Unsupported("its rotary positions have a 'high_freq_factor' that is not above its 'low_freq_factor'")
    turns = np.float32(scaling["original_max_position_embeddings"]) * plain / np.float32(2 * math.pi)
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    scaled: Array = (1 - kept) * slow + kept * plain
    return scaled


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
