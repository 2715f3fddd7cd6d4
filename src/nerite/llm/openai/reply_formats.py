"""The replies of completions and chat completions, whole and as events. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import orjson

from nerite.core.errors import NeriteError
from nerite.llm.openai.errors import body_of, reply_of
from nerite.llm.openai.tool_calls import Event, ReasoningText, ToolArguments, ToolCall
from nerite.transports.http.reply import Reply

# Log probabilities: from the format of Triton's vLLM backend to the two formats of OpenAI


class LogprobToken(NamedTuple):
    """A chosen token, and the likely tokens in its position, the likeliest first."""

    text: str
    logprob: float | None
    """None for the first token of a prompt, which follows none."""
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


def read_prompt_logprobs(text: str) -> list[LogprobToken]:
    """Parse the output ``prompt_logprobs``, whose first position has no probability. Raises ``ValueError``."""
    try:
        positions = orjson.loads(text)
        first = next(iter(positions[0].values()))
        begin = LogprobToken(str(first["decoded_token"] or ""), None, [])
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise ValueError(f"the output 'prompt_logprobs' is malformed: {error}") from error
    return [begin, *read_logprobs(orjson.dumps(positions[1:]).decode())]


def chat_logprobs(tokens: list[LogprobToken], count: int) -> dict[str, Any]:
    """Return tokens in the format of chat completions, with the ``count`` likeliest per position."""

    def entry(text: str, logprob: float | None) -> dict[str, Any]:
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
        "top_logprobs": [None if token.logprob is None else dict(token.top[:count]) for token in tokens],
        "text_offset": offsets,
    }


Choice = dict[str, Any]
"""An entry of ``choices``."""


class Usage(NamedTuple):
    """Token counts of a reply. A prompt with several answers counts once."""

    prompt: int
    completion: int
    cached: int | None = None
    """Tokens of the prompt that an engine found in its cache; None if it does not say."""

    def counts(self) -> dict[str, Any]:
        """Return the counts in OpenAI's format."""
        total = self.prompt + self.completion
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": total,
        }
        return counts if self.cached is None else counts | {"prompt_tokens_details": {"cached_tokens": self.cached}}


class ChoiceOutput:
    """Accumulated output of one choice."""

    __slots__ = (
        *("_arguments", "_texts", "_thoughts", "calls", "echo", "index", "keeps", "length", "likelihood", "prompt_ids"),
        *("prompt_tokens", "reason", "token_ids", "tokens"),
    )

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
        self.prompt_tokens: list[LogprobToken] = []
        """Those of the prompt, if they were requested."""
        self.token_ids: list[int] | None = None
        """None if the ids of tokens were not requested; in a stream, those that were not sent yet."""
        self.prompt_ids: list[int] | None = None
        """Likewise, of the prompt."""
        self.likelihood = 0.0
        """Mean log probability of the tokens, by which the best of several choices are chosen."""
        self.reason = "stop"
        # Kept as lists of parts, because joining them for each part would take quadratic time.
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._arguments: list[list[str]] = []

    @property
    def text(self) -> str:
        """The text without thoughts and tool calls."""
        return "".join(self._texts)

    @property
    def thoughts(self) -> str:
        """What the model thought."""
        return "".join(self._thoughts)

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
        elif isinstance(event, ReasoningText):
            if self.keeps:
                self._thoughts.append(event.text)
        else:
            self.length += len(event)
            if self.keeps:
                self._texts.append(event)


