"""Replies that several requests to a model share, sent whole or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nerite.core.errors import NeriteError
from nerite.core.execution_observer import TraceContext
from nerite.core.failures import report
from nerite.core.request import CancelReason, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec
from nerite.llm.openai import reply_formats, text_model
from nerite.llm.openai.errors import ApiError, reply_of
from nerite.llm.openai.reply_formats import ChoiceOutput, LogprobToken, ReplyFormat, Usage
from nerite.llm.openai.sampling import in_words_of_client
from nerite.llm.openai.text_model import TextDelta
from nerite.llm.openai.tool_calls import BrokenCall, Event, ToolParser, joined_calls
from nerite.transports import access_log
from nerite.transports.http import reply
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_AT_ONCE: Final = 64
"""Requests that are submitted per turn of the event loop."""


class SharedReply:
    """Sink of several requests that share one reply. Its connection pauses and cancels them as one.

    Subclasses build the reply in ``_take``; the first error of any request becomes the reply.
    """

    protocol = "HTTP"
    fields: Mapping[str, str] = MappingProxyType({})
    """The client's request fields by the model's names for them."""

    def __init__(self, connection: HttpExchange) -> None:
        self.header = RequestHeader("", "", ())
        """Header of the first request."""
        self.id = ""
        """Id of the first request."""
        self._connection = connection
        self._requests: Sequence[InferenceRequest] = ()
        self._places: dict[int, int] = {}
        """Index of each request, by its identity."""
        self._closed = False
        """Whether the reply is complete or no longer needed."""

    @property
    def outer_span(self) -> TraceContext | None:
        """The client's span, which is the parent of the requests' spans."""
        return self._connection.outer_span

    def begin(self, requests: Sequence[InferenceRequest], submit: Callable[[InferenceRequest], None]) -> None:
        """Submit all requests, over several turns of the event loop so that others are not delayed."""
        self._requests = requests
        self.header, self.id = requests[0].header, requests[0].id
        self._places = {id(request): place for place, request in enumerate(requests)}
        self._connection.request = self
        self._submit_from(0, submit)

    def _submit_from(self, place: int, submit: Callable[[InferenceRequest], None]) -> None:
        for request in self._requests[place : place + _AT_ONCE]:
            if self._closed:  # one was rejected immediately
                return
            submit(request)
        if place + _AT_ONCE < len(self._requests):
            self._call_soon(self._submit_from, place + _AT_ONCE, submit)

    def _call_soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call ``call`` in the next turn of the loop, if the reply is still needed then."""

        def go_on() -> None:
            if self._closed or self._connection.request is not self:
                return
            first = self._requests[0]
            try:
                call(*arguments)
            except NeriteError as error:
                self._fail(first, error)
            except Exception as error:
                self._fail(first, report("openai", error, f"for '{self.header.model_name}'", self.id))
            if self._closed:
                self._requests = ()

        asyncio.get_running_loop().call_soon(go_on)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Cancel all requests."""
        self._closed = True
        for request in self._requests:
            request.cancel(why)

    def pause(self, paused: bool) -> None:
        """Pause or resume all requests."""
        for request in self._requests:
            request.pause(paused)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Handle a response; drop it if the reply is no longer needed."""
        if not self._closed and self._connection.request is self:
            self._respond(request, response, final)
        if self._closed:
            self._requests = ()  # break the reference cycle, which only the garbage collector would free

    def _respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        if response.error is not None:  # not raised: its traceback would be another reference cycle
            self._fail(request, response.error)
            return
        try:
            self._take(self._places[id(request)], response, final)
        except NeriteError as error:
            self._fail(request, error)
        except Exception as error:
            failure = report("openai", error, f"in an answer of '{request.header.model_name}'", request.id)
            self._fail(request, failure)
        else:
            if not final and not self._connection.writable:
                request.pause(True)

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        """Handle a successful response. Raises ``NeriteError`` if it cannot be used."""
        raise NotImplementedError

    def _fail(self, request: InferenceRequest, error: NeriteError) -> None:
        """Cancel all requests and reply with an error."""
        access_log.log_refusal(request.id, error)
        self.cancel()
        self._answer_error(in_words_of_client(error, self.fields))

    def _answer_error(self, error: NeriteError) -> None:
        self._connection.send([reply_of(error).encode()])


Outputs: TypeAlias = Mapping[str, tuple[TensorSpec, Buffer]]


