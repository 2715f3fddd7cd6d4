"""Instances of models that write down what is said, and the metrics of their work.

A request is one recording. Its text is sent as it is found if the caller streams.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core import tensor
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array
from nerite.llm.embedding import decoded
from nerite.llm.streaming import CANCELLED, ResponseHeaders
from triton_python_backend_utils.metrics import MetricFamily

RATE: Final = 16_000
"""Samples per second that models take."""
AUDIO: Final = "audio"
SEGMENTS: Final = "segments"
WORDS: Final = "words"
NONE, SEGMENT, WORD = "none", "segment", "word"
TRANSCRIBE, TRANSLATE = "transcribe", "translate"
MAX_SAMPLES: Final = 3600 * RATE
"""Maximum length of a recording: nothing else runs meanwhile."""


class TranscriptionSettings(NamedTuple):
    """What a request says about the transcript."""

    language: str = ""
    """Code of the language, such as ``en``; empty: the model finds out."""
    task: str = TRANSCRIBE
    prompt: str = ""
    """Text before the recording, whose style and spellings the model continues."""
    temperature: float = 0.0
    timestamps: str = NONE


class TimedText(NamedTuple):
    """A part of a transcript, and the seconds at which it is said."""

    start: float
    end: float
    text: str


class Transcript(NamedTuple):
    """What is said in a recording."""

    text: str
    language: str = ""
    """Code of the language; empty if the model does not say."""
    segments: Sequence[TimedText] = ()
    words: Sequence[TimedText] = ()


class Transcriber(Protocol):
    """Writes down what is said."""

    def transcribe(self, samples: Array, settings: TranscriptionSettings, heard: Callable[[str], bool]) -> Transcript:
        """Return the transcript of a recording; ``heard`` is called with text as it is found.

        If that returns False, the transcript ends there. Raises ``NeriteError`` for settings that the model lacks.
        """

    def close(self) -> None:
        """Release all resources."""


class TranscriptionMetrics:
    """Metrics of the transcripts of a model: exported as long as the object exists."""

    _SECONDS: Final = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0]
    _FACTORS: Final = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0]

    def __init__(self, model: str, version: str) -> None:
        labels = {"model": model, "version": version}
        self._families = (
            MetricFamily(
                "nerite_transcription_audio_seconds_total",
                "Seconds of recordings that were transcribed",
                MetricFamily.COUNTER,
            ),
            MetricFamily(
                "nerite_transcription_first_text_seconds",
                "Time from the start of a transcription to its first text",
                MetricFamily.HISTOGRAM,
            ),
            MetricFamily(
                "nerite_transcription_real_time_factor",
                "Time that a transcription took, divided by the length of the recording",
                MetricFamily.HISTOGRAM,
            ),
        )
        audio, first, factor = self._families
        self._audio = audio.Metric(labels)
        self._first = first.Metric(labels, self._SECONDS)
        self._factor = factor.Metric(labels, self._FACTORS)

    def first_text(self, seconds: float) -> None:
        """Note the time to the first text of a transcript."""
        self._first.observe(seconds)

    def done(self, audio: float, seconds: float) -> None:
        """Note the seconds of a recording and of its transcription."""
        self._audio.increment(audio)
        self._factor.observe(seconds / audio)


class TranscriptionInstance:
    """Instance that answers requests with a transcriber, one after the other."""

    checks_readiness = False

    def __init__(
        self, model: ModelContext, transcriber: Transcriber, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` returns seconds."""
        self._transcriber = transcriber
        self._clock = clock
        self._decoupled = bool(model.config.get("model_transaction_policy", {}).get("decoupled"))
        version = str(model.version)
        self._headers = ResponseHeaders(model.name, version, [output["name"] for output in model.config["output"]])
        self._metrics = TranscriptionMetrics(model.name, version)

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        """Transcribe the recording of each request; invalid requests get an error."""
        responses: list[InferenceResponse | None] = []
        for request in requests:
            try:
                responses.append(self._answer(request))
            except NeriteError as error:
                responses.append(InferenceResponse.failed(error))
        return responses

    def _answer(self, request: InferenceRequest) -> InferenceResponse | None:
        """Return the response; None if it was sent because the caller streams."""
        pairs = zip(request.header.inputs, request.data, strict=True)
        given = {spec.name: to_array(spec, data).reshape(-1) for spec, data in pairs}
        samples, settings = given[AUDIO], read_settings(given)
        check_samples(samples)
        streams = bool(given.get("stream", [False])[0])
        if streams and not self._decoupled:
            raise InvalidArgument(
                "the model sends one response per request (model_transaction_policy { decoupled: false }): omit "
                "'stream'"
            )
        began = self._clock()
        found = sent = False

        def heard(text: str) -> bool:
            nonlocal found, sent
            if text and not found:
                found = True
                self._metrics.first_text(self._clock() - began)
            if text and streams and not request.is_cancelled():
                sent = True
                request.respond(self._response(request, Transcript(text), ended=False), False)
            return not request.is_cancelled()

        transcript = self._transcriber.transcribe(samples, settings, heard)
        if request.is_cancelled():
            raise Cancelled(CANCELLED)
        if not found:
            self._metrics.first_text(self._clock() - began)
        self._metrics.done(len(samples) / RATE, self._clock() - began)
        response = self._response(request, transcript._replace(text="") if sent else transcript, ended=True)
        if not streams:
            return response
        request.respond(response)
        return None

    def _response(self, request: InferenceRequest, transcript: Transcript, *, ended: bool) -> InferenceResponse:
        texts = {"text_output": transcript.text}
        if ended:
            texts["language"] = transcript.language
            texts[SEGMENTS] = as_json(transcript.segments)
            texts[WORDS] = as_json(transcript.words)
        outputs = {name: np.array([text.encode()], tensor.BYTES.numpy) for name, text in texts.items()}
        return self._headers.response(request, outputs)

    def is_ready(self) -> bool:
        """Return True: the model has no state that could be lost."""
        return True

    def close(self) -> None:
        """Release the model."""
        self._transcriber.close()


