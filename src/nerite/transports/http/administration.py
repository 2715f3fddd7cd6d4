"""Administrative endpoints of the HTTP port: everything that is not an inference."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from nerite import __version__
from nerite.config.rollout_spec import MAX_SPEC
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.ledger.usage import UsageQuery
from nerite.observability.log import log
from nerite.rollouts.analysis import answer_of, question_of
from nerite.routes.route_file import SHADOW_RESULTS, route_from_json, route_to_json
from nerite.transports import settings
from nerite.transports.http import large_json, reply, request_bodies
from nerite.transports.http.background import not_ready
from nerite.transports.http.handler import BackgroundCalls, HttpExchange
from nerite.transports.http.json_text import LARGE, parse_settings
from nerite.transports.http.reply import Reply
from nerite.transports.http.rollout_check import RolloutChecks

if TYPE_CHECKING:
    from nerite.rollouts.controller import RolloutController
    from nerite.server import InferenceServer

_DONE: Final = Reply(200, b"", "application/json")
_UNHEALTHY: Final = Reply(503, b"", reply.PLAIN)


class HttpAdministration:
    """Answers the administrative endpoints.

    Each method is named after its endpoint (``routes``), takes the arguments in the path, and sends one reply.
    """

    def __init__(self, server: InferenceServer, rollouts: RolloutController | None = None) -> None:
        """Without ``rollouts``, rollouts are rejected."""
        self._server = server
        self._all_rollouts = rollouts
        self._background_calls = BackgroundCalls()
        self._rollout_checks = RolloutChecks(server)

    def live(self, connection: HttpExchange, body: memoryview) -> None:
        """Report whether the server is live."""
        connection.send([(reply.EMPTY if self._server.live else reply.BAD_REQUEST).encode()])

    def ready(self, connection: HttpExchange, body: memoryview) -> None:
        """Report whether the server can serve requests."""
        self._server.ask_ready(lambda ready: connection.send([self._readiness(ready, reply.BAD_REQUEST).encode()]))

    def health(self, connection: HttpExchange, body: memoryview) -> None:
        """Report whether the server can serve requests, with the statuses of vLLM."""
        self._server.ask_ready(lambda ready: connection.send([self._readiness(ready, _UNHEALTHY).encode()]))

    def _readiness(self, ready: bool, otherwise: Reply) -> Reply:
        return reply.EMPTY if ready else not_ready(self._server.loops.obstacle, otherwise)

    ping = change_ping = health

    def release(self, connection: HttpExchange, body: memoryview) -> None:
        """Send the version of the server."""
        connection.send([reply.json_reply({"version": __version__}).encode()])

    def model_ready(self, connection: HttpExchange, body: memoryview, model: str, version: str) -> None:
        """Report whether a model can serve requests."""

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
        """Send the configuration of a model."""
        connection.send([reply.json_reply(self._server.model_config(model, version)).encode()])

    def statistics(self, connection: HttpExchange, body: memoryview, model: str, version: str) -> None:
        """Send the statistics of a model."""
        connection.send([reply.json_reply({"model_stats": self._server.statistics(model, version)}).encode()])

    def all_statistics(self, connection: HttpExchange, body: memoryview) -> None:
        """Send the statistics of all models."""
        connection.send([reply.json_reply({"model_stats": self._server.statistics("", "")}).encode()])

    def quota(self, connection: HttpExchange, body: memoryview, tenant: str | None) -> None:
        """Send the usage and the remaining quota of a tenant, or of all."""
        connection.send([reply.json_reply(self._server.quota(tenant)).encode()])

    def usage(self, connection: HttpExchange, body: memoryview, query: str, tenant: str | None) -> None:
        """Send what requests of a tenant used, or of all."""
        asked = replace(UsageQuery.parse(query, time.time(), None), tenant=tenant)
        self._background_calls.start(connection, _json(self._server.usage(asked)))

    def index(self, connection: HttpExchange, body: memoryview, repository: str) -> None:
        """List the models of the repositories."""
        ready = _json_object(body).get("ready", False)
        if type(ready) is not bool:
            raise InvalidArgument("Invalid value for 'ready': expected a boolean")
        self._background_calls.start(connection, self._index(ready))

    def wake(self, connection: HttpExchange, body: memoryview) -> None:
        """Load the models of a server that stands by."""
        self._background_calls.start(connection, _done(self._server.wake()))

    def load(self, connection: HttpExchange, body: memoryview, repository: str, model: str) -> None:
        """Load a model."""
        if repository:
            raise Unsupported("'repository_name' specification is not supported")

        def load(parameters: dict[str, str | bytes]) -> None:
            self._background_calls.start(connection, _done(self._server.load_for_client(model, parameters)))

        def refuse(error: NeriteError) -> None:
            connection.send([reply.error_reply(error).encode()])

        if len(body) <= LARGE:
            load(request_bodies.read_load_parameters(_json_object(body)))
            return

        def done(values: list[Any]) -> None:
            load(large_json.load_of(values))

        large_json.InferReading(self._server.helpers, connection, large_json.read_load, [body], done, refuse)

    def unload(self, connection: HttpExchange, body: memoryview, repository: str, model: str) -> None:
        """Unload a model."""
        if repository:
            raise Unsupported("'repository_name' specification is not supported")
        parameters = _json_object(body).get("parameters", {})
        if not isinstance(parameters, dict):  # Triton ignores it, too
            parameters = {}
        self._background_calls.start(connection, _done(self._server.unload(model, parameters)))

    def rollouts(self, connection: HttpExchange, body: memoryview) -> None:
        """Send the status of the last rollout of each model, and how those before it have ended."""
        told = {"rollouts": self._rollouts.statuses(), "past": self._rollouts.past()}
        connection.send([reply.json_reply(told).encode()])

    def rollout(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Send the status of a model's rollout."""
        connection.send([reply.json_reply(self._rollouts.status(model)).encode()])

    def change_rollout(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Start a rollout."""
        if len(body) > MAX_SPEC:
            raise InvalidArgument(f"a rollout may be described in at most {MAX_SPEC} bytes")
        self._background_calls.start(connection, _json(self._rollouts.begin(model, parse_settings(body))))

    def rollout_history(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Send the decisions of a model's rollouts."""
        connection.send([reply.json_reply({"history": self._rollouts.history(model)}).encode()])

    def rollout_follow(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Take an order of a fleet command."""
        self._background_calls.start(connection, _json(self._rollouts.follow(model, parse_settings(body))))

    def rollout_analysis(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Send what the judge says, for Argo Rollouts."""
        connection.send([reply.json_reply(self._rollouts.analysis(model)).encode()])

    def change_rollout_analysis(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Answer a webhook of Flagger with a status code."""
        ask = question_of(parse_settings(body))
        status, document = answer_of(ask, self._rollouts.analysis(model))
        connection.send([reply.json_reply(document, status).encode()])

    def rollout_command(self, connection: HttpExchange, body: memoryview, model: str, command: str) -> None:
        """Pause, resume, promote, abort or clear a rollout."""
        given = _json_object(body)
        force = given.pop("force", False)
        if given or type(force) is not bool:
            raise InvalidArgument('the body of a command of a rollout may be empty, or {"force": true}')
        self._background_calls.start(connection, _json(self._rollouts.command(model, command, force=force)))

    @property
    def _rollouts(self) -> RolloutController:
        if self._all_rollouts is None:
            raise Unsupported("this port has no rollouts")
        return self._all_rollouts

    def rollout_check(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Compare the arms of a rollout."""
        self._background_calls.start(connection, self._rollout_checks.answer(model, _json_object(body)))

    def regions(self, connection: HttpExchange, body: memoryview, region: str, owner: str) -> None:
        """List the regions of shared memory."""
        listed = self._server.regions.listed(region, owner)
        described = [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size} for each in listed
        ]
        connection.send([reply.json_reply(described).encode()])

    def register(self, connection: HttpExchange, body: memoryview, region: str, owner: str) -> None:
        """Register a region of shared memory."""
        self._server.regions.register(*request_bodies.system_region(region, body), owner)
        connection.send([_DONE.encode()])

    def unregister(self, connection: HttpExchange, body: memoryview, region: str, owner: str) -> None:
        """Unregister one or all regions of shared memory."""
        self._server.regions.unregister(region, owner)
        connection.send([_DONE.encode()])

    def cuda_regions(self, connection: HttpExchange, body: memoryview, region: str, owner: str) -> None:
        """List the regions of CUDA memory."""
        listed = self._server.regions.listed_cuda(region, owner)
        described = [{"name": each.name, "device_id": each.device, "byte_size": each.byte_size} for each in listed]
        connection.send([reply.json_reply(described).encode()])

    def register_cuda(self, connection: HttpExchange, body: memoryview, region: str, owner: str) -> None:
        """Register a region of CUDA memory."""

        async def register() -> Reply:
            await self._server.regions.register_cuda(*request_bodies.cuda_region(region, body), owner)
            return _DONE

        self._background_calls.start(connection, register())

    def unregister_cuda(self, connection: HttpExchange, body: memoryview, region: str, owner: str) -> None:
        """Unregister a region of CUDA memory."""
        self._server.regions.unregister_cuda(region, owner)
        connection.send([_DONE.encode()])

    def route(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Send how the requests to a name are divided."""
        document = route_to_json(self._server.route(model))
        if (results := self._server.routes.shadow_status(model)) is not None:
            document[SHADOW_RESULTS] = results
        connection.send([reply.json_reply(document).encode()])

    def change_route(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Change how the requests to a name are divided, and send the result."""
        if self._all_rollouts is not None:
            self._all_rollouts.check_route(model)
        given = _json_object(body)
        if not given:
            self._server.routes.remove(model)
            connection.send([_DONE.encode()])
            return
        self._server.put_route(route_from_json(given, model))
        self.route(connection, body, model)

    def logging(self, connection: HttpExchange, body: memoryview) -> None:
        """Send the log settings."""
        connection.send([reply.json_reply(log.settings).encode()])

    def change_logging(self, connection: HttpExchange, body: memoryview) -> None:
        """Change the log settings, and send the result."""

        def read(name: str, kind: type, value: Any) -> settings.Value:
            fits = type(value) is kind
            if not fits or (kind is int and value < 0):
                raise _wrong_type({bool: "boolean", int: "unsigned-integer", str: "string"}[kind])
            found: settings.Value = value
            return found

        # As in Triton, a body that is not an object changes nothing, and neither does a null.
        given = [item for item in _members(body).items() if item[1] is not None]
        settings.change_log_settings(
            given, read, lambda name: Unavailable(f"invalid argument for --log_format, got: {name}")
        )
        self.logging(connection, body)

    def trace(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Send the trace settings."""
        current = self._server.trace_settings(model).current(model)
        # Not through a dict: Triton uses the same key for each resource attribute.
        members = b",".join(orjson.dumps(name) + b":" + orjson.dumps(value) for name, value in current)
        connection.send([Reply(200, b"{" + members + b"}").encode()])

    def change_trace(self, connection: HttpExchange, body: memoryview, model: str) -> None:
        """Change the trace settings, and send the result."""

        def read(name: str, value: Any) -> Sequence[str] | None:
            if value is None:
                return None
            if name == "trace_level" and not isinstance(value, list):
                raise _wrong_type("array")
            texts = value if name == "trace_level" else [value]
            if not all(isinstance(text, str) for text in texts):
                raise _wrong_type("string")
            return texts

        settings.change_trace_settings(self._server.trace_settings(model), model, _members(body), read)
        self.trace(connection, body, model)

    async def _index(self, ready_only: bool) -> Reply:
        return reply.json_reply(await self._server.repository_index(ready_only))


async def _done(work: Coroutine[Any, Any, None]) -> Reply:
    await work
    return _DONE


async def _json(work: Coroutine[Any, Any, dict[str, Any]]) -> Reply:
    return reply.json_reply(await work)


def _wrong_type(kind: str) -> NeriteError:
    return Internal(f"attempt to access JSON non-{kind} as {kind}")


def _members(body: memoryview) -> dict[str, Any]:
    """Return the members of the JSON object in a body; an empty dict for JSON that is not an object."""
    value = parse_settings(body)
    return value if isinstance(value, dict) else {}


def _json_object(body: memoryview) -> dict[str, Any]:
    """Return the JSON object in a body; an empty body counts as an empty object."""
    return _members(body) if len(body) else {}
