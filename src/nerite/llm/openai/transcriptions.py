"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: reads the form, and writes the reply in each format."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson

from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes
from nerite.core.text import quoted_text
from nerite.llm import checkpoint
from nerite.llm.openai import text_model
from nerite.llm.openai.audio_files import RATE, decode_audio
from nerite.llm.openai.errors import ApiError, body_of
from nerite.llm.openai.fields import UnknownField, check_name, missing, wrong_value
from nerite.llm.openai.replies import SharedReply
from nerite.llm.openai.sampling import not_offered
from nerite.llm.openai.text_model import TEXT_OUTPUT, CallOrigin, ModelAddress, ModelPurpose, ModelRequest, text_of
from nerite.llm.speech import AUDIO, NONE, SEGMENT, SEGMENTS, TRANSCRIBE, TRANSLATE, WORD, WORDS, TimedText
from nerite.transports.access import SenderHeaders
from nerite.transports.http import files, reply
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_MAX_UNKNOWN: Final = 16
_LONGEST_PROMPT: Final = 8192
"""Characters. A model takes some hundred tokens."""
_OPENING: Final = 64 * 1024
"""Bytes of a recording that stand for the beginning of a prompt."""


def is_transcriber(signature: Signature) -> bool:
    """Return whether a model turns samples into text."""
    audio = signature.inputs.get(AUDIO)
    return (
        audio is not None
        and audio.datatype is dtypes.FP32
        and audio.dims == (-1,)
        and text_model.has_type(signature.outputs.get(TEXT_OUTPUT), dtypes.BYTES)
        and signature.required <= {AUDIO}
    )


PURPOSE: Final = ModelPurpose(
    is_transcriber,
    f"does not transcribe: it needs an input '{AUDIO}' (FP32) and an output '{TEXT_OUTPUT}' (BYTES)",
    checkpoint.TRANSCRIBE,
)


# The form

JSON, TEXT, SRT, VTT, VERBOSE = "json", "text", "srt", "vtt", "verbose_json"
_FORMATS: Final = (JSON, TEXT, SRT, VTT, VERBOSE)
_GRANULARITIES: Final = "timestamp_granularities"
_FIELDS: Final = frozenset(
    {
        *("file", "model", "language", "prompt", "response_format", "temperature", "stream", "user"),
        *(_GRANULARITIES, f"{_GRANULARITIES}[]"),
        # Without influence on the text:
        *("chunking_strategy", "include", "include[]"),
    }
)


