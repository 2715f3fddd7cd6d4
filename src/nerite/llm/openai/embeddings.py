"""The endpoints for embeddings and for reranking: parse the body, and turn the model's outputs into the reply.

Reranking has the request and response formats of Cohere, Jina and vLLM.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core import tensor as dtypes
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes, to_array
from nerite.llm.embedding import MAX_DOCUMENTS
from nerite.llm.openai import text_model
from nerite.llm.openai.exchange import JointWork
from nerite.llm.openai.fields import ApiError, Fields, UnknownField, check_count, missing, wrong_type, wrong_value
from nerite.llm.openai.requests import read_texts
from nerite.llm.openai.text_model import ModelAddress, ModelRequest
from nerite.transports.access import SenderHeaders
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_MAX_COUNT: Final = 2048
"""Maximum number of texts per request, as with OpenAI."""
_KNOWN: Final = ("model", "input", "encoding_format", "dimensions", "user")

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


class Embedding(JointWork):
    """An exchange for embeddings, with one model request per text."""

    fields = MappingProxyType({"text_input": "input", "prompt_token_ids": "input", "dimensions": "dimensions"})

    def __init__(self, connection: HttpExchange, asked: EmbeddingRequest) -> None:
        super().__init__(connection)
        self._asked = asked
        self._entries: list[bytes] = [b""] * len(asked.texts)
        """JSON entry of each text, encoded when its vector arrives: encoding all at once would block the loop."""
        self._tokens: list[int] = []
        self._left = len(asked.texts)

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        if response.header is not None:
            outputs = zip(response.header.outputs, response.data, strict=True)
            found = {spec.name: to_array(spec, data) for spec, data in outputs}
            vector = found[text_model.EMBEDDING].reshape(-1)
            if self._asked.dimensions:
                vector = cut_vectors(vector, self._asked.dimensions)
            embedding = encode_vectors(vector) if self._asked.base64 else np.ascontiguousarray(vector)
            entry = {"object": "embedding", "index": place, "embedding": embedding}
            self._entries[place] = orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
            if "num_input_tokens" in found:
                self._tokens.append(int(found["num_input_tokens"].sum()))
        if not final:
            return
        if not self._entries[place]:
            raise ApiError("The model returned no embedding.", None, None, 500)
        self._left -= 1
        if not self._left:
            self._closed = True
            self._connection.send([Reply(200, self._encoded_reply()).encode()])

    def _encoded_reply(self) -> bytes:
        head: dict[str, Any] = {"object": "list", "model": self._asked.model}
        # Clients expect the counts: they are 0 if the model does not report them.
        tokens = sum(self._tokens) if len(self._tokens) == len(self._entries) else 0
        head["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return b'%b,"data":[%b]}' % (orjson.dumps(head)[:-1], b",".join(self._entries))


# Reranking

QUERY: Final = "query"
DOCUMENTS: Final = "documents"
SCORES: Final = "scores"
NEEDS: Final = f"it needs inputs '{QUERY}' and '{DOCUMENTS}' (BYTES) and an output '{SCORES}' (FP32)"
_RERANK_KNOWN: Final = ("model", "query", "documents", "top_n", "return_documents", "user")


def is_reranker(signature: Signature) -> bool:
    """Return whether a model has the inputs and outputs of a reranker."""
    inputs, scores = signature.inputs, signature.outputs.get(SCORES)
    return (
        all(name in inputs and inputs[name].datatype is dtypes.BYTES for name in (QUERY, DOCUMENTS))
        and signature.required <= {QUERY, DOCUMENTS}
        and scores is not None
        and scores.datatype is dtypes.FP32
    )


class RerankRequest(NamedTuple):
    """The parsed body of a request to rerank."""

    model: str
    query: bytes | memoryview
    """In UTF-8, like the documents."""
    documents: Sequence[bytes | memoryview]
    top_n: int
    return_documents: bool
    user: str = ""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""


def read_reranking(body: Buffer) -> RerankRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_RERANK_KNOWN)
    model, query = fields.name("model"), fields.text("query").encode()
    user = fields.name("user", "")
    if "documents" not in fields:
        raise missing("documents")
    given = fields.array("documents", MAX_DOCUMENTS)
    if not given:
        raise wrong_value("documents", "at least one text", given)
    documents = [_document(fields, place, each).encode() for place, each in enumerate(given)]
    top_n = fields.integer("top_n", len(documents), 1, 2**31)
    returned = fields.flag("return_documents", default=True)
    return RerankRequest(model, query, documents, top_n, returned, user, fields.unknown)


def _document(body: Fields, place: int, given: Any) -> str:
    """Return the text of a document, which is a string or an object with 'text'."""
    where = f"documents[{place}]"
    if isinstance(given, str):
        return given
    if not isinstance(given, dict):
        raise wrong_type(where, "a string or an object with 'text'", given)
    fields = body.within(given, where)
    fields.pass_over_unknown(("text",))
    return fields.text("text")


def rerank_requests(
    asked: RerankRequest, signature: Signature, sender: SenderHeaders, address: ModelAddress
) -> ModelRequest:
    """Return the request to the model."""
    rows = (1,) if signature.max_batch_size else ()
    inputs = {QUERY: [asked.query], DOCUMENTS: asked.documents}
    specs = [TensorSpec(name, dtypes.BYTES, (*rows, len(texts))) for name, texts in inputs.items()]
    data: list[Buffer] = [join_bytes(texts) for texts in inputs.values()]
    parameters = dict(sender.forwarded)
    return ModelRequest(address.header(specs, parameters, sender), data)


class Reranking(JointWork):
    """An exchange for reranking."""

    fields = MappingProxyType({"query": "query", "documents": "documents"})

    def __init__(self, connection: HttpExchange, name: str, asked: RerankRequest) -> None:
        super().__init__(connection)
        self._name = name
        self._asked = asked
        self._scores: NDArray[np.float32] | None = None
        self._tokens: int | None = None

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        if response.header is not None:
            outputs = zip(response.header.outputs, response.data, strict=True)
            found = {spec.name: to_array(spec, data) for spec, data in outputs}
            # Copied, because the received memory is released.
            self._scores = found[SCORES].reshape(-1).copy()
            if "num_input_tokens" in found:
                self._tokens = int(found["num_input_tokens"].sum())
        if not final:
            return
        documents = len(self._asked.documents)
        if self._scores is None or len(self._scores) != documents:
            count = 0 if self._scores is None else len(self._scores)
            raise ApiError(f"The model returned {count} scores for {documents} documents.", None, None, 500)
        self._closed = True
        self._connection.send([Reply(200, self._encoded_reply(self._scores)).encode()])

    def _encoded_reply(self, scores: NDArray[np.float32]) -> bytes:
        best = np.argsort(-scores, kind="stable")[: self._asked.top_n].tolist()
        results: list[dict[str, Any]] = []
        for index in best:
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if self._asked.return_documents:
                result["document"] = {"text": bytes(self._asked.documents[index]).decode()}
            results.append(result)
        answer: dict[str, Any] = {"id": self._name, "model": self._asked.model, "results": results}
        if self._tokens is not None:
            answer["usage"] = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return orjson.dumps(answer)


# Scoring: the score of each pair of texts, in vLLM's format

_SCORE_KNOWN: Final = ("model", "text_1", "text_2", "queries", "documents", "user")


class ScoreRequest(NamedTuple):
    """The parsed body of a request to score."""

    model: str
    firsts: Sequence[bytes | memoryview]
    """Queries in UTF-8: one for all of ``seconds``, or one for each."""
    seconds: Sequence[bytes | memoryview]
    user: str = ""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""

    def rankings(self) -> list[RerankRequest]:
        """Return the requests to the model: one if all pairs have the same query."""
        if len(self.firsts) == 1:
            return [RerankRequest(self.model, self.firsts[0], self.seconds, len(self.seconds), False)]
        pairs = zip(self.firsts, self.seconds, strict=True)
        return [RerankRequest(self.model, first, [second], 1, False) for first, second in pairs]


def read_scoring(body: Buffer) -> ScoreRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_SCORE_KNOWN)
    names = ("queries", "documents") if "queries" in fields else ("text_1", "text_2")
    firsts, seconds = (_texts(fields, name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise wrong_value(names[0], f"one text, or as many as the {len(seconds)} of '{names[1]}'", len(firsts))
    return ScoreRequest(fields.name("model"), firsts, seconds, fields.name("user", ""), fields.unknown)


def _texts(fields: Fields, name: str) -> list[bytes]:
    if name not in fields:
        raise missing(name)
    given: Any = fields[name]
    texts = given if isinstance(given, list) else [given]
    check_count(name, texts, MAX_DOCUMENTS)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise wrong_type(name, "a string or an array of strings", given)
    return [text.encode() for text in texts]


class Scoring(JointWork):
    """An exchange for scores, with one model request per query."""

    fields = MappingProxyType({"query": "text_1", "documents": "text_2"})

    def __init__(self, connection: HttpExchange, name: str, model: str, rankings: Sequence[RerankRequest]) -> None:
        super().__init__(connection)
        self._head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
        self._rankings = rankings
        self._scores: list[list[float]] = [[] for _ in rankings]
        self._tokens = 0
        self._left = len(rankings)

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        if response.header is not None:
            outputs = zip(response.header.outputs, response.data, strict=True)
            found = {spec.name: to_array(spec, data) for spec, data in outputs}
            self._scores[place] = found[SCORES].reshape(-1).tolist()
            if "num_input_tokens" in found:
                self._tokens += int(found["num_input_tokens"].sum())
        if not final:
            return
        documents = len(self._rankings[place].documents)
        if len(self._scores[place]) != documents:
            count = len(self._scores[place])
            raise ApiError(f"The model returned {count} scores for {documents} texts.", None, None, 500)
        self._left -= 1
        if self._left:
            return
        self._closed = True
        scores = [score for each in self._scores for score in each]
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        self._connection.send([Reply(200, orjson.dumps({**self._head, "data": data, "usage": usage})).encode()])
