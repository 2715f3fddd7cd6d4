"""A model for tests that takes images, in the form of LLaVA's: random weights, four tokens for each image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llm_models import VOCABULARY, WIDTH, network, write_tokenizer
from nerite.frameworks.openvino.graph import openvino

ov = openvino()
ops = ov.opset15

MARK = "<image>"
SIZE, PATCH = 8, 4
TOKENS = (SIZE // PATCH) ** 2
"""Of an image."""


def seeing_model(directory: Path, context: int = 4000) -> Path:
    """Write the version directory of a model that takes images; return it."""
    directory.mkdir(parents=True)
    vocabulary = VOCABULARY + 1
    parts = {
        "language": network(vocabulary=vocabulary, embedded=True),
        "text_embeddings": _text_embeddings(vocabulary),
        "vision_embeddings": _vision_embeddings(),
    }
    for name, part in parts.items():
        ov.save_model(part, directory / f"openvino_{name}_model.xml", compress_to_fp16=False)
    write_tokenizer(directory, MARK)
    config = {"model_type": "llava", "max_position_embeddings": context, "vision_config": {"patch_size": PATCH}}
    (directory / "config.json").write_text(json.dumps(config))
    seen = {
        "crop_size": {"height": SIZE, "width": SIZE},
        "size": {"shortest_edge": SIZE},
        "image_mean": [0.5] * 3,
        "image_std": [0.3] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(seen))
    return directory


def _text_embeddings(vocabulary: int) -> Any:
    table = np.random.default_rng(1).standard_normal((vocabulary, WIDTH)).astype(np.float32)
    ids = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64, name="input")
    ids.output(0).set_names({"input"})
    vectors = ops.gather(ops.constant(table), ids, ops.constant(np.int64(0)))
    vectors.output(0).set_names({"inputs_embeds"})
    return ov.Model([ops.result(vectors)], [ids], "text_embeddings")


def _vision_embeddings() -> Any:
    """A vector for each patch."""
    pixels = ops.parameter(ov.PartialShape([-1, 3, -1, -1]), ov.Type.f32, name="pixel_values")
    pixels.output(0).set_names({"pixel_values"})
    kernel = np.random.default_rng(2).standard_normal((WIDTH, 3, PATCH, PATCH)).astype(np.float32)
    patches = ops.convolution(pixels, ops.constant(kernel), [PATCH, PATCH], [0, 0], [0, 0], [1, 1])
    rows = ops.reshape(patches, ops.constant(np.array([0, WIDTH, -1], np.int64)), True)
    vectors = ops.transpose(rows, ops.constant(np.array([0, 2, 1], np.int64)))
    vectors.output(0).set_names({"last_hidden_state"})
    return ov.Model([ops.result(vectors)], [pixels], "vision_embeddings")