def read_settings(given: Mapping[str, Array]) -> TranscriptionSettings:
    """Return the settings in a request's inputs. Raises ``InvalidArgument``."""

    def text(name: str, default: str = "") -> str:
        return decoded(name, given[name][0]) or default if name in given else default

    settings = TranscriptionSettings(
        text("language"), text("task", TRANSCRIBE), text("prompt"), timestamps=text("timestamps", NONE)
    )
    if settings.task not in (TRANSCRIBE, TRANSLATE):
        raise InvalidArgument(f"'task' is '{settings.task}'; it must be {TRANSCRIBE} or {TRANSLATE}")
    if settings.timestamps not in (NONE, SEGMENT, WORD):
        raise InvalidArgument(f"'timestamps' is '{settings.timestamps}'; it must be {NONE}, {SEGMENT} or {WORD}")
    temperature = float(given["temperature"][0]) if "temperature" in given else 0.0
    if not 0 <= temperature <= 2:
        raise InvalidArgument(f"'temperature' is {temperature}; it must be from 0 to 2")
    return settings._replace(temperature=temperature)


def check_samples(samples: Array) -> None:
    """Raise ``InvalidArgument`` for a recording that is empty, too long or no recording."""
    if not len(samples):
        raise InvalidArgument(f"'{AUDIO}' is empty")
    if len(samples) > MAX_SAMPLES:
        raise InvalidArgument(f"'{AUDIO}' has {len(samples)} samples; the maximum is {MAX_SAMPLES}: send it in parts")
    if not np.isfinite(samples).all():
        raise InvalidArgument(f"'{AUDIO}' has values that are not numbers")


def as_json(parts: Sequence[TimedText]) -> str:
    """Return parts of a transcript as a JSON array of objects."""
    return json.dumps([part._asdict() for part in parts])