class TranscriptionRequest(NamedTuple):
    """The parsed form of a request to transcribe or translate."""

    model: str
    samples: Buffer
    """32-bit numbers, ``RATE`` per second."""
    format: str = JSON
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    words: bool = False
    """Whether the times of words are wanted."""
    stream: bool = False
    user: str = ""
    unknown: Sequence[UnknownField] = ()
    """Parts of the form that were passed over."""
    task: str = TRANSCRIBE

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return len(self.samples) / (4 * RATE)

    @property
    def timestamps(self) -> str:
        """What the model is to find the times of."""
        if self.words:
            return WORD
        return SEGMENT if self.format in (SRT, VTT, VERBOSE) else NONE

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""
        return CallOrigin(sender, self.user, lambda _: bytes(self.samples[:_OPENING]))

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return the request to the model. Raises ``ApiError`` for settings that it has no input for."""
        rows = (1,) if signature.max_batch_size else ()
        specs = [TensorSpec(AUDIO, dtypes.FP32, (*rows, len(self.samples) // 4))]
        data: list[Buffer] = [self.samples]
        given: dict[str, tuple[str, Any]] = {
            "language": ("language", self.language),
            "task": ("model", self.task if self.task == TRANSLATE else ""),
            "prompt": ("prompt", self.prompt),
            "temperature": ("temperature", self.temperature),
            "timestamps": (_GRANULARITIES if self.words else "response_format", self.timestamps),
            "stream": ("stream", self.stream),
        }
        # A model without them answers at once, and with a text for the whole recording.
        optional = ("stream",) if self.words else ("stream", "timestamps")
        for name, (param, value) in given.items():
            declared = signature.inputs.get(name)
            if not value or value == NONE:
                continue
            if declared is None:
                if name in optional:
                    continue
                raise not_offered(param, f"model '{self.model}' has no input '{name}' to pass it to the model")
            specs.append(TensorSpec(name, declared.datatype, (*rows, *(1 for _ in declared.dims))))
            if declared.datatype is dtypes.BYTES:
                data.append(join_bytes([str(value).encode()]))
            else:
                data.append(np.array([value], declared.datatype.numpy).tobytes())
        return [ModelRequest(address.header(specs, dict(sender.forwarded), sender), data)]

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> TranscriptionReply:
        """Return the sink of the request."""
        return TranscriptionReply(connection, self)


def read_translation(body: Buffer, content_type: Buffer) -> TranscriptionRequest:
    """Read a form with a recording that is to be translated. Raises ``ApiError``."""
    return read_transcription(body, content_type)._replace(task=TRANSLATE)


def read_transcription(body: Buffer, content_type: Buffer) -> TranscriptionRequest:
    """Read a form with a recording. Raises ``ApiError``."""
    kind = bytes(content_type).decode("latin-1")
    if files.form_media_type(kind) != files.TYPE:
        raise ApiError(f"A recording is sent as a form of type {files.TYPE}.", None, "invalid_content_type")
    try:
        parts = files.parse_multipart(kind, body)
    except InvalidArgument as error:
        raise ApiError(f"The form could not be read: {error.message}", None, "invalid_form") from None
    texts: dict[str, str] = {}
    wanted: list[str] = []
    for part in parts:
        if part.name == "file":
            continue
        text = _text(part)
        if part.name.removesuffix("[]") == _GRANULARITIES:
            wanted.append(text)
        else:
            texts[part.name] = text
    file = next((part for part in parts if part.name == "file"), None)
    if file is None:
        raise missing("file")
    if "model" not in texts:
        raise missing("model")
    for name in ("model", "user", "language"):
        check_name(name, texts.get(name, ""))
    asked = TranscriptionRequest(
        texts["model"],
        b"",
        _choice(texts, "response_format", JSON, _FORMATS),
        texts.get("language", ""),
        texts.get("prompt", ""),
        _temperature(texts),
        _wants_words(wanted),
        _choice(texts, "stream", "false", ("true", "false")) == "true",
        texts.get("user", ""),
        [UnknownField(quoted_text(name), "") for name in texts if name not in _FIELDS][:_MAX_UNKNOWN],
    )
    if "include" in texts or "include[]" in texts:
        raise not_offered("include", "the engine reports no log probabilities of transcripts")
    if asked.stream and asked.timestamps != NONE:
        raise wrong_value("response_format", f"{JSON} or {TEXT}, because times are known at the end", asked.format)
    if wanted and asked.format != VERBOSE:
        raise wrong_value("response_format", f"{VERBOSE} with '{_GRANULARITIES}'", asked.format)
    return asked._replace(samples=decode_audio(file.data).tobytes())


def _text(part: files.FormPart) -> str:
    """Return a field of a form. Raises ``ApiError``."""
    check_name("form", part.name)
    try:
        text = bytes(part.data[: 4 * _LONGEST_PROMPT + 4]).decode()
    except UnicodeDecodeError:
        raise wrong_value(part.name, f"UTF-8 of at most {_LONGEST_PROMPT} characters", bytes(part.data[:32])) from None
    if len(text) > _LONGEST_PROMPT:
        raise ApiError(
            f"Invalid '{part.name}': string too long. Expected a string with maximum length {_LONGEST_PROMPT}.",
            part.name,
            "string_above_max_length",
        )
    return text


def _choice(texts: Mapping[str, str], name: str, default: str, among: Sequence[str]) -> str:
    value = texts.get(name) or default
    if value.lower() not in among:
        raise wrong_value(name, "one of " + ", ".join(f"'{each}'" for each in among), value)
    return value.lower()


def _temperature(texts: Mapping[str, str]) -> float:
    given = texts.get("temperature") or "0"
    try:
        value = float(given) if len(given) < 32 else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise wrong_value("temperature", "a number from 0 to 1", given)
    return value


def _wants_words(wanted: Sequence[str]) -> bool:
    for each in wanted:
        if each not in (SEGMENT, WORD):
            raise wrong_value(f"{_GRANULARITIES}[]", f"'{SEGMENT}' or '{WORD}'", each)
    return WORD in wanted


# The reply

_EVENTS: Final = "text/event-stream; charset=utf-8"


class TranscriptionReply(SharedReply):
    """A transcript, which is one request to the model."""

    fields = MappingProxyType(
        {
            **{name: name for name in ("language", "prompt", "temperature")},
            "audio": "file",
            "timestamps": _GRANULARITIES,
        }
    )

    def __init__(self, connection: HttpExchange, asked: TranscriptionRequest) -> None:
        super().__init__(connection)
        self._asked = asked._replace(samples=b"")
        self._seconds = asked.seconds
        self._decoder = text_model.decoder()
        self._text: list[str] = []
        self._language = asked.language
        self._segments = self._words = b""
        """JSON arrays of times and texts."""
        self._opened = False

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        found = b""
        if response.header is not None:
            for spec, data in zip(response.header.outputs, response.buffers, strict=True):
                if spec.name == TEXT_OUTPUT:
                    found = text_of(data)
                elif spec.name == "language":
                    self._language = text_of(data).decode(errors="replace") or self._language
                elif spec.name == SEGMENTS:
                    self._segments = text_of(data)
                elif spec.name == WORDS:
                    self._words = text_of(data)
        text = self._decoder.decode(found, final)
        if not self._text:
            text = text.lstrip()  # a transcript begins with a blank
        if text:
            self._text.append(text)
        if self._asked.stream:
            if text:
                self._send({"type": "transcript.text.delta", "delta": text})
            if final:
                self._closed = True
                whole = {"type": "transcript.text.done", "text": "".join(self._text), "usage": self._usage()}
                self._send(whole)
                self._connection.close_reply()
        elif final:
            self._closed = True
            self._connection.send([self._whole().encode()])

    def _send(self, event: Mapping[str, Any]) -> None:
        encoded = b"data: %b\n\n" % orjson.dumps(event)
        if self._opened:
            self._connection.send_chunk(encoded)
        else:
            self._opened = True
            self._connection.open(reply.chunked_head(200, _EVENTS), encoded)

    def _answer_error(self, error: NeriteError) -> None:
        if self._opened:
            self._connection.send_chunk(b"data: %b\n\n" % body_of(error))
            self._connection.close_reply()
        else:
            super()._answer_error(error)

    def _usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self._seconds)}

    def _whole(self) -> Reply:
        """Return the reply in the format that was asked for. Raises ``ApiError`` if the model's times are no times."""
        text = "".join(self._text)
        if self._asked.format == JSON:
            return Reply(200, orjson.dumps({"text": text, "usage": self._usage()}))
        if self._asked.format == TEXT:
            return Reply(200, f"{text}\n".encode(), "text/plain; charset=utf-8")
        segments = _times(SEGMENTS, self._segments)
        if self._asked.format == VERBOSE:
            return Reply(200, orjson.dumps(self._verbose(text, segments)))
        # A model without times has said all at once.
        cues = segments or [TimedText(0.0, self._seconds, text)]
        if self._asked.format == SRT:
            return Reply(200, "".join(srt(cues)).encode(), "text/plain; charset=utf-8")
        return Reply(200, "".join(vtt(cues)).encode(), "text/vtt; charset=utf-8")

    def _verbose(self, text: str, segments: Sequence[TimedText]) -> dict[str, Any]:
        made: dict[str, Any] = {
            "task": self._asked.task,
            "language": self._language,
            "duration": round(self._seconds, 3),
            "text": text,
            "segments": [_segment(number, each, self._asked.temperature) for number, each in enumerate(segments)],
            "usage": self._usage(),
        }
        if self._asked.words:
            words = _times(WORDS, self._words)
            made["words"] = [{"word": each.text.strip(), "start": each.start, "end": each.end} for each in words]
        return made


