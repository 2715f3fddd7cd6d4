"""Speech by OpenVINO GenAI's pipelines: transcripts by models of the Whisper family, recordings by SpeechT5."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import openvino, translated
from nerite.llm.engine import LONGEST_TOKEN, longest_text
from nerite.llm.openvino_genai.framework import genai, tokenizer
from nerite.llm.openvino_genai.options import SpeechSynthesizerOptions, TranscriberOptions
from nerite.llm.speech import (
    NONE,
    TRANSLATE,
    WORD,
    TimedText,
    Transcript,
    TranscriptionSettings,
)

_ENGLISH: Final = "en"
_SHORTEST: Final = 400
"""Samples of a window of the Fourier transform: fewer cannot be analysed, so that silence is added."""


class OpenVinoTranscriber:
    """Transcriber with OpenVINO GenAI's pipeline."""

    def __init__(self, options: TranscriberOptions) -> None:
        """Raises ``NeriteError``."""
        self._name = options.name
        self._words = options.words
        more = {"word_timestamps": True} if options.words else {}
        try:
            self._pipeline: Any = genai().WhisperPipeline(
                str(options.directory), options.device, **options.properties, **more
            )
            config = self._pipeline.get_generation_config()
            self._tokenizer: Any = self._pipeline.get_tokenizer()
        except Exception as error:  # any error of the framework explains why the model cannot be loaded
            raise translated(error, "loading model") from error
        if options.words and not config.alignment_heads:
            raise Unsupported(
                f"model '{options.name}' has WORD_TIMESTAMPS, but its generation_config.json has no alignment_heads, "
                "which say where a model attends to words: remove the parameter"
            )
        self._status = genai().StreamingStatus
        self._languages = {name.strip("<|>"): name for name in config.lang_to_id} if config.is_multilingual else {}
        """The model's tokens for languages by their codes; empty if it knows English alone."""

    def transcribe(self, samples: Array, settings: TranscriptionSettings, heard: Callable[[str], bool]) -> Transcript:
        """Return the transcript of a recording; ``heard`` is called with text as it is found.

        If that returns False, the transcript ends there. Raises ``NeriteError`` for settings that the model lacks.
        """
        config = self._config(settings)
        if len(samples) < _SHORTEST:
            samples = np.pad(samples, (0, _SHORTEST - len(samples)))

        def stream(text: str) -> Any:
            return self._status.RUNNING if heard(text) else self._status.CANCEL

        try:
            result = self._pipeline.generate(samples.tolist(), config, stream)
        except RuntimeError as error:
            raise translated(error, "transcribing") from error
        return Transcript(
            result.texts[0],
            (result.language or "").strip("<|>") or settings.language,
            [_timed(each, each.text) for each in result.chunks or ()],
            [_timed(each, each.word) for each in result.words or ()],
        )

    def _config(self, settings: TranscriptionSettings) -> Any:
        config = self._pipeline.get_generation_config()
        config.return_timestamps = settings.timestamps != NONE
        if settings.timestamps == WORD and not self._words:
            raise Unsupported(
                f"'timestamps' is {WORD}, but model '{self._name}' was loaded without them: set the parameter "
                "WORD_TIMESTAMPS in its configuration to true"
            )
        config.word_timestamps = settings.timestamps == WORD
        if self._languages:
            config.task = settings.task
            if settings.language:
                config.language = self._language(settings.language)
        elif settings.task == TRANSLATE or settings.language not in ("", _ENGLISH):
            raise Unsupported(f"model '{self._name}' knows English alone: omit 'language' and 'task'")
        if settings.prompt:
            config.initial_prompt = self._end_of(settings.prompt, config.max_length // 2 - 1)
        if settings.temperature:
            config.do_sample = True
            config.temperature = settings.temperature
            # The framework's default seed is the same for all requests.
            config.rng_seed = random.getrandbits(63)
        return config

    def _end_of(self, prompt: str, most: int) -> str:
        """Return the end of a prompt: only half of what a model writes may be a prompt, and OpenAI cuts it, too."""
        # Each token has a byte, so more characters than bytes of the longest ones cannot be in the end.
        prompt = prompt[-most * LONGEST_TOKEN :]
        tokens = self._tokenizer.encode(prompt, add_special_tokens=False).input_ids.data[0].tolist()
        return prompt if len(tokens) <= most else str(self._tokenizer.decode(tokens[-most:]))

    def _language(self, code: str) -> str:
        token: str | None = self._languages.get(code.lower())
        if token is None:
            meant = nearest(code.lower(), list(self._languages))
            hint = f" Did you mean '{meant}'?" if meant else ""
            raise InvalidArgument(
                f"'language' is '{code}', which model '{self._name}' does not know. It takes codes such as 'en'.{hint}"
            )
        return token

    def close(self) -> None:
        """Release the model."""
        self._pipeline = None


def _timed(part: Any, text: str) -> TimedText:
    return TimedText(round(part.start_ts, 3), round(part.end_ts, 3), text)


class OpenVinoSpeechSynthesizer:
    """SpeechSynthesizer with OpenVINO GenAI's pipeline."""

    def __init__(self, options: SpeechSynthesizerOptions) -> None:
        """Raises ``NeriteError``."""
        self._name = options.name
        self._longest = options.longest
        try:
            self._tokenizer: Any = tokenizer(options.directory)
            self._pipeline: Any = genai().Text2SpeechPipeline(
                str(options.directory), options.device, **options.properties
            )
            self._voices = {name: _voice(file) for name, file in options.voices.items()}
        except Exception as error:  # any error of the framework explains why the model cannot be loaded
            raise translated(error, "loading model") from error

    def synthesize(self, text: str, voice: str) -> tuple[Array, int]:
        """Return samples from -1 to 1, and how many of them are a second. Raises ``NeriteError``.

        A model without voices has one, whatever it is called.
        """
        if not text.strip():
            raise InvalidArgument("'text_input' is empty")
        if self._longest and len(text) > longest_text(self._longest):
            raise InvalidArgument(
                f"'text_input' has {len(text)} characters, but the model takes {self._longest} tokens"
            )
        length = self._tokenizer.encode(text).input_ids.data.size
        if self._longest and length > self._longest:
            raise InvalidArgument(
                f"'text_input' has {length} tokens, but the model takes {self._longest}: send it in parts"
            )
        if voice and self._voices and voice not in self._voices:
            raise InvalidArgument(
                f"'voice' is '{voice}', which model '{self._name}' does not have. There are: {', '.join(self._voices)}."
            )
        try:
            result = self._pipeline.generate(text, self._voices.get(voice))
        except RuntimeError as error:
            raise translated(error, "synthesizing speech") from error
        # Copied, because the pipeline uses the memory again.
        return np.array(result.speeches[0].data, np.float32).reshape(-1), int(result.output_sample_rate)

    def close(self) -> None:
        """Release the model."""
        self._pipeline = self._tokenizer = None


def _voice(file: Path) -> Any:
    """Return the embedding of a voice: 32-bit numbers, as in a file of numpy's ``tofile``."""
    return openvino().Tensor(np.fromfile(file, np.float32).reshape(1, -1))
