"""GGUF files for tests: the language model of ``checkpoints`` in the format of llama.cpp, written here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import CONTEXT, HEADS, LAYERS, VOCABULARY, WIDTH, language_weights
from llm_models import END, TEMPLATE, byte_tokenizer

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_F32, _F16 = 0, 1
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_model(file: Path, seed: int = 0, architecture: str = "llama") -> Path:
    """Write a Llama with 16-bit weights and its tokenizer; return the file. Equal seeds, equal weights."""
    file.parent.mkdir(parents=True, exist_ok=True)
    values = _values(architecture)
    tensors = {_name(name): tensor for name, tensor in language_weights(seed).items()}
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))
    for key, (kind, value) in values.items():
        head += _string(key) + struct.pack("<I", kind) + _value(kind, value)
    at, data = 0, b""
    for name, tensor in tensors.items():
        # Norms stay whole, as llama.cpp writes them.
        kind, raw = (_F32, tensor) if tensor.ndim == 1 else (_F16, tensor.astype(np.float16))
        content = raw.tobytes()
        head += _string(name) + struct.pack(f"<I{tensor.ndim}QIQ", tensor.ndim, *reversed(tensor.shape), kind, at)
        data += content + b"\0" * (-len(content) % _ALIGNMENT)
        at = len(data)
    file.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + data)
    return file


def _values(architecture: str) -> dict[str, tuple[int, Any]]:
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    # A merge has to make a token, and the readers want one.
    tokens.append("ab")
    tokens += [f"<unused{number}>" for number in range(len(tokens), VOCABULARY)]
    return {
        "general.architecture": (_STRING, architecture),
        "general.name": (_STRING, "tiny"),
        "general.file_type": (_UINT32, 1),
        f"{architecture}.context_length": (_UINT32, CONTEXT),
        f"{architecture}.embedding_length": (_UINT32, WIDTH),
        f"{architecture}.block_count": (_UINT32, LAYERS),
        f"{architecture}.feed_forward_length": (_UINT32, 2 * WIDTH),
        f"{architecture}.rope.dimension_count": (_UINT32, WIDTH // HEADS),
        f"{architecture}.rope.freq_base": (_FLOAT32, 10000.0),
        f"{architecture}.attention.head_count": (_UINT32, HEADS),
        f"{architecture}.attention.head_count_kv": (_UINT32, HEADS),
        f"{architecture}.attention.layer_norm_rms_epsilon": (_FLOAT32, 1e-5),
        f"{architecture}.vocab_size": (_UINT32, VOCABULARY),
        "tokenizer.ggml.model": (_STRING, "gpt2"),
        "tokenizer.ggml.pre": (_STRING, "llama-bpe"),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, tokens)),
        "tokenizer.ggml.token_type": (_ARRAY, (_INT32, [3, 3, *[1] * (len(tokens) - 2)])),
        "tokenizer.ggml.merges": (_ARRAY, (_STRING, ["a b"])),
        "tokenizer.ggml.bos_token_id": (_UINT32, 0),
        "tokenizer.ggml.eos_token_id": (_UINT32, END),
        "tokenizer.ggml.padding_token_id": (_UINT32, END),
        "tokenizer.ggml.add_bos_token": (_BOOL, False),
        "tokenizer.chat_template": (_STRING, TEMPLATE),
    }


def _name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
    known = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return f"{known[name.removesuffix('.weight')]}.weight"


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)
