"""Models that speak, behind a server: what is heard under /v1 is what the engine's own pipeline makes."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from nerite.frameworks.openvino.graph import openvino
from nerite.llm.openvino_genai.framework import genai
from serving import Serving, python_model, serving
from speaking_models import RATE, speaking_model

HUMS = """
def execute(self, requests):
    for request in requests:
        speed = pb_utils.get_input_tensor_by_name(request, "speed")
        count = int(400_000 / (1 if speed is None else speed.as_numpy().reshape(-1)[0]))
        sender = request.get_response_sender()
        for half in (0, 1):
            audio = np.full(count // 2, half - 0.5, np.float32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("audio", audio)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HUMS_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "speed" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
]
output [ { name: "audio" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [{ kind: KIND_CPU }]
"""
TEXT = "Good morning."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speech") / "models"
    speaking_model(made / "speaks" / "1", "alice", "bob")
    speaking_model(made / "plain" / "1")
    python_model(made, "hums", HUMS, HUMS_CONFIG)
    return made


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    with serving(models, models.parent / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as made:
        yield made


def own(directory: Path, voice: str = "") -> Any:
    """What the engine's own pipeline says."""
    pipeline = genai().Text2SpeechPipeline(str(directory), "CPU")
    embedding = None
    if voice:
        embedding = openvino().Tensor(np.fromfile(directory / "voices" / f"{voice}.bin", np.float32).reshape(1, -1))
    return np.array(pipeline.generate(TEXT, embedding).speeches[0].data).reshape(-1)


def heard(file: bytes) -> Any:
    """Return the samples of a WAV file."""
    with wave.open(io.BytesIO(file)) as opened:
        assert (opened.getnchannels(), opened.getsampwidth(), opened.getframerate()) == (1, 2, RATE)
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2") / 32767


@pytest.mark.feature("openvino_genai", "speech")
@pytest.mark.parametrize(("model", "voice"), [("speaks", "alice"), ("speaks", "bob"), ("plain", "")])
def test_the_sound_is_the_engines_own(models: Path, client: openai.OpenAI, model: str, voice: str) -> None:
    answer = client.audio.speech.create(model=model, input=TEXT, voice=voice or "alloy", response_format="wav")
    expected = own(models / model / "1", voice)
    samples = heard(answer.content)
    assert len(samples) == len(expected) > 0
    assert samples == pytest.approx(np.clip(expected, -1, 1), abs=1e-3)
    assert answer.response.headers["content-type"] == "audio/wav"


def test_a_model_of_another_backend(client: openai.OpenAI) -> None:
    """Many samples, in two responses, at another speed."""
    answer = client.audio.speech.create(model="hums", input=TEXT, voice="any", response_format="pcm", speed=2)
    samples = np.frombuffer(answer.content, "<i2")
    assert len(samples) == 200_000
    assert (samples[:100_000] == -16383).all()
    assert (samples[100_000:] == 16383).all()


@pytest.mark.parametrize(
    ("said", "param", "text"),
    [
        ({"input": TEXT}, "model", "Missing required parameter"),
        ({"model": "speaks"}, "input", "Missing required parameter"),
        ({"model": "speaks", "input": ""}, "input", "Expected a text"),
        ({"model": "speaks", "input": "x" * 4097}, "input", "maximum length 4096"),
        ({"model": "speaks", "input": "x" * 601}, "input", "601 tokens, but the model takes 600"),
        ({"model": "speaks", "input": TEXT, "voice": "carol"}, "voice", "There are: alice, bob."),
        ({"model": "speaks", "input": TEXT, "response_format": "mp3"}, "response_format", "one of 'wav', 'pcm'"),
        ({"model": "speaks", "input": TEXT, "speed": 2}, "speed", "has no input 'speed'"),
        ({"model": "speaks", "input": TEXT, "stream_format": "sse"}, "stream_format", "and not as events"),
    ],
)
def test_what_is_refused(server: Serving, said: dict[str, Any], param: str, text: str) -> None:
    status, _, body = server.ask("POST", "/v1/audio/speech", said)
    error = json.loads(body)["error"]
    assert (status, error["param"]) == (400, param), error
    assert text in error["message"]


def test_the_models_own_tensors(server: Serving) -> None:
    status, _, body = server.ask("POST", "/v2/models/speaks/generate", {"text_input": "a", "voice": "bob"})
    answer = json.loads(body)
    assert (status, answer["sample_rate"]) == (200, RATE)
    assert len(answer["audio"]) > 0
