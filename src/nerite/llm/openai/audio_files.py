"""Decodes audio files to what speech models take: one channel of 16,000 samples a second, from -1 to 1.

WAV is read here, other formats by the package ``soundfile`` where it is installed. Runs in a helper process, because
the files come from clients.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.core.tensor import Array, Buffer
from nerite.llm.openai.errors import ApiError

RATE: Final = 16_000
"""Samples per second of speech models."""
MAX_SECONDS: Final = 3600
_MAX_VALUES: Final = 1 << 28
"""Maximum number of samples of all channels in a file: 1 GiB as 32-bit numbers."""
_MAX_CHANNELS: Final = 8
_RATES: Final = range(4_000, 192_001)
_BLOCK: Final = 1 << 16

_BY_LIBRARY: Final[Mapping[str, Callable[[bytes], bool]]] = {
    "FLAC": lambda start: start.startswith(b"fLaC"),
    "OGG": lambda start: start.startswith(b"OggS"),
    "MP3": lambda start: start.startswith(b"ID3") or (start[:1] == b"\xff" and start[1:2] >= b"\xe0"),
}
"""Formats that the library reads here, and how they begin. It knows more, which nobody sends on purpose."""


def decode_audio(data: Buffer) -> Array:
    """Return the samples of a file. Raises ``ApiError`` if it is of no accepted format, damaged, or too long."""
    start = bytes(data[:12])
    if start[:4] == b"RIFF" and start[8:12] == b"WAVE":
        samples, rate = _wav(memoryview(data))
    else:
        kind = next((kind for kind, begins in _BY_LIBRARY.items() if begins(start)), "")
        samples, rate = _by_library(kind, data)
    if not len(samples):
        raise refused("it has no samples")
    if not np.isfinite(samples).all():
        raise refused("it has samples that are not numbers")
    return resampled(samples, rate)


def refused(why: str) -> ApiError:
    """Return the error for a file."""
    return ApiError(f"The audio file could not be read: {why}.", "file", "invalid_file_format")


def _check(rate: int, channels: int, frames: int) -> None:
    if rate not in _RATES:
        raise refused(f"it has {rate} samples per second, and {_RATES.start} to {_RATES.stop - 1} are accepted")
    if not 1 <= channels <= _MAX_CHANNELS:
        raise refused(f"it has {channels} channels, and 1 to {_MAX_CHANNELS} are accepted")
    if frames > MAX_SECONDS * rate or frames * channels > _MAX_VALUES:
        raise ApiError(
            f"The audio takes {frames / rate:.0f} seconds. At most {MAX_SECONDS} seconds and {_MAX_VALUES} samples of "
            "all channels are accepted: send it in parts.",
            "file",
            "content_too_large",
        )


# WAV

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MAX_CHUNKS: Final = 1024
"""Before the samples; common files have a handful."""
_UNKNOWN_SIZE: Final = 0xFFFFFFFF
"""Size of the samples in a file that was written to a pipe."""


class _Layout(NamedTuple):
    """The ``fmt`` chunk of a file."""

    kind: int
    channels: int
    rate: int
    bits: int


def _wav(data: memoryview) -> tuple[Array, int]:
    layout: _Layout | None = None
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            raise refused("it has no samples")
        name, size = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], "little")
        chunk = data[at + 8 :] if name == b"data" and size == _UNKNOWN_SIZE else data[at + 8 : at + 8 + size]
        if name == b"fmt ":
            layout = _layout(chunk)
        elif name == b"data":
            if layout is None:
                raise refused("its samples come before their description")
            return _samples(layout, chunk), layout.rate
        at += 8 + size + size % 2
    raise refused(f"its samples come after more than {_MAX_CHUNKS} chunks")


def _layout(chunk: memoryview) -> _Layout:
    if len(chunk) < 16:
        raise refused("its description is cut off")
    kind, channels, rate, _, _, bits = np.frombuffer(chunk[:16], "<u2,<u2,<u4,<u4,<u2,<u2", 1)[0].tolist()
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        kind = int.from_bytes(chunk[24:26], "little")
    return _Layout(kind, channels, rate, bits)


_READERS: Final[Mapping[tuple[int, int], Callable[[memoryview], Array]]] = {
    (_PCM, 8): lambda data: (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128,
    (_PCM, 16): lambda data: np.frombuffer(data, "<i2").astype(np.float32) / 2**15,
    (_PCM, 24): lambda data: _of_24_bits(data).astype(np.float32) / 2**23,
    (_PCM, 32): lambda data: np.frombuffer(data, "<i4").astype(np.float32) / 2**31,
    (_FLOAT, 32): lambda data: np.frombuffer(data, "<f4").astype(np.float32),
    (_FLOAT, 64): lambda data: np.frombuffer(data, "<f8").astype(np.float32),
}
"""By kind and bits per sample."""


def _of_24_bits(data: memoryview) -> Array:
    parts = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
    whole: Array = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
    whole -= (whole & 0x800000) << 1
    return whole


def _samples(layout: _Layout, data: memoryview) -> Array:
    read = _READERS.get((layout.kind, layout.bits))
    if read is None:
        raise refused(
            f"it is a WAV file of kind {layout.kind} with {layout.bits} bits per sample, and PCM with 8, 16, 24 or 32 "
            "and floating point with 32 or 64 are accepted"
        )
    frame = layout.channels * layout.bits // 8
    _check(layout.rate, layout.channels, len(data) // frame if frame else 0)
    values = read(data[: len(data) // frame * frame])
    if layout.channels == 1:
        return values
    mixed: Array = values.reshape(-1, layout.channels).mean(axis=1, dtype=np.float32)
    return mixed


# Other formats


def _by_library(kind: str, data: Buffer) -> tuple[Array, int]:
    if not kind:
        raise refused(f"it is none of WAV, {', '.join(_BY_LIBRARY)}")
    try:
        import soundfile
    except (ImportError, OSError):  # the second: its library is missing
        raise refused(
            f"{kind} is decoded by the package soundfile, which the server lacks. Send WAV, or install it there: pip "
            "install 'nerite[audio]'"
        ) from None
    try:
        return _read(soundfile, data)
    except soundfile.SoundFileError as error:
        # The whole text has the address of the object that was read.
        raise refused(f"{kind}: {getattr(error, 'error_string', 'it is damaged')}") from None


def _read(library: Any, data: Buffer) -> tuple[Array, int]:
    with library.SoundFile(io.BytesIO(data)) as file:
        rate, channels = file.samplerate, file.channels
        _check(rate, channels, max(file.frames, 0))
        blocks, frames = [], 0
        for block in file.blocks(_BLOCK, dtype="float32", always_2d=True):
            frames += len(block)
            _check(rate, channels, frames)  # the file may say less than it has
            blocks.append(block.mean(axis=1))
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32), rate


# Another rate

_CROSSINGS: Final = 16
"""Zero crossings of the filter on each side: more is sharper and slower."""


def resampled(samples: Array, rate: int) -> Array:
    """Return samples at ``RATE``: a polyphase filter, a sinc function in a Hann window."""
    if rate == RATE:
        return samples
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    cut = min(1.0, up / down)
    half = math.ceil(_CROSSINGS / cut)
    # Row i has the samples around sample i, without a copy.
    around = np.lib.stride_tricks.sliding_window_view(np.pad(samples, half), 2 * half)
    made = np.empty(-(-len(samples) * up // down), np.float32)
    for phase in range(min(up, len(made))):
        first, rest = divmod(phase * down, up)
        places = np.arange(-half, half) - rest / up
        weights = cut * np.sinc(cut * places) * np.cos(np.clip(places / half, -1, 1) * np.pi / 2) ** 2
        count = len(made[phase::up])
        made[phase::up] = around[first::down][:count] @ weights.astype(np.float32)
    return made
