"""Forms with recordings, and transcripts in each format."""

from __future__ import annotations

import pytest

from hearing_models import recording, wav
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.transcriptions import TranscriptionRequest, read_transcription, srt, vtt
from nerite.llm.speech import TimedText

KIND = b"multipart/form-data; boundary=edge"
FILE = wav(recording(0.1))


def form(*fields: tuple[str, bytes]) -> bytes:
    parts = [b'--edge\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), v) for n, v in fields]
    return b"".join(parts) + b"--edge--\r\n"


def read(*fields: tuple[str, bytes]) -> TranscriptionRequest:
    return read_transcription(memoryview(form(("file", FILE), ("model", b"m"), *fields)), KIND)


def test_a_form() -> None:
    asked = read(
        ("language", b"en"), ("prompt", "naïve".encode()), ("temperature", b"0.5"),
        ("response_format", b"verbose_json"),
        ("timestamp_granularities[]", b"segment"), ("timestamp_granularities[]", b"word"), ("user", b"u"),
        ("chunking_strategy", b"auto"), ("strange", b"1"),
    )  # fmt: skip
    assert (asked.model, asked.language, asked.prompt, asked.temperature) == ("m", "en", "naïve", 0.5)
    assert (asked.format, asked.timestamps, asked.stream, asked.user) == ("verbose_json", "word", False, "u")
    assert (asked.seconds, len(asked.samples)) == (0.1, 6400)
    assert [each.path for each in asked.unknown] == ["strange"]


def test_defaults() -> None:
    asked = read()
    assert (asked.format, asked.timestamps, asked.stream, asked.temperature) == ("json", "none", False, 0.0)
    assert read(("response_format", b"srt")).timestamps == "segment"
    assert read(("stream", b"True"), ("response_format", b"text")).stream


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("response_format", b"xml")], "response_format"),
        ([("temperature", b"warm")], "temperature"),
        ([("temperature", b"nan")], "temperature"),
        ([("temperature", b"1.5")], "temperature"),
        ([("stream", b"yes")], "stream"),
        ([("stream", b"true"), ("response_format", b"vtt")], "response_format"),
        ([("timestamp_granularities[]", b"letter")], "timestamp_granularities[]"),
        ([("timestamp_granularities[]", b"word")], "response_format"),
        ([("include[]", b"logprobs")], "include"),
        ([("prompt", b"\xff")], "prompt"),
        ([("prompt", b"x" * 8193)], "prompt"),
        ([("language", b"x" * 2000)], "language"),
    ],
)
def test_what_is_refused(fields: list[tuple[str, bytes]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(*fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (form(("model", b"m")), KIND, "Missing required parameter: 'file'"),
        (form(("file", FILE)), KIND, "Missing required parameter: 'model'"),
        (b"{}", b"application/json", "sent as a form of type multipart/form-data"),
        (b"--edge", KIND, "the closing boundary is missing"),
        (b"", b"multipart/form-data", "needs a boundary"),
    ],
)
def test_forms_that_are_none(body: bytes, kind: bytes, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_transcription(memoryview(body), kind)
    assert text in caught.value.message


def test_subtitles() -> None:
    cues = [TimedText(0.0, 1.5, " One\n\ntwo"), TimedText(3661.0625, 3662.0, "a --> b")]
    assert "".join(srt(cues)) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne two\n\n2\n01:01:01,062 --> 01:01:02,000\na --> b\n\n"
    )
    assert "".join(vtt(cues)) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne two\n\n01:01:01.062 --> 01:01:02.000\na -> b\n\n"
    )
