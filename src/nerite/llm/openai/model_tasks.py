"""What models are asked for besides text: vectors, rankings, classes, images and audio, each by one request or several.

An endpoint of this kind reads a body, asks a model for which the body has everything, and gathers the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from nerite.core.signature import Signature
from nerite.llm.openai import classification, embeddings, images, reranking, speech, transcriptions
from nerite.llm.openai.fields import UnknownField
from nerite.llm.openai.replies import SharedReply
from nerite.llm.openai.text_model import CallOrigin, ModelAddress, ModelPurpose, ModelRequest
from nerite.transports.access import SenderHeaders

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange


class TaskRequest(Protocol):
    """The parsed body of a request."""

    @property
    def model(self) -> str:
        """Name of the model, an alias or a route."""

    @property
    def unknown(self) -> Sequence[UnknownField]:
        """Fields of the body that were passed over."""

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return the requests to the model. Raises ``ApiError`` for settings that it has no input for."""

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> SharedReply:
        """Return the sink of these requests. ``name`` is the id of the reply."""


class ModelTask(NamedTuple):
    """What an endpoint asks of a model."""

    purpose: ModelPurpose
    prefix: str
    """Begins the ids of requests."""
    read: Callable[..., TaskRequest]
    """Reads a body. Raises ``ApiError``."""
    kind: type
    """The class of requests: a named tuple whose fields are JSON, buffers, or lists of buffers."""
    takes_file: bool = False
    """Whether the body is a form with a file; its content type is read, too."""


_CLASSIFY: Final = ModelTask(
    classification.PURPOSE, "classify", classification.read_classification, classification.ClassifyRequest
)
TASKS: Final[Mapping[str, ModelTask]] = {
    "embeddings": ModelTask(embeddings.PURPOSE, "embd", embeddings.read_embedding, embeddings.EmbeddingRequest),
    "rerank": ModelTask(reranking.PURPOSE, "rerank", reranking.read_reranking, reranking.RerankRequest),
    "score": ModelTask(reranking.PURPOSE, "score", reranking.read_scoring, reranking.ScoreRequest),
    "classify": _CLASSIFY,
    "classify_texts": _CLASSIFY,
    "images": ModelTask(images.PURPOSE, "img", images.read_images, images.ImageRequest),
    "speech": ModelTask(speech.PURPOSE, "speech", speech.read_speech, speech.SpeechRequest),
    "transcriptions": ModelTask(
        *(transcriptions.PURPOSE, "transcription", transcriptions.read_transcription),
        *(transcriptions.TranscriptionRequest, True),
    ),
    "translations": ModelTask(
        *(transcriptions.PURPOSE, "transcription", transcriptions.read_translation),
        *(transcriptions.TranscriptionRequest, True),
    ),
}
"""By the names of their endpoints (``http/routes.py``)."""
