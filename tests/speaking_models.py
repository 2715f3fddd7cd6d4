"""Models that speak, for tests: random weights in the form of a SpeechT5 that an exporter has written.

It makes noise, which depends on the text and on the voice. A token for each byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llm_models import VOCABULARY, write_tokenizer
from nerite.frameworks.openvino.graph import openvino

ov = openvino()
ops = ov.opset15

WIDTH, MELS, REDUCTION, VOICE, HOP = 8, 80, 2, 512, 256
RATE = 16_000


def speaking_model(directory: Path, *voices: str) -> Path:
    """Write the version directory of a model with some voices; return it."""
    directory.mkdir(parents=True)
    for name, network in (("encoder_model", _encoder), ("decoder_model", _decoder), ("postnet", _postnet)):
        ov.save_model(network(), directory / f"openvino_{name}.xml", compress_to_fp16=False)
    ov.save_model(_vocoder(), directory / "openvino_vocoder.xml", compress_to_fp16=False)
    write_tokenizer(directory)
    described = {
        "architectures": ["SpeechT5ForTextToSpeech"], "model_type": "speecht5", "num_mel_bins": MELS,
        "reduction_factor": REDUCTION, "max_text_positions": 600, "speaker_embedding_dim": VOICE,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(described))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    for number, name in enumerate(voices):
        (directory / "voices").mkdir(exist_ok=True)
        voice = np.random.default_rng(number).standard_normal(VOICE).astype(np.float32)
        voice.tofile(directory / "voices" / f"{name}.bin")
    return directory


def _weights(random: Any, rows: int, columns: int, scale: float) -> Any:
    return ops.constant((random.standard_normal((rows, columns)) * scale).astype(np.float32))


def _numbers(*values: int) -> Any:
    return ops.constant(np.array(values, np.int64))


def _parameter(name: str, dims: list[int], element: Any) -> Any:
    node = ops.parameter(ov.PartialShape(dims), element, name=name)
    node.output(0).set_names({name})
    return node


def _named(node: Any, name: str) -> Any:
    node.output(0).set_names({name})
    return ops.result(node)


def _encoder() -> Any:
    random = np.random.default_rng(1)
    ids = _parameter("input_ids", [-1, -1], ov.Type.i64)
    states = ops.gather(_weights(random, VOCABULARY, WIDTH, 1.0), ids, ops.constant(np.int64(0)))
    ones = ops.broadcast(ops.constant(np.int64(1)), ops.shape_of(ids))
    results = [_named(states, "last_hidden_state"), _named(ones, "encoder_attention_mask")]
    return ov.Model(results, [ids], "encoder")


def _decoder() -> Any:
    """The last frame asks for states of the encoder; the voice colours what comes of it."""
    random = np.random.default_rng(2)
    frames = _parameter("inputs_embeds", [-1, -1, MELS], ov.Type.f32)
    voice = _parameter("speaker_embeddings", [-1, VOICE], ov.Type.f32)
    states = _parameter("encoder_hidden_states", [-1, -1, WIDTH], ov.Type.f32)
    mask = _parameter("encoder_attention_mask", [-1, -1], ov.Type.i64)
    beams = _parameter("beam_idx", [-1], ov.Type.i32)
    info = ov.op.util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, WIDTH]), ov.Type.f32, "sum"
    variable = ov.op.util.Variable(info)
    rows = ops.gather(ops.shape_of(frames), _numbers(0), ops.constant(np.int64(0)))
    nothing = ops.broadcast(ops.constant(np.float32(0)), ops.concat([rows, _numbers(WIDTH)], 0))
    before = ops.gather(ops.read_value(nothing, variable), beams, ops.constant(np.int64(0)))
    last = ops.gather(frames, ops.constant(np.int64(-1)), ops.constant(np.int64(1)))
    asks = ops.tanh(ops.add(before, ops.matmul(last, _weights(random, MELS, WIDTH, 0.3), False, False)))
    asks = ops.add(asks, ops.matmul(voice, _weights(random, VOICE, WIDTH, 0.1), False, False))
    kept = ops.assign(asks, variable)
    seen = ops.unsqueeze(ops.convert(mask, ov.Type.f32), _numbers(2))
    found = ops.softmax(ops.matmul(states, ops.unsqueeze(asks, _numbers(2)), False, False), 1)
    heard = ops.reduce_sum(ops.multiply(ops.multiply(found, seen), states), _numbers(1), keep_dims=False)
    made = ops.tanh(ops.matmul(ops.add(heard, asks), _weights(random, WIDTH, REDUCTION * MELS, 0.4), False, False))
    spectrum = ops.reshape(made, _numbers(0, REDUCTION, MELS), True)
    newest = ops.gather(spectrum, _numbers(REDUCTION - 1), ops.constant(np.int64(1)))
    prob = ops.sigmoid(ops.matmul(heard, _weights(random, WIDTH, REDUCTION, 0.2), False, False))
    results = [
        _named(ops.concat([frames, newest], 1), "output_sequence_out"),
        _named(spectrum, "spectrum"),
        _named(ops.multiply(prob, ops.constant(np.float32(0.2))), "prob"),
    ]
    return ov.Model(results, [kept], [frames, voice, states, mask, beams], "decoder")


def _postnet() -> Any:
    raw = _parameter("raw_spectrogram", [-1, -1, REDUCTION, MELS], ov.Type.f32)
    ordered = ops.transpose(raw, _numbers(1, 0, 2, 3))
    flat = ops.reshape(ordered, _numbers(0, -1, MELS), True)
    return ov.Model([_named(flat, "postnet_spectrogram")], [raw], "postnet")


def _vocoder() -> Any:
    random = np.random.default_rng(3)
    spectrogram = _parameter("spectrogram", [-1, -1, MELS], ov.Type.f32)
    pieces = ops.tanh(ops.matmul(spectrogram, _weights(random, MELS, HOP, 0.1), False, False))
    wave = ops.reshape(pieces, _numbers(0, -1), True)
    return ov.Model([_named(wave, "waveform")], [spectrogram], "vocoder")
