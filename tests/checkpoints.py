"""Checkpoints of Hugging Face for tests: random weights, two layers, a token for each byte; with no network."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from llm_models import END, byte_tokenizer

WIDTH, HEADS, LAYERS, VOCABULARY, CONTEXT = 64, 1, 2, 260, 2048


def language_checkpoint(directory: Path, seed: int = 0, *, begin: bool = False) -> Path:
    """Write a Llama; return its directory. Equal seeds, equal weights. ``begin``: its texts begin with a token."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": END,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    _write_safetensors(directory / "model.safetensors", language_weights(seed))
    byte_tokenizer(begin=begin).save_pretrained(directory)
    return directory


def decoder_checkpoint(
    directory: Path, model_type: str, dtype: str = "float32", *, shards: bool = False, **settings: Any
) -> Path:
    """Write a decoder as transformers writes it, with random biases and norms; return its directory."""
    import torch  # here, for both take seconds
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": END,
        "pad_token_id": None, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="30KB" if shards else "1GB")
    byte_tokenizer().save_pretrained(directory)
    return directory


@functools.cache
def language_weights(seed: int) -> dict[str, Any]:
    """Return the weights of ``language_checkpoint`` by their names."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 0.2) -> Any:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights: dict[str, Any] = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH, 1.0)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(WIDTH, WIDTH)
        weights[f"{prefix}mlp.gate_proj.weight"] = matrix(2 * WIDTH, WIDTH)
        weights[f"{prefix}mlp.up_proj.weight"] = matrix(2 * WIDTH, WIDTH)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(WIDTH, 2 * WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(WIDTH, np.float32)
    weights["model.norm.weight"] = np.ones(WIDTH, np.float32)
    weights["lm_head.weight"] = matrix(VOCABULARY, WIDTH, 0.5)
    return weights


def adapter(directory: Path, seed: int, rank: int = 4) -> Path:
    """Write a LoRA adapter for the attention of ``language_checkpoint``; return its directory."""
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "", "lora_dropout": 0.0,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(1000 + seed)
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = random.standard_normal((rank, WIDTH)).astype(np.float32) * 0.5
            weights[f"{prefix}.lora_B.weight"] = random.standard_normal((WIDTH, rank)).astype(np.float32) * 0.5
    _write_safetensors(directory / "adapter_model.safetensors", weights)
    return directory


def _write_safetensors(file: Path, tensors: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            out.write(tensor.tobytes())
