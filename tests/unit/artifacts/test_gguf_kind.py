"""GGUF files are recognised by a header whose every number is bounded."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest

from gguf_files import gguf_model
from llm_models import TEMPLATE
from nerite.artifacts.artifact import Candidate, Unusable
from nerite.artifacts.recognition import recognise


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_recognised(tmp_path: Path, architecture: str) -> None:
    file = gguf_model(tmp_path / "tiny.gguf", architecture=architecture)
    artifact = recognise(Candidate(file))
    assert (artifact.kind, artifact.name) == (f"GGUF model ({architecture})", "tiny")
    assert (artifact.config.backend, dict(artifact.files)) == ("llm", {"model.gguf": file})
    assert artifact.make is not None
    artifact.make(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 2048
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert described == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}


def test_an_architecture_that_cannot_be_read(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "tiny.gguf", architecture="gemma3")
    with pytest.raises(Unusable, match=r"architecture 'gemma3'; OpenVINO GenAI reads llama, qwen2, qwen3\n"):
        recognise(Candidate(file))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2, 0.9])
def test_truncated(tmp_path: Path, share: float) -> None:
    file = gguf_model(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole[: max(5, int(len(whole) * share))])
    with pytest.raises(Unusable, match="the file is truncated"):
        recognise(Candidate(file))


def test_any_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = gguf_model(tmp_path / "tiny.gguf").read_bytes()
    rng = random.Random(38)
    refused = 0
    for number in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(min(2000, len(damaged)))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        file = tmp_path / "damaged.gguf"
        file.write_bytes(damaged)
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            artifact = recognise(Candidate(file))
            if artifact.make is not None:
                artifact.make(directory)
        except Unusable:
            refused += 1
    assert 0 < refused < 600


@pytest.mark.parametrize(
    "rest",
    [
        struct.pack("<IQQ", 1, 0, 0),
        struct.pack("<IQQ", 3, 1 << 60, 0),
        struct.pack("<IQQ", 3, 0, 1 << 60),
        struct.pack("<IQQQ", 3, 0, 1, 1 << 62),
        struct.pack("<IQQQ4sI", 3, 0, 1, 4, b"name", 99),
        struct.pack("<IQQQ4sIIQ", 3, 0, 1, 4, b"name", 9, 4, 1 << 62),
        struct.pack("<IQQQ4sIIQ", 3, 0, 1, 4, b"name", 9, 9, 1),
        struct.pack("<IQQQ4sI", 3, 1, 0, 4, b"name", 1 << 30),
        bytes(range(200)),
    ],
)
def test_numbers_without_end(tmp_path: Path, rest: bytes) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + rest)
    with pytest.raises(Unusable):
        recognise(Candidate(file))
