"""One exchange: the requests of a model that a completion is made of, and its reply, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.transports.http import reply
from nerite.transports.http.reply import Reply
from nerite.transports.openai import logprobs, text_model
from nerite.transports.openai.errors import ApiError, body_of
from nerite.transports.openai.joint_work import JointWork
from nerite.transports.openai.shapes import Finished, Shape, Usage
from nerite.transports.openai.tools.parser import BrokenCall, Event, ToolParser, joined

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

_EVENTS: Final = "text/event-stream; charset=utf-8"
_PIECE: Final = 4096
"""Characters that are looked at for tool calls at a time."""
_DONE: Final = b"data: [DONE]\n\n"


class Stream:
    """One choice on its way: what its model has said so far."""

    __slots__ = (
        "begun",
        "decoder",
        "done",
        "finished",
        "input_tokens",
        "output_tokens",
        "parser",
        "prompt",
        "whole",
    )

    def __init__(self, index: int, prompt: int, parser: ToolParser | None) -> None:
        """``prompt`` says which of several it answers."""
        self.finished = Finished(index)
        self.prompt = prompt
        self.parser = parser
        self.decoder = text_model.decoder()
        self.begun = self.done = False
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.whole: list[str] = []
        """Text that waits for the end, to be looked at as one."""


class Exchange(JointWork):
    """A completion on its way, each of its choices a request.

    The status is decided by the first that any of the requests answers; after that an error is an event.
    """

    def __init__(
        self,
        connection: HttpExchange,
        shape: Shape,
        streams: Sequence[Stream],
        *,
        events: bool,
        usage: bool = False,
    ) -> None:
        """``events``: send what comes as it comes. ``usage``: end with how many tokens it took."""
        super().__init__(connection)
        self._shape = shape
        self._streams = streams
        self._events = events
        self._usage = usage
        self._opened = False
        for stream in streams:
            stream.finished.keeps = not events

    def span_attributes(self, request: InferenceRequest) -> dict[str, str | int]:
        """Return what OpenTelemetry's conventions for language models have for one of the requests."""
        stream = self._streams[self._places[id(request)]]
        told: dict[str, str | int] = {
            "gen_ai.operation.name": self._shape.operation,
            "gen_ai.request.model": request.header.model_name,
        }
        counts = {"input": stream.input_tokens, "output": stream.output_tokens}
        return told | {f"gen_ai.usage.{name}_tokens": count for name, count in counts.items() if count is not None}

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        stream = self._streams[place]
        sent = [] if stream.begun or not self._events else self._first(stream)
        if not response.empty:
            sent += self._said(stream, response)
        if final and self._events:
            sent += self._rest(stream, self._parsed(stream, stream.decoder.decode(b"", True), last=True))
        if sent:
            self._send(b"".join(sent))
        if not final:
            return
        if self._events:
            self._done(stream)
        else:
            stream.whole.append(stream.decoder.decode(b"", True))
            self._look_at_whole(stream, "".join(stream.whole), 0, [])

    def _first(self, stream: Stream) -> list[bytes]:
        stream.begun = True
        first = self._shape.first(stream.finished)
        return [] if first is None else [self._event(self._shape.chunk([first]))]

    def _said(self, stream: Stream, response: InferenceResponse) -> list[bytes]:
        """Return the events of a response."""
        delta = text_model.read(response)
        finished = stream.finished
        finished.reason = delta.finish_reason or finished.reason
        if delta.input_tokens is not None:
            stream.input_tokens = delta.input_tokens
        if delta.output_tokens is not None:
            stream.output_tokens = (stream.output_tokens or 0) + delta.output_tokens
        tokens = None
        if finished.tokens is not None and delta.logprobs:
            tokens = logprobs.read(delta.logprobs)
            if finished.keeps:
                finished.tokens += tokens
        text = stream.decoder.decode(delta.text)
        if not self._events:
            stream.whole.append(text)
            text = ""
        return self._steps(stream, self._parsed(stream, text), tokens)

    def _parsed(self, stream: Stream, text: str, *, last: bool = False) -> list[Event]:
        """Return what there is to text that is sent as it comes."""
        parser = stream.parser
        if parser is None:
            return [text] if text else []
        try:
            found: list[Event] = []
            for at in range(0, len(text), _PIECE):  # what follows a call is copied
                found += parser.feed(text[at : at + _PIECE])
            return joined(found + (parser.finish() if last else []))
        except BrokenCall as error:
            raise ApiError(
                f"The model began a tool call that is not valid JSON: {error}", None, "invalid_tool_call", 500
            ) from None

    def _look_at_whole(self, stream: Stream, text: str, at: int, found: list[Event]) -> None:
        """Look for calls in a text that is all here, a piece of it in each turn of the loop."""
        parser = stream.parser
        if parser is None:
            found = [text] if text else []
        else:
            try:
                found += parser.feed(text[at : at + _PIECE])
                if at + _PIECE < len(text):
                    self._soon(self._look_at_whole, stream, text, at + _PIECE, found)
                    return
                found = joined(found + parser.finish())
            except BrokenCall:
                found = [text]
        self._rest(stream, found)
        self._done(stream)

    def _done(self, stream: Stream) -> None:
        stream.done = True
        if all(each.done for each in self._streams):
            self._close()

    def _rest(self, stream: Stream, rest: list[Event]) -> list[bytes]:
        """Return the events of what was held back, and of the end."""
        sent = self._steps(stream, rest, None)
        finished = stream.finished
        if finished.calls and finished.reason == "stop":
            finished.reason = "tool_calls"
        if self._events:
            sent.append(self._event(self._shape.chunk([self._shape.last(finished)])))
        return sent

    def _steps(self, stream: Stream, events: list[Event], tokens: list[logprobs.Token] | None) -> list[bytes]:
        if not events and tokens:
            events = [""]  # tokens whose text is held back, or is none
        sent = []
        for event in events:
            stream.finished.take(event)
            if self._events:
                step = self._shape.step(stream.finished, event, tokens)
                sent.append(self._event(self._shape.chunk([step])))
            tokens = None
        return sent

    def _event(self, data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"

    def _send(self, events: bytes) -> None:
        if self._opened:
            self._connection.send_chunk(events)
        else:
            self._opened = True
            self._connection.open(reply.chunked_head(200, _EVENTS), events)

    def _close(self) -> None:
        self._closed = True
        usage = self._counted()
        if not self._events:
            whole = self._shape.whole([stream.finished for stream in self._streams], usage)
            self._connection.send([Reply(200, whole).encode()])
            return
        # Without numbers there is no chunk for them: one without choices is a surprise to many clients.
        last = self._event(self._shape.chunk([], usage)) if self._usage and usage else b""
        self._connection.send_chunk(last + _DONE)
        self._connection.close_reply()

    def _counted(self) -> Usage | None:
        """Return how many tokens came and went, None if the model does not say. A prompt counts once."""
        prompts = {stream.prompt: stream.input_tokens for stream in self._streams}
        given = [count for count in prompts.values() if count is not None]
        made = [stream.output_tokens for stream in self._streams if stream.output_tokens is not None]
        if len(given) < len(prompts) or len(made) < len(self._streams):
            return None
        return {
            "prompt_tokens": sum(given),
            "completion_tokens": sum(made),
            "total_tokens": sum(given) + sum(made),
        }

    def _answer_error(self, error: NeriteError) -> None:
        if not self._opened:
            super()._answer_error(error)
            return
        self._connection.send_chunk(self._event(body_of(error)) + _DONE)
        self._connection.close_reply()
