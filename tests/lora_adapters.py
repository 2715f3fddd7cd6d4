"""Writes LoRA adapters beside language models."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from llm_models import WIDTH

RANK, ALPHA = 4, 8
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj")


def adapter(directory: Path, name: str = "poet", layers: tuple[str, ...] = LAYERS, **described: Any) -> dict[str, Any]:
    """Write an adapter beside a model, and its name into multi_lora.json; return what it adds to each layer."""
    place = directory / "adapters" / name
    place.mkdir(parents=True)
    random = np.random.default_rng(7)
    parts = {
        layer: (random.standard_normal((RANK, WIDTH)), random.standard_normal((WIDTH, RANK)) * 0.1) for layer in layers
    }
    tensors = {}
    for layer, (down, up) in parts.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = down.astype(np.float32)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = up.astype(np.float32)
    write(place / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **described}
    (place / "adapter_config.json").write_text(json.dumps(config))
    file = directory / "multi_lora.json"
    named = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**named, name: f"adapters/{name}"}))
    return {layer: ALPHA / RANK * (up @ down).T for layer, (down, up) in parts.items()}


def write(file: Path, tensors: dict[str, Any]) -> None:
    """Write a file in the format safetensors."""
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))
