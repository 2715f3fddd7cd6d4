"""The text models of the server, under the names that clients have for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from nerite.config.near import nearest
from nerite.core.errors import NeriteError, NotFound
from nerite.core.signature import Signature
from nerite.transports.openai import reranking, text_model
from nerite.transports.openai.errors import ApiError

if TYPE_CHECKING:
    from nerite.execution.running_version import RunningVersion
    from nerite.server import InferenceServer

_OWNER: Final = "nerite"

TEXT: Final = "text"
EMBEDDING: Final = "embedding"
RERANKING: Final = "reranking"
_PURPOSES: Final[Mapping[str, tuple[Callable[[Signature], bool], str]]] = {
    TEXT: (text_model.is_text, f"is no text model: {text_model.NEEDS}"),
    EMBEDDING: (
        text_model.is_embedding,
        f"has no embeddings: it needs an output '{text_model.EMBEDDING}' (FP32)",
    ),
    RERANKING: (reranking.is_reranker, f"rates no texts: {reranking.NEEDS}"),
}
"""What a model can be asked for: what tells whether it can, and what is said of one that cannot."""


class TextModels:
    """Looks models up, and lists them."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self.began = int(time.time())
        """What is said of when models were made: nobody knows, and clients expect a time."""

    def find(self, name: str, purpose: str = TEXT) -> RunningVersion:
        """Return where requests for a model go. Raises ``ApiError`` if it is not there, or for something else.

        Raises also what the server says of a model that cannot be asked now.
        """
        try:
            running = self._server.find(name, "", "")
        except NotFound:
            raise self._unknown(name) from None
        signature = running.signature
        serves, lack = _PURPOSES[purpose]
        if not serves(signature):
            raise ApiError(f"Model '{name}' {lack}.", "model", "model_not_supported")
        return running

    def listed(self) -> list[dict[str, Any]]:
        """Return what is told of each model that this API can ask."""
        found = []
        for name in sorted({record.name for record in self._server.manager.records if record.running}):
            try:
                found.append(self.told(name))
            except NeriteError:  # another kind of model, or two of one name
                continue
        return found

    def told(self, name: str) -> dict[str, Any]:
        """Return what is told of a model. Raises ``ApiError`` if this API cannot ask it."""
        try:
            signature = self._server.signature(name, "")
        except NotFound:
            raise self._unknown(name) from None
        if not _answers(signature):
            raise self._unknown(name)
        return described(name, self.began)

    def _unknown(self, name: str) -> ApiError:
        names = [
            record.name
            for record in self._server.manager.records
            if any(_answers(running.signature) for running in record.running.values())
        ]
        return unknown(name, names)


def unknown(name: str, names: Collection[str], status: int = 404) -> ApiError:
    """Return the refusal of a model that is none of ``names``."""
    meant = nearest(name, names)
    hint = f". Did you mean '{meant}'?" if meant and meant != name else ""
    return ApiError(f"Unknown model: {name}{hint}", "model", "model_not_found", status)


def described(name: str, made: int) -> dict[str, Any]:
    """Return what is told of a model. ``made``: when, in seconds."""
    return {"id": name, "object": "model", "created": made, "owned_by": _OWNER}


def _answers(signature: Signature) -> bool:
    return any(serves(signature) for serves, _ in _PURPOSES.values())