class ReplyFormat(ABC):
    """Format of the replies to one kind of request: whole, or as server-sent events."""

    operation: ClassVar[str]
    """Name of the operation in OpenTelemetry's conventions."""
    id: str
    """Id of the reply."""

    @abstractmethod
    def opening(self, choice: ChoiceOutput, usage: Usage | None) -> bytes:
        """Return the events that a choice begins with. ``usage``: the counts so far, if they are known."""

    @abstractmethod
    def step(
        self, choice: ChoiceOutput, event: Event, tokens: list[LogprobToken] | None, usage: Usage | None = None
    ) -> bytes:
        """Return the events for an event, which was already added to ``choice``."""

    @abstractmethod
    def ending(self, choice: ChoiceOutput, usage: Usage | None = None) -> bytes:
        """Return the events that end a choice."""

    @abstractmethod
    def closing(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the events that end the stream. ``usage`` is None if it is unknown."""

    @abstractmethod
    def failing(self, error: NeriteError) -> bytes:
        """Return the events that end the stream with an error."""

    @abstractmethod
    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the whole reply as JSON."""

    def refusal(self, error: NeriteError) -> Reply:
        """Return the reply for an error before any event."""
        return reply_of(error)


DONE: Final = b"data: [DONE]\n\n"


class ChunkFormat(ReplyFormat):
    """Format of OpenAI's completions: events without names, each with entries of ``choices``."""

    kind: ClassVar[str]
    """Value of ``object`` in whole replies."""
    chunk_kind: ClassVar[str]
    """Value of ``object`` in chunks."""

    def __init__(
        self, id: str, created: int, model: str, *, usage: bool = False, top: int = 0, running_usage: bool = False
    ) -> None:
        """``top`` is the number of likely tokens per position; ``usage``: a stream ends with token counts."""
        self.id = id
        self._head = {"id": id, "object": self.kind, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_kind}
        # With ``include_usage`` every chunk has the key, which is null in all but the last.
        self._usage = usage
        self._running_usage = running_usage
        self._top = top

    @abstractmethod
    def _full(self, choice: ChoiceOutput) -> Choice:
        """Return the entry of a whole choice."""

    def _chunk(self, choices: list[Choice], usage: Usage | None = None) -> bytes:
        """Return an event of a stream."""
        counts = usage.counts() if usage is not None and (self._running_usage or not choices) else None
        more = {"usage": counts} if self._usage else {}
        return b"data: " + orjson.dumps({**self._chunk_head, "choices": choices, **more}) + b"\n\n"

    def closing(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the event with the token counts, if they are wanted, and the end of the stream."""
        # Without counts the event is omitted, because chunks without choices surprise many clients.
        return (self._chunk([], usage) if self._usage and usage else b"") + DONE

    def failing(self, error: NeriteError) -> bytes:
        """Return the events that end the stream with an error."""
        return b"data: " + body_of(error) + b"\n\n" + DONE

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the whole reply."""
        entries = [self._full(choice) for choice in choices]
        more: dict[str, Any] = {"usage": usage.counts()} if usage else {}
        return orjson.dumps({**self._head, "choices": entries, **more, **self._whole_more(choices)})

    def _whole_more(self, choices: Sequence[ChoiceOutput]) -> Mapping[str, Any]:
        """Return further members of a whole reply."""
        return {}


def _taken_ids(choice: ChoiceOutput) -> dict[str, Any]:
    """Return the ids of tokens that were not sent yet; nothing if they are not wanted."""
    if choice.token_ids is None:
        return {}
    ids, choice.token_ids = choice.token_ids, []
    more: dict[str, Any] = {"token_ids": ids}
    if choice.prompt_ids is not None:
        more["prompt_token_ids"], choice.prompt_ids = choice.prompt_ids, None
    return more


class ChatFormat(ChunkFormat):
    """Format of chat completions."""

    operation = "chat"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, choice: ChoiceOutput, usage: Usage | None) -> bytes:
        """Return the event with the role."""
        return self._chunk([self._choice(choice, {"role": "assistant", "content": ""})], usage)

    def step(
        self, choice: ChoiceOutput, event: Event, tokens: list[LogprobToken] | None, usage: Usage | None = None
    ) -> bytes:
        """Return the event for an event of a choice."""
        delta: dict[str, Any]
        if isinstance(event, str):
            delta = {"content": event}
        elif isinstance(event, ReasoningText):
            delta = thought_fields(event.text)
        else:
            call: dict[str, Any] = {"index": len(choice.calls) - 1}
            if isinstance(event, ToolCall):
                call |= {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
            else:
                call["function"] = {"arguments": event.text}
            delta = {"tool_calls": [call]}
        return self._chunk([self._choice(choice, delta, tokens)], usage)

    def ending(self, choice: ChoiceOutput, usage: Usage | None = None) -> bytes:
        """Return the event that ends a choice."""
        return self._chunk([self._choice(choice, {}, reason=choice.reason)], usage)

    def _full(self, choice: ChoiceOutput) -> Choice:
        text = choice.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thoughts := choice.thoughts:
            message |= thought_fields(thoughts)
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments or "{}"}}
                for call, arguments in zip(choice.calls, choice.arguments, strict=True)
            ]
        likely = None if choice.tokens is None else chat_logprobs(choice.tokens, self._top)
        ids = {} if choice.token_ids is None else {"token_ids": choice.token_ids}
        reason = choice.reason
        return {"index": choice.index, "message": message, "logprobs": likely, "finish_reason": reason, **ids}

    def _whole_more(self, choices: Sequence[ChoiceOutput]) -> Mapping[str, Any]:
        """Return the ids of the prompt's tokens, if they are wanted: a chat has one prompt."""
        ids = choices[0].prompt_ids
        return {} if ids is None else {"prompt_token_ids": ids}

    def _choice(
        self,
        choice: ChoiceOutput,
        delta: dict[str, Any],
        tokens: list[LogprobToken] | None = None,
        reason: str | None = None,
    ) -> Choice:
        likely = chat_logprobs(tokens, self._top) if tokens else None
        more = _taken_ids(choice) if choice.token_ids or reason else {}
        return {"index": choice.index, "delta": delta, "logprobs": likely, "finish_reason": reason, **more}


def thought_fields(text: str) -> dict[str, str]:
    """Return what a model thought under both names that clients read: DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


class CompletionFormat(ChunkFormat):
    """Format of text completions."""

    operation = "text_completion"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def opening(self, choice: ChoiceOutput, usage: Usage | None) -> bytes:
        """Return the event with the prompt if it is echoed."""
        return self._chunk([self._choice(choice, choice.echo)], usage) if choice.echo else b""

    def step(
        self, choice: ChoiceOutput, event: Event, tokens: list[LogprobToken] | None, usage: Usage | None = None
    ) -> bytes:
        """Return the event for an event of a choice."""
        assert isinstance(event, str)  # completions have no tools
        start = len(choice.echo) + choice.length - len(event)
        return self._chunk([self._choice(choice, event, tokens, start)], usage)

    def ending(self, choice: ChoiceOutput, usage: Usage | None = None) -> bytes:
        """Return the event that ends a choice."""
        return self._chunk([self._choice(choice, "", reason=choice.reason)], usage)

    def _full(self, choice: ChoiceOutput) -> Choice:
        text, start, tokens = choice.echo + choice.text, len(choice.echo), choice.tokens
        if choice.prompt_tokens:
            start, tokens = 0, choice.prompt_tokens + (tokens or [])
        return self._choice(choice, text, tokens, start, choice.reason)

    def _choice(
        self,
        choice: ChoiceOutput,
        text: str,
        tokens: list[LogprobToken] | None = None,
        start: int = 0,
        reason: str | None = None,
    ) -> Choice:
        likely = None if tokens is None else completion_logprobs(tokens, self._top, start)
        more = _taken_ids(choice) if choice.token_ids or reason else {}
        return {"index": choice.index, "text": text, "logprobs": likely, "finish_reason": reason, **more}
