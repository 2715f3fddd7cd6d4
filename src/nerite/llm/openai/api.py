"""The endpoints under ``/v1``: find the handler, check who may use it, and turn errors into OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

from nerite.config.options import OpenAiOptions
from nerite.core.client_text import checked_name
from nerite.core.errors import InvalidArgument, NeriteError, NotLoaded, Restricted
from nerite.core.failures import report
from nerite.core.text import quoted_text
from nerite.ledger.usage import UsageQuery
from nerite.llm.openai.batch_api import BatchApi
from nerite.llm.openai.bodies import send_error
from nerite.llm.openai.errors import ApiError, reply_for, reply_of
from nerite.llm.openai.generation import EndpointHandler, TextGeneration
from nerite.llm.openai.model_control import ModelControl
from nerite.llm.openai.model_tasks import TASKS
from nerite.llm.openai.responses.api import ResponseApi
from nerite.llm.openai.responses.store import ResponseStore
from nerite.llm.openai.serving import OpenAiServing
from nerite.transports import access
from nerite.transports.access import Lock, SenderHeaders
from nerite.transports.http import routes
from nerite.transports.http.awaited_load import AwaitedLoad
from nerite.transports.http.handler import BackgroundCalls
from nerite.transports.http.head import header_bytes_of
from nerite.transports.http.infer_request import Call, HttpTarget
from nerite.transports.http.reply import json_reply

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.head import RequestHead
    from nerite.transports.http.reply import Reply

UsageOf: TypeAlias = Callable[[UsageQuery], Coroutine[Any, Any, dict[str, Any]]]
"""Reports what the requests of a tenant used."""
_ANTHROPIC_KEY: Final = "x-api-key"


class OpenAi:
    """All endpoints."""

    def __init__(
        self,
        server: TransportEntry,
        control: ModelControl | None,
        *,
        locks: Mapping[str, Lock],
        max_input_size: int,
        sender_of: Callable[[RequestHead], SenderHeaders],
        batches: BatchApi | None = None,
        usage_of: UsageOf | None = None,
        options: OpenAiOptions | None = None,
        responses: ResponseStore | None = None,
    ) -> None:
        """``sender_of`` reads the headers about the sender from a head.

        A front has no ``control`` and ``usage_of``. ``batches`` answers the endpoints of files and batches, which a
        front relays. ``responses`` keeps responses; a front relays requests for them.
        """
        options = options or OpenAiOptions()
        self._server = server
        self._locks = locks
        self._max_input_size = max_input_size
        self._sender_of = sender_of
        self._control = control
        self._usage_of = usage_of
        self._background_calls = BackgroundCalls(reply_of)
        serving = OpenAiServing(server, options)
        self._models = serving.models
        batches = batches or BatchApi(None)
        stored = ResponseApi(responses)
        self._handlers: Mapping[str, EndpointHandler] = {
            "openai_models": self._list_models,
            "openai_model": self._describe_model,
            "openai_load": self._load,
            "openai_unload": self._unload,
            "load_adapter": partial(self._change_adapter, load=True),
            "unload_adapter": partial(self._change_adapter, load=False),
            "own_usage": self._own_usage,
            "response": partial(stored.answer, items=False),
            "response_items": partial(stored.answer, items=True),
            **TextGeneration(serving, options, stored, max_input_size).handlers,
            **{endpoint: partial(serving.run_task, endpoint) for endpoint in TASKS},
            **{endpoint: partial(batches.answer, endpoint) for endpoint in routes.BATCH_ENDPOINTS},
        }
        """By the names of the endpoints (``http/routes.py``)."""

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a request under ``/v1``."""
        try:
            return HttpTarget(call=self._call(head))
        except NeriteError as error:
            return HttpTarget(refusal=reply_for(head.path)(error))

    def _call(self, head: RequestHead) -> Call:
        """Return the call that answers. Raises ``NeriteError`` if the head alone is reason to reject the request."""
        route = routes.find_route(head.path.partition("?")[0])
        if route is None:
            raise ApiError(f"Unknown request URL: {head.method} {head.path}", None, "unknown_url", 404)
        endpoint = route.endpoint
        if head.method not in endpoint.methods:
            allowed = ", ".join(endpoint.methods)
            raise ApiError(f"Method not allowed for {head.path}: it takes {allowed}", None, "method_not_allowed", 405)
        if self._is_locked(endpoint, head):
            header = self._locks[endpoint.category].header
            raise Restricted(f"This API is restricted, expecting header '{header}' with valid value")
        if head.content_length > self._max_input_size:
            limit = f"the maximum allowed input size of {self._max_input_size} bytes (--http-max-input-size)"
            size = head.content_length
            raise ApiError(f"The body of {size} bytes exceeds {limit}.", None, "content_too_large", 413)
        if head.headers.get("content-encoding", "identity") != "identity":
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        sender = self._sender_of(head)
        answer = self._handlers[endpoint.name]
        arguments = {
            name: checked_name(unquote(value, errors="surrogateescape"), f"the {name} in the path")
            for name, value in route.arguments.items()
        }
        if endpoint.name in routes.QUERIED:
            arguments = {"query": head.query}

        refusal = reply_for(head.path)

        def call(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            try:
                answer(connection, body, sender, **arguments)
            except NotLoaded as absent:
                again = partial(call, connection, head, body)
                refuse = partial(send_error, connection, refusal)
                AwaitedLoad(self._server.waits, connection, absent.without_frames(), sender.caller, again, refuse)
            except NeriteError as error:
                send_error(connection, refusal, error)
            except Exception as error:
                failure = report("openai", error, f"in a request to {quoted_text(head.path)}")
                send_error(connection, refusal, failure)

        return call

    def _is_locked(self, endpoint: routes.Endpoint, head: RequestHead) -> bool:
        """Return whether a request lacks the key of its endpoint, which Anthropic's clients send in another header."""
        if access.key_refusal(self._locks, endpoint.category, head) is None:
            return False
        lock = self._locks[endpoint.category]
        key = head.headers.get(_ANTHROPIC_KEY)
        if endpoint.name not in routes.ANTHROPIC or key is None or lock.header.lower() != "authorization":
            return True
        return not lock.opens(b"Bearer " + header_bytes_of(key))

    def _list_models(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """List the models."""
        connection.send([json_reply({"object": "list", "data": self._models.listed()}).encode()])

    def _describe_model(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, model: str) -> None:
        """Describe a model."""
        connection.send([json_reply(self._models.describe(model)).encode()])

    def _load(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, model: str) -> None:
        """Load a model."""
        assert self._control is not None
        self._control.load(connection, model)

    def _unload(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, model: str) -> None:
        """Unload a model."""
        assert self._control is not None
        self._control.unload(connection, model)

    def _own_usage(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, query: str) -> None:
        """Send what the requests of the sender's tenant used."""
        assert self._usage_of is not None
        asked = UsageQuery.parse(query, time.time(), "" if sender.caller is None else sender.caller.tenant)
        self._background_calls.start(connection, _as_reply(self._usage_of(asked)))

    def _change_adapter(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, *, load: bool) -> None:
        """Load or unload a LoRA adapter."""
        assert self._control is not None
        self._control.change_adapter(connection, body, load=load)


async def _as_reply(document: Coroutine[Any, Any, dict[str, Any]]) -> Reply:
    return json_reply(await document)
