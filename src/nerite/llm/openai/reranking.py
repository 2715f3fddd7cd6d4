"""``/v1/rerank`` as with Cohere, Jina and vLLM, and ``/v1/score`` as with vLLM: how well documents answer queries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core import tensor as dtypes
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes, to_array
from nerite.llm import checkpoint
from nerite.llm.embedding import MAX_DOCUMENTS
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, UnknownField, check_count, missing, wrong_type, wrong_value
from nerite.llm.openai.replies import Outputs, WholeReply
from nerite.llm.openai.text_model import CallOrigin, ModelAddress, ModelPurpose, ModelRequest, has_type
from nerite.transports.access import SenderHeaders

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

QUERY: Final = "query"
DOCUMENTS: Final = "documents"
SCORES: Final = "scores"
_RERANK_KNOWN: Final = ("model", "query", "documents", "top_n", "return_documents", "user")


def is_reranker(signature: Signature) -> bool:
    """Return whether a model has the inputs and outputs of a reranker."""
    return (
        all(has_type(signature.inputs.get(name), dtypes.BYTES) for name in (QUERY, DOCUMENTS))
        and signature.required <= {QUERY, DOCUMENTS}
        and has_type(signature.outputs.get(SCORES), dtypes.FP32)
    )


PURPOSE: Final = ModelPurpose(
    is_reranker,
    f"is not a reranking model: it needs inputs '{QUERY}' and '{DOCUMENTS}' (BYTES) and an output '{SCORES}' (FP32)",
    checkpoint.RERANK,
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

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""
        return CallOrigin(sender, self.user, lambda _: bytes(self.query))

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return the request to the model."""
        rows = (1,) if signature.max_batch_size else ()
        inputs = {QUERY: [self.query], DOCUMENTS: self.documents}
        specs = [TensorSpec(name, dtypes.BYTES, (*rows, len(texts))) for name, texts in inputs.items()]
        data: list[Buffer] = [join_bytes(texts) for texts in inputs.values()]
        parameters = dict(sender.forwarded)
        return [ModelRequest(address.header(specs, parameters, sender), data)]

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> RerankingReply:
        """Return the sink of the request."""
        return RerankingReply(connection, name, self)


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


class RerankingReply(WholeReply):
    """A ranking, which is one request to the model."""

    fields = MappingProxyType({"query": "query", "documents": "documents"})

    def __init__(self, connection: HttpExchange, name: str, asked: RerankRequest) -> None:
        super().__init__(connection)
        self._name = name
        self._asked = asked
        self._scores: NDArray[np.float32] | None = None
        self._tokens: int | None = None

    def _add(self, place: int, outputs: Outputs) -> None:
        # Copied, because the received memory is released.
        self._scores = to_array(*outputs[SCORES]).reshape(-1).copy()
        if "num_input_tokens" in outputs:
            self._tokens = int(to_array(*outputs["num_input_tokens"]).sum())

    def _check(self, place: int) -> None:
        _check_scores(0 if self._scores is None else len(self._scores), self._asked.documents, "documents")

    def _encoded(self) -> bytes:
        scores = self._scores
        assert scores is not None  # checked
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

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""
        return CallOrigin(sender, self.user, lambda _: bytes(self.firsts[0]), len(self.firsts))

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return a request to the model for each query."""
        return [request for each in self.rankings() for request in each.model_requests(signature, sender, address)]

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> ScoreReply:
        """Return the sink of these requests."""
        return ScoreReply(connection, name, self.model, self.rankings())

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


class ScoreReply(WholeReply):
    """Scores, with one model request per query."""

    fields = MappingProxyType({"query": "text_1", "documents": "text_2"})

    def __init__(self, connection: HttpExchange, name: str, model: str, rankings: Sequence[RerankRequest]) -> None:
        super().__init__(connection)
        self._head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
        self._rankings = rankings
        self._scores: list[list[float]] = [[] for _ in rankings]
        self._tokens = 0

    def _add(self, place: int, outputs: Outputs) -> None:
        self._scores[place] = to_array(*outputs[SCORES]).reshape(-1).tolist()
        if "num_input_tokens" in outputs:
            self._tokens += int(to_array(*outputs["num_input_tokens"]).sum())

    def _check(self, place: int) -> None:
        _check_scores(len(self._scores[place]), self._rankings[place].documents, "texts")

    def _encoded(self) -> bytes:
        scores = [score for each in self._scores for score in each]
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return orjson.dumps({**self._head, "data": data, "usage": usage})


def _check_scores(count: int, documents: Sequence[Buffer], what: str) -> None:
    if count != len(documents):
        raise ApiError(f"The model returned {count} scores for {len(documents)} {what}.", None, None, 500)
