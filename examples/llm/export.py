"""Writes a checkpoint of a small Llama as OpenVINO runs it: the same weights as a graph, and the tokenizer as another.

    python examples/llm/export.py examples/llm/models/docent/1

Exporters do this for any model, by tracing PyTorch. One architecture fits on a page, and needs nothing but OpenVINO.
What an engine looks for: keys and values of earlier tokens in variables, and attention as one operation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino_tokenizers import convert_tokenizer
from safetensors.numpy import load_file
from transformers import AutoTokenizer


def main() -> None:
    """Export the checkpoint that the command line names, in its own folder."""
    (folder,) = map(Path, sys.argv[1:])
    export(folder)


def export(folder: Path) -> None:
    """Write model, tokenizer and detokenizer beside a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    ov.save_model(network(config, load_file(folder / "model.safetensors")), folder / "openvino_model.xml")
    there, back = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    ov.save_model(there, folder / "openvino_tokenizer.xml")
    ov.save_model(back, folder / "openvino_detokenizer.xml")


def network(config: dict[str, Any], weights: dict[str, np.ndarray]) -> ov.Model:
    """Return a Llama whose heads all have keys and values of their own."""
    heads = config["num_attention_heads"]
    size = config["hidden_size"] // heads
    base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    table = weights["model.embed_tokens.weight"]

    ids, mask, positions = (parameter(name, ov.Type.i64, 2) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = parameter("beam_idx", ov.Type.i32, 1)
    rows = ops.gather(ops.shape_of(ids), numbers(0), number(0))
    kept = []

    def normal(values: Any, name: str) -> Any:
        mean = ops.reduce_mean(ops.multiply(values, values), numbers(-1), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(config["rms_norm_eps"]))))
        return ops.multiply(ops.divide(values, root), ops.constant(weights[f"{name}.weight"]))

    def linear(values: Any, name: str) -> Any:
        return ops.matmul(values, ops.constant(weights[f"{name}.weight"]), False, True)

    def by_head(values: Any) -> Any:
        return ops.transpose(ops.reshape(values, numbers(0, 0, heads, size), True), numbers(0, 2, 1, 3))

    def turned(values: Any) -> Any:
        """Rotate pairs of numbers by angles that grow with the position."""
        first, second = ops.split(values, number(3), 2).outputs()
        crossed = ops.concat([ops.negative(second), first], -1)
        return ops.add(ops.multiply(values, cosine), ops.multiply(crossed, sine))

    def remembered(name: str, new: Any) -> Any:
        """Return what is in a variable with what is new behind it, and leave both there."""
        info = ov.op.util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, heads, -1, size]), ov.Type.f32, name
        variable = ov.op.util.Variable(info)
        nothing = ops.broadcast(
            ops.constant(np.float32(0)), ops.concat([rows, numbers(heads), numbers(0), numbers(size)], 0)
        )
        before = ops.gather(ops.read_value(nothing, variable), beams, number(0))
        both = ops.concat([before, new], -2)
        kept.append(ops.assign(both, variable))
        return both

    def seen(query: Any, keys: Any) -> Any:
        """Say which tokens each token may look at: those before it that are no padding."""
        length = ops.gather(ops.shape_of(keys), number(2), number(0))
        first = ops.subtract(length, ops.gather(ops.shape_of(query), number(2), number(0)))
        here = ops.unsqueeze(ops.range(first, length, number(1), ov.Type.i64), number(1))
        there = ops.unsqueeze(ops.range(number(0), length, number(1), ov.Type.i64), number(0))
        earlier = ops.unsqueeze(ops.less_equal(there, here), numbers(0, 1))
        return ops.logical_and(earlier, ops.unsqueeze(ops.convert(mask, ov.Type.boolean), numbers(1, 2)))

    speeds = ops.constant((base ** -(np.arange(0, size, 2) / size)).astype(np.float32))
    half = ops.multiply(ops.unsqueeze(ops.convert(positions, ov.Type.f32), numbers(1, 3)), speeds)
    angles = ops.concat([half, half], -1)
    cosine, sine = ops.cos(angles), ops.sin(angles)

    hidden = ops.gather(ops.constant(table), ids, number(0))
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        before = normal(hidden, f"{name}.input_layernorm")
        query, keys, values = (by_head(linear(before, f"{name}.self_attn.{each}_proj")) for each in "qkv")
        keys = remembered(f"past_key_values.{layer}.keypresent.{layer}.key", turned(keys))
        values = remembered(f"past_key_values.{layer}.valuepresent.{layer}.value", values)
        attended = ops.scaled_dot_product_attention(turned(query), keys, values, seen(query, keys))
        joined = ops.reshape(ops.transpose(attended, numbers(0, 2, 1, 3)), numbers(0, 0, heads * size), True)
        hidden = ops.add(hidden, linear(joined, f"{name}.self_attn.o_proj"))
        before = normal(hidden, f"{name}.post_attention_layernorm")
        gate = ops.swish(linear(before, f"{name}.mlp.gate_proj"))
        inner = ops.multiply(gate, linear(before, f"{name}.mlp.up_proj"))
        hidden = ops.add(hidden, linear(inner, f"{name}.mlp.down_proj"))
    logits = ops.matmul(normal(hidden, "model.norm"), ops.constant(weights.get("lm_head.weight", table)), False, True)
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], kept, [ids, mask, positions, beams], "llama")


def parameter(name: str, element: ov.Type, dimensions: int) -> Any:
    node = ops.parameter(ov.PartialShape([-1] * dimensions), element, name=name)
    node.output(0).set_names({name})
    return node


def numbers(*values: int) -> Any:
    return ops.constant(np.array(values, np.int64))


def number(value: int) -> Any:
    return ops.constant(np.int64(value))


if __name__ == "__main__":
    main()
