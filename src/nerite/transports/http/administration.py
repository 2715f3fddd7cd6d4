"""The calls that are no inference: bodies to calls of the server, results to replies."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.observability.log import log
from nerite.transports import settings
from nerite.transports.http import large_json, reply, request_bodies
from nerite.transports.http.handler import BackgroundCalls, HttpExchange
from nerite.transports.http.json_text import LARGE, parse_settings
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_DONE: Final = Reply(200, b"", "application/json")


class HttpAdministration:
    """Each method is named for its endpoint (``routes``), takes what the path says, and sends one reply."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._background_calls = BackgroundCalls()

    def live(self, connection: HttpExchange, body: memoryview) -> None:
        """Say whether the server runs."""
        connection.send([_health(self._server.live).encode()])

    def ready(self, connection: HttpExchange, body: memoryview) -> None:
        """Say whether requests can be served."""
        self._server.ask_ready(lambda ready: connection.send([_health(ready).encode()]))

    def model_ready(self, connection: HttpExchange, body: memoryview, model: str, version: str) -> None:
        """Say whether a model can be served."""

        def answer(ready: bool) -> None:
            connection.send([(reply.EMPTY if ready else reply.MODEL_NOT_READY).encode()])

        try:
            self._server.ask_model_ready(model, version, answer)
        except NeriteError:
            answer(False)

    def server_metadata(self, connection: HttpExchange, body: memoryview) -> None:
        """Describe the server."""
        connection.send([reply.json_reply(self._server.metadata()).encode()])

    def model_metadata(self, connection: HttpExchange, body: memoryview, model: str, version: str) -> None:
        """Describe a model."""
        connection.send([reply.json_reply(self._server.model_metadata(model, version)).encode()])

    def config(self, connection: HttpExchange, body: memoryview, model: str, version: str) -> None:
        """Tell a model's configuration."""
        connection.send([reply.json_reply(self._server.model_config(model, version)).encode()])

    def statistics(self, connection: HttpExchange, body: memoryview, model: str, version: str) -> None:
        """Tell the statistics of a model."""
        connection.send([reply.json_reply({"model_stats": self._server.statistics(model, version)}).encode()])

    def all_statistics(self, connection: HttpExchange, body: memoryview) -> None:
        """Tell the statistics of all models."""
        connection.send([reply.json_reply({"model_stats": self._server.statistics("", "")}).encode()])

    def quota(self, connection: HttpExchange, body: memoryview) -> None:
        """Tell what tenants have used, and what they have left."""
        connection.send([reply.json_reply(self._server.quota()).encode()])

    def index(self, connection: HttpExchange, body: memoryview, repository: str) -> None:
        """List the models of the repositories."""
        ready = _object(body).get("ready", False)
        if type(ready) is not bool:
            raise InvalidArgument("Invalid value for 'ready': expected a boolean")
        self._background_calls.start(connection, self._index(ready))

    def load(self, connection: HttpExchange, body: memoryview, repository: str, model: str) -> None:
        """Load a model."""
        if repository:
            raise Unsupported("'repository_name' specification is not supported")

        def load(parameters: dict[str, str | bytes]) -> None:
            self._background_calls.start(connection, _done(self._server.load_for_client(model, parameters)))

        def refuse(error: NeriteError) -> None:
            connection.send([reply.error_reply(error).encode()])

        if len(body) <= LARGE:
            load(request_bodies.read_load_parameters(_object(body)))
            return

        def done(values: list[Any]) -> None:
            load(large_json.load_of(values))

        large_json.InferReading(self._server.helpers, connection, large_json.read_load, [body], done, refuse)

    def unload(self, connection: HttpExchange, body: memoryview, repository: str, model: str) -> None:
        """Unload a model."""
        if repository:
            raise Unsupported("'repository_name' specification is not supported")
        parameters = _object(body).get("parameters", {})
        if not isinstance(parameters, dict):  # Triton looks for one it knows, and finds none
            parameters = {}
        self._background_calls.start(connection, _done(self._server.unload(model, parameters)))

    def regions(self, connection: HttpExchange, body: memoryview, region: str) -> None:
        """List the regions of shared memory."""
        listed = self._server.regions.listed(region)
        told = [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size} for each in listed
        ]
        connection.send([reply.json_reply(told).encode()])

    def register(self, connection: HttpExchange, body: memoryview, region: str) -> None:
        """Register a region of shared memory."""
        self._server.regions.register(*request_bodies.system_region(region, body))
        connection.send([_DONE.encode()])

    def unregister(self, connection: HttpExchange, body: memoryview, region: str) -> None:
        """Forget a region of shared memory, or all."""
        self._server.regions.unregister(region)
        connection.send([_DONE.encode()])

    def cuda_regions(self, connection: HttpExchange, body: memoryview, region: str) -> None:
        """List the regions of CUDA memory: there are none."""
        self._server.regions.check_cuda(region)
        connection.send([reply.json_reply([]).encode()])

    def register_cuda(self, connection: HttpExchange, body: memoryview, region: str) -> None:
        """Refuse to register CUDA memory."""
        request_bodies.check_cuda_region(region, body)
        self._server.regions.register_cuda(region)

    def unregister_cuda(self, connection: HttpExchange, body: memoryview, region: str) -> None:
        """Forget a region of CUDA memory."""
        self._server.regions.unregister_cuda(region)
        connection.send([_DONE.encode()])

    def logging(self, connection: HttpExchange, body: memoryview) -> None:
        """Tell what is logged."""
        connection.send([reply.json_reply(log.settings).encode()])

    def change_logging(self, connection: HttpExchange, body: memoryview) -> None:
        """Change what is logged, and tell it."""

        def read(name: str, kind: type, value: Any) -> settings.Value:
            fits = type(value) is kind
            if not fits or (kind is int and value < 0):
                raise _not_of_kind({bool: "boolean", int: "unsigned-integer", str: "string"}[kind])
            found: settings.Value = value
            return found

        # As with Triton what is no object says nothing, and so does a null.
        given = [item for item in _members(body).items() if item[1] is not None]
        settings.change_log_settings(
            given, read, lambda name: Unavailable(f"invalid argument for --log_format, got: {name}")
        )
        self.logging(connection, body)

    def trace(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Tell what is traced."""
        told = self._server.trace_settings(model).told(model)
        # Not by way of a dict: Triton names each resource attribute with the same key.
        members = b",".join(orjson.dumps(name) + b":" + orjson.dumps(value) for name, value in told)
        connection.send([Reply(200, b"{" + members + b"}").encode()])

    def change_trace(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Change what is traced, and tell it."""

        def read(name: str, value: Any) -> Sequence[str] | None:
            if value is None:
                return None
            if name == "trace_level" and not isinstance(value, list):
                raise _not_of_kind("array")
            texts = value if name == "trace_level" else [value]
            if not all(isinstance(text, str) for text in texts):
                raise _not_of_kind("string")
            return texts

        settings.change_trace_settings(self._server.trace_settings(model), model, _members(body), read)
        self.trace(connection, body, model)

    async def _index(self, ready_only: bool) -> Reply:
        return reply.json_reply(await self._server.repository_index(ready_only))


async def _done(work: Coroutine[Any, Any, None]) -> Reply:
    await work
    return _DONE


def _health(healthy: bool) -> Reply:
    return reply.EMPTY if healthy else Reply(400, b"", "text/plain")


def _not_of_kind(kind: str) -> NeriteError:
    return Internal(f"attempt to access JSON non-{kind} as {kind}")


def _members(body: memoryview) -> dict[str, Any]:
    """Return the members of the JSON object that a body is; none of a body that is JSON, but no object."""
    value = parse_settings(body)
    return value if isinstance(value, dict) else {}


def _object(body: memoryview) -> dict[str, Any]:
    """Return the JSON object that an administrative body is; an empty body is an empty object."""
    return _members(body) if len(body) else {}
