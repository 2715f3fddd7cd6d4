"""Embeddings: texts to vectors, as numbers or in base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, to_array
from nerite.transports.http.reply import Reply
from nerite.transports.openai import text_model
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.fields import Fields, check_count, missing, wrong_type, wrong_value
from nerite.transports.openai.joint_work import JointWork
from nerite.transports.openai.sampling import not_offered

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_MOST: Final = 2048
"""Texts at once, as with OpenAI."""
_KNOWN: Final = ("model", "input", "encoding_format", "dimensions", "user")

Vector = NDArray[np.float32]


class EmbeddingRequest(NamedTuple):
    """A body, understood."""

    model: str
    texts: Sequence[bytes | memoryview]
    """As UTF-8."""
    base64: bool
    dimensions: int
    """0: as many as there are."""


def read(body: Buffer) -> EmbeddingRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_KNOWN)
    model = fields.name("model")
    fields.name("user", "")
    if "input" not in fields:
        raise missing("input")
    given: Any = fields["input"]
    texts = given if isinstance(given, list) else [given]
    check_count("input", texts, _MOST)
    if any(isinstance(text, (int, list)) for text in texts):
        raise not_offered("input", "what is embedded is a string, or an array of strings; tokens are the model's.")
    if not all(isinstance(text, str) for text in texts):
        raise wrong_type("input", "a string or an array of strings", given)
    if not texts:
        raise wrong_value("input", "at least one text", texts)
    encoded = fields.choice("encoding_format", "float", ("float", "base64")) == "base64"
    dimensions = fields.integer("dimensions", 1, 1, 2**31) if "dimensions" in fields else 0
    return EmbeddingRequest(model, [text.encode() for text in texts], encoded, dimensions)


def cut(vector: Vector, dimensions: int) -> Vector:
    """Return the first of the numbers, at length 1 again. Raises ``ApiError`` if there are not as many."""
    if dimensions > vector.size:
        raise wrong_value("dimensions", f"no more than the {vector.size} that the model has", dimensions)
    vector = vector[:dimensions]
    length = np.linalg.norm(vector)
    return (vector / length).astype(np.float32) if length else vector


def encode(vector: Vector) -> str:
    """Return a vector in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class Embedding(JointWork):
    """The vectors of some texts on their way, each text a request."""

    fields = MappingProxyType({"text_input": "input", "dimensions": "dimensions"})

    def __init__(self, connection: HttpExchange, asked: EmbeddingRequest) -> None:
        super().__init__(connection)
        self._asked = asked
        self._entries: list[bytes] = [b""] * len(asked.texts)
        """What is told of each text. Written as its vector comes: all at once would hold others up."""
        self._tokens: list[int] = []
        self._left = len(asked.texts)

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        if response.header is not None:
            outputs = zip(response.header.outputs, response.data, strict=True)
            found = {spec.name: to_array(spec, data) for spec, data in outputs}
            vector = found[text_model.EMBEDDING].reshape(-1)
            if self._asked.dimensions:
                vector = cut(vector, self._asked.dimensions)
            embedding = encode(vector) if self._asked.base64 else np.ascontiguousarray(vector)
            entry = {"object": "embedding", "index": place, "embedding": embedding}
            self._entries[place] = orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
            if "num_input_tokens" in found:
                self._tokens.append(int(found["num_input_tokens"].sum()))
        if not final:
            return
        if not self._entries[place]:
            raise ApiError("The model gave no embedding.", None, None, 500)
        self._left -= 1
        if not self._left:
            self._closed = True
            self._connection.send([Reply(200, self._written()).encode()])

    def _written(self) -> bytes:
        told: dict[str, Any] = {"object": "list", "model": self._asked.model}
        if len(self._tokens) == len(self._entries):
            tokens = sum(self._tokens)
            told["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return b'%b,"data":[%b]}' % (orjson.dumps(told)[:-1], b",".join(self._entries))
