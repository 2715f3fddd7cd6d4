"""The endpoints under ``/v1``: bodies to requests of models, and what goes wrong to replies in OpenAI's shape."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, NeriteError, Restricted
from nerite.core.internal_errors import report
from nerite.core.request import InferenceRequest, RepeatedRequest
from nerite.core.text import shown
from nerite.transports.callers import Sender
from nerite.transports.http import access, reply, routes
from nerite.transports.http.target import Call, Target
from nerite.transports.keys import Lock
from nerite.transports.openai import (
    beside,
    completion_request,
    reranking,
    sampling,
    text_models,
)
from nerite.transports.openai.beside import Reader
from nerite.transports.openai.chat_models import ChatModel, ChatModels
from nerite.transports.openai.chat_request import ChatRequest
from nerite.transports.openai.completion_request import CompletionRequest, Wanted
from nerite.transports.openai.embeddings import Embedding, EmbeddingRequest
from nerite.transports.openai.errors import ApiError, reply_of
from nerite.transports.openai.exchange import Exchange, Stream
from nerite.transports.openai.joint_work import JointWork
from nerite.transports.openai.messages import not_taken
from nerite.transports.openai.model_control import ModelControl
from nerite.transports.openai.reranking import RerankRequest
from nerite.transports.openai.shapes import ChatShape, CompletionShape
from nerite.transports.openai.text_model import SPECIAL, Asked, Strings, TextModel
from nerite.transports.openai.text_models import TextModels
from nerite.transports.openai.tools.parser import ToolParser

if TYPE_CHECKING:
    from nerite.server import InferenceServer
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.head import RequestHead

PREFIX: Final = "/v1/"


class OpenAi:
    """Each method but ``target`` is named for its endpoint (``http/routes.py``), and sees to one reply."""

    def __init__(
        self,
        server: InferenceServer,
        *,
        locks: Mapping[str, Lock],
        max_input_size: int,
        sender_of: Callable[[RequestHead], Sender],
    ) -> None:
        """``sender_of`` has what a head says beside what is asked."""
        self._server = server
        self._locks = locks
        self._max_input_size = max_input_size
        self._sender_of = sender_of
        self._models = TextModels(server)
        self._control = ModelControl(server, self._models)
        self._chats = ChatModels(server)

    def target(self, head: RequestHead) -> Target:
        """Return what a head under ``/v1`` asks for."""
        try:
            return Target(call=self._call(head))
        except NeriteError as error:
            return Target(refusal=reply_of(error))

    def _call(self, head: RequestHead) -> Call:
        """Return what answers. Raises ``NeriteError`` for what can be refused without looking at the body."""
        route = routes.find(head.path.partition("?")[0])
        if route is None:
            asked = f"{head.method} {head.path}"
            raise ApiError(f"Unknown request URL: {asked}", None, "unknown_url", 404)
        endpoint = route.endpoint
        if head.method not in endpoint.methods:
            allowed = ", ".join(endpoint.methods)
            raise ApiError(f"Not allowed method for {head.path}: it takes {allowed}", None, "method_not_allowed", 405)
        if access.refusal(self._locks, endpoint.category, head) is not None:
            header = self._locks[endpoint.category].header
            raise Restricted(f"This API is restricted, expecting header '{header}' with valid value")
        if head.content_length > self._max_input_size:
            limit = f"the maximum allowed input size of {self._max_input_size} bytes (--http-max-input-size)"
            size = head.content_length
            raise ApiError(f"The body of {size} bytes exceeds {limit}.", None, "content_too_large", 413)
        if head.headers.get("content-encoding", "identity") != "identity":
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        sender = self._sender_of(head)
        answer = getattr(self, endpoint.name)
        arguments = {
            name: checked(unquote(value, errors="surrogateescape"), f"the {name} in the path")
            for name, value in route.arguments.items()
        }

        def call(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            try:
                answer(connection, body, sender, **arguments)
            except NeriteError as error:
                connection.send([reply_of(error).encode()])
            except Exception as error:
                failure = report("openai", error, f"in a request to {shown(head.path)}")
                connection.send([reply_of(failure).encode()])

        return call

    def openai_models(self, connection: HttpExchange, body: memoryview, sender: Sender) -> None:
        """List the models."""
        connection.send([reply.json_reply({"object": "list", "data": self._models.listed()}).encode()])

    def openai_model(self, connection: HttpExchange, body: memoryview, sender: Sender, model: str) -> None:
        """Tell of a model."""
        connection.send([reply.json_reply(self._models.told(model)).encode()])

    def openai_load(self, connection: HttpExchange, body: memoryview, sender: Sender, model: str) -> None:
        """Load a model."""
        self._control.load(connection, model)

    def openai_unload(self, connection: HttpExchange, body: memoryview, sender: Sender, model: str) -> None:
        """Unload a model."""
        self._control.unload(connection, model)

    def completions(self, connection: HttpExchange, body: memoryview, sender: Sender) -> None:
        """Go on with a text."""
        self._read(connection, body, beside.COMPLETION, partial(self._complete, connection, sender))

    def _complete(self, connection: HttpExchange, sender: Sender, asked: CompletionRequest) -> None:
        wanted = asked.wanted
        running = self._models.find(wanted.model)
        model = TextModel(wanted.model, running.signature)
        _check(model, wanted)
        if not running.generates:  # engines have as many by themselves, and a policy may allow fewer
            wanted.sampling.setdefault("max_tokens", completion_request.DEFAULT_TOKENS)
        requests = self._asked(model, wanted, asked.prompts, sender, special=wanted.special is not False)
        made = f"cmpl-{secrets.token_hex(16)}"
        shape = CompletionShape(made, int(time.time()), wanted.model, usage=wanted.usage, top=wanted.logprobs)
        echoes = [bytes(prompt).decode() if asked.echo else "" for prompt in asked.prompts]
        streams = []
        for number in range(len(requests)):
            stream = _stream(number, number // wanted.n, wanted)
            stream.finished.echo = echoes[stream.prompt]
            streams.append(stream)
        exchange = Exchange(connection, shape, streams, events=wanted.stream, usage=wanted.usage)
        exchange.fields = sampling.fields_of(wanted.sampling, "prompt")
        self._begin(exchange, made, requests, sender, wanted.n)

    def chat_completions(self, connection: HttpExchange, body: memoryview, sender: Sender) -> None:
        """Go on with a conversation."""
        self._read(connection, body, beside.CHAT, partial(self._chat, connection, sender))

    def _chat(self, connection: HttpExchange, sender: Sender, asked: ChatRequest) -> None:
        running = self._models.find(asked.wanted.model)
        model = TextModel(asked.wanted.model, running.signature)
        _check(model, asked.wanted)
        if asked.images and not model.takes_images:
            raise not_taken(asked.first_image)
        chat = self._chats.of(running)
        template = chat.template(asked)
        prompt = template.render_briefly(asked.given) if isinstance(asked.given, dict) else None
        then = partial(self._converse, connection, sender, asked, model, chat)
        if prompt is not None:
            then(prompt.encode("utf-8", "surrogatepass"))
            return
        arguments = [template.source, template.origin, dict(template.words), beside.as_json(asked.given)]
        beside.Beside(self._server.helpers, connection, beside.render, arguments, then, "rendering the chat template")

    def _converse(
        self,
        connection: HttpExchange,
        sender: Sender,
        asked: ChatRequest,
        model: TextModel,
        chat: ChatModel,
        prompt: bytes | memoryview,
    ) -> None:
        """Go on with the prompt that a conversation is."""
        wanted = asked.wanted
        if model.takes_sampling:
            chat.prepare(asked, wanted.sampling)
        made = f"chatcmpl-{secrets.token_hex(16)}"
        shape = ChatShape(made, int(time.time()), wanted.model, usage=wanted.usage, top=wanted.logprobs)
        streams = [_stream(number, 0, wanted, chat.parser(asked)) for number in range(wanted.n)]
        exchange = Exchange(connection, shape, streams, events=wanted.stream, usage=wanted.usage)
        exchange.fields = sampling.fields_of(wanted.sampling, "messages")
        special = chat.adds_special if wanted.special is None else wanted.special
        requests = self._asked(model, wanted, [prompt], sender, asked.images, special=special)
        self._begin(exchange, made, requests, sender, wanted.n)

    def embeddings(self, connection: HttpExchange, body: memoryview, sender: Sender) -> None:
        """Turn texts into vectors."""
        self._read(connection, body, beside.EMBEDDING, partial(self._embed, connection, sender))

    def _embed(self, connection: HttpExchange, sender: Sender, asked: EmbeddingRequest) -> None:
        model = TextModel(asked.model, self._models.find(asked.model, text_models.EMBEDDING).signature)
        header, (_, *rest) = model.ask(Strings(asked.texts[:1]), {}, sender)
        # One header for all, which is checked, and crosses to the worker, once.
        requests = [Asked(header, [Strings([text]).data, *rest]) for text in asked.texts]
        self._begin(Embedding(connection, asked), f"embd-{secrets.token_hex(16)}", requests, sender)

    def rerank(self, connection: HttpExchange, body: memoryview, sender: Sender) -> None:
        """Say which texts answer a query best."""
        self._read(connection, body, beside.RERANKING, partial(self._rerank, connection, sender))

    def _rerank(self, connection: HttpExchange, sender: Sender, asked: RerankRequest) -> None:
        signature = self._models.find(asked.model, text_models.RERANKING).signature
        made = f"rerank-{secrets.token_hex(16)}"
        work = reranking.Reranking(connection, made, asked)
        self._begin(work, made, [reranking.ask(asked, signature, sender)], sender)

    def _read(self, connection: HttpExchange, body: memoryview, reader: Reader, then: Callable[[Any], None]) -> None:
        """Read a body, or have it read elsewhere if it is large, and go on with what it says."""
        if len(body) < beside.LARGE:
            then(reader.here(body))
            return
        read = partial(reader.told, then)
        beside.Beside(self._server.helpers, connection, reader.there, [body], read, "reading the body")

    def _asked(
        self,
        model: TextModel,
        wanted: Wanted,
        prompts: Sequence[bytes | memoryview],
        sender: Sender,
        images: Sequence[bytes | memoryview] = (),
        *,
        special: bool,
    ) -> list[Asked]:
        """Return what a model is asked: ``n`` times the same for each prompt."""
        if wanted.n > 1:
            size = wanted.n * sum(map(len, (*prompts, *images, sampling.written(wanted.sampling))))
            if size > self._max_input_size:
                limit = f"the maximum allowed input size of {self._max_input_size} bytes (--http-max-input-size)"
                raise ApiError(f"All choices together have {size} bytes, which exceeds {limit}.", "n", "invalid_value")
        seen = Strings(images) if images else None
        asked: list[Asked] = []
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

    def _begin(self, work: JointWork, name: str, asked: Sequence[Asked], sender: Sender, answers: int = 1) -> None:
        """Ask the model all of it: so many ``answers`` to each prompt, one after the other."""
        key = sender.idempotency_key
        if key is not None:
            parts = [key._replace(part=part, parts=len(asked)) for part in range(len(asked))]
            asked = [
                Asked(header.changed(idempotency_key=part), data)
                for (header, data), part in zip(asked, parts, strict=True)
            ]
        now = time.monotonic_ns()
        names = [name] if len(asked) == 1 else [f"{name}-{number}" for number in range(len(asked))]
        requests = [
            (RepeatedRequest if number % answers else InferenceRequest)(header, data, work, now, each)
            for number, ((header, data), each) in enumerate(zip(asked, names, strict=True))
        ]
        # All headers are checked before the first is asked.
        for request in requests:
            self._server.version_of(request)
        work.begin(requests, self._submit)

    def _submit(self, request: InferenceRequest) -> None:
        self._server.version_of(request).submit(request)


def _stream(index: int, prompt: int, wanted: Wanted, parser: ToolParser | None = None) -> Stream:
    stream = Stream(index, prompt, parser)
    if wanted.logprobs >= 0:
        stream.finished.tokens = []
    return stream


def _check(model: TextModel, wanted: Wanted) -> None:
    """Refuse what the model has no output for."""
    if wanted.logprobs >= 0 and not model.gives_logprobs:
        raise sampling.not_offered("logprobs", f"model '{model.name}' does not say how likely its tokens are.")
    if wanted.special is not None and not model.takes_special:
        raise sampling.not_offered(SPECIAL, f"model '{model.name}' has no input '{SPECIAL}', by which it could be told")
