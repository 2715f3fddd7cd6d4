"""Networks of known families, written without the exporter: their logits are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import decoder_checkpoint
from nerite.core.errors import Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import openvino
from nerite.llm.conversion.decoder import EMBEDDINGS, HEAD, Decoder, read_decoder
from nerite.llm.conversion.formats import QuantizedMatrix, quantized
from nerite.llm.conversion.graph import DecoderGraph, save
from nerite.llm.conversion.weights import StoredTensor, read_tensors

TOKENS = np.random.default_rng(3).integers(2, 258, (1, 24))
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1,
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, one group, bf16": ("llama", {"dtype": "bfloat16", "num_key_value_heads": 1}),
    "llama, shards, f16": ("llama", {"dtype": "float16", "shards": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2, tied, bf16": ("qwen2", {"dtype": "bfloat16", "tie_word_embeddings": True, "head_dim": 12}),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-5}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.05,
            "logits_scaling": 8.0,
        },
    ),
    "granite, tied, biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, tied, bf16": ("phi3", {"dtype": "bfloat16", "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
    "smollm3, tied, biases": ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True}),
    "qwen3, biases, bf16, shards": ("qwen3", {"dtype": "bfloat16", "attention_bias": True, "shards": True}),
}


def written(directory: Path, target: Path, weights: str = "fp32") -> Path:
    decoder = read_decoder(directory)
    tensors = read_tensors(directory, decoder.shapes(), f"{HEAD}.weight")
    target.mkdir(exist_ok=True)
    graph = DecoderGraph(decoder, tensors, weights, target)
    save(graph.model(), target / "model.xml", weights)
    assert {file.name for file in target.iterdir()} == {"model.xml", "model.bin"}
    return target / "model.xml"


def logits(file: Path, tokens: Array, *parts: int) -> Array:
    """Run ``tokens`` in parts of these lengths, and what remains."""
    request = openvino().Core().compile_model(file, "CPU", EXACT).create_infer_request()
    request.reset_state()
    found, begin = [], 0
    for end in (*np.cumsum(parts), tokens.shape[1]):
        inputs = {
            "input_ids": tokens[:, begin:end],
            "attention_mask": np.ones((len(tokens), end), np.int64),
            "position_ids": np.broadcast_to(np.arange(begin, end), tokens[:, begin:end].shape),
            "beam_idx": np.arange(len(tokens), dtype=np.int32),
        }
        found.append(request.infer(inputs)["logits"].copy())
        begin = end
    return np.concatenate(found, 1)


def expected(directory: Path, tokens: Array) -> Array:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(tokens)).logits)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    kind, settings = CASES[case]
    directory = decoder_checkpoint(tmp_path / "m", kind, **settings)
    right = expected(directory, TOKENS)
    scale = np.abs(right).max()
    exact = written(directory, tmp_path / "exact")
    np.testing.assert_allclose(logits(exact, TOKENS), right, atol=1e-5 * scale)
    np.testing.assert_allclose(logits(exact, TOKENS, 11, 1, 1), right, atol=1e-5 * scale)
    # Weights of 16 bits take no less space, and those of BF16 are exact in FP16 unless they are tiny.
    narrow = written(directory, tmp_path / "narrow", "fp16")
    rounds = settings.get("dtype", "float32") == "float32"
    np.testing.assert_allclose(logits(narrow, TOKENS), right, atol=(1e-2 if rounds else 1e-4) * scale)
    assert (weights_of(narrow) < 0.7 * weights_of(exact)) == rounds


def weights_of(file: Path) -> int:
    """Return the number of bytes of a network's weights."""
    return file.with_suffix(".bin").stat().st_size


@pytest.mark.parametrize("case", ["llama, tied", "qwen3, biases, bf16, shards"])
def test_weights_of_8_bits(tmp_path: Path, case: str) -> None:
    kind, settings = CASES[case]
    directory = decoder_checkpoint(tmp_path / "m", kind, **settings)
    right = expected(directory, TOKENS)
    file, exact = written(directory, tmp_path / "o", "int8"), written(directory, tmp_path / "exact")
    np.testing.assert_allclose(logits(file, TOKENS), right, atol=0.05 * np.abs(right).max())
    assert weights_of(file) < (0.4 if "bf16" not in case else 0.7) * weights_of(exact)


WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_weights_of_4_bits(tmp_path: Path, kind: str) -> None:
    """The logits are those of transformers with the same rounded weights."""
    from safetensors.numpy import load_file, save_file

    directory = decoder_checkpoint(tmp_path / "m", kind, **WIDE)
    tensors = read_tensors(directory, read_decoder(directory).shapes(), "")
    sizes = [weights_of(written(directory, tmp_path / weights, weights)) for weights in ("fp16", "int8", "int4")]
    assert sizes[2] < 0.68 * sizes[1] < 0.4 * sizes[0]
    rounded = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            outside = name in (f"{EMBEDDINGS}.weight", f"{HEAD}.weight")
            rounded[name] = widened(quantized(tensor, tmp_path, *((8, 0) if outside else (4, 128))))
    save_file(rounded, directory / "model.safetensors", {"format": "pt"})
    right = expected(directory, TOKENS)
    found = logits(tmp_path / "int4" / "model.xml", TOKENS)
    np.testing.assert_allclose(found, right, atol=1e-3 * np.abs(right).max())


