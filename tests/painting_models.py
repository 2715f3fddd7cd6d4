"""Models that paint, for tests: random weights in the form of a Stable Diffusion that an exporter has written.

It paints patterns, which depend on the text and on the seed. A token for each byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llm_models import VOCABULARY, byte_tokenizer
from nerite.frameworks.openvino.graph import openvino

ov = openvino()
ops = ov.opset15

WIDTH, TOKENS, LATENT, SCALE = 8, 77, 4, 8


def painting_model(directory: Path) -> Path:
    """Write the version directory of a model; return it."""
    from openvino_tokenizers import convert_tokenizer

    for name, network in (("text_encoder", _text_encoder()), ("unet", _unet()), ("vae_decoder", _vae_decoder())):
        (directory / name).mkdir(parents=True)
        ov.save_model(network, directory / name / "openvino_model.xml", compress_to_fp16=False)
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = TOKENS
    tokenizer.backend_tokenizer.enable_truncation(TOKENS)
    (directory / "tokenizer").mkdir()
    ov.save_model(convert_tokenizer(tokenizer), directory / "tokenizer" / "openvino_tokenizer.xml")
    described: dict[str, dict[str, Any]] = {
        "model_index.json": {
            "_class_name": "StableDiffusionPipeline",
            "scheduler": ["diffusers", "DDIMScheduler"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
        "scheduler/scheduler_config.json": {
            "_class_name": "DDIMScheduler", "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012,
            "beta_schedule": "scaled_linear", "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1,
            "prediction_type": "epsilon", "timestep_spacing": "leading", "rescale_betas_zero_snr": False,
        },
        "text_encoder/config.json": {"max_position_embeddings": TOKENS, "num_hidden_layers": 1, "hidden_size": WIDTH},
        "unet/config.json": {"in_channels": LATENT, "sample_size": 8, "time_cond_proj_dim": None},
        "vae_decoder/config.json": {
            "in_channels": 3, "latent_channels": LATENT, "out_channels": 3, "scaling_factor": 0.18215,
            "block_out_channels": [4, 4, 4, 4],
        },
    }  # fmt: skip
    (directory / "scheduler").mkdir()
    for name, values in described.items():
        (directory / name).write_text(json.dumps(values))
    return directory


def _weights(random: Any, *shape: int, scale: float = 1.0) -> Any:
    return ops.constant((random.standard_normal(shape) * scale).astype(np.float32))


def _numbers(*values: int) -> Any:
    return ops.constant(np.array(values, np.int64))


def _parameter(name: str, dims: list[int], element: Any) -> Any:
    node = ops.parameter(ov.PartialShape(dims), element, name=name)
    node.output(0).set_names({name})
    return node


def _named(node: Any, name: str) -> Any:
    node.output(0).set_names({name})
    return ops.result(node)


def _text_encoder() -> Any:
    random = np.random.default_rng(1)
    ids = _parameter("input_ids", [-1, -1], ov.Type.i64)
    states = ops.gather(_weights(random, VOCABULARY, WIDTH), ids, ops.constant(np.int64(0)))
    pooled = ops.reduce_mean(states, _numbers(1), keep_dims=False)
    return ov.Model([_named(states, "last_hidden_state"), _named(pooled, "pooler_output")], [ids], "text_encoder")


def _unet() -> Any:
    random = np.random.default_rng(2)
    sample = _parameter("sample", [-1, LATENT, -1, -1], ov.Type.f32)
    time = _parameter("timestep", [1], ov.Type.i64)
    states = _parameter("encoder_hidden_states", [-1, -1, WIDTH], ov.Type.f32)
    text = ops.matmul(
        ops.reduce_mean(states, _numbers(1), keep_dims=False), _weights(random, WIDTH, LATENT), False, False
    )
    ticks = ops.multiply(ops.convert(time, ov.Type.f32), ops.constant(np.float32(0.001)))
    kernel = _weights(random, LATENT, LATENT, 3, 3, scale=0.2)
    seen = ops.convolution(sample, kernel, [1, 1], [1, 1], [1, 1], [1, 1])
    noise = ops.tanh(ops.add(seen, ops.unsqueeze(ops.add(text, ticks), _numbers(2, 3))))
    return ov.Model([_named(noise, "out_sample")], [sample, time, states], "unet")


def _vae_decoder() -> Any:
    random = np.random.default_rng(3)
    latent = _parameter("latent_sample", [-1, LATENT, -1, -1], ov.Type.f32)
    small = ops.tanh(ops.convolution(latent, _weights(random, 3, LATENT, 1, 1), [1, 1], [0, 0], [0, 0], [1, 1]))
    shape = ops.concat([_numbers(1, 1), ops.constant(np.array([SCALE, SCALE], np.int64))], 0)
    large = ops.interpolate(small, ops.convert(shape, ov.Type.f32), "nearest", "scales")
    return ov.Model([_named(large, "sample")], [latent], "vae_decoder")
