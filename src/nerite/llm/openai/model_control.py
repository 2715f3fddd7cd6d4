"""Loads and unloads models on request, as in Triton's OpenAI frontend, and LoRA adapters, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nerite.core.errors import NeriteError
from nerite.llm.openai import text_model
from nerite.llm.openai.errors import ApiError, reply_of
from nerite.llm.openai.fields import Fields, wrong_value
from nerite.llm.openai.served_models import ServedModels, describe_model, unknown_model
from nerite.transports.http.handler import BackgroundCalls
from nerite.transports.http.reply import Reply, json_reply

if TYPE_CHECKING:
    from nerite.models.running_version import RunningVersion
    from nerite.server import InferenceServer
    from nerite.transports.http.handler import HttpExchange


class AdapterRequest(NamedTuple):
    """The parsed body of a request to load or unload a LoRA adapter."""

    name: str
    path: str
    model: str
    """Model that takes the adapter; empty if there is only one."""

    @classmethod
    def read(cls, fields: Fields, *, load: bool) -> AdapterRequest:
        """Read a body. Raises ``ApiError``."""
        fields.refuse_unknown(("lora_name", "lora_path", "model") if load else ("lora_name", "lora_int_id"))
        name, path = fields.name("lora_name"), fields.name("lora_path") if load else ""
        for param, value in (("lora_name", name), ("lora_path", path)):
            if not value and (load or param == "lora_name"):
                raise wrong_value(param, "text", value)
        return cls(name, path, fields.name("model", "") if load else "")


def _success(what: str) -> Reply:
    return Reply(200, f"Success: {what}".encode(), "text/plain; charset=utf-8")


class ModelControl:
    """Runs these requests one by one, and replies to each when it is done."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._models = ServedModels(server)
        self._background_calls = BackgroundCalls(reply_of)

    def load(self, connection: HttpExchange, model: str) -> None:
        """Load a model that is not loaded, and reply when it is."""
        self._background_calls.start(connection, self._load(model))

    def unload(self, connection: HttpExchange, model: str) -> None:
        """Unload a model that is loaded."""
        self._background_calls.start(connection, self._unload(model))

    def change_adapter(self, connection: HttpExchange, body: memoryview, *, load: bool) -> None:
        """Load a LoRA adapter into a running model, or unload it, as vLLM does."""
        fields = Fields.of_small_body(body)
        asked = AdapterRequest.read(fields, load=load)
        self._background_calls.start(connection, self._load_adapter(asked) if load else self._unload_adapter(asked))

    async def _load_adapter(self, asked: AdapterRequest) -> Reply:
        self._check()
        if asked.name in {each["id"] for each in self._models.listed()}:
            raise ApiError(
                f"The name '{asked.name}' has already been loaded: it is that of a model or an adapter.",
                "lora_name",
                "model_already_loaded",
            )
        running = self._adaptable(asked.model)
        version = self._server.version_directory(running)
        directory = Path(asked.path) if version is None else version.absolute() / asked.path
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (directory / file).is_file():
                raise wrong_value("lora_path", f"a directory of the server with a file {file}", asked.path)
        await self._server.load_adapter(running.name, asked.name, str(directory))
        return _success(f"LoRA adapter '{asked.name}' added successfully.")

    async def _unload_adapter(self, asked: AdapterRequest) -> Reply:
        self._check()
        owner = next((each for each in self._server.running_versions() if asked.name in each.runtime_adapters), None)
        if owner is None:
            raise ApiError(
                f"The LoRA adapter '{asked.name}' cannot be found among those that were loaded while their model ran.",
                "lora_name",
                "model_not_found",
                404,
            )
        await self._server.unload_adapter(owner.name, asked.name)
        return _success(f"LoRA adapter '{asked.name}' removed successfully.")

    def _adaptable(self, model: str) -> RunningVersion:
        """Return the model that takes an adapter: the one with this name, or the only language model."""
        found = {each.name: each for each in self._server.running_versions() if each.generates}
        found = {name: each for name, each in found.items() if text_model.is_text(each.signature)}
        if model:
            if model not in found:
                raise unknown_model(model, sorted(found))
            return found[model]
        if len(found) != 1:
            names = ", ".join(sorted(found)) or "none"
            raise ApiError(f"Name the 'model' for the adapter. Language models: {names}.", "model", "invalid_value")
        return next(iter(found.values()))

    async def _load(self, model: str) -> Reply:
        self._check()
        if self._runs(model):
            raise ApiError(f"Model '{model}' is already loaded", "model", "model_already_loaded")
        index = await self._server.repository_index(ready_only=False)
        if all(each["name"] != model for each in index):
            raise unknown_model(model, {each["name"] for each in index}, status=400)
        try:
            await self._server.load(model, {})
        except NeriteError as error:
            raise ApiError(f"Failed to load model '{model}': {error.message}", "model", "model_not_loaded") from None
        return json_reply(self._described(model))

    async def _unload(self, model: str) -> Reply:
        self._check()
        if not self._runs(model):
            names = {running.name for running in self._server.running_versions()}
            raise unknown_model(model, names, status=400)
        await self._server.unload(model, {})
        return json_reply(self._described(model))

    def _check(self) -> None:
        if not self._server.is_controlled_by_hand:
            raise ApiError("Model load/unload requires --model-control-mode=explicit", None, "model_control_mode")

    def _runs(self, model: str) -> bool:
        return any(running.name == model for running in self._server.running_versions())

    def _described(self, model: str) -> Mapping[str, Any]:
        return describe_model(model, self._models.began)