def test_the_plugin_computes_with_4_bits(tmp_path: Path) -> None:
    """It has not widened the weights when it loaded them, which would take eight times the memory."""
    file = written(decoder_checkpoint(tmp_path / "m", "llama", **WIDE), tmp_path / "o", "int4")
    model = openvino().Core().compile_model(file, "CPU", EXACT).get_runtime_model()
    kinds = [
        each.input(1).get_element_type().get_type_name()
        for each in model.get_ops()
        if each.get_rt_info()["layerType"].astype(str) == "FullyConnected"
    ]
    assert kinds.count("u4") == 14, kinds


def test_rows_that_cannot_be_divided_have_8_bits(tmp_path: Path) -> None:
    directory = decoder_checkpoint(tmp_path / "m", "llama")
    sizes = [weights_of(written(directory, tmp_path / weights, weights)) for weights in ("int8", "int4")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1), "48 and 80 numbers in a row; 64 in that of one layer"


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128), (4, 32)])
def test_integers_are_as_near_as_their_scale_allows(tmp_path: Path, bits: int, group: int) -> None:
    weights = np.random.default_rng(0).standard_normal((6, 384)).astype(np.float32)
    weights[3] = 0
    weights[4] = np.abs(weights[4]) + 1
    (tmp_path / "w").write_bytes(weights.tobytes())
    made = quantized(StoredTensor("F32", weights.shape, tmp_path / "w", 0), tmp_path, bits, group)
    found = widened(made).reshape(6, made.groups, -1)
    scales = made.scales.astype(np.float32)
    apart = np.abs(found - weights.reshape(found.shape))
    assert (apart <= 0.51 * scales).all()
    assert not found[3].any()
    assert made.groups == (384 // group if group else 1)


def widened(made: QuantizedMatrix) -> Array:
    """Return the numbers that a matrix of integers stands for."""
    values, zeros = (
        each if made.bits == 8 else np.stack([each & 15, each >> 4], -1)
        for each in map(np.asarray, (made.values, made.zeros))
    )
    rows = len(made.scales)
    apart = values.reshape(rows, made.groups, -1).astype(np.float32) - zeros.reshape(rows, made.groups, 1)
    found: Array = (apart * made.scales.astype(np.float32)).reshape(rows, -1)
    return found


def test_several_rows_with_padding(tmp_path: Path) -> None:
    """A state has a row for each sequence, and tokens that the mask leaves out are not seen."""
    directory = decoder_checkpoint(tmp_path / "m", "qwen3")
    file = written(directory, tmp_path / "o")
    request = openvino().Core().compile_model(file, "CPU", EXACT).create_infer_request()
    request.reset_state()
    rows = np.vstack([TOKENS, np.roll(TOKENS, 4)])
    mask = np.ones(rows.shape, np.int64)
    mask[1, :4] = 0
    inputs = {
        "input_ids": rows,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(1) - 1, 0),
        "beam_idx": np.arange(2, dtype=np.int32),
    }
    found = request.infer(inputs)["logits"]
    alone = expected(directory, TOKENS)
    np.testing.assert_allclose(found[0], alone[0], atol=1e-4)
    np.testing.assert_allclose(found[1, 4:], alone[0, :-4], atol=1e-4)


def test_weights_that_16_bits_cannot_hold_stay_as_they_are(tmp_path: Path) -> None:
    directory = decoder_checkpoint(tmp_path / "m", "llama")
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    begin = head["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0] + 8 + int.from_bytes(content[:8], "little")
    content[begin : begin + 4] = np.float32(1e6).tobytes()
    file.write_bytes(content)
    right = expected(directory, TOKENS)
    found = logits(written(directory, tmp_path / "o", "fp16"), TOKENS)
    np.testing.assert_allclose(found, right, atol=1e-2 * np.abs(right).max())


CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768,
    "use_sliding_window": False, "max_window_layers": 21, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768, "use_cache": True, "bos_token_id": 151643, "eos_token_id": 151645,
    "attention_dropout": 0.0, "initializer_range": 0.02, "transformers_version": "4.43.1",
}  # fmt: skip


@pytest.fixture
def described(tmp_path: Path) -> Callable[..., Decoder]:
    def read(**changes: Any) -> Decoder:
        content = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_decoder(tmp_path)

    return read


