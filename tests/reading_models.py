"""Models for tests that read and do not write: random weights, a token for each byte, made in no network.

A text is the sum of its tokens and of what they have on average, so that what is padded must not count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llm_models import VOCABULARY, language_model, write_tokenizer
from nerite.frameworks.openvino.graph import openvino

ov = openvino()
ops = ov.opset15

WIDTH = 8


def embedding_model(directory: Path, positions: int = 512, *, longest: int = 0, **described: Any) -> Path:
    """Write the version directory of a model that turns texts into vectors; return it.

    ``longest``: its tokenizer cuts texts there, whatever positions there are.
    """
    _model(directory, {"architectures": ["BertModel"], "max_position_embeddings": positions, **described}, 0)
    if longest:
        write_tokenizer(directory, longest=longest)
    return directory


def reranking_model(directory: Path, positions: int = 512, **described: Any) -> Path:
    """Write the version directory of a model that rates pairs of texts; return it."""
    architecture = {"architectures": ["BertForSequenceClassification"], "max_position_embeddings": positions}
    return _model(directory, {**architecture, **described}, 1)


def classifying_model(directory: Path, *labels: str, **described: Any) -> Path:
    """Write the version directory of a model that sorts texts into classes; return it."""
    named = {str(number): label for number, label in enumerate(labels)}
    architecture = {"architectures": ["BertForSequenceClassification"], "max_position_embeddings": 512}
    return _model(directory, {**architecture, "id2label": named, **described}, len(labels))


def _model(directory: Path, described: dict[str, Any], scores: int) -> Path:
    language_model(directory)
    for file in ("openvino_model.xml", "openvino_model.bin", "openvino_detokenizer.xml", "openvino_detokenizer.bin"):
        (directory / file).unlink()
    ov.save_model(_network(scores), directory / "openvino_model.xml", compress_to_fp16=False)
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def _network(scores: int) -> Any:
    random = np.random.default_rng(0)

    def parameter(name: str) -> Any:
        node = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64, name=name)
        node.output(0).set_names({name})
        return node

    ids, mask = parameter("input_ids"), parameter("attention_mask")
    table = ops.constant(random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32))
    tokens = ops.gather(table, ids, ops.constant(np.int64(0)))
    seen = ops.unsqueeze(ops.convert(mask, ov.Type.f32), ops.constant(np.int64(2)))
    along = ops.constant(np.int64(1))
    count = ops.reduce_sum(seen, along, keep_dims=True)
    average = ops.divide(ops.reduce_sum(ops.multiply(tokens, seen), along, keep_dims=True), count)
    hidden = ops.tanh(ops.add(tokens, average))
    if not scores:
        hidden.output(0).set_names({"last_hidden_state"})
        return ov.Model([ops.result(hidden)], [ids, mask], "embedding_model")
    pooled = ops.reduce_sum(ops.multiply(hidden, seen), along, keep_dims=False)
    head = ops.constant((random.standard_normal((WIDTH, scores)) * 0.2).astype(np.float32))
    logits = ops.matmul(pooled, head, False, False)
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], [ids, mask], "reranking_model")
