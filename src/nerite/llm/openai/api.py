"""The endpoints under ``/v1``: turn bodies into requests to models, and errors into replies in OpenAI's format."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from nerite.config.mistake import nearest
from nerite.core import tensor as dtypes
from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, NeriteError, NotFound, NotLoaded, Restricted
from nerite.core.failures import report
from nerite.core.request import NOBODY, InferenceRequest, RepeatedRequest, RequestHeader
from nerite.core.signature import Signature
from nerite.core.tensor import TensorSpec
from nerite.core.text import quoted_text
from nerite.ledger.usage import UsageQuery
from nerite.llm.openai import embeddings, large_bodies, sampling, text_model
from nerite.llm.openai.batch_api import BatchApi
from nerite.llm.openai.chat_templates import ChatModel, ChatModels
from nerite.llm.openai.embeddings import Embedding, EmbeddingRequest, Reranking, RerankRequest, rerank_requests
from nerite.llm.openai.exchange import CompletionExchange, CompletionStream, JointWork
from nerite.llm.openai.fields import ApiError, reply_of
from nerite.llm.openai.large_bodies import BodyReader
from nerite.llm.openai.requests import (
    DEFAULT_TOKENS,
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    chat_opening,
    not_taken,
)
from nerite.llm.openai.shapes import ChatShape, CompletionShape
from nerite.llm.openai.text_model import SPECIAL, ModelAddress, ModelRequest, Strings, TextModel
from nerite.llm.openai.tool_calls import ToolParser
from nerite.scheduling.weighted_route import KeySource, WeightedRoute
from nerite.transports import access
from nerite.transports.access import Lock, SenderHeaders
from nerite.transports.http import reply, routes
from nerite.transports.http.awaited_load import AwaitedLoad
from nerite.transports.http.handler import BackgroundCalls
from nerite.transports.http.infer_request import Call, HttpTarget
from nerite.transports.http.reply import json_reply

if TYPE_CHECKING:
    from nerite.core.servable_version import ServableVersion
    from nerite.inference_entry import TransportEntry
    from nerite.server import InferenceServer
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.head import RequestHead
    from nerite.transports.http.reply import Reply


_OWNER: Final = "nerite"

TEXT: Final = "text"
EMBEDDING: Final = "embedding"
RERANKING: Final = "reranking"
_PURPOSES: Final[Mapping[str, tuple[Callable[[Signature], bool], str]]] = {
    TEXT: (text_model.is_text, f"is not a text model: {text_model.NEEDS}"),
    EMBEDDING: (
        text_model.is_embedding,
        f"is not an embedding model: it needs an output '{text_model.EMBEDDING}' (FP32)",
    ),
    RERANKING: (embeddings.is_reranker, f"is not a reranking model: {embeddings.NEEDS}"),
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

    def __init__(self, server: TransportEntry) -> None:
        self._server = server
        self.began = int(time.time())
        """Creation time reported for all models. The real one is unknown, but clients expect a time."""

    def find(self, name: str, call: CallOrigin, purpose: str = TEXT) -> tuple[ServableVersion, ModelAddress]:
        """Return the version that answers a call, and what its requests have to name.

        Raises ``ApiError`` if it is unknown or has another purpose, and the server's error for a model that is not
        ready.
        """
        route = self._server.routes.get(name)
        address = ModelAddress(name)
        try:
            if route is None:
                running = self._server.find(name, "", "")
            else:
                running, model, version, assignment = self._server.assign(call.probe(route))
                if call.requests > 1 and not assignment.cluster:
                    assignment = assignment._replace(cluster=secrets.randbits(62) + 1)
                address = ModelAddress(model, version, assignment)
        except NotFound:
            raise self._unknown(name) from None
        signature = running.signature
        serves, lack = _PURPOSES[purpose]
        if not serves(signature):
            raise ApiError(f"Model '{name}' {lack}.", "model", "model_not_supported")
        return running, address

    def listed(self) -> list[dict[str, Any]]:
        """Return the descriptions of all models that this API serves."""
        found = []
        names = {route.name for route in self._server.routes}
        running = (running.name for running in self._server.running_versions())
        for name in sorted(names.union(running, self._server.loadable)):
            try:
                found.append(self.describe(name))
            except NeriteError:  # another kind of model, or an ambiguous name
                continue
        return found

    def describe(self, name: str) -> dict[str, Any]:
        """Return the description of a model. Raises ``ApiError`` if this API does not serve it."""
        if name in self._server.loadable:
            return describe_model(name, self.began)
        try:
            signature = self._server.signature(name, "")
        except NotFound:
            raise self._unknown(name) from None
        if not _answers(signature):
            raise self._unknown(name)
        return describe_model(name, self.began)

    def _unknown(self, name: str) -> ApiError:
        names = {running.name for running in self._server.running_versions() if _answers(running.signature)}
        return unknown_model(name, sorted(names))


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


class ModelControl:
    """Loads and unloads models on request, as in Triton's OpenAI frontend."""

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


