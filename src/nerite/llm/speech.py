"""Instances of models that write down what is said, with the metrics of their work, and of models that speak.

A request is one recording, whose text is sent as it is found if the caller streams; or one text to be spoken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from nerite.backends.interface import ModelContext
from nerite.core import tensor
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array
from nerite.llm.pipeline_instance import Pipeline, PipelineInstance, check_wanted, decoded
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


class Transcriber(Pipeline, Protocol):
    """Writes down what is said."""

    def transcribe(self, samples: Array, settings: TranscriptionSettings, heard: Callable[[str], bool]) -> Transcript:
        """Return the transcript of a recording; ``heard`` is called with text as it is found.

        If that returns False, the transcript ends there. Raises ``NeriteError`` for settings that the model lacks.
        """


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


class TranscriptionInstance(PipelineInstance[Transcriber]):
    """Instance that answers requests with a transcriber."""

    def __init__(
        self, model: ModelContext, transcriber: Transcriber, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` returns seconds."""
        super().__init__(model, transcriber)
        self._clock = clock
        self._decoupled = bool(model.config.get("model_transaction_policy", {}).get("decoupled"))
        self._metrics = TranscriptionMetrics(model.name, str(model.version))

    def _answer(self, request: InferenceRequest, given: Mapping[str, Array]) -> InferenceResponse | None:
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

        transcript = self._pipeline.transcribe(samples, settings, heard)
        check_wanted(request)
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


# Synthesis

VOICE: Final = "voice"
SAMPLE_RATE: Final = "sample_rate"


class SpeechSynthesizer(Pipeline, Protocol):
    """Synthesizes speech."""

    def synthesize(self, text: str, voice: str) -> tuple[Array, int]:
        """Return samples from -1 to 1, and how many of them are a second. Raises ``NeriteError``.

        ``voice`` is the name of a voice; empty for the model's usual one.
        """


class SpeechInstance(PipelineInstance[SpeechSynthesizer]):
    """Instance that answers requests with a synthesizer."""

    def _outputs(self, request: InferenceRequest, given: Mapping[str, Array]) -> Mapping[str, Array]:
        texts = {name: decoded(name, elements[0]) for name, elements in given.items()}
        samples, rate = self._pipeline.synthesize(texts["text_input"], texts.get(VOICE, ""))
        return {"audio": np.ascontiguousarray(samples, np.float32), SAMPLE_RATE: np.array([rate], np.uint32)}
