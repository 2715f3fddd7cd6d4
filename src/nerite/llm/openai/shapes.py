"""The JSON of completions and chat completions, whole and in chunks. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import orjson

from nerite.llm.openai.tool_calls import Event, ToolArguments, ToolCall

# Log probabilities: from the format of Triton's vLLM backend to the two formats of OpenAI


class LogprobToken(NamedTuple):
    """A chosen token, and the likely tokens in its position, the likeliest first."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


def read_logprobs(text: str) -> list[LogprobToken]:
    """Parse the output ``logprobs``. Raises ``ValueError`` if it has another format.

    It is a list with an object per position, whose keys are token ids, the chosen token first.
    """
    tokens = []
    try:
        for each in orjson.loads(text) or ():
            entries = [(str(entry["decoded_token"] or ""), float(entry["logprob"])) for entry in each.values()]
            tokens.append(LogprobToken(*entries[0], sorted(entries, key=lambda entry: -entry[1])))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the output 'logprobs' is malformed: {error}") from error
    return tokens


def chat_logprobs(tokens: list[LogprobToken], count: int) -> dict[str, Any]:
    """Return tokens in the format of chat completions, with the ``count`` likeliest per position."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}

    content = [
        {**entry(token.text, token.logprob), "top_logprobs": [entry(*each) for each in token.top[:count]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: list[LogprobToken], count: int, start: int) -> dict[str, Any]:
    """Return tokens in the format of completions; ``start`` is the offset of the first token in the text."""
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top[:count]) for token in tokens],
        "text_offset": offsets,
    }


Choice = dict[str, Any]
"""An entry of ``choices``."""
Usage = dict[str, int]


class Finished:
    """Accumulated output of one choice."""

    __slots__ = ("_arguments", "_texts", "calls", "echo", "index", "keeps", "length", "reason", "tokens")

    def __init__(self, index: int) -> None:
        self.index = index
        self.keeps = True
        """Whether text and arguments are kept for a reply that is sent as a whole."""
        self.length = 0
        """Characters of text so far."""
        self.echo = ""
        """Text that precedes the model's text."""
        self.calls: list[ToolCall] = []
        self.tokens: list[LogprobToken] | None = None
        """None if log probabilities were not requested."""
        self.reason = "stop"
        # Kept as lists of parts, because joining them for each part would take quadratic time.
        self._texts: list[str] = []
        self._arguments: list[list[str]] = []

    @property
    def text(self) -> str:
        """The text without tool calls."""
        return "".join(self._texts)

    @property
    def arguments(self) -> list[str]:
        """The arguments of each tool call."""
        return ["".join(parts) for parts in self._arguments]

    def take(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, ToolCall):
            self.calls.append(event)
            self._arguments.append([])
        elif isinstance(event, ToolArguments):
            if self.keeps:
                self._arguments[-1].append(event.text)
        else:
            self.length += len(event)
            if self.keeps:
                self._texts.append(event)


class Shape(ABC):
    """JSON format of one kind of completion."""

    operation: ClassVar[str]
    """Name of the operation in OpenTelemetry's conventions."""
    kind: ClassVar[str]
    """Value of ``object`` in whole replies."""
    chunk_kind: ClassVar[str]
    """Value of ``object`` in chunks."""

    def __init__(self, id: str, created: int, model: str, *, usage: bool = False, top: int = 0) -> None:
        """``top`` is the number of likely tokens per position."""
        self._head = {"id": id, "object": self.kind, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_kind}
        # With ``include_usage`` every chunk has the key, which is null in all but the last.
        self._usage = usage
        self._top = top

    @abstractmethod
    def first(self, choice: Finished) -> Choice | None:
        """Return the entry that a stream begins with, if any."""

    @abstractmethod
    def step(self, choice: Finished, event: Event, tokens: list[LogprobToken] | None) -> Choice:
        """Return the entry for an event, which was already added to ``choice``."""

    @abstractmethod
    def last(self, choice: Finished) -> Choice:
        """Return the entry that ends a choice."""

    @abstractmethod
    def _full(self, choice: Finished) -> Choice:
        """Return the entry of a whole choice."""

    def chunk(self, choices: list[Choice], usage: Usage | None = None) -> bytes:
        """Return a chunk of a stream."""
        more = {"usage": usage} if self._usage else {}
        return orjson.dumps({**self._chunk_head, "choices": choices, **more})

    def whole(self, choices: list[Finished], usage: Usage | None) -> bytes:
        """Return the whole reply."""
        entries = [self._full(choice) for choice in choices]
        return orjson.dumps({**self._head, "choices": entries, **({"usage": usage} if usage else {})})


class ChatShape(Shape):
    """JSON format of chat completions."""

    operation = "chat"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self, choice: Finished) -> Choice | None:
        """Return the entry with the role."""
        return self._choice(choice, {"role": "assistant", "content": ""})

    def step(self, choice: Finished, event: Event, tokens: list[LogprobToken] | None) -> Choice:
        """Return the entry for an event."""
        if isinstance(event, str):
            return self._choice(choice, {"content": event}, tokens)
        call: dict[str, Any] = {"index": len(choice.calls) - 1}
        if isinstance(event, ToolCall):
            call |= {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": event.text}
        return self._choice(choice, {"tool_calls": [call]}, tokens)

    def last(self, choice: Finished) -> Choice:
        """Return the entry that ends a choice."""
        return self._choice(choice, {}, reason=choice.reason)

    def _full(self, choice: Finished) -> Choice:
        text = choice.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments or "{}"}}
                for call, arguments in zip(choice.calls, choice.arguments, strict=True)
            ]
        likely = None if choice.tokens is None else chat_logprobs(choice.tokens, self._top)
        return {"index": choice.index, "message": message, "logprobs": likely, "finish_reason": choice.reason}

    def _choice(
        self,
        choice: Finished,
        delta: dict[str, Any],
        tokens: list[LogprobToken] | None = None,
        reason: str | None = None,
    ) -> Choice:
        likely = chat_logprobs(tokens, self._top) if tokens else None
        return {"index": choice.index, "delta": delta, "logprobs": likely, "finish_reason": reason}


class CompletionShape(Shape):
    """JSON format of text completions."""

    operation = "text_completion"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def first(self, choice: Finished) -> Choice | None:
        """Return the entry with the prompt if it is echoed."""
        return self._choice(choice, choice.echo) if choice.echo else None

    def step(self, choice: Finished, event: Event, tokens: list[LogprobToken] | None) -> Choice:
        """Return the entry for an event."""
        assert isinstance(event, str)  # completions have no tools
        return self._choice(choice, event, tokens, start=len(choice.echo) + choice.length - len(event))

    def last(self, choice: Finished) -> Choice:
        """Return the entry that ends a choice."""
        return self._choice(choice, "", reason=choice.reason)

    def _full(self, choice: Finished) -> Choice:
        text = choice.echo + choice.text
        return self._choice(choice, text, choice.tokens, len(choice.echo), choice.reason)

    def _choice(
        self,
        choice: Finished,
        text: str,
        tokens: list[LogprobToken] | None = None,
        start: int = 0,
        reason: str | None = None,
    ) -> Choice:
        likely = None if tokens is None else completion_logprobs(tokens, self._top, start)
        return {"index": choice.index, "text": text, "logprobs": likely, "finish_reason": reason}
