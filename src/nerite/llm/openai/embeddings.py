"""``/v1/embeddings``: reads the body, and writes the vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, to_array
from nerite.llm import checkpoint
from nerite.llm.openai import text_model
from nerite.llm.openai.completion_requests import read_texts
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, UnknownField, wrong_value
from nerite.llm.openai.replies import Outputs, WholeReply
from nerite.llm.openai.sampling import not_offered
from nerite.llm.openai.text_model import (
    CallOrigin,
    ModelAddress,
    ModelPurpose,
    ModelRequest,
    Strings,
    TextModel,
    TokenIds,
)
from nerite.transports.access import SenderHeaders

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_MAX_COUNT: Final = 2048
"""Maximum number of texts per request, as with OpenAI."""
_KNOWN: Final = ("model", "input", "encoding_format", "dimensions", "user")

PURPOSE: Final = ModelPurpose(
    text_model.is_embedding,
    f"is not an embedding model: it needs an output '{text_model.EMBEDDING}' (FP32)",
    checkpoint.EMBED,
)

Vector = NDArray[np.float32]


class EmbeddingRequest(NamedTuple):
    """The parsed body of a request for embeddings."""

    model: str
    texts: Sequence[bytes | memoryview]
    """In UTF-8; token ids in JSON if ``tokens``."""
    base64: bool
    dimensions: int
    """0 means all dimensions."""
    user: str = ""
    tokens: bool = False
    """Whether the texts are token ids."""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""
        return CallOrigin(sender, self.user, lambda _: bytes(self.texts[0]), len(self.texts))

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return a request to the model for each text. Raises ``ApiError`` for token ids that it does not take."""
        model = TextModel(self.model, signature, address)
        if self.tokens and not model.takes_tokens:
            raise not_offered("input", f"model '{model.name}' takes text only, and no token ids.")
        # One header for all requests, which is validated and sent to the worker once.
        header, data = model.ask((TokenIds if self.tokens else Strings)(self.texts[:1]), {}, sender)
        before, behind = (data[:1], data[2:]) if self.tokens else ([], data[1:])
        return [ModelRequest(header, [*before, Strings([text]).data, *behind]) for text in self.texts]

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> EmbeddingReply:
        """Return the sink of these requests."""
        return EmbeddingReply(connection, self)


def read_embedding(body: Buffer) -> EmbeddingRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_KNOWN)
    model = fields.name("model")
    user = fields.name("user", "")
    texts, tokens = read_texts(fields, "input", _MAX_COUNT)
    if not texts:
        raise wrong_value("input", "at least one text", texts)
    encoded = fields.choice("encoding_format", "float", ("float", "base64")) == "base64"
    dimensions = fields.integer("dimensions", 1, 1, 2**31) if "dimensions" in fields else 0
    return EmbeddingRequest(model, texts, encoded, dimensions, user, tokens, fields.unknown)


def cut_vectors(vector: Vector, dimensions: int) -> Vector:
    """Return a vector truncated to ``dimensions`` and normalized. Raises ``ApiError`` if it has fewer."""
    if dimensions > vector.size:
        raise wrong_value("dimensions", f"no more than the {vector.size} that the model has", dimensions)
    vector = vector[:dimensions]
    length = np.linalg.norm(vector)
    return (vector / length).astype(np.float32) if length else vector


def encode_vectors(vector: Vector) -> str:
    """Return a vector in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class EmbeddingReply(WholeReply):
    """Embeddings, with one model request per text."""

    fields = MappingProxyType({"text_input": "input", "prompt_token_ids": "input", "dimensions": "dimensions"})

    def __init__(self, connection: HttpExchange, asked: EmbeddingRequest) -> None:
        super().__init__(connection)
        self._asked = asked
        self._entries: list[bytes] = [b""] * len(asked.texts)
        """JSON entry of each text, encoded when its vector arrives: encoding all at once would block the loop."""
        self._tokens: list[int] = []

    def _add(self, place: int, outputs: Outputs) -> None:
        vector = to_array(*outputs[text_model.EMBEDDING]).reshape(-1)
        if self._asked.dimensions:
            vector = cut_vectors(vector, self._asked.dimensions)
        embedding = encode_vectors(vector) if self._asked.base64 else np.ascontiguousarray(vector)
        entry = {"object": "embedding", "index": place, "embedding": embedding}
        self._entries[place] = orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
        if "num_input_tokens" in outputs:
            self._tokens.append(int(to_array(*outputs["num_input_tokens"]).sum()))

    def _check(self, place: int) -> None:
        if not self._entries[place]:
            raise ApiError("The model returned no embedding.", None, None, 500)

    def _encoded(self) -> bytes:
        head: dict[str, Any] = {"object": "list", "model": self._asked.model}
        # Clients expect the counts: they are 0 if the model does not report them.
        tokens = sum(self._tokens) if len(self._tokens) == len(self._entries) else 0
        head["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return b'%b,"data":[%b]}' % (orjson.dumps(head)[:-1], b",".join(self._entries))
