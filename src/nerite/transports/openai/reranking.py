"""Reranking: which of several texts answer a query best, asked and told as Cohere, Jina and vLLM have it."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.backends.llm.reranking import MOST_DOCUMENTS
from nerite.core import dtype as dtypes
from nerite.core.request import RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes, to_array
from nerite.transports.callers import Sender
from nerite.transports.http.reply import Reply
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.fields import Fields, missing, wrong_type, wrong_value
from nerite.transports.openai.joint_work import JointWork
from nerite.transports.openai.text_model import Asked

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

QUERY: Final = "query"
DOCUMENTS: Final = "documents"
SCORES: Final = "scores"
NEEDS: Final = f"it needs inputs '{QUERY}' and '{DOCUMENTS}' (BYTES) and an output '{SCORES}' (FP32)"
_KNOWN: Final = ("model", "query", "documents", "top_n", "return_documents", "user")


def is_reranker(signature: Signature) -> bool:
    """Say whether a model rates texts by a query."""
    inputs, scores = signature.inputs, signature.outputs.get(SCORES)
    return (
        all(name in inputs and inputs[name].datatype is dtypes.BYTES for name in (QUERY, DOCUMENTS))
        and signature.required <= {QUERY, DOCUMENTS}
        and scores is not None
        and scores.datatype is dtypes.FP32
    )


class RerankRequest(NamedTuple):
    """A body, understood."""

    model: str
    query: bytes | memoryview
    """As UTF-8, as are the documents."""
    documents: Sequence[bytes | memoryview]
    top_n: int
    return_documents: bool


def read(body: Buffer) -> RerankRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_KNOWN)
    model, query = fields.name("model"), fields.text("query").encode()
    fields.name("user", "")
    if "documents" not in fields:
        raise missing("documents")
    given = fields.array("documents", MOST_DOCUMENTS)
    if not given:
        raise wrong_value("documents", "at least one text", given)
    documents = [_document(place, each).encode() for place, each in enumerate(given)]
    top_n = fields.integer("top_n", len(documents), 1, 2**31)
    return RerankRequest(model, query, documents, top_n, fields.flag("return_documents", default=True))


def _document(place: int, given: Any) -> str:
    """Return the text of a document, which may be an object with it."""
    where = f"documents[{place}]"
    if isinstance(given, str):
        return given
    if not isinstance(given, dict):
        raise wrong_type(where, "a string or an object with 'text'", given)
    fields = Fields(given, where)
    fields.refuse_unknown(("text",))
    return fields.text("text")


def ask(asked: RerankRequest, signature: Signature, sender: Sender) -> Asked:
    """Return the request that it is for its model."""
    rows = (1,) if signature.max_batch_size else ()
    inputs = {QUERY: [asked.query], DOCUMENTS: asked.documents}
    specs = [TensorSpec(name, dtypes.BYTES, (*rows, len(texts))) for name, texts in inputs.items()]
    data: list[Buffer] = [join_bytes(texts) for texts in inputs.values()]
    parameters = dict(sender.forwarded)
    return Asked(RequestHeader(asked.model, "", specs, parameters=parameters, caller=sender.caller), data)


class Reranking(JointWork):
    """The ratings on their way."""

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
            # What is received is given back.
            self._scores = found[SCORES].reshape(-1).copy()
            if "num_input_tokens" in found:
                self._tokens = int(found["num_input_tokens"].sum())
        if not final:
            return
        documents = len(self._asked.documents)
        if self._scores is None or len(self._scores) != documents:
            told = 0 if self._scores is None else len(self._scores)
            raise ApiError(f"The model gave {told} scores for {documents} documents.", None, None, 500)
        self._closed = True
        self._connection.send([Reply(200, self._written(self._scores)).encode()])

    def _written(self, scores: NDArray[np.float32]) -> bytes:
        best = np.argsort(-scores, kind="stable")[: self._asked.top_n].tolist()
        results: list[dict[str, Any]] = []
        for index in best:
            told: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if self._asked.return_documents:
                told["document"] = {"text": bytes(self._asked.documents[index]).decode()}
            results.append(told)
        answer: dict[str, Any] = {"id": self._name, "model": self._asked.model, "results": results}
        if self._tokens is not None:
            answer["usage"] = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return orjson.dumps(answer)
