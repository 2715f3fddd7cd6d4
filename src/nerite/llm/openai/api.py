"""The endpoints under ``/v1``: turn bodies into requests to models, and errors into replies in OpenAI's format."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

from nerite.config.options import OpenAiOptions
from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, NeriteError, NotLoaded, Restricted
from nerite.core.failures import report
from nerite.core.request import InferenceRequest, RepeatedRequest
from nerite.core.text import quoted_text
from nerite.ledger.usage import UsageQuery
from nerite.llm.openai import anthropic, large_bodies, sampling
from nerite.llm.openai.batch_api import BatchApi
from nerite.llm.openai.body_reading import read_body, send_error
from nerite.llm.openai.chat_templates import ChatModel, ChatModels
from nerite.llm.openai.checkpoint_settings import CheckpointSettingsCache
from nerite.llm.openai.embeddings import (
    Embedding,
    EmbeddingRequest,
    Reranking,
    RerankRequest,
    ScoreRequest,
    Scoring,
    rerank_requests,
)
from nerite.llm.openai.exchange import CompletionExchange, CompletionStream, JointWork
from nerite.llm.openai.fields import ApiError, UnknownField, reply_of
from nerite.llm.openai.further_endpoints import FurtherEndpoints
from nerite.llm.openai.requests import (
    DEFAULT_TOKENS,
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    chat_opening,
    not_taken,
)
from nerite.llm.openai.response_api import ResponseApi
from nerite.llm.openai.response_shape import ResponseShape
from nerite.llm.openai.response_store import ResponseStore
from nerite.llm.openai.responses import ResponseCall
from nerite.llm.openai.served_models import EMBEDDING, RERANKING, CallOrigin, ModelControl, TextModels
from nerite.llm.openai.shapes import ChatShape, ChunkShape, CompletionShape, Shape
from nerite.llm.openai.text_model import SPECIAL, ModelRequest, Strings, TextModel, TokenIds
from nerite.llm.openai.tokens import TextShape, TokensShape
from nerite.llm.openai.tool_calls import ToolParser
from nerite.transports import access
from nerite.transports.access import Lock, SenderHeaders
from nerite.transports.http import reply, routes
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

_log = logging.getLogger("nerite.http")
_MAX_TOLD: Final = 256
"""Number of unknown fields that are logged."""


async def _as_reply(document: Coroutine[Any, Any, dict[str, Any]]) -> Reply:
    return json_reply(await document)


UsageOf: TypeAlias = Callable[[UsageQuery], Coroutine[Any, Any, dict[str, Any]]]
"""Reports what the requests of a tenant used."""
PREFIX: Final = "/v1/"
ShapeOf: TypeAlias = Callable[[ChatRequest], Shape]
"""Returns the shape of the reply to a chat."""


_ANTHROPIC_KEY: Final = "x-api-key"
_MESSAGES: Final = "/v1/messages"


def refusal_for(path: str) -> Callable[[NeriteError], Reply]:
    """Return what makes the replies for errors of a path: in Anthropic's format for its API, otherwise in OpenAI's."""
    return anthropic.refusal_of if path.startswith(_MESSAGES) else reply_of


def _shape(kind: type[ChunkShape], prefix: str, asked: ChatRequest | CompletionRequest) -> ChunkShape:
    """Return the shape of a reply to ``asked``, whose id begins with ``prefix``."""
    wanted = asked.wanted
    return kind(
        *(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), wanted.model),
        usage=wanted.usage,
        top=wanted.logprobs,
        running_usage=wanted.running_usage,
    )


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
        options: OpenAiOptions | None = None,
        responses: ResponseStore | None = None,
    ) -> None:
        """``sender_of`` reads the headers about the sender from a head.

        A front has no ``control`` and ``usage_of``. ``batches`` answers the endpoints of files and batches, which a
        front relays. ``responses`` keeps responses; a front relays requests for them.
        """
        self._server = server
        self._locks = locks
        self._max_input_size = max_input_size
        self._sender_of = sender_of
        options = options or OpenAiOptions()
        self._strict = options.strict
        self._told: set[UnknownField] = set()
        """Unknown fields that were logged."""
        self._models = TextModels(server, options.aliases)
        self._settings = CheckpointSettingsCache(server, defaults=options.generation_config == "auto")
        self._control = control
        self._batches = batches or BatchApi(None)
        self._usage_of = usage_of
        self._background_calls = BackgroundCalls(reply_of)
        self._chats = ChatModels(server)
        self._responses = ResponseApi(responses)
        self._read = partial(read_body, server)
        self._further = FurtherEndpoints(self._models, control, self._read, self._begin, self._pass_over).handlers

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a request under ``/v1``."""
        try:
            return HttpTarget(call=self._call(head))
        except NeriteError as error:
            return HttpTarget(refusal=refusal_for(head.path)(error))

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
        of_batches = endpoint.name in routes.BATCH_ENDPOINTS
        answer = partial(self._batches.answer, endpoint.name, head) if of_batches else self._handler(endpoint.name)
        arguments = {
            name: checked(unquote(value, errors="surrogateescape"), f"the {name} in the path")
            for name, value in route.arguments.items()
        }
        if endpoint.name in routes.QUERIED:
            arguments = {"query": head.query}

        refusal = refusal_for(head.path)

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

    def _handler(self, endpoint: str) -> Callable[..., None]:
        handler: Callable[..., None] = self._further.get(endpoint) or getattr(self, endpoint)
        return handler

    def _is_locked(self, endpoint: routes.Endpoint, head: RequestHead) -> bool:
        """Return whether a request lacks the key of its endpoint, which Anthropic's clients send in another header."""
        if access.key_refusal(self._locks, endpoint.category, head) is None:
            return False
        lock = self._locks[endpoint.category]
        key = head.headers.get(_ANTHROPIC_KEY)
        if endpoint.name not in routes.ANTHROPIC or key is None or lock.header.lower() != "authorization":
            return True
        return not lock.opens(b"Bearer " + header_bytes_of(key))

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
        then = partial(self._complete, connection, sender, CompletionShape)
        self._read(connection, body, large_bodies.COMPLETION, then)

    def tokenize(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Return the tokens of a prompt or of a chat."""

        def then(asked: CompletionRequest | ChatRequest) -> None:
            if isinstance(asked, ChatRequest):
                self._chat(connection, sender, partial(_shape, TokensShape, "tokens"), asked)
            else:
                self._complete(connection, sender, TokensShape, asked)

        self._read(connection, body, large_bodies.TOKENIZE, then)

    def detokenize(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Return the text of tokens."""
        self._read(connection, body, large_bodies.DETOKENIZE, partial(self._complete, connection, sender, TextShape))

    def responses(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Continue a conversation with the Responses API, whose beginning may be kept here."""
        kept = self._responses

        def then(asked: ResponseCall | str) -> None:
            if isinstance(asked, str):
                kept.find(connection, sender, asked, partial(self._continue, connection, sender, whole))
            else:
                self._respond(connection, sender, asked)

        # The body is read again behind the look into the database, when the buffer of the connection is another's.
        whole = bytes(body) if kept.keeps else b""
        self._read(connection, body, large_bodies.RESPONSE, then)

    def _continue(self, connection: HttpExchange, sender: SenderHeaders, body: bytes, earlier: bytes) -> None:
        """Respond in a conversation that was kept."""
        then = partial(self._respond, connection, sender)
        self._read(connection, memoryview(body), large_bodies.RESPONSE, then, more=[earlier])

    def _respond(self, connection: HttpExchange, sender: SenderHeaders, asked: ResponseCall) -> None:
        store = asked.store and self._responses.keeps

        def keep(response: Mapping[str, Any]) -> None:
            if store:
                self._responses.save(sender, asked.items, response)

        def shape_of(chat: ChatRequest) -> Shape:
            return ResponseShape(
                *(int(time.time()), chat.wanted.model, asked.echo),
                store=store,
                keep=keep,
                sealed=asked.sealed,
                kinds=asked.kinds,
            )

        self._chat(connection, sender, shape_of, asked.chat)

    def response(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, response: str) -> None:
        """Return or delete a response that is kept."""
        self._responses.answer(connection, sender, response, items=False)

    def response_items(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders, response: str) -> None:
        """Return the conversation before a response that is kept."""
        self._responses.answer(connection, sender, response, items=True)

    def messages(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Continue a conversation in Anthropic's format."""

        def shape_of(asked: ChatRequest) -> Shape:
            return anthropic.MessagesShape(asked.wanted.model)

        then = partial(self._chat, connection, sender, shape_of)
        self._read(connection, body, large_bodies.MESSAGES, then, anthropic.refusal_of)

    def count_tokens(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Return the number of tokens of a conversation in Anthropic's format."""

        def shape_of(asked: ChatRequest) -> Shape:
            return anthropic.CountShape(asked.wanted.model)

        then = partial(self._chat, connection, sender, shape_of)
        self._read(connection, body, large_bodies.COUNT, then, anthropic.refusal_of)

    def _complete(
        self,
        connection: HttpExchange,
        sender: SenderHeaders,
        kind: type[CompletionShape],
        asked: CompletionRequest,
    ) -> None:
        wanted = asked.wanted
        self._pass_over(wanted.unknown)
        call = CallOrigin(sender, wanted.user, lambda _: bytes(asked.prompts[0]), len(asked.prompts) * wanted.n)
        running, address = self._models.find(wanted.model, call)
        model = TextModel(wanted.model, running.signature, address)
        _check(model, wanted)
        if asked.tokens and not model.takes_tokens:
            raise sampling.not_offered("prompt", f"model '{model.name}' takes text only, and no token ids.")
        settings = self._settings.of(running)
        if model.takes_sampling:
            settings.complete(wanted.sampling)
        if not running.generates:  # engines have the same default, and a policy may allow fewer
            wanted.sampling.setdefault("max_tokens", DEFAULT_TOKENS)
        prompts: Sequence[bytes | memoryview] = asked.prompts
        if asked.suffix:
            if settings.gap is None:
                raise sampling.not_offered("suffix", f"the tokenizer of model '{model.name}' has no tokens for a gap.")
            prompts = [settings.gap.prompt(bytes(each), bytes(asked.suffix)) for each in prompts]
        returned = self._returned(model, asked)
        requests = self._asked(
            *(model, wanted, prompts, sender),
            special=wanted.special is not False,
            tokens=asked.tokens,
            returned=returned,
            echo=asked.echo and asked.tokens,
        )
        shape = _shape(kind, "cmpl", asked)
        echoes = [bytes(prompt).decode() if asked.echo and not asked.tokens else "" for prompt in prompts]
        streams = []
        for number in range(len(requests)):
            stream = _stream(number, number // wanted.n, wanted)
            stream.finished.echo = echoes[stream.prompt]
            streams.append(stream)
        kept = asked.kept if asked.kept < wanted.n else 0
        exchange = CompletionExchange(connection, shape, streams, events=wanted.stream, kept=kept)
        exchange.fields = sampling.fields_of(wanted.sampling, "prompt")
        self._begin(exchange, shape.id, requests, sender, wanted.n)

    @staticmethod
    def _returned(model: TextModel, asked: CompletionRequest) -> list[str]:
        """Return the outputs that a completion needs beside its text. Raises ``ApiError`` for what there is not."""
        wanted, returned = asked.wanted, []
        if asked.kept < wanted.n and wanted.logprobs < 0:
            if not model.gives_logprobs:
                raise sampling.not_offered("best_of", f"model '{model.name}' does not report log probabilities.")
            wanted.sampling["logprobs"] = sampling.SamplingSetting(0, "best_of")
            returned.append("logprobs")
        if not asked.echo:
            return returned
        if wanted.stream and (asked.tokens or wanted.logprobs >= 0):
            raise ApiError(
                "'echo' with 'logprobs' or token ids cannot be combined with 'stream'", "echo", "invalid_parameter"
            )
        if wanted.logprobs >= 0:
            if not model.gives_prompt_logprobs:
                raise sampling.not_offered("echo", f"model '{model.name}' does not report 'logprobs' of a prompt.")
            wanted.sampling["prompt_logprobs"] = sampling.SamplingSetting(wanted.logprobs, "logprobs")
            returned.append("prompt_logprobs")
        return returned

    def chat_completions(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Complete a chat."""
        shape_of = partial(_shape, ChatShape, "chatcmpl")
        self._read(connection, body, large_bodies.CHAT, partial(self._chat, connection, sender, shape_of))

    def _chat(self, connection: HttpExchange, sender: SenderHeaders, shape_of: ShapeOf, asked: ChatRequest) -> None:
        """Complete a chat whose reply has the shape that ``shape_of`` returns."""
        self._pass_over(asked.wanted.unknown)
        shape = shape_of(asked)
        call = CallOrigin(sender, asked.wanted.user, partial(chat_opening, asked.given), asked.wanted.n)
        running, address = self._models.find(asked.wanted.model, call)
        model = TextModel(asked.wanted.model, running.signature, address)
        _check(model, asked.wanted)
        if asked.images and not model.takes_images:
            raise not_taken(asked.first_image)
        if model.takes_sampling:
            self._settings.of(running).complete(asked.wanted.sampling)
        chat = self._chats.of(running)
        template = chat.template(asked)
        prompt = template.render_briefly(asked.given) if isinstance(asked.given, dict) else None
        then = partial(self._complete_chat, connection, sender, asked, model, chat, shape)
        if prompt is not None:
            then(prompt.encode("utf-8", "surrogatepass"))
            return
        arguments = [template.source, template.origin, dict(template.words), large_bodies.as_json(asked.given)]
        large_bodies.PromptHelper(
            *(self._server.helpers, connection, large_bodies.render, arguments, then, "rendering the chat template"),
            refusal=shape.refusal,
        )

    def _complete_chat(
        self,
        connection: HttpExchange,
        sender: SenderHeaders,
        asked: ChatRequest,
        model: TextModel,
        chat: ChatModel,
        shape: Shape,
        prompt: bytes | memoryview,
    ) -> None:
        """Complete the rendered prompt of a chat."""
        wanted = asked.wanted
        prompt = asked.open_ended(prompt)
        if model.takes_sampling:
            chat.prepare(asked, wanted.sampling, prompt)
        if "thinking_budget" in wanted.sampling and not model.takes_tokens:
            raise sampling.not_offered(
                "thinking_token_budget", f"model '{model.name}' runs on no engine of this server."
            )
        streams = [_stream(number, 0, wanted, chat.parser(asked, prompt)) for number in range(wanted.n)]
        exchange = CompletionExchange(connection, shape, streams, events=wanted.stream)
        exchange.fields = sampling.fields_of(wanted.sampling, "messages")
        special = chat.adds_special if wanted.special is None else wanted.special
        requests = self._asked(model, wanted, [prompt], sender, asked.images, special=special)
        self._begin(exchange, shape.id, requests, sender, wanted.n)

    def embeddings(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Turn texts into vectors."""
        self._read(connection, body, large_bodies.EMBEDDING, partial(self._embed, connection, sender))

    def _pass_over(self, unknown: Sequence[UnknownField]) -> None:
        """Log each unknown field once, or refuse the first one if the server is strict."""
        if self._strict and unknown:
            raise unknown[0].error()
        for field in unknown:
            if field in self._told or len(self._told) >= _MAX_TOLD:
                continue
            self._told.add(field)
            meant = f" (did the client mean '{field.meant}'?)" if field.meant else ""
            _log.warning(
                "requests under /v1 have the field '%s', which is unknown here and passed over%s; "
                "--openai-strict=true refuses such requests",
                field.path,
                meant,
            )

    def _embed(self, connection: HttpExchange, sender: SenderHeaders, asked: EmbeddingRequest) -> None:
        self._pass_over(asked.unknown)
        call = CallOrigin(sender, asked.user, lambda _: bytes(asked.texts[0]), len(asked.texts))
        running, address = self._models.find(asked.model, call, EMBEDDING)
        model = TextModel(asked.model, running.signature, address)
        if asked.tokens and not model.takes_tokens:
            raise sampling.not_offered("input", f"model '{model.name}' takes text only, and no token ids.")
        # One header for all requests, which is validated and sent to the worker once.
        header, data = model.ask((TokenIds if asked.tokens else Strings)(asked.texts[:1]), {}, sender)
        before, behind = (data[:1], data[2:]) if asked.tokens else ([], data[1:])
        requests = [ModelRequest(header, [*before, Strings([text]).data, *behind]) for text in asked.texts]
        self._begin(Embedding(connection, asked), f"embd-{secrets.token_hex(16)}", requests, sender)

    def rerank(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Rank documents by how well they answer a query."""
        self._read(connection, body, large_bodies.RERANKING, partial(self._rerank, connection, sender))

    def _rerank(self, connection: HttpExchange, sender: SenderHeaders, asked: RerankRequest) -> None:
        self._pass_over(asked.unknown)
        call = CallOrigin(sender, asked.user, lambda _: bytes(asked.query))
        running, address = self._models.find(asked.model, call, RERANKING)
        made = f"rerank-{secrets.token_hex(16)}"
        work = Reranking(connection, made, asked)
        self._begin(work, made, [rerank_requests(asked, running.signature, sender, address)], sender)

    def score(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Score pairs of texts."""
        self._read(connection, body, large_bodies.SCORING, partial(self._score, connection, sender))

    def _score(self, connection: HttpExchange, sender: SenderHeaders, asked: ScoreRequest) -> None:
        self._pass_over(asked.unknown)
        rankings = asked.rankings()
        call = CallOrigin(sender, asked.user, lambda _: bytes(rankings[0].query), len(rankings))
        running, address = self._models.find(asked.model, call, RERANKING)
        made = f"score-{secrets.token_hex(16)}"
        requests = [rerank_requests(each, running.signature, sender, address) for each in rankings]
        self._begin(Scoring(connection, made, asked.model, rankings), made, requests, sender)

    def _asked(
        self,
        model: TextModel,
        wanted: CompletionFields,
        prompts: Sequence[bytes | memoryview],
        sender: SenderHeaders,
        images: Sequence[bytes | memoryview] = (),
        *,
        special: bool,
        tokens: bool = False,
        returned: Sequence[str] = (),
        echo: bool = False,
    ) -> list[ModelRequest]:
        """Return the requests to the model: ``n`` for each prompt. ``tokens``: the prompts are token ids."""
        if wanted.logprobs >= 0:
            returned = [*returned, "logprobs"]
        if wanted.token_ids:
            returned = [*returned, "token_ids", "prompt_token_ids"]
        if wanted.n > 1:
            size = wanted.n * sum(map(len, (*prompts, *images, sampling.written(wanted.sampling))))
            if size > self._max_input_size:
                limit = f"the maximum allowed input size of {self._max_input_size} bytes (--http-max-input-size)"
                raise ApiError(f"All choices together have {size} bytes, which exceeds {limit}.", "n", "invalid_value")
        seen = Strings(images) if images else None
        asked: list[ModelRequest] = []
        for each in prompts:
            prompt = TokenIds([each]) if tokens else Strings([each])
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
                        special=special,
                        images=seen,
                        priority=wanted.priority,
                        returned=returned,
                        echo=echo,
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


def _stream(index: int, prompt: int, wanted: CompletionFields, parser: ToolParser | None = None) -> CompletionStream:
    stream = CompletionStream(index, prompt, parser)
    if wanted.logprobs >= 0:
        stream.finished.tokens = []
    if wanted.token_ids:
        stream.finished.token_ids = []
    return stream


def _check(model: TextModel, wanted: CompletionFields) -> None:
    """Reject fields that the model has no input or output for."""
    limit = wanted.sampling.get("max_tokens")
    if limit is not None and limit.value == 0 and not model.takes_tokens:
        raise ApiError(
            f"Model '{model.name}' runs on no engine of this server, which could read a prompt without answering it.",
            "model",
            "model_not_supported",
        )
    if wanted.logprobs >= 0 and not model.gives_logprobs:
        raise sampling.not_offered("logprobs", f"model '{model.name}' does not report log probabilities.")
    if wanted.token_ids and not model.takes_tokens:
        raise sampling.not_offered("return_token_ids", f"model '{model.name}' does not report the ids of tokens.")
    if wanted.special is not None and not model.takes_special:
        raise sampling.not_offered(SPECIAL, f"model '{model.name}' has no input '{SPECIAL}' to pass it to the model")
