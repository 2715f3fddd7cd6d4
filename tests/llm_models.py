"""A language model for tests: random weights, two layers, a token for each byte; made in a second and in no network.

It speaks no language, and does all that an engine does: KV cache, batches, seeds, stops.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nerite.frameworks.openvino.graph import openvino

ov = openvino()
ops = ov.opset15

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 2, 2, 258
HEAD = WIDTH // HEADS
CONTEXT = 100_000
END = 1
"""The token by which the model says that it is done."""
TEMPLATE = "{{ bos_token }}{% for each in messages %}[{{ each.role }}]{{ each.content }}{{ eos_token }}{% endfor %}"
"""For chats. Like most of them it has the tokens that a tokenizer adds to other texts."""


def language_model(directory: Path, context: int = CONTEXT, changes: Mapping[str, Any] | None = None) -> Path:
    """Write the version directory of a language model; return it. ``changes`` are added to weights of that name."""
    shutil.copytree(_written(), directory)
    if changes:
        ov.save_model(network(changes), directory / "openvino_model.xml", compress_to_fp16=False)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return directory


@functools.cache
def _written() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="language-model-"))
    atexit.register(shutil.rmtree, folder)
    # Half the precision would make the XML many times as long.
    ov.save_model(network(), folder / "openvino_model.xml", compress_to_fp16=False)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, *special: str, longest: int = 0, begin: bool = False) -> None:
    """Write the tokenizer of a model and the way back: bytes, and after them some special tokens.

    ``longest``: it can cut texts there. ``begin``: it puts one before each text.
    """
    # Its import has all cores read what it adds to OpenVINO.
    from openvino_tokenizers import convert_tokenizer

    tokenizer = byte_tokenizer(special, begin=begin)
    if longest:
        tokenizer.model_max_length = longest
        tokenizer.backend_tokenizer.enable_truncation(longest)
    there, back = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(there, folder / "openvino_tokenizer.xml")
    ov.save_model(back, folder / "openvino_detokenizer.xml")


def byte_tokenizer(special: Sequence[str] = (), *, begin: bool = False) -> Any:
    """Bytes are tokens: the first two are special ones. ``begin``: the first stands before each text."""
    # Here, for they take seconds, and whoever collects tests imports this file.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": END, **{character: number + 2 for number, character in enumerate(characters)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=list(special)
    )


def chat_tokens(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the tokens that Hugging Face has for a chat with ``TEMPLATE``, if texts begin with one."""
    tokens = byte_tokenizer(begin=True).apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=True, return_dict=False
    )
    return list(tokens)


def network(
    changes: Mapping[str, Any] = MappingProxyType({}), vocabulary: int = VOCABULARY, *, embedded: bool = False
) -> Any:
    """A decoder as exporters write it: KV in variables, attention as one operation. ``changes`` are added to it.

    ``embedded``: tokens come as vectors.
    """
    random = np.random.default_rng(0)

    def weights(rows: int, columns: int, scale: float = 0.2) -> Any:
        return ops.constant((random.standard_normal((rows, columns)) * scale).astype(np.float32))

    def numbers(*values: int) -> Any:
        return ops.constant(np.array(values, np.int64))

    def number(value: int) -> Any:
        return ops.constant(np.int64(value))

    def parameter(name: str, dims: list[int], element: Any) -> Any:
        node = ops.parameter(ov.PartialShape(dims), element, name=name)
        node.output(0).set_names({name})
        return node

    def product(left: Any, right: Any) -> Any:
        return ops.matmul(left, right, False, False)

    def projected(values: Any, layer: int, name: str) -> Any:
        """Multiply with weights, under a name as exporters give it."""
        name = f"model.layers.{layer}.self_attn.{name}"
        matrix = random.standard_normal((WIDTH, WIDTH)) * 0.2 + changes.get(name, 0)
        made = product(values, ops.constant(matrix.astype(np.float32)))
        made.set_friendly_name(f"__module.{name}/ov_ext::linear/MatMul")
        return made

    def normal(values: Any) -> Any:
        return ops.mvn(values, numbers(-1), True, 1e-5, "inside_sqrt")

    def heads(values: Any) -> Any:
        split = ops.reshape(values, numbers(0, 0, HEADS, HEAD), True)
        return ops.transpose(split, numbers(0, 2, 1, 3))

    def length(values: Any) -> Any:
        return ops.gather(ops.shape_of(values), number(2), number(0))

    if embedded:
        ids = parameter("inputs_embeds", [-1, -1, WIDTH], ov.Type.f32)
    else:
        ids = parameter("input_ids", [-1, -1], ov.Type.i64)
    mask = parameter("attention_mask", [-1, -1], ov.Type.i64)
    positions = parameter("position_ids", [-1, -1], ov.Type.i64)
    beams = parameter("beam_idx", [-1], ov.Type.i32)
    rows = ops.gather(ops.shape_of(ids), numbers(0), number(0))
    assigned = []

    def cached(name: str, new: Any) -> Any:
        info = ov.op.util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, HEADS, -1, HEAD]), ov.Type.f32, name
        variable = ov.op.util.Variable(info)
        shape = ops.concat([rows, numbers(HEADS), numbers(0), numbers(HEAD)], 0)
        before = ops.read_value(ops.broadcast(ops.constant(np.float32(0)), shape), variable)
        both = ops.concat([ops.gather(before, beams, number(0)), new], -2)
        assigned.append(ops.assign(both, variable))
        return both

    place = ops.gather(weights(512, WIDTH, 0.3), ops.mod(positions, number(512)), number(0))
    tokens = ids if embedded else ops.gather(weights(vocabulary, WIDTH, 1.0), ids, number(0))
    hidden = ops.add(tokens, place)
    for layer in range(LAYERS):
        before = normal(hidden)
        query = heads(projected(before, layer, "q_proj"))
        keys = cached(f"past_key_values.{layer}.keypresent.{layer}.key", heads(projected(before, layer, "k_proj")))
        kept = f"past_key_values.{layer}.valuepresent.{layer}.value"
        values = cached(kept, heads(projected(before, layer, "v_proj")))
        first = ops.subtract(length(keys), length(query))
        at = ops.unsqueeze(ops.range(first, length(keys), number(1), ov.Type.i64), number(1))
        earlier = ops.less_equal(
            ops.unsqueeze(ops.range(number(0), length(keys), number(1), ov.Type.i64), number(0)), at
        )
        seen = ops.unsqueeze(ops.convert(mask, ov.Type.boolean), numbers(1, 2))
        allowed = ops.logical_and(ops.unsqueeze(earlier, numbers(0, 1)), seen)
        attention = ops.scaled_dot_product_attention(query, keys, values, allowed)
        joined = ops.reshape(ops.transpose(attention, numbers(0, 2, 1, 3)), numbers(0, 0, WIDTH), True)
        hidden = ops.add(hidden, product(joined, weights(WIDTH, WIDTH)))
        inner = ops.relu(product(normal(hidden), weights(WIDTH, 2 * WIDTH)))
        hidden = ops.add(hidden, product(inner, weights(2 * WIDTH, WIDTH)))
    logits = product(normal(hidden), weights(WIDTH, vocabulary, 0.5))
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], assigned, [ids, mask, positions, beams], "language_model")
