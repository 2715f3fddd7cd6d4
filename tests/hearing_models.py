"""Speech models for tests: random weights in the form of a Whisper that an exporter has written; made in no network.

They understand nothing, and what they write depends on the whole recording. A token for each byte, and Whisper's own.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import shutil
import struct
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np

from llm_models import byte_tokenizer
from nerite.frameworks.openvino.graph import openvino

ov = openvino()
ops = ov.opset15

WIDTH, MELS, FRAMES, RATE = 16, 80, 3000, 16_000
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
FIRST = 258
"""Number of the first special token."""
TOKENS = {name: FIRST + place for place, name in enumerate(SPECIAL)}
TIMES = FIRST + len(SPECIAL)
"""Number of the first token for a time, of which there are 1,501."""
VOCABULARY = TIMES + 1501
LONGEST = 48
"""Tokens of 30 seconds at most."""


def speech_model(directory: Path, *, english: bool = False) -> Path:
    """Write the version directory of a model; return it. ``english``: it knows no other language."""
    shutil.copytree(_written(), directory)
    if english:
        config = json.loads((directory / "generation_config.json").read_text())
        config["is_multilingual"] = False
        del config["lang_to_id"], config["task_to_id"]
        (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


def recording(seconds: float, seed: int = 0) -> Any:
    """Return samples: a tone that changes, with noise."""
    random = np.random.default_rng(seed)
    at = np.arange(int(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (200 + 100 * seed + 60 * np.sin(at * (1 + seed))) * at) * 0.4
    return (tone + random.standard_normal(len(at)) * 0.05).astype(np.float32)


def wav(samples: Any, rate: int = RATE) -> bytes:
    """Return a WAV file of 16 bits."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return made.getvalue()


def riff(layout: bytes, data: bytes, *, size: int | None = None) -> bytes:
    """Return a WAV file of any layout. ``size``: what it says about the size of its samples."""
    described = struct.pack("<4sI", b"fmt ", len(layout)) + layout
    samples = struct.pack("<4sI", b"data", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(described) + len(samples)) + b"WAVE" + described + samples


@functools.cache
def _written() -> Path:
    from openvino_tokenizers import convert_tokenizer

    tokenizer = byte_tokenizer(SPECIAL)
    letters = {tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghijklmnopqrstuvwxyzĠ"}
    silent = [token for token in range(FIRST) if token not in letters]
    folder = Path(tempfile.mkdtemp(prefix="speech-model-"))
    atexit.register(shutil.rmtree, folder)
    ov.save_model(_encoder(), folder / "openvino_encoder_model.xml", compress_to_fp16=False)
    ov.save_model(_decoder(), folder / "openvino_decoder_model.xml", compress_to_fp16=False)
    there, back = convert_tokenizer(tokenizer, with_detokenizer=True, skip_special_tokens=True)
    ov.save_model(there, folder / "openvino_tokenizer.xml")
    ov.save_model(back, folder / "openvino_detokenizer.xml")
    described: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": WIDTH,
            "max_source_positions": FRAMES // 2, "max_target_positions": 64, "num_mel_bins": MELS,
            "vocab_size": VOCABULARY, "decoder_start_token_id": TOKENS["<|startoftranscript|>"],
            "eos_token_id": TOKENS["<|endoftext|>"],
        },
        "generation_config.json": {
            "decoder_start_token_id": TOKENS["<|startoftranscript|>"], "eos_token_id": TOKENS["<|endoftext|>"],
            "pad_token_id": TOKENS["<|endoftext|>"], "is_multilingual": True, "max_length": LONGEST,
            "max_initial_timestamp_index": 50, "no_timestamps_token_id": TOKENS["<|notimestamps|>"],
            "prev_sot_token_id": TOKENS["<|startofprev|>"], "return_timestamps": False,
            "lang_to_id": {name: TOKENS[name] for name in ("<|en|>", "<|de|>")},
            "task_to_id": {name: TOKENS[f"<|{name}|>"] for name in ("translate", "transcribe")},
            "suppress_tokens": [*silent, *range(TOKENS["<|startoftranscript|>"], TIMES)],
            "begin_suppress_tokens": [TOKENS["<|endoftext|>"]],
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": RATE,
            "hop_length": 160, "n_fft": 400, "chunk_length": 30, "n_samples": 30 * RATE, "nb_max_frames": FRAMES,
            "padding_value": 0.0, "padding_side": "right", "return_attention_mask": False,
        },
    }  # fmt: skip
    for name, values in described.items():
        (folder / name).write_text(json.dumps(values))
    return folder


def _weights(random: Any, rows: int, columns: int, scale: float) -> Any:
    return ops.constant((random.standard_normal((rows, columns)) * scale).astype(np.float32))


def _numbers(*values: int) -> Any:
    return ops.constant(np.array(values, np.int64))


def _number(value: int) -> Any:
    return ops.constant(np.int64(value))


def _parameter(name: str, dims: list[int], element: Any) -> Any:
    node = ops.parameter(ov.PartialShape(dims), element, name=name)
    node.output(0).set_names({name})
    return node


def _encoder() -> Any:
    """Two frames become a state."""
    random = np.random.default_rng(1)
    features = _parameter("input_features", [-1, MELS, FRAMES], ov.Type.f32)
    frames = ops.transpose(features, _numbers(0, 2, 1))
    pairs = ops.reshape(frames, _numbers(0, FRAMES // 2, 2 * MELS), True)
    states = ops.tanh(ops.matmul(pairs, _weights(random, 2 * MELS, WIDTH, 0.4), False, False))
    states.output(0).set_names({"last_hidden_state"})
    return ov.Model([ops.result(states)], [features], "encoder")


def _decoder() -> Any:
    """The sum of all tokens so far, which is kept in a variable, asks for states of the encoder."""
    random = np.random.default_rng(2)
    states = _parameter("encoder_hidden_states", [-1, -1, WIDTH], ov.Type.f32)
    ids = _parameter("input_ids", [-1, -1], ov.Type.i64)
    beams = _parameter("beam_idx", [-1], ov.Type.i32)
    info = ov.op.util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, WIDTH]), ov.Type.f32, "sum"
    variable = ov.op.util.Variable(info)
    rows = ops.gather(ops.shape_of(ids), _numbers(0), _number(0))
    nothing = ops.broadcast(ops.constant(np.float32(0)), ops.concat([rows, _numbers(WIDTH)], 0))
    before = ops.gather(ops.read_value(nothing, variable), beams, _number(0))
    tokens = ops.gather(_weights(random, VOCABULARY, WIDTH, 1.0), ids, _number(0))
    sums = ops.add(ops.cum_sum(tokens, _number(1)), ops.unsqueeze(before, _number(1)))
    kept = ops.assign(ops.gather(sums, _number(-1), _number(1)), variable)
    found = ops.softmax(ops.matmul(sums, states, False, True), 2)
    hidden = ops.tanh(
        ops.add(ops.matmul(found, states, False, False), ops.multiply(sums, ops.constant(np.float32(0.3))))
    )
    often = np.zeros(VOCABULARY, np.float32)
    often[TOKENS["<|endoftext|>"]], often[TIMES:] = -2, -5
    scores = ops.matmul(hidden, _weights(random, WIDTH, VOCABULARY, 1.0), False, False)
    logits = ops.add(scores, ops.constant(often))
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], [kept], [states, ids, beams], "decoder")
