"""Endpoints under ``/v1`` beside those that generate text: classes, transcripts, recordings, and LoRA adapters."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from nerite.llm.openai import large_bodies
from nerite.llm.openai.classification import Classification, ClassifyRequest, classify_requests
from nerite.llm.openai.images import ImageExchange, ImageRequest, image_requests
from nerite.llm.openai.served_models import (
    CLASSIFYING,
    IMAGES,
    SPEECH,
    TRANSCRIBING,
    CallOrigin,
    ModelControl,
    TextModels,
)
from nerite.llm.openai.speech import Speech, SpeechRequest, speech_request
from nerite.llm.openai.transcriptions import Transcription, TranscriptionRequest, transcription_request
from nerite.llm.transcription import TRANSCRIBE, TRANSLATE

if TYPE_CHECKING:
    from nerite.transports.access import SenderHeaders
    from nerite.transports.http.handler import HttpExchange

EndpointHandler: TypeAlias = Callable[..., None]
_OPENING: Final = 64 * 1024
"""Bytes of a recording that stand for the beginning of a prompt."""


class FurtherEndpoints:
    """Handlers by the names of their endpoints (``http/routes.py``)."""

    def __init__(
        self,
        models: TextModels,
        control: ModelControl | None,
        read: Callable[..., None],
        begin: Callable[..., None],
        pass_over: Callable[..., None],
    ) -> None:
        """``read`` reads a body, ``begin`` submits requests, ``pass_over`` logs or refuses unknown fields.

        A front has no ``control``, and relays requests for adapters.
        """
        self._control = control
        self._models = models
        self._read = read
        self._begin = begin
        self._pass_over = pass_over
        self.handlers: Mapping[str, EndpointHandler] = {
            "load_adapter": partial(self._change_adapter, load=True),
            "unload_adapter": partial(self._change_adapter, load=False),
            "classify": self._classification,
            "classify_texts": self._classification,
            "images": self._images,
            "speech": self._speech,
            "transcriptions": partial(self._transcription, TRANSCRIBE),
            "translations": partial(self._transcription, TRANSLATE),
        }

    def _change_adapter(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, *, load: bool) -> None:
        """Load or unload a LoRA adapter."""
        assert self._control is not None
        self._control.change_adapter(connection, body, load=load)

    def _classification(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Return the class of each text."""
        self._read(connection, body, large_bodies.CLASSIFICATION, partial(self._classify, connection, sender))

    def _classify(self, connection: HttpExchange, sender: SenderHeaders, asked: ClassifyRequest) -> None:
        self._pass_over(asked.unknown)
        call = CallOrigin(sender, asked.user, lambda _: bytes(asked.texts[0]), len(asked.texts))
        running, address = self._models.find(asked.model, call, CLASSIFYING)
        name = f"classify-{secrets.token_hex(16)}"
        work = Classification(connection, name, asked, running.signature)
        self._begin(work, name, classify_requests(asked, running.signature, sender, address), sender)

    def _images(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Generate images."""
        self._read(connection, body, large_bodies.IMAGES, partial(self._generate_images, connection, sender))

    def _generate_images(self, connection: HttpExchange, sender: SenderHeaders, asked: ImageRequest) -> None:
        self._pass_over(asked.unknown)
        call = CallOrigin(sender, asked.user, lambda _: asked.prompt, asked.n)
        running, address = self._models.find(asked.model, call, IMAGES)
        requests = image_requests(asked, running.signature, sender, address)
        self._begin(ImageExchange(connection, asked), f"img-{secrets.token_hex(16)}", requests, sender)

    def _speech(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Synthesize speech."""
        self._read(connection, body, large_bodies.SPEECH, partial(self._synthesize, connection, sender))

    def _synthesize(self, connection: HttpExchange, sender: SenderHeaders, asked: SpeechRequest) -> None:
        self._pass_over(asked.unknown)
        call = CallOrigin(sender, asked.user, lambda _: asked.text)
        running, address = self._models.find(asked.model, call, SPEECH)
        request = speech_request(asked, running.signature, sender, address)
        self._begin(Speech(connection, asked), f"speech-{secrets.token_hex(16)}", [request], sender)

    def _transcription(self, task: str, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Transcribe or translate a recording."""
        content_type = connection.head.headers.get("content-type", "").encode("latin-1", "replace")
        then = partial(self._transcribe, task, connection, sender)
        self._read(connection, body, large_bodies.TRANSCRIPTION, then, more=[content_type], apart=True)

    def _transcribe(
        self, task: str, connection: HttpExchange, sender: SenderHeaders, asked: TranscriptionRequest
    ) -> None:
        self._pass_over(asked.unknown)
        call = CallOrigin(sender, asked.user, lambda _: bytes(asked.samples[:_OPENING]))
        running, address = self._models.find(asked.model, call, TRANSCRIBING)
        request = transcription_request(asked, task, running.signature, sender, address)
        work = Transcription(connection, asked, task)
        self._begin(work, f"transcription-{secrets.token_hex(16)}", [request], sender)
