"""Audio files, decoded: each kind of WAV, other rates, and what is refused."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearing_models import recording, riff, wav
from nerite.llm.openai.audio_files import MAX_SECONDS, RATE, decode_audio, resampled
from nerite.llm.openai.errors import ApiError

TONE = (np.sin(np.arange(4000) / 10) * 0.5).astype(np.float32)


def layout(kind: int, bits: int, channels: int = 1, rate: int = RATE) -> bytes:
    frame = channels * bits // 8
    return struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits)


def of_24_bits(samples: Any) -> bytes:
    return (samples * 2**23).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


@pytest.mark.parametrize(
    ("described", "data"),
    [
        (layout(1, 8), (TONE * 128 + 128).astype(np.uint8).tobytes()),
        (layout(1, 16), (TONE * 2**15).astype("<i2").tobytes()),
        (layout(1, 24), of_24_bits(TONE)),
        (layout(1, 32), (TONE * 2**31).astype("<i4").tobytes()),
        (layout(3, 32), TONE.tobytes()),
        (layout(3, 64), TONE.astype("<f8").tobytes()),
        (layout(0xFFFE, 16) + struct.pack("<HHIH", 22, 16, 0, 1) + bytes(14), (TONE * 2**15).astype("<i2").tobytes()),
        (layout(3, 32, channels=2), np.stack([TONE * 2, TONE * 0], 1).tobytes()),
    ],
    ids=["8", "16", "24", "32", "float", "double", "extensible", "stereo"],
)
def test_kinds_of_wav(described: bytes, data: bytes) -> None:
    assert decode_audio(riff(described, data)) == pytest.approx(TONE, abs=1 / 100)


def test_a_file_from_a_pipe_ends_where_it_ends() -> None:
    file = riff(layout(3, 32), TONE.tobytes() + b"\0", size=0xFFFFFFFF)
    assert np.array_equal(decode_audio(file), TONE)


def test_other_chunks_are_passed_over() -> None:
    file = riff(layout(3, 32), TONE.tobytes())
    file = file[:12] + struct.pack("<4sI", b"LIST", 3) + b"abc\0" + file[12:]
    assert np.array_equal(decode_audio(memoryview(file)), TONE)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_rates(rate: int) -> None:
    """A tone stays the tone, without its ends, where silence comes in."""
    seconds = 0.5
    before = np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate).astype(np.float32)
    after = decode_audio(wav(before, rate))
    expected = np.sin(2 * np.pi * 440 * np.arange(len(after)) / RATE)
    assert len(after) == pytest.approx(seconds * RATE, abs=1)
    assert np.abs(after - expected)[400:-400].max() < 0.01


def test_what_the_rate_cannot_hold_is_filtered() -> None:
    high = np.sin(2 * np.pi * 11_000 * np.arange(24_000) / 48_000).astype(np.float32)
    assert np.abs(resampled(high, 48_000))[200:-200].max() < 0.02


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (b"", "it is none of WAV, FLAC, OGG, MP3"),
        (b"RIFF\0\0\0\0WAVE", "it has no samples"),
        (riff(layout(1, 16), b""), "it has no samples"),
        (b"RIFF\0\0\0\0WAVE" + b"none\0\0\0\0" * 2000, "its samples come after more than 1024 chunks"),
        (riff(layout(1, 16, rate=2**31 - 1), b"\0\0"), "it has 2147483647 samples per second"),
        (riff(layout(1, 16, channels=30000), bytes(90)), "it has 30000 channels"),
        (riff(layout(1, 16), b"\0"), "it has no samples"),
        (riff(layout(1, 16)[:8], b"\0\0"), "its description is cut off"),
        (riff(layout(7, 8), b"\0\0"), "a WAV file of kind 7 with 8 bits"),
        (riff(layout(1, 16, channels=0), b"\0\0"), "it has 0 channels"),
        (riff(layout(1, 16, channels=9), bytes(90)), "it has 9 channels"),
        (riff(layout(1, 16, rate=1), b"\0\0"), "it has 1 samples per second"),
        (riff(layout(3, 32), np.array([np.nan], np.float32).tobytes()), "samples that are not numbers"),
        (riff(layout(1, 8, rate=4000), bytes(4000 * MAX_SECONDS + 1)), "At most 3600 seconds"),
    ],
)
def test_what_is_refused(file: bytes, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_audio(file)
    assert text in caught.value.message
    assert (caught.value.param, caught.value.status) == ("file", 400)


def test_formats_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for start, kind in ((b"fLaC", "FLAC"), (b"OggS", "OGG"), (b"ID3", "MP3"), (b"\xff\xfb", "MP3")):
        with pytest.raises(ApiError, match=rf"{kind} is decoded by the package soundfile, which the server lacks"):
            decode_audio(start + bytes(40))


class Broken(Exception):
    """What the library raises for a damaged file."""

    error_string = "Format not recognised."


class Opened:
    """A file that the library has opened: stereo, at half the rate, of as many frames as its last byte says."""

    samplerate, channels = RATE // 2, 2

    def __init__(self, file: Any) -> None:
        data = file.read()
        if data.endswith(b"broken"):
            raise Broken(f"Error opening {file!r}: Format not recognised.")
        self.whole = 1000 * data[-1]
        self.frames = -1 if data[-2] else self.whole

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def blocks(self, size: int, dtype: str, always_2d: bool) -> Iterator[Any]:
        for at in range(0, self.whole, size):
            yield np.tile(np.array([[1.0, 0.0]], dtype), (min(size, self.whole - at), 1))


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for soundfile."""
    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(SoundFile=Opened, SoundFileError=Broken))


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("unknown", [b"\0", b"\1"])
def test_what_the_library_reads_is_mixed_and_resampled(unknown: bytes) -> None:
    samples = decode_audio(b"fLaC" + unknown + b"\x64")
    assert len(samples) == 200_000
    assert samples[1000:-1000] == pytest.approx(0.5, abs=0.01)


@pytest.mark.usefixtures("_library")
def test_what_the_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError, match=r"The audio file could not be read: MP3: Format not recognised\."):
        decode_audio(b"ID3broken")
    with pytest.raises(ApiError, match="it has no samples"):
        decode_audio(b"OggS\0\0")
    monkeypatch.setattr(Opened, "samplerate", 4000)
    monkeypatch.setattr("nerite.llm.openai.audio_files.MAX_SECONDS", 10)
    for unknown in (b"\0", b"\1"):  # whether the file says how long it is, or not
        with pytest.raises(ApiError, match="At most 10 seconds"):
            decode_audio(b"OggS" + unknown + b"\xff")


@given(st.binary(max_size=200))
def test_any_bytes_are_samples_or_refused(data: bytes) -> None:
    for file in (data, b"RIFF\0\0\0\0WAVE" + data, riff(data, data)):
        try:
            assert np.isfinite(decode_audio(file)).all()
        except ApiError as error:
            assert error.param == "file"


def test_a_recording_of_a_minute() -> None:
    assert len(decode_audio(wav(recording(60), 48_000))) == 60 * RATE // 3
