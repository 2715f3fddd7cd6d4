"""``/v1/classify`` in vLLM's format: the class of each text, by a model with a text and an output of scores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson

from nerite.core import tensor as dtypes
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import Buffer, TensorSpec, join_bytes, to_array
from nerite.llm import checkpoint
from nerite.llm.openai.completion_requests import read_texts
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, UnknownField, wrong_value
from nerite.llm.openai.replies import Outputs, WholeReply
from nerite.llm.openai.sampling import not_offered
from nerite.llm.openai.text_model import CallOrigin, ModelAddress, ModelPurpose, ModelRequest, text_of
from nerite.transports.access import SenderHeaders

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_SCORES: Final = ("scores", "probabilities")
_LABEL: Final = "label"
_MAX_COUNT: Final = 1024
"""Maximum number of texts per request."""
_KNOWN: Final = ("model", "input", "user", "use_activation", "softmax")
_ACTIVATION: Final = ("use_activation", "softmax")
"""vLLM's newer and older name for whether scores become probabilities."""


def is_classifier(signature: Signature) -> bool:
    """Return whether a model turns a text into a number for each class."""
    return _text_input(signature) is not None and bool(_scores_output(signature))


def _text_input(signature: Signature) -> SignatureInput | None:
    """Return the input for the text; None if the model is no classifier."""
    names = list(signature.required) or [name for name in ("text_input", "text") if name in signature.inputs]
    if len(names) != 1:
        return None
    declared = signature.inputs[names[0]]
    plain = declared.datatype is dtypes.BYTES and all(size in (1, -1) for size in declared.dims)
    return declared if plain else None


def _scores_output(signature: Signature) -> str:
    """Return the name of the output with the scores; empty if there is none."""
    found = (signature.outputs.get(name) for name in _SCORES)
    return next((each.name for each in found if each is not None and each.datatype is dtypes.FP32), "")


PURPOSE: Final = ModelPurpose(
    is_classifier,
    "does not classify texts: it needs one required input (BYTES, one element) and an output "
    f"{' or '.join(map(repr, _SCORES))} (FP32) with a number for each class",
    checkpoint.CLASSIFY,
)


class ClassifyRequest(NamedTuple):
    """The parsed body of a request to classify."""

    model: str
    texts: Sequence[bytes | memoryview]
    """In UTF-8."""
    user: str = ""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""
        return CallOrigin(sender, self.user, lambda _: bytes(self.texts[0]), len(self.texts))

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return a request to the model for each text: its batcher joins them."""
        declared = _text_input(signature)
        assert declared is not None  # the model was recognized by it
        rows = (1,) if signature.max_batch_size else ()
        specs = [TensorSpec(declared.name, dtypes.BYTES, (*rows, *(1 for _ in declared.dims)))]
        header = address.header(specs, dict(sender.forwarded), sender)
        return [ModelRequest(header, [join_bytes([text])]) for text in self.texts]

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> ClassificationReply:
        """Return the sink of these requests."""
        return ClassificationReply(connection, name, self, signature)


def read_classification(body: Buffer) -> ClassifyRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_KNOWN)
    model, user = fields.name("model"), fields.name("user", "")
    for name in _ACTIVATION:
        if not fields.flag(name, default=True):
            raise not_offered(name, "the scores are those of the model, which are probabilities")
    texts, tokens = read_texts(fields, "input", _MAX_COUNT)
    if tokens:
        raise not_offered("input", "models that classify take text only, and no token ids")
    if not texts:
        raise wrong_value("input", "at least one text", texts)
    return ClassifyRequest(model, texts, user, fields.unknown)


class ClassificationReply(WholeReply):
    """Classes, with one model request per text."""

    fields = MappingProxyType({"text_input": "input", "text": "input"})

    def __init__(self, connection: HttpExchange, name: str, asked: ClassifyRequest, signature: Signature) -> None:
        super().__init__(connection)
        self._head = {"id": name, "object": "list", "created": int(time.time()), "model": asked.model}
        self._output = _scores_output(signature)
        self._labels = signature.outputs[self._output].labels
        self._found: list[dict[str, Any]] = [{} for _ in asked.texts]
        self._tokens = 0

    def _add(self, place: int, outputs: Outputs) -> None:
        scores = to_array(*outputs[self._output]).reshape(-1)
        best = int(np.argmax(scores)) if len(scores) else -1
        label = self._labels[best] if 0 <= best < len(self._labels) else None
        if label is None and _LABEL in outputs and outputs[_LABEL][0].datatype is dtypes.BYTES:
            label = text_of(outputs[_LABEL][1]).decode(errors="replace")
        if "num_input_tokens" in outputs:
            self._tokens += int(to_array(*outputs["num_input_tokens"]).sum())
        self._found[place] = {
            "index": place,
            "label": label,
            "probs": [float(score) for score in scores],
            "num_classes": len(scores),
        }

    def _check(self, place: int) -> None:
        if not self._found[place]:
            raise ApiError("The model returned no scores.", None, None, 500)

    def _encoded(self) -> bytes:
        usage = {
            "prompt_tokens": self._tokens,
            "total_tokens": self._tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        return orjson.dumps({**self._head, "data": self._found, "usage": usage})