def _times(output: str, parts: bytes) -> list[TimedText]:
    """Return the parts of a transcript that an output has. Raises ``ApiError``."""
    try:
        found = [TimedText(**each) for each in orjson.loads(parts or b"[]")]
        return [TimedText(float(each.start), float(each.end), str(each.text)) for each in found]
    except (ValueError, TypeError):
        raise ApiError(f"The model's output '{output}' is no array of times and texts.", None, None, 500) from None


def _segment(number: int, part: TimedText, temperature: float) -> dict[str, Any]:
    """Return a segment as OpenAI describes it. What the engine does not report is 0, which filters let pass."""
    text = part.text.encode()
    return {
        "id": number,
        "seek": int(part.start * 100),
        "start": part.start,
        "end": part.end,
        "text": part.text,
        "tokens": [],
        "temperature": temperature,
        "avg_logprob": 0.0,
        "compression_ratio": round(len(text) / len(zlib.compress(text)), 3),
        "no_speech_prob": 0.0,
    }


def srt(cues: Sequence[TimedText]) -> Iterator[str]:
    """Yield subtitles in the format of SubRip."""
    for number, cue in enumerate(cues, start=1):
        times = f"{_clock(cue.start)} --> {_clock(cue.end)}".replace(".", ",")
        yield f"{number}\n{times}\n{_line(cue.text)}\n\n"


def vtt(cues: Sequence[TimedText]) -> Iterator[str]:
    """Yield subtitles in WebVTT, in which an arrow would begin a cue."""
    yield "WEBVTT\n\n"
    for cue in cues:
        yield f"{_clock(cue.start)} --> {_clock(cue.end)}\n{_line(cue.text).replace('-->', '->')}\n\n"


def _line(text: str) -> str:
    """Return the text of a cue, which an empty line would end."""
    return " ".join(text.split())


def _clock(seconds: float) -> str:
    whole, thousandths = divmod(round(max(seconds, 0) * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}.{thousandths:03}"