class WholeReply(SharedReply):
    """A reply that is sent when the last request has been answered."""

    def begin(self, requests: Sequence[InferenceRequest], submit: Callable[[InferenceRequest], None]) -> None:
        """Submit all requests, over several turns of the event loop so that others are not delayed."""
        self._left = len(requests)
        super().begin(requests, submit)

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        if response.header is not None:
            outputs = zip(response.header.outputs, response.buffers, strict=True)
            self._add(place, {spec.name: (spec, data) for spec, data in outputs})
        if not final:
            return
        self._check(place)
        self._left -= 1
        if not self._left:
            self._closed = True
            self._connection.send([Reply(200, self._encoded()).encode()])

    def _add(self, place: int, outputs: Outputs) -> None:
        """Take the outputs of a response, whose memory is released afterwards. Raises ``NeriteError``."""
        raise NotImplementedError

    def _check(self, place: int) -> None:
        """Raise ``ApiError`` if a request has ended without what the reply needs of it."""
        raise NotImplementedError

    def _encoded(self) -> bytes:
        """Return the reply in JSON."""
        raise NotImplementedError


_EVENTS: Final = "text/event-stream; charset=utf-8"
_PIECE: Final = 4096
"""Characters that are parsed for tool calls at a time."""


class CompletionStream:
    """State of one choice: its parser and its output so far."""

    __slots__ = ("_ranked", "begun", "decoder", "done", "output", "parser", "prompt", "tokens", "whole")

    def __init__(self, index: int, prompt: int, parser: ToolParser | None) -> None:
        """``prompt`` is the index of the prompt that the choice answers."""
        self.output = ChoiceOutput(index)
        self.prompt = prompt
        self.parser = parser
        self.decoder = text_model.decoder()
        self.begun = self.done = False
        self.tokens = text_model.TokenCounts()
        self.whole: list[str] = []
        """Text that is kept until the end, to be parsed as a whole."""
        self._ranked = 0

    def take(self, delta: TextDelta) -> None:
        """Take what a response says apart from its text and its log probabilities."""
        output = self.output
        output.reason = delta.finish_reason or output.reason
        self.tokens.add(delta)
        if output.token_ids is not None:
            output.token_ids += delta.token_ids
            output.prompt_ids = delta.prompt_ids or output.prompt_ids

    def rank(self, tokens: Sequence[LogprobToken]) -> None:
        """Count log probabilities in the likelihood of the choice."""
        output = self.output
        for token in tokens:
            self._ranked += 1
            output.likelihood += ((token.logprob or 0.0) - output.likelihood) / self._ranked


