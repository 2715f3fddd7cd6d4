"""Models that come and go under ``/v1``, as in Triton's frontend for OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nerite.core.errors import NeriteError
from nerite.transports.http.errands import Errands
from nerite.transports.http.reply import json_reply
from nerite.transports.openai import text_models
from nerite.transports.openai.errors import ApiError, reply_of

if TYPE_CHECKING:
    from nerite.server import InferenceServer
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.reply import Reply
    from nerite.transports.openai.text_models import TextModels


class ModelControl:
    """Loads and unloads models for who asks."""

    def __init__(self, server: InferenceServer, models: TextModels) -> None:
        self._server = server
        self._models = models
        self._errands = Errands(reply_of)

    def load(self, connection: HttpExchange, model: str) -> None:
        """Load a model that is not, and answer once it is."""
        self._errands.start(connection, self._load(model))

    def unload(self, connection: HttpExchange, model: str) -> None:
        """Unload a model that is loaded."""
        self._errands.start(connection, self._unload(model))

    async def _load(self, model: str) -> Reply:
        self._check()
        if self._runs(model):
            raise ApiError(f"Model '{model}' is already loaded", "model", "model_already_loaded")
        there = await self._server.repository_index(ready_only=False)
        if all(each["name"] != model for each in there):
            raise text_models.unknown(model, {each["name"] for each in there}, status=400)
        try:
            await self._server.load(model, {})
        except NeriteError as error:
            raise ApiError(f"Failed to load model '{model}': {error.message}", "model", "model_not_loaded") from None
        return json_reply(self._described(model))

    async def _unload(self, model: str) -> Reply:
        self._check()
        if not self._runs(model):
            names = {record.name for record in self._server.manager.records if record.running}
            raise text_models.unknown(model, names, status=400)
        await self._server.unload(model, {})
        return json_reply(self._described(model))

    def _check(self) -> None:
        if not self._server.is_controlled_by_hand:
            raise ApiError("Model load/unload requires --model-control-mode=explicit", None, "model_control_mode")

    def _runs(self, model: str) -> bool:
        return any(record.name == model and record.running for record in self._server.manager.records)

    def _described(self, model: str) -> Mapping[str, Any]:
        return text_models.described(model, self._models.began)
