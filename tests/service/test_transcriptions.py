"""Speech models behind a server: transcripts under /v1 are those of the engine's own pipeline, word by word."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from hearing_models import recording, speech_model, wav
from nerite.llm.openvino_genai.framework import genai
from serving import ALL_TENANTS, Serving, eventually, python_model, serving

POLICY = """
[tenants.acme]
keys = ["acme-key"]
[tenants.other]
keys = ["other-key"]
concurrency = 1
"""
PATIENT = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        while not request.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([b"on "], object))]))
            time.sleep(0.01)
        print("cancelled by the client", flush=True)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PATIENT_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [
  { name: "audio" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [{ kind: KIND_CPU }]
"""
SHORT, LONG = wav(recording(2)), wav(recording(70))
SAMPLES = {2: recording(2), 70: recording(70)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hearing")
    speech_model(made / "models" / "listens" / "1")
    speech_model(made / "models" / "english" / "1", english=True)
    python_model(made / "models", "patient", PATIENT, PATIENT_CONFIG)
    (made / "policy.toml").write_text(POLICY)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    flags = [f"--policy-file={folder / 'policy.toml'}", ALL_TENANTS, f"--ledger={folder / 'ledger.db'}"]
    with serving(folder / "models", folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="acme-key", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    """The engine's own pipeline, on what is left of a recording in 16 bits."""
    pipeline = genai().WhisperPipeline(str(folder / "models" / "listens" / "1"), "CPU")

    def transcribed(seconds: int, **settings: Any) -> Any:
        heard = (np.clip(SAMPLES[seconds], -1, 1) * 32767).astype("<i2").astype(np.float32) / 32768
        return pipeline.generate(heard.tolist(), **settings)

    return transcribed


def post(server: Serving, fields: dict[str, str], file: bytes = SHORT, path: str = "transcriptions") -> tuple[int, str]:
    """Send a form; return the status and the body."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", f"/v1/audio/{path}", form(fields, file), HEADERS)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


HEADERS = {"Content-Type": "multipart/form-data; boundary=edge", "Authorization": "Bearer acme-key"}


def form(fields: dict[str, str], file: bytes) -> bytes:
    parts = [
        b'--edge\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value.encode())
        for name, value in fields.items()
    ]
    named = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n' % file
    return b"".join([*parts, named, b"--edge--\r\n"])


@pytest.mark.feature("openvino_genai", "transcription")
@pytest.mark.parametrize(("seconds", "file"), [(2, SHORT), (70, LONG)])
def test_the_words_are_the_engines_own(client: openai.OpenAI, own: Any, seconds: int, file: bytes) -> None:
    plain = client.audio.transcriptions.create(model="listens", file=("a.wav", file))
    assert plain.text == own(seconds).texts[0].strip() != ""
    timed = client.audio.transcriptions.create(model="listens", file=("a.wav", file), response_format="verbose_json")
    expected = own(seconds, return_timestamps=True)
    assert timed.text == expected.texts[0].strip()
    assert timed.segments is not None
    assert [(each.text, each.start, each.end) for each in timed.segments] == [
        (each.text, round(each.start_ts, 3), round(each.end_ts, 3)) for each in expected.chunks
    ]
    assert (timed.language, float(timed.duration)) == (expected.language.strip("<|>"), seconds)


def test_formats(server: Serving, client: openai.OpenAI, own: Any) -> None:
    expected = own(2, return_timestamps=True)

    def create(kind: Any) -> str:
        return str(client.audio.transcriptions.create(model="listens", file=("a.wav", SHORT), response_format=kind))

    assert create("text") == f"{own(2).texts[0].strip()}\n"
    first = expected.chunks[0]
    subtitles = create("srt").split("\n\n")
    assert subtitles[0].splitlines()[::2] == ["1", " ".join(first.text.split())]
    assert subtitles[0].splitlines()[1].startswith(f"00:00:00,{round(first.start_ts * 1000):03} --> 00:00:")
    assert len(subtitles) == len(expected.chunks) + 1
    assert create("vtt").startswith(f"WEBVTT\n\n00:00:00.{round(first.start_ts * 1000):03} --> 00:00:")


def test_settings_are_the_engines(server: Serving, client: openai.OpenAI, own: Any) -> None:
    def create(**settings: Any) -> str:
        return str(client.audio.transcriptions.create(model="listens", file=("a.wav", SHORT), **settings).text)

    assert create(prompt="hello there") == own(2, initial_prompt="hello there").texts[0].strip()
    assert create(language="de") == own(2, language="<|de|>").texts[0].strip()
    status, body = post(server, {"model": "listens"}, path="translations")
    assert status == 200
    assert json.loads(body)["text"] == own(2, task="translate").texts[0].strip() != own(2).texts[0].strip()
    # Of a prompt that is too long the end counts.
    assert create(prompt="x" * 4000 + "hello there") == own(2, initial_prompt="x" * 12 + "hello there").texts[0].strip()
    assert len({create(temperature=1.0) for _ in range(4)}) > 1


@pytest.mark.parametrize(("seconds", "file"), [(2, SHORT), (70, LONG)])
def test_a_stream(client: openai.OpenAI, own: Any, seconds: int, file: bytes) -> None:
    events = list(client.audio.transcriptions.create(model="listens", file=("a.wav", file), stream=True))
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert len(events) > 2
    deltas = "".join(event.delta for event in events[:-1] if event.type == "transcript.text.delta")
    last = events[-1]
    assert last.type == "transcript.text.done"
    assert last.text == deltas == own(seconds).texts[0].strip()
    assert last.model_dump()["usage"]["seconds"] == seconds


def test_the_models_own_tensors(server: Serving, own: Any) -> None:
    heard = SAMPLES[2].tolist()
    status, _, body = server.ask("POST", "/v2/models/listens/generate", {"audio": heard, "timestamps": "segment"})
    answer = json.loads(body)
    assert status == 200, answer
    assert json.loads(answer["segments"])[0].keys() == {"start", "end", "text"}
    assert server.json("GET", "/v2/models/listens/config")["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize(
    ("fields", "file", "status", "param", "text"),
    [
        ({}, SHORT, 400, "model", "Missing required parameter: 'model'"),
        ({"model": "none"}, SHORT, 404, "model", "Unknown model: none"),
        ({"model": "listens"}, b"ID3 no sound", 400, "file", "could not be read"),
        ({"model": "listens"}, b"GIF89a", 400, "file", "it is none of WAV, FLAC, OGG, MP3"),
        ({"model": "listens"}, SHORT[:44], 400, "file", "it has no samples"),
        ({"model": "listens", "response_format": "xml"}, SHORT, 400, "response_format", "Expected one of 'json'"),
        ({"model": "listens", "temperature": "3"}, SHORT, 400, "temperature", "a number from 0 to 1"),
        ({"model": "listens", "language": "xx"}, SHORT, 400, "language", "'language' is 'xx'"),
        ({"model": "english", "language": "de"}, SHORT, 400, "language", "knows English alone"),
        ({"model": "patient", "language": "de"}, SHORT, 400, "language", "has no input 'language'"),
        ({"model": "listens", "stream": "true", "response_format": "srt"}, SHORT, 400, "response_format", "json or"),
        (
            {"model": "listens", "response_format": "verbose_json", "timestamp_granularities[]": "word"},
            SHORT, 400, "timestamp_granularities", "set the parameter WORD_TIMESTAMPS",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(
    server: Serving, fields: dict[str, str], file: bytes, status: int, param: str, text: str
) -> None:
    got, body = post(server, fields, file)
    error = json.loads(body)["error"]
    assert (got, error["param"]) == (status, param), error
    assert text in error["message"]


def test_a_body_that_is_no_form(server: Serving) -> None:
    status, _, body = server.ask("POST", "/v1/audio/transcriptions", {"model": "listens"})
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_content_type")


def hang_up(server: Serving, fields: dict[str, str], until: bytes) -> None:
    """Send a form, and close the connection when ``until`` has come."""
    host, port = server.http.split(":")
    body = form(fields, SHORT)
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    with socket.create_connection((host, int(port))) as connection:
        first = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body)}"
        connection.sendall(first.encode() + b"\r\n\r\n" + body)
        got = b""
        while until not in got:
            got += connection.recv(65536)


def test_a_client_that_goes_away(server: Serving) -> None:
    before = server.text.count("cancelled by the client")
    hang_up(server, {"model": "patient", "stream": "true"}, b"transcript.text.delta")
    eventually(lambda: server.text.count("cancelled by the client") == before + 1)


def test_tenants(server: Serving) -> None:
    """One that has its only request under way is refused another, with OpenAI's code."""
    host, port = server.http.split(":")
    body = form({"model": "patient", "stream": "true"}, SHORT)
    theirs = {**HEADERS, "Authorization": "Bearer other-key"}
    first = http.client.HTTPConnection(host, int(port), timeout=60)
    first.request("POST", "/v1/audio/transcriptions", body, theirs)
    stream = first.getresponse()
    assert b"transcript.text.delta" in stream.readline()
    second = http.client.HTTPConnection(host, int(port), timeout=60)
    second.request("POST", "/v1/audio/transcriptions", form({"model": "listens"}, SHORT), theirs)
    answer = second.getresponse()
    assert answer.status == 429
    assert json.loads(answer.read())["error"]["code"] == "rate_limit_exceeded"
    second.close()
    stream.close()
    first.close()


def test_they_are_counted(server: Serving, client: openai.OpenAI) -> None:
    def figure(name: str) -> float:
        return server.metrics().get(f'nerite_transcription_{name}{{model="listens",version="1"}}', 0)

    before = [figure(name) for name in ("audio_seconds_total", "first_text_seconds_count", "real_time_factor_count")]
    client.audio.transcriptions.create(model="listens", file=("a.wav", SHORT))
    eventually(
        lambda: (
            [figure(name) for name in ("audio_seconds_total", "first_text_seconds_count", "real_time_factor_count")]
            == [before[0] + 2, before[1] + 1, before[2] + 1]
        )
    )
    rows = server.json("GET", "/v2/usage?group_by=model")["data"]
    (own,) = [each for each in rows if each.get("model") == "listens"]
    assert own["requests"] > 0
