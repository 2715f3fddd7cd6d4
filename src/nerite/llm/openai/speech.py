"""``/v1/audio/speech``: reads the body, and writes the recording."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Array, Buffer, TensorSpec, join_bytes, to_array
from nerite.llm import checkpoint
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, UnknownField, check_text_length, wrong_value
from nerite.llm.openai.replies import SharedReply
from nerite.llm.openai.sampling import not_offered
from nerite.llm.openai.text_model import (
    PROMPT,
    CallOrigin,
    ModelAddress,
    ModelPurpose,
    ModelRequest,
    has_type,
    needs_prompt_only,
)
from nerite.llm.speech import AUDIO, SAMPLE_RATE, VOICE
from nerite.transports.access import SenderHeaders
from nerite.transports.http import reply

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_SPEED: Final = "speed"
_FORMATS: Final = {"wav": "audio/wav", "pcm": "audio/pcm"}
_USUAL_RATE: Final = 16_000
"""Samples per second of a model that does not say."""
_LONGEST: Final = 4096
"""Maximum number of characters, as with OpenAI."""
_PIECE: Final = 1 << 17
"""Samples that are converted in one turn of the event loop."""
_KNOWN: Final = ("model", "input", "voice", "response_format", "speed", "stream_format", "user")


def synthesizes_speech(signature: Signature) -> bool:
    """Return whether a model turns a text into samples."""
    return needs_prompt_only(signature) and has_type(signature.outputs.get(AUDIO), dtypes.FP32)


PURPOSE: Final = ModelPurpose(
    synthesizes_speech,
    f"does not synthesize speech: it needs an input '{PROMPT}' (BYTES) and an output '{AUDIO}' (FP32)",
    checkpoint.TEXT_TO_SPEECH,
)


class SpeechRequest(NamedTuple):
    """The parsed body of a request for speech."""

    model: str
    text: bytes | memoryview
    voice: str = ""
    format: str = "wav"
    speed: float = 1.0
    user: str = ""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""
        return CallOrigin(sender, self.user, lambda _: bytes(self.text))

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return the request to the model. Raises ``ApiError`` for settings that it has no input for."""
        rows = (1,) if signature.max_batch_size else ()
        specs = [TensorSpec(PROMPT, dtypes.BYTES, (*rows, 1))]
        data: list[Buffer] = [join_bytes([self.text])]
        if self.voice and VOICE in signature.inputs:
            specs.append(TensorSpec(VOICE, dtypes.BYTES, (*rows, 1)))
            data.append(join_bytes([self.voice.encode()]))
        if self.speed != 1:
            declared = signature.inputs.get(_SPEED)
            if declared is None or declared.datatype is not dtypes.FP32:
                raise not_offered(
                    _SPEED, f"model '{self.model}' has no input '{_SPEED}' (FP32) to pass it to the model"
                )
            specs.append(TensorSpec(_SPEED, dtypes.FP32, (*rows, 1)))
            data.append(np.array([self.speed], np.float32).tobytes())
        return [ModelRequest(address.header(specs, dict(sender.forwarded), sender), data)]

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> SpeechReply:
        """Return the sink of the request."""
        return SpeechReply(connection, self.format)


def read_speech(body: Buffer) -> SpeechRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_KNOWN)
    text = fields.text("input")
    if not text:
        raise wrong_value("input", "a text", text)
    check_text_length("input", text, _LONGEST)
    if fields.choice("stream_format", "audio", ("audio", "sse")) == "sse":
        raise not_offered("stream_format", "the recording is sent as it is, and not as events")
    return SpeechRequest(
        fields.name("model"),
        text.encode(),
        fields.name("voice", ""),
        fields.choice("response_format", "wav", _FORMATS),
        fields.number(_SPEED, 0.25, 4.0) if _SPEED in fields else 1.0,
        fields.name("user", ""),
        fields.unknown,
    )


class SpeechReply(SharedReply):
    """A recording, which is one request to the model."""

    fields = MappingProxyType({"text_input": "input", "voice": "voice"})

    def __init__(self, connection: HttpExchange, audio_format: str) -> None:
        super().__init__(connection)
        self._format = audio_format
        self._samples: Array = np.zeros(0, np.float32)
        self._rate = _USUAL_RATE

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        if response.header is not None:
            outputs: dict[str, Any] = {
                spec.name: to_array(spec, data)
                for spec, data in zip(response.header.outputs, response.buffers, strict=True)
            }
            # Copied, because the received memory is released.
            self._samples = np.concatenate([self._samples, outputs[AUDIO].reshape(-1)])
            if SAMPLE_RATE in outputs:
                self._rate = int(outputs[SAMPLE_RATE].reshape(-1)[0])
        if not final:
            return
        if not len(self._samples):
            raise ApiError("The model returned no samples.", None, None, 500)
        head = wav_head(len(self._samples), self._rate) if self._format == "wav" else b""
        self._connection.open(reply.chunked_head(200, _FORMATS[self._format]), head)
        self._send_from(0)

    def _send_from(self, at: int) -> None:
        self._connection.send_chunk(pcm(self._samples[at : at + _PIECE]))
        if at + _PIECE < len(self._samples):
            self._call_soon(self._send_from, at + _PIECE)
            return
        self._closed = True
        self._connection.close_reply()


def wav_head(count: int, rate: int) -> bytes:
    """Return what stands before ``count`` samples of 16 bits in a WAV file."""
    size = 2 * count
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", 4 + len(layout) + 8 + size) + b"WAVE" + layout + struct.pack("<4sI", b"data", size)
    )


def pcm(samples: Array) -> bytes:
    """Return samples in 16 bits; what is no number is silence."""
    encoded: bytes = (np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype("<i2").tobytes()
    return encoded
