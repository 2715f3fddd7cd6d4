"""Anthropic's Messages API: its bodies as chat completions, and its replies and events.

A body becomes the fields of a chat completion, whose way it goes from there on. Pure.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from nerite.core.errors import NeriteError
from nerite.core.tensor import Buffer
from nerite.llm.openai.chat_requests import ChatRequest, chat_request
from nerite.llm.openai.errors import ApiError, anthropic_body_of, anthropic_reply_of
from nerite.llm.openai.fields import Fields, check_count, missing, wrong_type, wrong_value
from nerite.llm.openai.reply_formats import ChoiceOutput, LogprobToken, ReplyFormat, Usage
from nerite.llm.openai.sampling import not_offered
from nerite.llm.openai.tokenization import without_text
from nerite.llm.openai.tool_calls import Event, ReasoningText, ToolArguments, ToolCall
from nerite.transports.http.reply import Reply

# Bodies

_MAX_MESSAGES: Final = 2048
_MAX_BLOCKS: Final = 1024
_MAX_TOOLS: Final = 128
_MAX_STOPS: Final = 64
_LARGEST_LIMIT: Final = 2**31 - 1
_KNOWN: Final = (
    *("model", "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature", "top_p", "top_k"),
    *("tools", "tool_choice", "thinking", "output_config", "output_format", "metadata", "service_tier"),
    "priority",
)
_BILLING: Final = "x-anthropic-billing-header:"
"""Begins a system text of an agent that differs in each request, and would keep prompts from sharing a prefix."""
_NO_ROLE: Final = "'user' or 'assistant'"
_TO_OPENAI: Final = {"auto": "auto", "any": "required", "none": "none"}
_BEYOND_MODELS: Final = ("mcp_servers", "container")
_PARAMS: Final = {
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "max_tokens",
}

_Message = dict[str, Any]


def read_messages(body: Buffer) -> ChatRequest:
    """Return the chat that a body describes. Raises ``ApiError``."""
    return _read(Fields.of_body(body), counting=False)


def read_count(body: Buffer) -> ChatRequest:
    """Return the chat whose tokens a body wants counted. Raises ``ApiError``."""
    return _read(Fields.of_body(body), counting=True)


def _read(fields: Fields, *, counting: bool) -> ChatRequest:
    fields.pass_over_unknown((*_KNOWN, *_BEYOND_MODELS))
    for name in _BEYOND_MODELS:
        if fields.values.get(name):
            raise not_offered(name, "this server runs models only.")
    body: dict[str, Any] = {"model": fields.name("model"), "messages": _messages(fields)}
    if not counting:
        if "max_tokens" not in fields:
            raise missing("max_tokens")
        body["max_completion_tokens"] = fields.integer("max_tokens", 0, 1, _LARGEST_LIMIT)
        if fields.flag("stream"):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
    for name, (low, high) in {"temperature": (0.0, 1.0), "top_p": (0.0, 1.0)}.items():
        if name in fields:
            body[name] = fields.number(name, low, high)
    for name in ("top_k", "priority"):
        if name in fields:
            body[name] = fields.integer(name, 0, 0, _LARGEST_LIMIT)
    if stops := fields.array("stop_sequences", _MAX_STOPS):
        body["stop"] = stops
    body |= _tools(fields) | _thinking(fields) | _form(fields)
    if _is_begun(body["messages"][-1]):
        body["continue_final_message"] = True
    metadata = fields.object("metadata")
    if "user_id" in metadata:
        body["user"] = metadata.text("user_id")[:256]
    asked = chat_request(Fields(body))
    if counting:
        asked = asked._replace(wanted=without_text(asked.wanted))
    settings = asked.wanted.sampling
    for name, setting in settings.items():
        settings[name] = setting._replace(param=_PARAMS.get(setting.param, setting.param))
    return asked._replace(wanted=asked.wanted._replace(unknown=[*fields.unknown, *asked.wanted.unknown]))


def _is_begun(last: _Message) -> bool:
    """Return whether the last message begins the answer, which the model is to continue."""
    return last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())


def _messages(fields: Fields) -> list[_Message]:
    given = fields.array("messages", _MAX_MESSAGES)
    if not given:
        raise missing("messages")
    messages = _system(fields)
    for number, each in enumerate(given):
        message = fields.within(each, f"messages[{number}]")
        message.pass_over_unknown(("role", "content"))
        role = message.text("role")
        if "content" not in message:
            raise missing(message.path("content"))
        if role == "user":
            messages += _user(message)
        elif role == "assistant":
            messages.append(_assistant(message))
        elif role == "system":
            messages.append({"role": "system", "content": _text_of(message, "content")})
        else:
            raise wrong_value(message.path("role"), _NO_ROLE, role)
    return messages


def _system(fields: Fields) -> list[_Message]:
    if "system" not in fields:
        return []
    given: Any = fields["system"]
    texts = [given] if isinstance(given, str) else [block.text("text") for block in _blocks(fields, "system")]
    text = "\n".join(each for each in texts if not each.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _blocks(fields: Fields, name: str) -> list[Fields]:
    """Return the blocks of a content. Raises ``ApiError`` if it is no array."""
    given: Any = fields[name]
    if not isinstance(given, list):
        raise wrong_type(fields.path(name), "a string or an array of blocks", given)
    check_count(fields.path(name), given, _MAX_BLOCKS)
    return [fields.within(each, f"{fields.path(name)}[{at}]") for at, each in enumerate(given)]


def _text_of(fields: Fields, name: str) -> str:
    """Return a content that can only be text."""
    given: Any = fields[name]
    if isinstance(given, str):
        return given
    return "\n".join(block.text("text") for block in _blocks(fields, name))


def _user(message: Fields) -> list[_Message]:
    """Return the messages that a message of the user stands for: results of tools are messages of their own."""
    content: Any = message["content"]
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[_Message] = []
    parts: list[dict[str, Any]] = []
    for block in _blocks(message, "content"):
        kind = block.text("type")
        if kind == "tool_result":
            found = _result_parts(block)
            text = "\n".join(part["text"] for part in found if part["type"] == "text")
            results.append({"role": "tool", "tool_call_id": block.name("tool_use_id"), "content": text})
            parts += [part for part in found if part["type"] != "text"]
        else:
            parts.append(_part(block, kind))
    if not parts:
        return results
    texts = [part["text"] for part in parts if part["type"] == "text"]
    whole: Any = "\n".join(texts) if len(texts) == len(parts) else parts
    return [*results, {"role": "user", "content": whole}]


def _result_parts(block: Fields) -> list[dict[str, Any]]:
    if "content" not in block:
        return [{"type": "text", "text": ""}]
    content: Any = block["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_part(each, each.text("type")) for each in _blocks(block, "content")]


def _part(block: Fields, kind: str) -> dict[str, Any]:
    """Return the part of a chat completion that a block stands for."""
    if kind == "text":
        return {"type": "text", "text": block.text("text")}
    if kind == "image":
        source = block.object("source")
        if source.text("type") == "base64":
            url = f"data:{source.name('media_type')};base64,{source.text('data')}"
        else:
            url = source.text("url")
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "document" and block.object("source").values.get("type") == "text":
        return {"type": "text", "text": block.object("source").text("data")}
    if kind == "tool_reference":
        return {"type": "text", "text": block.name("tool_name")}
    raise not_offered(block.path("type"), f"models take no blocks of the type '{kind}'.")


def _assistant(message: Fields) -> _Message:
    content: Any = message["content"]
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for block in _blocks(message, "content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            function = {"name": block.name("name"), "arguments": orjson.dumps(block.object("input").values).decode()}
            calls.append({"id": block.name("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise not_offered(block.path("type"), f"models take no blocks of the type '{kind}'.")
    made: _Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _tools(fields: Fields) -> dict[str, Any]:
    tools = []
    for number, each in enumerate(fields.array("tools", _MAX_TOOLS)):
        tool = fields.within(each, f"tools[{number}]")
        if "input_schema" not in tool:
            kind = tool.text("type", "")
            raise not_offered(tool.path("type"), f"models call functions, and no tools of the type '{kind}'.")
        function = {"name": tool.name("name"), "parameters": tool.object("input_schema").values}
        if "description" in tool:
            function["description"] = tool.text("description")
        tools.append({"type": "function", "function": function})
    if not tools:
        return {}
    body: dict[str, Any] = {"tools": tools}
    choice = fields.object("tool_choice")
    if choice.values:
        kind = choice.choice("type", "", (*_TO_OPENAI, "tool"))
        body["tool_choice"] = _TO_OPENAI.get(kind) or {"type": "function", "function": {"name": choice.name("name")}}
        body["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    return body


def _thinking(fields: Fields) -> dict[str, Any]:
    """Return whether the model thinks, and whether its thoughts are returned: both only if the client says so."""
    thinking = fields.object("thinking")
    wanted = bool(thinking.values) and thinking.choice("type", "", ("enabled", "disabled", "adaptive")) != "disabled"
    found: dict[str, Any] = {"enable_thinking": wanted, "include_reasoning": wanted}
    if wanted and "budget_tokens" in thinking:
        found["thinking_token_budget"] = thinking.integer("budget_tokens", 0, 1, _LARGEST_LIMIT)
    return found


def _form(fields: Fields) -> dict[str, Any]:
    """Return the structured output that a body demands."""
    form = fields.object("output_config").object("format")
    if not form.values:
        form = fields.object("output_format")
    if not form.values:
        return {}
    form.choice("type", "", ("json_schema",))
    schema = {"name": "answer", "schema": form.object("schema").values}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


# Replies

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat(ReplyFormat):
    """Format of Anthropic's messages: blocks of thoughts, text and calls."""

    operation = "chat"

    def __init__(self, model: str) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._index = -1
        """Number of the open block of a stream."""
        self._kind = ""
        """Type of the open block; empty if none is open."""

    def opening(self, choice: ChoiceOutput, usage: Usage | None) -> bytes:
        """Return the event that begins the message."""
        counts = _counts(usage or Usage(0, 0)) | {"output_tokens": 0}
        return _event("message_start", message=self._message([], None, counts)) + _event("ping")

    def step(
        self, choice: ChoiceOutput, event: Event, tokens: list[LogprobToken] | None, usage: Usage | None = None
    ) -> bytes:
        """Return the events for an event of a choice."""
        if isinstance(event, ToolCall):
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            return self._closed() + self._opened(block)
        if isinstance(event, ToolArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        if isinstance(event, ReasoningText):
            begun = self._begun("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta({"type": "thinking_delta", "thinking": event.text})
        if not event:
            return b""
        begun = self._begun("text", {"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": event})

    def _begun(self, kind: str, block: Mapping[str, Any]) -> bytes:
        return b"" if self._kind == kind else self._closed() + self._opened(block)

    def _opened(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        self._kind = block["type"]
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _closed(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._index)

    def ending(self, choice: ChoiceOutput, usage: Usage | None = None) -> bytes:
        """Return the event that ends the last block."""
        return self._closed()

    def closing(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the events that end the message."""
        delta = {"stop_reason": _STOP_REASONS.get(choices[0].reason, "end_turn"), "stop_sequence": None}
        counts = _counts(usage or Usage(0, 0))
        return _event("message_delta", delta=delta, usage=counts) + _event("message_stop")

    def failing(self, error: NeriteError) -> bytes:
        """Return the event that ends the stream with an error."""
        return b"event: error\ndata: " + anthropic_body_of(error) + b"\n\n"

    def refusal(self, error: NeriteError) -> Reply:
        """Return the reply for an error before any event."""
        return anthropic_reply_of(error)

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the whole message."""
        (choice,) = choices
        blocks: list[dict[str, Any]] = []
        if thoughts := choice.thoughts:
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if (text := choice.text) or not choice.calls:
            blocks.append({"type": "text", "text": text})
        for call, arguments in zip(choice.calls, choice.arguments, strict=True):
            blocks.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.loads(arguments or "{}")}
            )
        reason = _STOP_REASONS.get(choice.reason, "end_turn")
        return orjson.dumps(self._message(blocks, reason, _counts(usage or Usage(0, 0))))

    def _message(self, blocks: Sequence[Any], reason: str | None, counts: Mapping[str, int]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": blocks, "stop_reason": reason, "stop_sequence": None, "usage": counts}


class CountFormat(MessagesFormat):
    """Format of the number of tokens of a chat, for which no text is generated."""

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the number of tokens. Raises ``ApiError`` if the model does not report it."""
        if usage is None:
            raise ApiError(
                f"Model '{self._model}' does not report the number of tokens.", "model", "model_not_supported"
            )
        return orjson.dumps({"input_tokens": usage.prompt})


def _counts(usage: Usage) -> dict[str, int]:
    cached = usage.cached or 0
    return {
        "input_tokens": usage.prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
    }


def _event(name: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **members}))
