"""The endpoints under ``/v1`` that generate text, or count and split it: completions, chats, responses and messages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from nerite.balancing.response_ids import TAG_HEADER, checked_tag
from nerite.config.options import OpenAiOptions
from nerite.llm.openai import anthropic, bodies, sampling
from nerite.llm.openai.chat_requests import ChatRequest, chat_opening, not_taken
from nerite.llm.openai.chat_templates import ChatModel, ChatModels
from nerite.llm.openai.checkpoint_settings import CheckpointSettingsCache
from nerite.llm.openai.completion_requests import DEFAULT_TOKENS, CompletionFields, CompletionRequest
from nerite.llm.openai.errors import ApiError, anthropic_reply_of
from nerite.llm.openai.replies import CompletionReply, CompletionStream
from nerite.llm.openai.reply_formats import ChatFormat, ChunkFormat, CompletionFormat, ReplyFormat
from nerite.llm.openai.responses.api import ResponseApi
from nerite.llm.openai.responses.reply_format import ResponseObjectFormat
from nerite.llm.openai.responses.request import ResponseCall
from nerite.llm.openai.serving import OpenAiServing
from nerite.llm.openai.text_model import SPECIAL, CallOrigin, ModelRequest, Strings, TextModel, TokenIds
from nerite.llm.openai.tokenization import TextFormat, TokensFormat
from nerite.llm.openai.tool_calls import ToolParser
from nerite.transports.access import SenderHeaders

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

EndpointHandler: TypeAlias = Callable[..., None]
"""Takes the connection, the body, the headers about the sender, and the arguments in the path."""
FormatOf: TypeAlias = Callable[[ChatRequest], ReplyFormat]
"""Returns the reply_format of the reply to a chat."""


class TextGeneration:
    """Handlers of these endpoints."""

    def __init__(
        self, serving: OpenAiServing, options: OpenAiOptions, responses: ResponseApi, max_input_size: int
    ) -> None:
        """``max_input_size`` is also that of all choices of a request together."""
        self._serving = serving
        self._settings = CheckpointSettingsCache(serving.server, defaults=options.generation_config == "auto")
        self._chats = ChatModels(serving.server)
        self._responses = responses
        self._max_input_size = max_input_size
        self.handlers: Mapping[str, EndpointHandler] = {
            "completions": self._completions,
            "chat_completions": self._chat_completions,
            "responses": self._respond_to_body,
            "messages": self._messages,
            "count_tokens": self._count_tokens,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }
        """By the names of their endpoints (``http/routes.py``)."""

    def _completions(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Complete a prompt."""
        then = partial(self._complete, connection, sender, CompletionFormat)
        self._serving.read(connection, "completions", body, then)

    def _tokenize(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Return the tokens of a prompt or of a chat."""

        def then(asked: CompletionRequest | ChatRequest) -> None:
            if isinstance(asked, ChatRequest):
                self._chat(connection, sender, partial(_new_format, TokensFormat, "tokens"), asked)
            else:
                self._complete(connection, sender, TokensFormat, asked)

        self._serving.read(connection, "tokenize", body, then)

    def _detokenize(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Return the text of tokens."""
        self._serving.read(connection, "detokenize", body, partial(self._complete, connection, sender, TextFormat))

    def _respond_to_body(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Continue a conversation with the Responses API, whose beginning may be kept here."""
        kept = self._responses

        def then(asked: ResponseCall | str) -> None:
            if isinstance(asked, str):
                kept.find(connection, sender, asked, partial(self._continue, connection, sender, whole))
            else:
                self._respond(connection, sender, asked)

        # The body is read again behind the look into the database, when the buffer of the connection is another's.
        whole = bytes(body) if kept.keeps else b""
        self._serving.read(connection, "responses", body, then)

    def _continue(self, connection: HttpExchange, sender: SenderHeaders, body: bytes, earlier: bytes) -> None:
        """Respond in a conversation that was kept."""
        then = partial(self._respond, connection, sender)
        self._serving.read(connection, "responses", memoryview(body), then, more=[earlier])

    def _respond(self, connection: HttpExchange, sender: SenderHeaders, asked: ResponseCall) -> None:
        store = asked.store and self._responses.keeps
        tag = connection.head.headers.get(TAG_HEADER, "")
        if tag:
            checked_tag(tag)

        def keep(response: Mapping[str, Any]) -> None:
            if store:
                self._responses.save(sender, asked, response)

        def format_of(chat: ChatRequest) -> ReplyFormat:
            return ResponseObjectFormat(
                *(int(time.time()), chat.wanted.model, asked.echo),
                store=store,
                keep=keep,
                sealed=asked.sealed,
                kinds=asked.kinds,
                tag=tag,
            )

        chat = partial(self._chat, connection, sender, format_of, asked.chat)
        self._responses.with_room(connection, sender, asked, chat)

    def _messages(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Continue a conversation in Anthropic's format."""

        def format_of(asked: ChatRequest) -> ReplyFormat:
            return anthropic.MessagesFormat(asked.wanted.model)

        then = partial(self._chat, connection, sender, format_of)
        self._serving.read(connection, "messages", body, then, anthropic_reply_of)

    def _count_tokens(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Return the number of tokens of a conversation in Anthropic's format."""

        def format_of(asked: ChatRequest) -> ReplyFormat:
            return anthropic.CountFormat(asked.wanted.model)

        then = partial(self._chat, connection, sender, format_of)
        self._serving.read(connection, "count_tokens", body, then, anthropic_reply_of)

    def _complete(
        self,
        connection: HttpExchange,
        sender: SenderHeaders,
        kind: type[CompletionFormat],
        asked: CompletionRequest,
    ) -> None:
        wanted = asked.wanted
        self._serving.pass_over(wanted.unknown)
        call = CallOrigin(sender, wanted.user, lambda _: bytes(asked.prompts[0]), len(asked.prompts) * wanted.n)
        running, address = self._serving.models.find(wanted.model, call)
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
        reply_format = _new_format(kind, "cmpl", asked)
        echoes = [bytes(prompt).decode() if asked.echo and not asked.tokens else "" for prompt in prompts]
        streams = []
        for number in range(len(requests)):
            stream = _stream(number, number // wanted.n, wanted)
            stream.output.echo = echoes[stream.prompt]
            streams.append(stream)
        kept = asked.kept if asked.kept < wanted.n else 0
        reply = CompletionReply(connection, reply_format, streams, events=wanted.stream, kept=kept)
        reply.fields = sampling.fields_of(wanted.sampling, "prompt")
        self._serving.submit(reply, reply_format.id, requests, sender, wanted.n)

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

    def _chat_completions(self, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Complete a chat."""
        format_of = partial(_new_format, ChatFormat, "chatcmpl")
        self._serving.read(connection, "chat_completions", body, partial(self._chat, connection, sender, format_of))

    def _chat(self, connection: HttpExchange, sender: SenderHeaders, format_of: FormatOf, asked: ChatRequest) -> None:
        """Complete a chat whose reply has the reply_format that ``format_of`` returns."""
        self._serving.pass_over(asked.wanted.unknown)
        reply_format = format_of(asked)
        call = CallOrigin(sender, asked.wanted.user, partial(chat_opening, asked.given), asked.wanted.n)
        running, address = self._serving.models.find(asked.wanted.model, call)
        model = TextModel(asked.wanted.model, running.signature, address)
        _check(model, asked.wanted)
        if asked.images and not model.takes_images:
            raise not_taken(asked.first_image)
        if model.takes_sampling:
            self._settings.of(running).complete(asked.wanted.sampling)
        chat = self._chats.of(running)
        template = chat.template(asked)
        prompt = template.render_briefly(asked.given) if isinstance(asked.given, dict) else None
        then = partial(self._complete_chat, connection, sender, asked, model, chat, reply_format)
        if prompt is not None:
            then(prompt.encode("utf-8", "surrogatepass"))
            return
        arguments = [template.source, template.origin, dict(template.words), bodies.as_json(asked.given)]
        bodies.PromptHelper(
            *(self._serving.server.helpers, connection, bodies.render, arguments, then, "rendering the chat template"),
            refusal=reply_format.refusal,
        )

    def _complete_chat(
        self,
        connection: HttpExchange,
        sender: SenderHeaders,
        asked: ChatRequest,
        model: TextModel,
        chat: ChatModel,
        reply_format: ReplyFormat,
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
        reply = CompletionReply(connection, reply_format, streams, events=wanted.stream)
        reply.fields = sampling.fields_of(wanted.sampling, "messages")
        special = chat.adds_special if wanted.special is None else wanted.special
        requests = self._asked(model, wanted, [prompt], sender, asked.images, special=special)
        self._serving.submit(reply, reply_format.id, requests, sender, wanted.n)

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


def _new_format(kind: type[ChunkFormat], prefix: str, asked: ChatRequest | CompletionRequest) -> ChunkFormat:
    """Return the reply_format of a reply to ``asked``, whose id begins with ``prefix``."""
    wanted = asked.wanted
    return kind(
        *(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), wanted.model),
        usage=wanted.usage,
        top=wanted.logprobs,
        running_usage=wanted.running_usage,
    )


def _stream(index: int, prompt: int, wanted: CompletionFields, parser: ToolParser | None = None) -> CompletionStream:
    stream = CompletionStream(index, prompt, parser)
    if wanted.logprobs >= 0:
        stream.output.tokens = []
    if wanted.token_ids:
        stream.output.token_ids = []
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