class CompletionReply(SharedReply):
    """The reply to a completion, with one model request per choice.

    The first response of any request decides the HTTP status; later errors are sent as events.
    """

    def __init__(
        self,
        connection: HttpExchange,
        reply_format: ReplyFormat,
        streams: Sequence[CompletionStream],
        *,
        events: bool,
        kept: int = 0,
    ) -> None:
        """``events``: stream the output. ``kept``: return this many choices per prompt, the likeliest ones; 0: all."""
        super().__init__(connection)
        self._format = reply_format
        self._streams = streams
        self._events = events
        self._kept = kept
        self._opened = False
        for stream in streams:
            stream.output.keeps = not events

    @property
    def operation(self) -> str:
        """Name of the operation in OpenTelemetry's conventions."""
        return self._format.operation

    def span_attributes(self, request: InferenceRequest) -> dict[str, str | int]:
        """Return the span attributes of a request by OpenTelemetry's conventions for language models."""
        stream = self._streams[self._places[id(request)]]
        return stream.tokens.span_attributes(self.operation, request.header.model_name)

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        stream = self._streams[place]
        delta = None if response.empty else text_model.read(response)
        if delta is not None:
            stream.take(delta)
        sent = [] if stream.begun or not self._events else self._first(stream)
        if delta is not None:
            sent += self._response_events(stream, delta)
        if final and self._events:
            sent += self._rest(stream, self._parsed(stream, stream.decoder.decode(b"", True), last=True))
        if events := b"".join(sent):  # an empty chunk would end the reply
            self._send(events)
        if not final:
            return
        if self._events:
            self._done(stream)
        else:
            stream.whole.append(stream.decoder.decode(b"", True))
            self._parse_whole(stream, "".join(stream.whole), 0, [])

    def _first(self, stream: CompletionStream) -> list[bytes]:
        stream.begun = True
        return [self._format.opening(stream.output, self._running(stream))]

    def _running(self, stream: CompletionStream) -> Usage | None:
        """Return the token counts of a choice so far, if they are known."""
        if stream.tokens.input is None:
            return None
        return Usage(stream.tokens.input, stream.tokens.output or 0, stream.tokens.cached)

    def _response_events(self, stream: CompletionStream, delta: TextDelta) -> list[bytes]:
        """Return the events for a response."""
        output = stream.output
        tokens = None
        if delta.logprobs and (output.tokens is not None or self._kept):
            tokens = reply_formats.read_logprobs(delta.logprobs)
            stream.rank(tokens)
            if output.tokens is not None and output.keeps:
                output.tokens += tokens
        if delta.prompt_logprobs:
            output.prompt_tokens = reply_formats.read_prompt_logprobs(delta.prompt_logprobs)
        text = stream.decoder.decode(delta.text)
        if not self._events:
            stream.whole.append(text)
            text = ""
        return self._steps(stream, self._parsed(stream, text), tokens)

    def _parsed(self, stream: CompletionStream, text: str, *, last: bool = False) -> list[Event]:
        """Parse text that is streamed."""
        parser = stream.parser
        if parser is None:
            return [text] if text else []
        try:
            found: list[Event] = []
            for at in range(0, len(text), _PIECE):  # in pieces, because text after a call is copied
                found += parser.feed(text[at : at + _PIECE])
            return joined_calls(found + (parser.finish() if last else []))
        except BrokenCall as error:
            raise ApiError(
                f"The model began a tool call that is not valid JSON: {error}", None, "invalid_tool_call", 500
            ) from None

    def _parse_whole(self, stream: CompletionStream, text: str, at: int, found: list[Event]) -> None:
        """Parse a complete text for calls, one piece per turn of the event loop."""
        parser = stream.parser
        if parser is None:
            found = [text] if text else []
        else:
            try:
                found += parser.feed(text[at : at + _PIECE])
                if at + _PIECE < len(text):
                    self._call_soon(self._parse_whole, stream, text, at + _PIECE, found)
                    return
                found = joined_calls(found + parser.finish())
            except BrokenCall:
                found = [text]
        self._rest(stream, found)
        self._done(stream)

    def _done(self, stream: CompletionStream) -> None:
        stream.done = True
        if all(each.done for each in self._streams):
            self._close()

    def _rest(self, stream: CompletionStream, rest: list[Event]) -> list[bytes]:
        """Return the final events: text that was held back, and the end of the choice."""
        sent = self._steps(stream, rest, None)
        output = stream.output
        if output.calls and output.reason == "stop":
            output.reason = "tool_calls"
        if self._events:
            sent.append(self._format.ending(output, self._running(stream)))
        return sent

    def _steps(self, stream: CompletionStream, events: list[Event], tokens: list[LogprobToken] | None) -> list[bytes]:
        if not events and tokens:
            events = [""]  # tokens whose text is empty or held back
        sent = []
        for event in events:
            stream.output.take(event)
            if self._events:
                sent.append(self._format.step(stream.output, event, tokens, self._running(stream)))
            tokens = None
        return sent

    def _send(self, events: bytes) -> None:
        if self._opened:
            self._connection.send_chunk(events)
        else:
            self._opened = True
            self._connection.open(reply.chunked_head(200, _EVENTS), events)

    def _close(self) -> None:
        self._closed = True
        usage = self._usage_counts()
        choices = self._best() if self._kept else [stream.output for stream in self._streams]
        if not self._events:
            self._connection.send([Reply(200, self._format.whole(choices, usage)).encode()])
            return
        self._connection.send_chunk(self._format.closing(choices, usage))
        self._connection.close_reply()

    def _best(self) -> list[ChoiceOutput]:
        """Return the likeliest choices of each prompt, numbered anew."""
        prompts: dict[int, list[ChoiceOutput]] = {}
        for stream in self._streams:
            prompts.setdefault(stream.prompt, []).append(stream.output)
        best: list[ChoiceOutput] = []
        for output in prompts.values():
            best += sorted(output, key=lambda each: -each.likelihood)[: self._kept]
        for index, each in enumerate(best):
            each.index = index
        return best

    def _usage_counts(self) -> Usage | None:
        """Return the token counts, or None if the model does not report them. A prompt counts once."""
        prompts = {stream.prompt: stream.tokens for stream in self._streams}
        inputs = [counts.input for counts in prompts.values() if counts.input is not None]
        outputs = [stream.tokens.output for stream in self._streams if stream.tokens.output is not None]
        if len(inputs) < len(prompts) or len(outputs) < len(self._streams):
            return None
        cached = [counts.cached for counts in prompts.values() if counts.cached is not None]
        return Usage(sum(inputs), sum(outputs), sum(cached) if len(cached) == len(prompts) else None)

    def _answer_error(self, error: NeriteError) -> None:
        if not self._opened:
            self._connection.send([self._format.refusal(error).encode()])
            return
        self._connection.send_chunk(self._format.failing(error))
        self._connection.close_reply()
