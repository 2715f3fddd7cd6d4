"""Builds the network of a decoder as OpenVINO GenAI expects it, from the weights of a checkpoint.

Its form is that of OpenVINO's exporter: keys and values are states, from which the pipeline makes a paged cache; names
of layers are those by which LoRA adapters find them; and norms, rotary positions and attention have the forms that
plugins recognize and replace by fast kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import openvino
from nerite.llm.conversion.decoder import EMBEDDINGS, HEAD, NORM, Decoder
from nerite.llm.conversion.formats import FP16, INT4, INTEGERS, group_of, halved, quantized
from nerite.llm.conversion.weights import StoredTensor

_WIDENED: Final = "/widened"
"""End of the names of nodes that widen weights of 16 bits."""


class DecoderGraph:
    """Builds the network of one decoder."""

    def __init__(self, decoder: Decoder, tensors: Mapping[str, StoredTensor], weights: str, room: Path) -> None:
        """``weights`` is one of ``FORMATS``. ``room`` is a directory for weights that are made from others."""
        self._ov = openvino()
        self._ops = self._ov.opset15
        self._decoder = decoder
        self._tensors = tensors
        self._weights = weights
        self._room = room
        self._memory: list[Array] = []
        """What the network's weights are in, which it does not keep itself."""
        self._states: list[Any] = []

    def model(self) -> Any:
        """Return the network, an ``openvino.Model``. Its weights are in files that this object keeps mapped."""
        ops, types = self._ops, self._ov.Type
        tokens = self._parameter("input_ids", 2, types.i64)
        mask = self._parameter("attention_mask", 2, types.i64)
        positions = self._parameter("position_ids", 2, types.i64)
        self._beams = self._parameter("beam_idx", 1, types.i32)
        self._rows = ops.gather(ops.shape_of(tokens), self._numbers(0), self._number(0))
        self._cosines, self._sines = self._rotations(positions)
        self._embeddings = self._matrix(EMBEDDINGS)
        hidden = self._scaled(ops.gather(self._embeddings, tokens, self._number(0)), self._decoder.embedding_scale)
        self._allowed: Any = None
        for layer in range(self._decoder.layers):
            prefix = f"model.layers.{layer}"
            values = self._normal(f"{prefix}.input_layernorm", hidden)
            hidden = self._sum(hidden, self._attention(layer, f"{prefix}.self_attn", values, mask))
            values = self._normal(f"{prefix}.post_attention_layernorm", hidden)
            gate, up = self._products(f"{prefix}.mlp", ("gate", "up"), values, [self._decoder.inner] * 2)
            inner = ops.multiply(ops.swish(gate), up)
            hidden = self._sum(hidden, self._product(f"{prefix}.mlp.down_proj", inner))
        logits = self._product(HEAD, self._normal(NORM, hidden))
        if self._decoder.logits_divisor != 1:
            logits = ops.divide(logits, self._floats(np.array(self._decoder.logits_divisor)))
        logits.output(0).set_names({"logits"})
        inputs = [tokens, mask, positions, self._beams]
        return self._ov.Model([ops.result(logits)], self._states, inputs, "decoder")

    def _parameter(self, name: str, rank: int, element: Any) -> Any:
        node = self._ops.parameter(self._ov.PartialShape([-1] * rank), element, name=name)
        node.output(0).set_names({name})
        return node

    def _numbers(self, *values: int) -> Any:
        return self._ops.constant(np.array(values, np.int64))

    def _number(self, value: int) -> Any:
        return self._ops.constant(np.int64(value))

    def _floats(self, values: Array) -> Any:
        return self._ops.constant(np.asarray(values, np.float32))

    def _matrix(self, name: str) -> Any:
        """Return the weights of a layer, as numbers of 32 bits."""
        if name == HEAD and self._decoder.tied:
            return self._embeddings
        tensor = self._tensors[f"{name}.weight"]
        return self._integers(name, tensor) if self._weights in INTEGERS else self._plain(name, tensor)

    def _plain(self, name: str, tensor: StoredTensor) -> Any:
        """Return weights as they are, or narrowed."""
        narrow = halved(tensor, self._room) if self._weights == FP16 and tensor.type != "F16" else None
        kind, raw = (tensor.type, tensor.raw()) if narrow is None else ("F16", narrow)
        node = self._stored(raw, kind.lower(), tensor.shape)
        node.set_friendly_name(f"{name}.weight")
        if kind == "F32":
            return node
        widened = self._ops.convert(node, "f32")
        if kind == "F16":  # those of BF16 are widened when the network is loaded, because products with them are slow
            widened.set_friendly_name(f"{name}{_WIDENED}")
        return widened

    def _integers(self, name: str, tensor: StoredTensor) -> Any:
        """Return weights that have 8 bits and a scale for each row, or 4 bits and one for each group of a row.

        Embeddings and the last layer, where mistakes show most, have 8 bits in any case, as with the exporter.
        """
        ops, (count, columns) = self._ops, tensor.shape
        group = group_of(columns) if self._weights == INT4 and name not in (EMBEDDINGS, HEAD) else 0
        made = quantized(tensor, self._room, 4 if group else 8, group)
        inner = (made.groups, group) if group else (columns,)
        single = (made.groups, 1) if group else (1,)
        values = self._stored(made.values, f"u{made.bits}", (count, *inner))
        zeros = self._stored(made.zeros, f"u{made.bits}", (count, *single))
        values.set_friendly_name(f"{name}.weight")
        centered = ops.subtract(ops.convert(values, "f16"), ops.convert(zeros, "f16"))
        scaled = ops.multiply(centered, self._stored(made.scales, "f16", (count, *single)))
        return ops.convert(ops.reshape(scaled, self._numbers(count, columns), False) if group else scaled, "f32")

    def _stored(self, raw: Array, element: str, shape: tuple[int, ...]) -> Any:
        """Return a constant in memory that exists. It is not copied."""
        self._memory.append(raw)
        tensor = self._ov.Tensor(raw.reshape(-1).view(np.uint8), self._ov.Shape(shape), getattr(self._ov.Type, element))
        return self._ov.op.Constant(tensor, shared_memory=True)

    def _product(self, name: str, values: Any) -> Any:
        """Apply a linear layer."""
        product = self._ops.matmul(values, self._matrix(name), False, True)
        product.set_friendly_name(f"__module.{name}/aten::linear/MatMul")
        bias = self._tensors.get(f"{name}.bias")
        return product if bias is None else self._ops.add(product, self._floats(bias.floats().reshape(1, 1, -1)))

    def _products(self, place: str, names: Sequence[str], values: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """Apply layers to the same values, which may be fused to one whose result has parts of these sizes."""
        if not self._decoder.fused:
            return [self._product(f"{place}.{name}_proj", values) for name in names]
        whole = self._product(f"{place}.{('' if len(names) == 3 else '_').join(names)}_proj", values)
        return list(self._ops.variadic_split(whole, self._number(-1), self._numbers(*sizes)).outputs())

    def _scaled(self, values: Any, factor: float) -> Any:
        return values if factor == 1 else self._ops.multiply(values, self._floats(np.array(factor)))

    def _sum(self, hidden: Any, more: Any) -> Any:
        return self._ops.add(hidden, self._scaled(more, self._decoder.residual_scale))

    def _normal(self, name: str, values: Any) -> Any:
        """Divide by the root of the mean square, and multiply by weights."""
        ops = self._ops
        square = ops.reduce_mean(ops.power(values, self._floats(np.array(2))), self._numbers(-1), True)
        root = ops.sqrt(ops.add(square, self._floats(np.array(self._decoder.epsilon))))
        scaled = ops.multiply(values, ops.divide(self._floats(np.array(1)), root))
        return ops.multiply(self._floats(self._tensors[f"{name}.weight"].floats()), scaled)

    def _rotations(self, positions: Any) -> tuple[Any, Any]:
        """Return cosines and sines of the angles by which heads are rotated at positions."""
        ops = self._ops
        places = ops.convert(ops.unsqueeze(positions, self._number(1)), "f32")
        frequencies = self._floats(self._decoder.frequencies.reshape(1, -1, 1))
        angles = ops.transpose(ops.matmul(frequencies, places, False, False), self._numbers(0, 2, 1))
        both = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(both), self._number(1)), ops.unsqueeze(ops.sin(both), self._number(1))

    def _rotated(self, values: Any) -> Any:
        ops, half = self._ops, self._decoder.head // 2

        def part(begin: int, end: int) -> Any:
            return ops.slice(values, self._numbers(begin), self._numbers(end), self._numbers(1), self._numbers(3))

        second = ops.multiply(part(half, 2 * half), self._floats(np.array(-1)))
        turned = ops.concat([second, part(0, half)], -1)
        return ops.add(ops.multiply(values, self._cosines), ops.multiply(turned, self._sines))

    def _heads(self, product: Any, count: int, norm: str = "") -> Any:
        """Divide the result of a linear layer into heads; normalize them if there is a ``norm``."""
        ops = self._ops
        split = ops.reshape(product, self._numbers(0, 0, count, self._decoder.head), True)
        return ops.transpose(self._normal(norm, split) if norm else split, self._numbers(0, 2, 1, 3))

    def _kept(self, kind: str, layer: int, new: Any) -> Any:
        """Return the keys or values of all tokens so far, which are a state."""
        ops, decoder, library = self._ops, self._decoder, self._ov.op.util
        info = library.VariableInfo()
        info.data_shape = self._ov.PartialShape([-1, decoder.groups, -1, decoder.head])
        info.data_type, info.variable_id = self._ov.Type.f32, f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
        variable = library.Variable(info)
        empty = ops.concat(
            [self._rows, self._numbers(decoder.groups), self._numbers(0), self._numbers(decoder.head)], 0
        )
        before = ops.read_value(ops.broadcast(self._floats(np.array(0)), empty), variable)
        both = ops.concat([ops.gather(before, self._beams, self._number(0)), new], -2)
        self._states.append(ops.assign(both, variable))
        return both

    def _repeated(self, values: Any) -> Any:
        """Repeat the heads of keys or values for all heads that share them."""
        ops, decoder = self._ops, self._decoder
        if decoder.heads == decoder.groups:
            return values
        times = self._numbers(1, 1, decoder.heads // decoder.groups, 1, 1)
        wide = ops.broadcast(ops.unsqueeze(values, self._number(2)), times, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, self._numbers(0, decoder.heads, -1, decoder.head), True)

    def _attention(self, layer: int, name: str, values: Any, mask: Any) -> Any:
        ops, decoder = self._ops, self._decoder
        norms = [f"{name}.{each}_norm" if decoder.head_norms else "" for each in "qk"]
        sizes = [each * decoder.head for each in (decoder.heads, decoder.groups, decoder.groups)]
        products = self._products(name, ("q", "k", "v"), values, sizes)
        query = self._heads(products[0], decoder.heads, norms[0])
        key = self._heads(products[1], decoder.groups, norms[1])
        if decoder.rotated[layer]:
            query, key = self._rotated(query), self._rotated(key)
        keys = self._kept("key", layer, key)
        kept = self._kept("value", layer, self._heads(products[2], decoder.groups))
        if self._allowed is None:  # it is the same in all layers
            self._allowed = self._mask(query, keys, mask)
        scale = self._floats(np.array(decoder.attention_scale)) if decoder.attention_scale else None
        attention = ops.scaled_dot_product_attention(
            query, self._repeated(keys), self._repeated(kept), self._allowed, scale
        )
        joined = ops.transpose(attention, self._numbers(0, 2, 1, 3))
        return self._product(
            f"{name}.o_proj", ops.reshape(joined, self._numbers(0, 0, decoder.heads * decoder.head), True)
        )

    def _mask(self, query: Any, keys: Any, mask: Any) -> Any:
        """Return which tokens each new token may look at: itself and earlier ones that ``mask`` has."""
        ops = self._ops
        new, total = (ops.gather(ops.shape_of(each), self._number(2), self._number(0)) for each in (query, keys))
        integer = self._ov.Type.i64
        own = ops.range(ops.subtract(total, new), total, self._number(1), integer)
        every = ops.range(self._number(0), total, self._number(1), integer)
        earlier = ops.less_equal(ops.unsqueeze(every, self._number(0)), ops.unsqueeze(own, self._number(1)))
        seen = ops.unsqueeze(ops.convert(mask, self._ov.Type.boolean), self._numbers(1, 2))
        return ops.logical_and(ops.unsqueeze(earlier, self._numbers(0, 1)), seen)


def save(model: Any, file: Path, weights: str) -> None:
    """Write a network with weights of this format. They are copied from file to file."""
    # The exporter writes the same. With weights of 8 or 4 bits, keys and values may have as many.
    model.set_rt_info("8.0", ["runtime_options", "ACTIVATIONS_SCALE_FACTOR"])
    if weights not in INTEGERS:
        model.set_rt_info("f16", ["runtime_options", "KV_CACHE_PRECISION"])
    openvino().save_model(model, file, compress_to_fp16=False)
    # The library for Python cannot mark nodes. Without the mark, plugins would load weights with 32 bits.
    text = file.read_text()
    widening = re.compile(rf'(<layer id="\d+" name="[^"]*{_WIDENED}" type="Convert" version="opset1">\s*<data [^>]*/>)')
    file.write_text(widening.sub(r'\1<rt_info><attribute name="decompression" version="0" /></rt_info>', text))
