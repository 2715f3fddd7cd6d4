"""``Client`` for servers that speak KServe v2 over HTTP."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Generator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson

from nerite.client import tensors
from nerite.client.connection import Address, ClientError, HttpAnswer, HttpClientConnection, model_path, text_of
from nerite.client.models import (
    CompletionPart,
    MetricsPage,
    ModelDescription,
    ModelStatistics,
    ModelVersion,
    completion_parts,
)
from nerite.client.tensors import to_json
from nerite.core.tensor import Array, Buffer


class Client:
    """Client of one server over a persistent connection. Not thread-safe.

    ``url`` is ``host:port`` or a full URL, ``headers`` are sent with each request, ``timeout`` in seconds applies to
    each wait, and ``context`` is for servers whose certificate this machine does not trust, or that require a client
    certificate. Every method except ``live`` and ``ready`` raises ``ClientError`` if the request fails.
    """

    def __init__(
        self,
        url: str = "localhost:8000",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._connection = HttpClientConnection(Address.parse(url), headers or {}, timeout, context)
        self._models: dict[tuple[str, str], ModelDescription] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def live(self) -> bool:
        """Return whether the server is live; False if it cannot be reached."""
        return self._is_ok("/v2/health/live")

    def ready(self, model: str = "", version: str = "") -> bool:
        """Return whether the server, or a model, is ready to infer."""
        return self._is_ok(f"{model_path(model, version)}/ready" if model else "/v2/health/ready")

    def server_version(self) -> str:
        """Return name and version of the server, or "" if it does not tell."""
        for path in ("/v2", "/version"):
            try:
                found = self._json("GET", path)
            except ClientError:
                continue
            if isinstance(found, dict) and "version" in found:
                return f"{found.get('name', '')} {found['version']}".strip()
        return ""

    def models(self) -> list[ModelVersion]:
        """Return every version of every model in the repository, with its state."""
        return [ModelVersion.read(entry) for entry in self._json("POST", "/v2/repository/index")]

    def metrics(self) -> MetricsPage:
        """Return the metrics page, which servers publish on a separate port."""
        answer = self._connection.ask("GET", "/metrics")
        if answer.status != 200:
            raise ClientError(text_of(answer.status, answer.body), answer.status)
        return MetricsPage(answer.body.decode(errors="replace"))

    def model(self, name: str, version: str = "") -> ModelDescription:
        """Return the metadata of a model, such as its inputs and outputs. Without a version: of the one that serves."""
        return ModelDescription.read(self._json("GET", model_path(name, version)))

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        """Return the complete configuration of a model."""
        document: dict[str, Any] = self._json("GET", f"{model_path(name, version)}/config")
        return document

    def infer(
        self,
        model: str,
        inputs: Mapping[str, object],
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        version: str = "",
    ) -> dict[str, Array]:
        """Run a model; return all its outputs, or the named ones, by name.

        An input is an array, a number, a string, bytes, or lists of these; it is converted to the data type and shape
        in the model's metadata, which is requested once. BYTES are returned as ``bytes`` objects, BF16 as float32.
        ``parameters`` are those of the request: ``priority``, ``timeout``, ``sequence_id`` and so on, or custom ones.
        """
        key = model, version
        try:
            if key not in self._models:
                self._models[key] = self.model(model, version)
            parts, length = tensors.encode(self._models[key], inputs, outputs, parameters or {})
            headers = {tensors.HEADER_LENGTH: str(length), "Content-Type": "application/octet-stream"}
            return tensors.decode(self._ask("POST", f"{model_path(model, version)}/infer", parts, headers))
        except ClientError:
            # The model may have changed since its metadata was requested.
            self._models.pop(key, None)
            raise

    def stream(
        self,
        model: str,
        inputs: Mapping[str, object],
        *,
        parameters: Mapping[str, Any] | None = None,
        version: str = "",
    ) -> Generator[dict[str, Any]]:
        """Run a model with the generate extension; yield each response as it arrives: outputs by name, as JSON values.

        To cancel the rest, call ``close`` on the generator; this also notifies the server.
        """
        document = {**{name: to_json(value) for name, value in inputs.items()}, "parameters": dict(parameters or {})}
        # Not orjson: in both directions numbers may be NaN or infinite.
        body = json.dumps(document).encode()
        for line in self._connection.lines("POST", f"{model_path(model, version)}/generate_stream", [body]):
            event = line.removeprefix(b"data:").strip()
            if event:
                response = json.loads(event)
                if response.keys() == {"error"}:
                    raise ClientError(response["error"], 200)
                yield response

    def text_models(self) -> list[str]:
        """Return the names of the models that the server offers in the OpenAI API, under ``/v1``."""
        return [str(entry["id"]) for entry in self._json("GET", "/v1/models")["data"]]

    def chat_models(self) -> list[str]:
        """Return the names of the language models under ``/v1``, without embeddings, image models and LoRA adapters.

        On a server that does not describe its models under ``/v2``, such as vLLM, these are all that are no adapters.
        """
        entries = self._json("GET", "/v1/models")["data"]
        found: dict[bool | None, list[str]] = {True: [], False: [], None: []}
        for entry in entries:
            if not entry.get("parent"):
                found[self._generates_text(entry)].append(str(entry["id"]))
        return found[True] or found[None]

    def _generates_text(self, entry: Mapping[str, Any]) -> bool | None:
        """Return whether a model is a language model; None if the server does not describe it."""
        if "task" in entry:  # to ask for its tensors might load it
            return bool(entry["task"] == "generate")
        try:
            return self.model(str(entry["id"])).generates_text
        except ClientError:
            return None

    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        *,
        usage: bool = False,
    ) -> Generator[CompletionPart]:
        """Request a streamed chat completion under ``/v1``; yield its parts as they arrive.

        Each of ``messages`` has a ``role`` and a ``content``. ``settings`` are other fields of chat completions:
        ``temperature``, ``max_tokens`` and so on. With ``usage`` the last part has the token counts. To stop the model
        early, call ``close`` on the generator.
        """
        document = {"model": model, "messages": [*messages], "stream": True, **(settings or {})}
        if usage:
            document["stream_options"] = {"include_usage": True}
        headers = {"Content-Type": "application/json"}
        body = [orjson.dumps(document)]
        yield from completion_parts(self._connection.lines("POST", "/v1/chat/completions", body, headers))

    def load(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load or reload a model. Returns when it is ready.

        ``config``, as JSON text or an object to encode, replaces config.pbtxt. ``files``, by their path in the model's
        directory (``1/model.py``), replace that directory and require a ``config``.
        """
        self._models.clear()
        parameters = (
            {} if config is None else {"config": config if isinstance(config, str) else orjson.dumps(config).decode()}
        )
        for path, content in (files or {}).items():
            parameters[f"file:{path}"] = base64.b64encode(content).decode()
        document = {"parameters": parameters} if parameters else {}
        self._ask("POST", f"/v2/repository/models/{quote(name)}/load", [orjson.dumps(document)])

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model gracefully; with ``dependents`` also the models that were loaded only for it."""
        self._models.clear()
        document = {"parameters": {"unload_dependents": True}} if dependents else {}
        self._ask("POST", f"/v2/repository/models/{quote(name)}/unload", [orjson.dumps(document)])

    def statistics(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Return the statistics of each version of a model, or of all models."""
        path = f"{model_path(model, version)}/stats" if model else "/v2/models/stats"
        return [ModelStatistics.read(entry) for entry in self._json("GET", path)["model_stats"]]

    def register_shared_memory(self, region: str, key: str, size: int) -> None:
        """Register a region of system shared memory: the object ``key``, of ``size`` bytes."""
        document = {"key": key, "offset": 0, "byte_size": size}
        path = f"/v2/systemsharedmemory/region/{quote(region)}/register"
        self._ask("POST", path, [orjson.dumps(document)])

    def unregister_shared_memory(self, region: str) -> None:
        """Unregister a region of system shared memory."""
        self._ask("POST", f"/v2/systemsharedmemory/region/{quote(region)}/unregister")

    def quota(self) -> dict[str, Any]:
        """Return the usage and remaining quota of tenants by model. Only Nerite supports this."""
        document: dict[str, Any] = self._json("GET", "/v2/quota")
        return document

    def background(self) -> list[dict[str, Any]]:
        """Return the loops that run beside the requests, with what they have set aside. Only Nerite supports this."""
        found: list[dict[str, Any]] = self._json("GET", "/v2/background")["loops"]
        return found

    def retry_unit(self, loop: str, unit: str) -> dict[str, Any]:
        """Have what a loop has set aside tried again; return the loop."""
        return self._posted(f"/v2/background/{quote(loop, safe='')}/retry", {"unit": unit})

    def discard_unit(self, loop: str, unit: str) -> dict[str, Any]:
        """Give up what a loop has set aside; return the loop."""
        return self._posted(f"/v2/background/{quote(loop, safe='')}/discard", {"unit": unit})

    def rollouts(self) -> list[dict[str, Any]]:
        """Return the status of every rollout: the last one of each model."""
        found: list[dict[str, Any]] = self._json("GET", "/v2/rollouts")["rollouts"]
        return found

    def rollout(self, model: str) -> dict[str, Any]:
        """Return the status of a model's rollout."""
        document: dict[str, Any] = self._json("GET", f"{model_path(model, '')}/rollout")
        return document

    def rollout_history(self, model: str) -> list[dict[str, Any]]:
        """Return the decisions of a model's rollouts with their evidence, the oldest first."""
        found: list[dict[str, Any]] = self._json("GET", f"{model_path(model, '')}/rollout/history")["history"]
        return found

    def start_rollout(self, model: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Start a rollout and return its status. The keys of ``spec`` are those of ``rollout.toml``."""
        return self._posted(f"{model_path(model, '')}/rollout", spec)

    def command_rollout(self, model: str, command: str, *, force: bool = False) -> dict[str, Any]:
        """Pause, resume, promote, abort or clear a rollout; return its status."""
        return self._posted(f"{model_path(model, '')}/rollout/{command}", {"force": True} if force else {})

    def follow_rollout(self, model: str, order: Mapping[str, Any]) -> dict[str, Any]:
        """Tell a replica what the rollout of its fleet wants; return its status. For fleet commands."""
        return self._posted(f"{model_path(model, '')}/rollout/follow", order)

    def rollout_analysis(self, model: str) -> dict[str, Any]:
        """Return what the judge of a model's rollout says, as Argo Rollouts gets it."""
        document: dict[str, Any] = self._json("GET", f"{model_path(model, '')}/rollout/analysis")
        return document

    def _posted(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads(self._ask("POST", path, [orjson.dumps(document)]).body)
        return answer

    def rollout_check(self, model: str, arms: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the arms of a rollout, ``from`` and ``to``. Only Nerite supports this."""
        return self._posted(f"{model_path(model, '')}/rollout/check", arms)

    def _is_ok(self, path: str) -> bool:
        try:
            return self._connection.ask("GET", path).status == 200
        except ClientError:
            return False

    def _json(self, method: str, path: str) -> Any:
        answer = self._ask(method, path)
        try:
            return orjson.loads(answer.body)
        except orjson.JSONDecodeError as error:
            raise ClientError(f"the server's answer to {path} is not JSON: {error}", answer.status) from error

    def _ask(
        self, method: str, path: str, body: Sequence[Buffer] = (), headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        answer = self._connection.ask(method, path, body, headers)
        if answer.status != 200:
            raise ClientError(text_of(answer.status, answer.body), answer.status)
        return answer
