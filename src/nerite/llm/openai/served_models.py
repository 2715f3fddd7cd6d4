"""Which models the APIs under ``/v1`` serve, under which names; loading and unloading them on request."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from nerite.config.mistake import nearest
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError, NotFound
from nerite.core.request import NOBODY, InferenceRequest, RequestHeader
from nerite.core.signature import Signature
from nerite.core.tensor import TensorSpec
from nerite.llm.openai import classification, embeddings, images, speech, text_model, transcriptions
from nerite.llm.openai.fields import ApiError, Fields, reply_of, wrong_value
from nerite.llm.openai.text_model import ModelAddress, Strings
from nerite.scheduling.weighted_route import KeySource, WeightedRoute
from nerite.transports.access import SenderHeaders
from nerite.transports.http.handler import BackgroundCalls
from nerite.transports.http.reply import Reply, json_reply

if TYPE_CHECKING:
    from nerite.core.servable_version import ServableVersion
    from nerite.inference_entry import TransportEntry
    from nerite.models.running_version import RunningVersion
    from nerite.server import InferenceServer
    from nerite.transports.http.handler import HttpExchange

_OWNER: Final = "nerite"
ADAPTERS: Final = "multi_lora.json"
"""File with the names and directories of LoRA adapters."""
_PATTERN: Final = frozenset("*?[")
"""Characters of aliases that stand for others."""

TEXT: Final = "text"
EMBEDDING: Final = "embedding"
RERANKING: Final = "reranking"
CLASSIFYING: Final = "classifying"
TRANSCRIBING: Final = "transcribing"
SPEECH: Final = "speech"
IMAGES: Final = "images"
_PURPOSES: Final[Mapping[str, tuple[Callable[[Signature], bool], str]]] = {
    TEXT: (text_model.is_text, f"is not a text model: {text_model.NEEDS}"),
    EMBEDDING: (
        text_model.is_embedding,
        f"is not an embedding model: it needs an output '{text_model.EMBEDDING}' (FP32)",
    ),
    RERANKING: (embeddings.is_reranker, f"is not a reranking model: {embeddings.NEEDS}"),
    CLASSIFYING: (classification.is_classifier, f"does not classify texts: {classification.NEEDS}"),
    TRANSCRIBING: (transcriptions.is_transcriber, f"does not transcribe: {transcriptions.NEEDS}"),
    IMAGES: (images.generates_images, f"does not generate images: {images.NEEDS}"),
    SPEECH: (speech.synthesizes_speech, f"does not synthesize speech: {speech.NEEDS}"),
}
"""Purposes of models: how a signature is recognized, and the error text for models that do not match."""


class CallOrigin(NamedTuple):
    """What keeps a call on an arm of a route."""

    sender: SenderHeaders
    user: str
    opening: Callable[[int], bytes]
    """Returns the beginning of the prompt, of at least so many bytes if it is that long."""
    requests: int = 1
    """Number of requests of the call, which all go to the same arm."""

    def probe(self, route: WeightedRoute) -> InferenceRequest:
        """Return a request with the parts that its key may be made from."""
        sender = self.sender
        header = RequestHeader(
            route.name,
            "",
            [TensorSpec(text_model.PROMPT, dtypes.BYTES, (1,))],
            parameters={**sender.forwarded, **({"user": self.user} if self.user else {})},
            caller=sender.caller,
            idempotency_key=sender.idempotency_key,
            sticky_fields=sender.sticky_fields,
        )
        sizes = [key.size for key in route.sticky if key.source is KeySource.PROMPT]
        opening = Strings([self.opening(max(sizes))]).data if sizes else b""
        return InferenceRequest(header, [opening], NOBODY, 0)


class TextModels:
    """Finds and lists the models that this API serves."""

    def __init__(self, server: TransportEntry, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        """``aliases`` are further names, as patterns, and the models that answer for them."""
        self._server = server
        self._aliases = aliases
        self._adapters: WeakKeyDictionary[ServableVersion, tuple[str, ...]] = WeakKeyDictionary()
        """Names of the LoRA adapters of models that run on an engine."""
        self.began = int(time.time())
        """Creation time reported for all models. The real one is unknown, but clients expect a time."""

    def find(self, name: str, call: CallOrigin, purpose: str = TEXT) -> tuple[ServableVersion, ModelAddress]:
        """Return the version that answers a call, and what its requests have to name.

        A name that no model has may be that of a LoRA adapter, or an alias. Raises ``ApiError`` if it is unknown or has
        another purpose, and the server's error for a model that is not ready.
        """
        try:
            running, address = self._found(name, call)
        except NotFound:
            base = self._bases().get(name, "")
            meant = base or self._meant(name)
            if not meant:
                raise self._unknown(name) from None
            running, address = self._found(meant, call)
            if base:
                address = address._replace(lora=name)
        signature = running.signature
        serves, lack = _PURPOSES[purpose]
        if not serves(signature):
            raise ApiError(f"Model '{name}' {lack}.", "model", "model_not_supported")
        return running, address

    def _found(self, name: str, call: CallOrigin) -> tuple[ServableVersion, ModelAddress]:
        route = self._server.routes.get(name)
        if route is None:
            return self._server.find(name, "", ""), ModelAddress(name)
        running, model, version, assignment = self._server.assign(call.probe(route))
        if call.requests > 1 and not assignment.cluster:
            assignment = assignment._replace(cluster=secrets.randbits(62) + 1)
        return running, ModelAddress(model, version, assignment)

    def _meant(self, name: str) -> str:
        """Return the model that answers for a name; empty if the name is no alias."""
        return next((model for pattern, model in self._aliases.items() if fnmatchcase(name, pattern)), "")

    def _bases(self) -> dict[str, str]:
        """Return the model that each LoRA adapter belongs to."""
        bases: dict[str, str] = {}
        for running in self._server.running_versions():
            if not running.generates:
                continue
            names = self._adapters.get(running)
            if names is None:
                names = self._adapters[running] = _adapters_in(self._server.version_directory(running))
            for name in (*names, *running.runtime_adapters):
                bases.setdefault(name, running.name)
        return bases

    def listed(self) -> list[dict[str, Any]]:
        """Return the descriptions of all models that this API serves."""
        found = []
        names = {route.name for route in self._server.routes}.union(
            alias for alias in self._aliases if not _PATTERN.intersection(alias)
        )
        running = (running.name for running in self._server.running_versions())
        for name in sorted(names.union(running, self._server.loadable)):
            try:
                found.append(self.describe(name))
            except NeriteError:  # another kind of model, or an ambiguous name
                continue
        own = {each["id"] for each in found}
        found += [self.describe(name) for name in sorted(self._bases()) if name not in own]
        return found

    def describe(self, name: str) -> dict[str, Any]:
        """Return the description of a model. Raises ``ApiError`` if this API does not serve it."""
        if name in self._server.loadable:
            return describe_model(name, self.began)
        try:
            signature = self._server.signature(name, "")
        except NotFound:
            base = self._bases().get(name)
            if base is not None:
                return {**describe_model(name, self.began), "root": name, "parent": base}
            meant = self._meant(name)
            if not meant:
                raise self._unknown(name) from None
            signature = self._server.signature(meant, "")
        if not _answers(signature):
            raise self._unknown(name)
        return describe_model(name, self.began)

    def _unknown(self, name: str) -> ApiError:
        names = {running.name for running in self._server.running_versions() if _answers(running.signature)}
        return unknown_model(name, sorted(names))


_LARGEST: Final = 1 << 20
"""Maximum size of a file with the names of adapters in bytes."""


def _adapters_in(version: Path | None) -> tuple[str, ...]:
    """Return the names of the adapters of a model. The engine has validated their file."""
    if version is None:
        return ()
    try:
        file = version / ADAPTERS
        found = json.loads(file.read_bytes()) if file.is_file() and file.stat().st_size <= _LARGEST else {}
    except (OSError, ValueError, RecursionError):
        return ()
    return tuple(found) if isinstance(found, dict) else ()


def unknown_model(name: str, names: Collection[str], status: int = 404) -> ApiError:
    """Return the error for a model that is not one of ``names``."""
    meant = nearest(name, names)
    hint = f". Did you mean '{meant}'?" if meant and meant != name else ""
    return ApiError(f"Unknown model: {name}{hint}", "model", "model_not_found", status)


def describe_model(name: str, made: int) -> dict[str, Any]:
    """Return the description of a model. ``made`` is its creation time in seconds."""
    return {"id": name, "object": "model", "created": made, "owned_by": _OWNER}


def _answers(signature: Signature) -> bool:
    return any(serves(signature) for serves, _ in _PURPOSES.values())


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
    """Loads and unloads models on request, as in Triton's OpenAI frontend, and LoRA adapters, as in vLLM."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._models = TextModels(server)
        self._background_calls = BackgroundCalls(reply_of)

    def load(self, connection: HttpExchange, model: str) -> None:
        """Load a model that is not loaded, and reply when it is."""
        self._background_calls.start(connection, self._load(model))

    def unload(self, connection: HttpExchange, model: str) -> None:
        """Unload a model that is loaded."""
        self._background_calls.start(connection, self._unload(model))

    def change_adapter(self, connection: HttpExchange, body: memoryview, *, load: bool) -> None:
        """Load a LoRA adapter into a running model, or unload it, as vLLM does."""
        fields = Fields.of_body(body)
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
