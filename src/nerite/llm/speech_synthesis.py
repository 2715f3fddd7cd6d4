"""Instances of models that synthesize speech. A request is one text, and its response all samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array
from nerite.llm.embedding import decoded
from nerite.llm.streaming import ResponseHeaders

VOICE: Final = "voice"
SAMPLE_RATE: Final = "sample_rate"


class SpeechSynthesizer(Protocol):
    """Synthesizes speech."""

    def synthesize(self, text: str, voice: str) -> tuple[Array, int]:
        """Return samples from -1 to 1, and how many of them are a second. Raises ``NeriteError``.

        ``voice`` is the name of a voice; empty for the model's usual one.
        """

    def close(self) -> None:
        """Release all resources."""


class SpeechInstance:
    """Instance that answers requests with a synthesizer, one after the other."""

    checks_readiness = False

    def __init__(self, model: ModelContext, synthesizer: SpeechSynthesizer) -> None:
        self._synthesizer = synthesizer
        self._headers = ResponseHeaders(
            model.name, str(model.version), [output["name"] for output in model.config["output"]]
        )

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Synthesize the text of each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferenceRequest) -> InferenceResponse:
        pairs = zip(request.header.inputs, request.data, strict=True)
        given = {spec.name: decoded(spec.name, to_array(spec, data).reshape(-1)[0]) for spec, data in pairs}
        try:
            samples, rate = self._synthesizer.synthesize(given["text_input"], given.get(VOICE, ""))
        except NeriteError as error:
            return InferenceResponse.failed(error)
        outputs = {"audio": np.ascontiguousarray(samples, np.float32), SAMPLE_RATE: np.array([rate], np.uint32)}
        return self._headers.response(request, outputs)

    def is_ready(self) -> bool:
        """Return True: the model has no state that could be lost."""
        return True

    def close(self) -> None:
        """Release the model."""
        self._synthesizer.close()