def test_a_config_of_an_older_transformers(described: Callable[..., Decoder]) -> None:
    decoder = described()
    assert (decoder.head, decoder.groups, decoder.tied, decoder.query_bias, decoder.output_bias) == (
        64,
        2,
        True,
        True,
        False,
    )
    assert decoder.frequencies.dtype == np.float32
    np.testing.assert_allclose(decoder.frequencies, 1e6 ** (-np.arange(32) / 32), rtol=1e-6)
    assert described(rope_scaling={"type": "linear", "factor": 4}).frequencies[0] == 0.25


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["BertModel"]}, "its architecture is not known: BertModel"),
        ({"architectures": ...}, "its architecture is not known: config.json names none"),
        ({"model_type": "llama"}, "config.json has no 'model_type': 'qwen2'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantized"),
        ({"num_experts": 8}, "config.json has 'num_experts', which is not known"),
        ({"hidden_act": "gelu"}, "config.json has 'hidden_act': 'gelu', which is not known"),
        ({"use_sliding_window": True}, "config.json has 'use_sliding_window': True, which is not known"),
        ({"num_key_value_heads": ...}, "config.json has no 'num_key_value_heads'"),
        ({"num_key_value_heads": 3}, "14 heads of 64 elements cannot share those of 3 keys"),
        ({"hidden_size": -1}, "config.json has 'hidden_size': -1, where a number above 0 is expected"),
        ({"hidden_size": ...}, "config.json has 'hidden_size': None, where a number above 0 is expected"),
        ({"rms_norm_eps": "x"}, "config.json has no 'rms_norm_eps'"),
        ({"attention_bias": True}, "config.json has 'attention_bias', which this architecture is not known to have"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "its layers are of several kinds"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "its rotary positions are of the kind 'yarn', which is not"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4, "beta": 1}}, "the settings beta, factor, which are not"),
        ({"rope_scaling": [1]}, "config.json has a 'rope_scaling' that is not known"),
        ({"rope_theta": "high"}, "the settings of its rotary positions are not numbers above 0"),
    ],
)
def test_what_is_left_to_the_exporter(described: Callable[..., Decoder], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported) as refused:
        described(**changes)
    assert reason in refused.value.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no_rope_layers": [1] * 23}, "'no_rope_layers', which is not a list of 0 or 1 for each layer"),
        ({"no_rope_layers": [2] * 24}, "'no_rope_layers', which is not a list of 0 or 1 for each layer"),
        ({"no_rope_layers": ...}, "config.json has no 'no_rope_layers'"),
        ({"logits_scaling": 2.0}, "config.json has 'logits_scaling', which is not known"),
    ],
)
def test_settings_of_some_families(described: Callable[..., Decoder], changes: dict[str, Any], reason: str) -> None:
    smol = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1] * 24}
    assert described(**smol).rotated == [True] * 24
    with pytest.raises(Unsupported) as refused:
        described(**{**smol, **changes})
    assert reason in refused.value.message
    granite = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 0}
    with pytest.raises(Unsupported, match="'logits_scaling': 0, where a number above 0"):
        described(**granite, use_sliding_window=..., sliding_window=..., max_window_layers=...)


def test_a_sliding_window_is_left_to_the_exporter(described: Callable[..., Decoder]) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "use_sliding_window": ...}
    with pytest.raises(Unsupported, match="its attention has a sliding window"):
        described(**mistral, sliding_window=4096)
    with pytest.raises(Unsupported, match=r"config.json has no 'sliding_window'"):
        described(**mistral, sliding_window=...)
    assert described(**mistral, sliding_window=None).groups == 2


def test_weights_that_are_not_those_of_the_network(tmp_path: Path) -> None:
    directory = decoder_checkpoint(tmp_path / "m", "llama")
    shapes = read_decoder(directory).shapes()
    file = directory / "model.safetensors"
    with pytest.raises(Unsupported, match=r"it has a tensor 'lm_head.weight', which is not known"):
        read_tensors(directory, {name: shapes[name] for name in shapes.keys() - {"lm_head.weight"}}, "")
    with pytest.raises(Unsupported, match="it has no tensor 'other'"):
        read_tensors(directory, {**shapes, "other": (1,)}, "")
    with pytest.raises(Unsupported, match=r"'model.norm.weight' has the shape \(48,\), and not \(47,\)"):
        read_tensors(directory, {**shapes, "model.norm.weight": (47,)}, "")
    content = file.read_bytes()
    for damaged in (content[:1000], b"\xff" * 64, content[:8], content[:-1], content.replace(b'"F32"', b'"I32"')):
        file.write_bytes(damaged)
        with pytest.raises(Unsupported, match=r"'model.safetensors' is not a safetensors file of floating-point"):
            read_tensors(directory, shapes, "")
    file.unlink()
    with pytest.raises(Unsupported, match=r"it has neither a model.safetensors nor"):
        read_tensors(directory, shapes, "")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(Unsupported, match=r"names the file '../x.safetensors', which is not there"):
        read_tensors(directory, shapes, "")