async def _as_reply(document: Coroutine[Any, Any, dict[str, Any]]) -> Reply:
    return json_reply(await document)


UsageOf: TypeAlias = Callable[[UsageQuery], Coroutine[Any, Any, dict[str, Any]]]
"""Reports what the requests of a tenant used."""
PREFIX: Final = "/v1/"


class OpenAi:
    """Handlers of the endpoints. Each method but ``target`` is named for its endpoint (``http/routes.py``)."""

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
    ) -> None:
        """``sender_of`` reads the headers about the sender from a head.

        A front has no ``control`` and ``usage_of``. ``batches`` answers the endpoints of files and batches, which a
        front relays.
        """
        self._server = server
        self._locks = locks
        self._max_input_size = max_input_size
        self._sender_of = sender_of
        self._models = TextModels(server)
        self._control = control
        self._batches = batches or BatchApi(None)
        self._usage_of = usage_of
        self._background_calls = BackgroundCalls(reply_of)
        self._chats = ChatModels(server)

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a request under ``/v1``."""
        try:
            return HttpTarget(call=self._call(head))
        except NeriteError as error:
            return HttpTarget(refusal=reply_of(error))

    def _call(self, head: RequestHead) -> Call:
        """Return the call that answers. Raises ``NeriteError`` if the head alone is reason to reject the request."""
        route = routes.find_route(head.path.partition("?")[0])
        if route is None:
            raise ApiError(f"Unknown request URL: {head.method} {head.path}", None, "unknown_url", 404)
        endpoint = route.endpoint
        if head.method not in endpoint.methods:
            allowed = ", ".join(endpoint.methods)
            raise ApiError(f"Method not allowed for {head.path}: it takes {allowed}", None, "method_not_allowed", 405)
        if access.key_refusal(self._locks, endpoint.category, head) is not None:
            header = self._locks[endpoint.category].header
            raise Restricted(f"This API is restricted, expecting header '{header}' with valid value")
        if head.content_length > self._max_input_size:
            limit = f"the maximum allowed input size of {self._max_input_size} bytes (--http-max-input-size)"
            size = head.content_length
            raise ApiError(f"The body of {size} bytes exceeds {limit}.", None, "content_too_large", 413)
        if head.headers.get("content-encoding", "identity") != "identity":
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        sender = self._sender_of(head)
        of_batches = endpoint.name in routes.BATCH_ENDPOINTS
        answer = partial(self._batches.answer, endpoint.name, head) if of_batches else getattr(self, endpoint.name)
        arguments = {
            name: checked(unquote(value, errors="surrogateescape"), f"the {name} in the path")
            for name, value in route.arguments.items()
        }
        if endpoint.name in routes.QUERIED:
            arguments = {"query": head.query}

        def call(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            try:
                answer(connection, body, sender, **arguments)
            except NotLoaded as absent:
                again = partial(call, connection, head, body)
                refuse = partial(_send_error, connection)
                AwaitedLoad(self._server.waits, connection, absent.without_frames(), sender.caller, again, refuse)
            except NeriteError as error:
                _send_error(connection, error)
            except Exception as error:
                failure = report("openai", error, f"in a request to {quoted_text(head.path)}")
                connection.send([reply_of(failure).encode()])

        return call

    def openai_models(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """List the models."""
        connection.send([reply.json_reply({"object": "list", "data": self._models.listed()}).encode()])

    def openai_model(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, model: str) -> None:
        """Describe a model."""
        connection.send([reply.json_reply(self._models.describe(model)).encode()])

    def openai_load(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, model: str) -> None:
        """Load a model."""
        assert self._control is not None
        self._control.load(connection, model)

    def openai_unload(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, model: str) -> None:
        """Unload a model."""
        assert self._control is not None
        self._control.unload(connection, model)

    def own_usage(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, query: str) -> None:
        """Send what the requests of the sender's tenant used."""
        assert self._usage_of is not None
        asked = UsageQuery.parse(query, time.time(), "" if sender.caller is None else sender.caller.tenant)
        self._background_calls.start(connection, _as_reply(self._usage_of(asked)))

    def completions(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Complete a prompt."""
        self._read(connection, body, large_bodies.COMPLETION, partial(self._complete, connection, sender))

    def _complete(self, connection: HttpExchange, sender: SenderHeaders, asked: CompletionRequest) -> None:
        wanted = asked.wanted
        call = CallOrigin(sender, wanted.user, lambda _: bytes(asked.prompts[0]), len(asked.prompts) * wanted.n)
        running, address = self._models.find(wanted.model, call)
        model = TextModel(wanted.model, running.signature, address)
        _check(model, wanted)
        if not running.generates:  # engines have the same default, and a policy may allow fewer
            wanted.sampling.setdefault("max_tokens", DEFAULT_TOKENS)
        requests = self._asked(model, wanted, asked.prompts, sender, special=wanted.special is not False)
        made = f"cmpl-{secrets.token_hex(16)}"
        shape = CompletionShape(made, int(time.time()), wanted.model, usage=wanted.usage, top=wanted.logprobs)
        echoes = [bytes(prompt).decode() if asked.echo else "" for prompt in asked.prompts]
        streams = []
        for number in range(len(requests)):
            stream = _stream(number, number // wanted.n, wanted)
            stream.finished.echo = echoes[stream.prompt]
            streams.append(stream)
        exchange = CompletionExchange(connection, shape, streams, events=wanted.stream, usage=wanted.usage)
        exchange.fields = sampling.fields_of(wanted.sampling, "prompt")
        self._begin(exchange, made, requests, sender, wanted.n)

    def chat_completions(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Complete a chat."""
        self._read(connection, body, large_bodies.CHAT, partial(self._chat, connection, sender))

    def _chat(self, connection: HttpExchange, sender: SenderHeaders, asked: ChatRequest) -> None:
        call = CallOrigin(sender, asked.wanted.user, partial(chat_opening, asked.given), asked.wanted.n)
        running, address = self._models.find(asked.wanted.model, call)
        model = TextModel(asked.wanted.model, running.signature, address)
        _check(model, asked.wanted)
        if asked.images and not model.takes_images:
            raise not_taken(asked.first_image)
        chat = self._chats.of(running)
        template = chat.template(asked)
        prompt = template.render_briefly(asked.given) if isinstance(asked.given, dict) else None
        then = partial(self._complete_chat, connection, sender, asked, model, chat)
        if prompt is not None:
            then(prompt.encode("utf-8", "surrogatepass"))
            return
        arguments = [template.source, template.origin, dict(template.words), large_bodies.as_json(asked.given)]
        large_bodies.PromptHelper(
            self._server.helpers, connection, large_bodies.render, arguments, then, "rendering the chat template"
        )

    def _complete_chat(
        self,
        connection: HttpExchange,
        sender: SenderHeaders,
        asked: ChatRequest,
        model: TextModel,
        chat: ChatModel,
        prompt: bytes | memoryview,
    ) -> None:
        """Complete the rendered prompt of a chat."""
        wanted = asked.wanted
        if model.takes_sampling:
            chat.prepare(asked, wanted.sampling)
        made = f"chatcmpl-{secrets.token_hex(16)}"
        shape = ChatShape(made, int(time.time()), wanted.model, usage=wanted.usage, top=wanted.logprobs)
        streams = [_stream(number, 0, wanted, chat.parser(asked)) for number in range(wanted.n)]
        exchange = CompletionExchange(connection, shape, streams, events=wanted.stream, usage=wanted.usage)
        exchange.fields = sampling.fields_of(wanted.sampling, "messages")
        special = chat.adds_special if wanted.special is None else wanted.special
        requests = self._asked(model, wanted, [prompt], sender, asked.images, special=special)
        self._begin(exchange, made, requests, sender, wanted.n)

    def embeddings(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Turn texts into vectors."""
        self._read(connection, body, large_bodies.EMBEDDING, partial(self._embed, connection, sender))

    def _embed(self, connection: HttpExchange, sender: SenderHeaders, asked: EmbeddingRequest) -> None:
        call = CallOrigin(sender, asked.user, lambda _: bytes(asked.texts[0]), len(asked.texts))
        running, address = self._models.find(asked.model, call, EMBEDDING)
        model = TextModel(asked.model, running.signature, address)
        header, (_, *rest) = model.ask(Strings(asked.texts[:1]), {}, sender)
        # One header for all requests, which is validated and sent to the worker once.
        requests = [ModelRequest(header, [Strings([text]).data, *rest]) for text in asked.texts]
        self._begin(Embedding(connection, asked), f"embd-{secrets.token_hex(16)}", requests, sender)

    def rerank(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Rank documents by how well they answer a query."""
        self._read(connection, body, large_bodies.RERANKING, partial(self._rerank, connection, sender))

    def _rerank(self, connection: HttpExchange, sender: SenderHeaders, asked: RerankRequest) -> None:
        call = CallOrigin(sender, asked.user, lambda _: bytes(asked.query))
        running, address = self._models.find(asked.model, call, RERANKING)
        made = f"rerank-{secrets.token_hex(16)}"
        work = Reranking(connection, made, asked)
        self._begin(work, made, [rerank_requests(asked, running.signature, sender, address)], sender)

    def _read(
        self, connection: HttpExchange, body: memoryview, reader: BodyReader, then: Callable[[Any], None]
    ) -> None:
        """Parse a body, in a helper process if it is large, and call ``then`` with the result."""
        if len(body) < large_bodies.LARGE:
            then(reader.here(body))
            return

        def read(*parsed: Any) -> None:
            try:
                reader.resume(then, *parsed)
            except NotLoaded as absent:
                again = partial(_again, connection, partial(reader.resume, then, *parsed))
                refuse = partial(_send_error, connection)
                AwaitedLoad(self._server.waits, connection, absent.without_frames(), None, again, refuse)

        large_bodies.PromptHelper(self._server.helpers, connection, reader.there, [body], read, "reading the body")

    def _asked(
        self,
        model: TextModel,
        wanted: CompletionFields,
        prompts: Sequence[bytes | memoryview],
        sender: SenderHeaders,
        images: Sequence[bytes | memoryview] = (),
        *,
        special: bool,
    ) -> list[ModelRequest]:
        """Return the requests to the model: ``n`` for each prompt."""
        if wanted.n > 1:
            size = wanted.n * sum(map(len, (*prompts, *images, sampling.written(wanted.sampling))))
            if size > self._max_input_size:
                limit = f"the maximum allowed input size of {self._max_input_size} bytes (--http-max-input-size)"
                raise ApiError(f"All choices together have {size} bytes, which exceeds {limit}.", "n", "invalid_value")
        seen = Strings(images) if images else None
        asked: list[ModelRequest] = []
        for prompt in map(Strings, ([each] for each in prompts)):
            for index in range(wanted.n):
                settings = sampling.for_choice(wanted.sampling, index)
                if index and settings is wanted.sampling:
                    asked.append(asked[-1])
                    continue
                asked.append(
                    model.ask(
                        prompt,
                        settings,
                        sender,
                        stream=wanted.stream,
                        logprobs=wanted.logprobs >= 0,
                        special=special,
                        images=seen,
                        priority=wanted.priority,
                    )
                )
        return asked

    def _begin(
        self, work: JointWork, name: str, asked: Sequence[ModelRequest], sender: SenderHeaders, answers: int = 1
    ) -> None:
        """Submit all requests, of which consecutive groups of ``answers`` have the same prompt."""
        key = sender.idempotency_key
        if key is not None:
            parts = [key._replace(part=part, parts=len(asked)) for part in range(len(asked))]
            asked = [
                ModelRequest(header.changed(idempotency_key=part), data)
                for (header, data), part in zip(asked, parts, strict=True)
            ]
        now = time.monotonic_ns()
        names = [name] if len(asked) == 1 else [f"{name}-{number}" for number in range(len(asked))]
        requests = [
            (RepeatedRequest if number % answers else InferenceRequest)(header, data, work, now, each)
            for number, ((header, data), each) in enumerate(zip(asked, names, strict=True))
        ]
        # Validate all headers before submitting the first request.
        for request in requests:
            self._server.version_of(request)
        work.begin(requests, self._submit)

    def _submit(self, request: InferenceRequest) -> None:
        self._server.version_of(request).submit(request)


def _again(connection: HttpExchange, answer: Callable[[], None]) -> None:
    """Answer a request that has waited for its model."""
    try:
        answer()
    except NeriteError as error:
        _send_error(connection, error)
    except Exception as error:
        _send_error(connection, report("openai", error, "in a large request"))


def _send_error(connection: HttpExchange, error: NeriteError) -> None:
    connection.send([reply_of(error).encode()])


def _stream(index: int, prompt: int, wanted: CompletionFields, parser: ToolParser | None = None) -> CompletionStream:
    stream = CompletionStream(index, prompt, parser)
    if wanted.logprobs >= 0:
        stream.finished.tokens = []
    return stream


def _check(model: TextModel, wanted: CompletionFields) -> None:
    """Reject fields that the model has no input or output for."""
    if wanted.logprobs >= 0 and not model.gives_logprobs:
        raise sampling.not_offered("logprobs", f"model '{model.name}' does not report log probabilities.")
    if wanted.special is not None and not model.takes_special:
        raise sampling.not_offered(SPECIAL, f"model '{model.name}' has no input '{SPECIAL}' to pass it to the model")
