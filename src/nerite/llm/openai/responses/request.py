"""Bodies of the Responses API as chat completions. Pure.

Items become messages: what a model thought, said and called in a turn is one message of the assistant.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.tensor import Buffer
from nerite.llm.openai.chat_requests import ChatRequest, chat_request
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, UnknownField, check_count, missing, wrong_type, wrong_value
from nerite.llm.openai.responses.tools import KINDS, LOCAL_SHELL, call_id, call_of, function_of
from nerite.llm.openai.sampling import not_offered

_MAX_ITEMS: Final = 2048
_MAX_PARTS: Final = 1024
_MAX_TOOLS: Final = 128
_MAX_INCLUDED: Final = 64
_LARGEST_LIMIT: Final = 2**31 - 1
_PASSED: Final = ("temperature", "top_p", "top_k", "seed", "user", "priority", "chat_template_kwargs")
"""Fields that a chat completion has, too."""
_ECHOED: Final = (
    *("instructions", "max_output_tokens", "parallel_tool_calls", "previous_response_id", "reasoning", "temperature"),
    *("text", "tool_choice", "tools", "top_p", "metadata", "user"),
)
"""Fields of the body that the response repeats."""
_KNOWN: Final = frozenset(
    (
        *("model", "input", "stream", "stream_options", "store", "include", "truncation", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "client_metadata", "top_logprobs"),
        *("background", "conversation", "prompt", "max_tool_calls", "context_management"),
        *_ECHOED,
        *_PASSED,
    )
)
_REFUSED: Final = {
    "background": "requests are answered at once.",
    "conversation": "there are no conversations here: use 'previous_response_id'.",
    "prompt": "there are no stored prompts here.",
    "top_logprobs": "responses have no log probabilities here.",
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "metadata": {},
    "user": None,
}
_ENCRYPTED: Final = "reasoning.encrypted_content"
"""What clients include that keep a conversation themselves: thoughts in a form that they only send back."""
_OURS: Final = "nerite:"
"""Begins the ``encrypted_content`` of this server."""
_CALLS: Final = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_TEXTS: Final = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")

Item = dict[str, Any]


class ResponseCall(NamedTuple):
    """A request for a response."""

    chat: ChatRequest
    echo: Mapping[str, Any]
    """Fields that the response repeats."""
    items: bytes
    """What the request adds to the conversation, as items in JSON."""
    previous: str
    """Id of the response that it continues; empty if it begins a conversation."""
    store: bool
    """Whether the response is to be kept."""
    sealed: bool = False
    """Whether its reasoning items have ``encrypted_content``."""
    kinds: Mapping[str, str] = {}
    """Types of tools that are no functions, by name."""


def read_response(body: Buffer, earlier: Buffer = b"") -> ResponseCall | str:
    """Read a body. Return the id of the response that it continues if ``earlier`` is empty; else the call.

    ``earlier`` are the items of the conversation that it continues. Raises ``ApiError``.
    """
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_KNOWN)
    previous = fields.name("previous_response_id", "")
    if previous and not earlier:
        return previous
    for name, why in _REFUSED.items():
        if fields.values.get(name):
            raise not_offered(name, why)
    own = _items(fields)
    items = [*(orjson.loads(earlier) if earlier else ()), *own]
    check_count("input", items, _MAX_ITEMS)
    converted: dict[str, Any] = {"model": fields.name("model"), "messages": _messages(fields, items)}
    if "max_output_tokens" in fields:
        converted["max_completion_tokens"] = fields.integer("max_output_tokens", 0, 1, _LARGEST_LIMIT)
    if fields.flag("stream"):
        converted |= {"stream": True, "stream_options": {"include_usage": True}}
    converted |= {name: fields[name] for name in _PASSED if name in fields}
    tools, kinds, dropped = _tools(fields)
    converted |= tools | _form(fields) | _reasoning(fields)
    chat = chat_request(Fields(converted))
    for name, setting in chat.wanted.sampling.items():
        renamed = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}.get(setting.param)
        chat.wanted.sampling[name] = setting._replace(param=renamed or setting.param)
    unknown = [*fields.unknown, *dropped, *chat.wanted.unknown]
    chat = chat._replace(wanted=chat.wanted._replace(unknown=unknown))
    echo = {name: fields.values.get(name, default) for name, default in _DEFAULTS.items()}
    sealed = _ENCRYPTED in fields.array("include", _MAX_INCLUDED)
    return ResponseCall(chat, echo, orjson.dumps(own), previous, fields.flag("store", True), sealed, kinds)


def sealed_thought(text: str) -> str:
    """Return a thought as the ``encrypted_content`` of a reasoning item: encoded, because it is no secret."""
    return _OURS + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _opened_thought(item: Fields) -> str:
    """Return the thought in the ``encrypted_content`` of an item; empty if it has none, or one of another server."""
    sealed = item.text("encrypted_content", "")
    if not sealed.startswith(_OURS):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_OURS), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        path = item.path("encrypted_content")
        raise wrong_value(path, f"what this server has returned ({error})", sealed) from None


def _items(fields: Fields) -> list[Item]:
    if "input" not in fields:
        raise missing("input")
    given: Any = fields["input"]
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise wrong_type("input", "a string or an array of items", given)
    check_count("input", given, _MAX_ITEMS)
    if not given:
        raise wrong_value("input", "at least one item", given)
    return given


def _messages(fields: Fields, items: Sequence[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions := fields.text("instructions", ""):
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] = {}
    """The message of the assistant that items are added to; empty if the next one begins one."""
    for number, each in enumerate(items):
        item = fields.within(each, f"input[{number}]")
        kind = item.text("type", "message")
        of_assistant = kind in ("reasoning", *_CALLS) or (kind == "message" and item.values.get("role") == "assistant")
        if of_assistant and not turn:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if kind == "message":
            role = item.choice("role", "", ("user", "assistant", "system", "developer"))
            content = _content(item, "content")
            if role == "assistant":
                turn["content"] = "\n".join(filter(None, (turn["content"], _joined(content))))
            else:
                messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            _think(turn, item)
        elif kind in _CALLS:
            turn.setdefault("tool_calls", []).append(call_of(item, kind))
        elif kind in _OUTPUTS:
            output = _joined(_content(item, "output"))
            messages.append({"role": "tool", "tool_call_id": call_id(item), "content": output})
        elif kind == "item_reference":
            raise not_offered(item.path("type"), "items are not kept one by one: send the item itself.")
        else:
            raise not_offered(item.path("type"), f"models take no items of the type '{kind}'.")
        if not of_assistant:
            turn = {}
    return messages


def _think(turn: dict[str, Any], item: Fields) -> None:
    parts = [*item.array("content", _MAX_PARTS), *item.array("summary", _MAX_PARTS)]
    texts = [text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str)]
    if not item.array("content", _MAX_PARTS) and (thought := _opened_thought(item)):
        texts = [thought]
    if texts:
        turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), *texts)))


def _content(item: Fields, name: str) -> Any:
    """Return the content of a message of a chat: text, or parts if some are images."""
    if name not in item:
        raise missing(item.path(name))
    given: Any = item[name]
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong_type(item.path(name), "a string or an array of parts", given)
    check_count(item.path(name), given, _MAX_PARTS)
    parts: list[dict[str, Any]] = []
    for at, each in enumerate(given):
        part = item.within(each, f"{item.path(name)}[{at}]")
        kind = part.text("type")
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part.text("refusal" if kind == "refusal" else "text")})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.text("image_url")}})
        else:
            raise not_offered(part.path("type"), f"models take no parts of the type '{kind}'.")
    return parts if any(part["type"] != "text" for part in parts) else _joined(parts)


def _joined(content: Any) -> str:
    """Return the text of a content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _tools(fields: Fields) -> tuple[dict[str, Any], dict[str, str], list[UnknownField]]:
    """Return the tools of a chat, the types of those that are no functions, and those that are passed over.

    The latter are tools that OpenAI's servers run themselves.
    """
    tools, kinds, dropped = [], {}, []
    for number, each in enumerate(fields.array("tools", _MAX_TOOLS)):
        tool = fields.within(each, f"tools[{number}]")
        kind = tool.name("type")
        if kind in KINDS:
            made = function_of(tool, kind)
            kinds[made["name"]] = kind
            tools.append({"type": "function", "function": made})
            continue
        if kind != "function":
            dropped.append(UnknownField(f"tools[].type={kind}"[:64], ""))
            continue
        function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
        tools.append({"type": "function", "function": function})
    choice: Any = fields.values.get("tool_choice", "auto")
    if isinstance(choice, dict):
        wanted = fields.object("tool_choice")
        if (kind := wanted.text("type")) not in ("function", *KINDS):
            raise not_offered("tool_choice.type", "a choice is 'none', 'auto', 'required' or a tool of the client.")
        name = kind if kind == LOCAL_SHELL else wanted.name("name")
        choice = {"type": "function", "function": {"name": name}}
    if not tools:
        if choice not in ("auto", "none"):
            raise ApiError("Tool choice requires 'tools' with functions.", "tool_choice", "invalid_value")
        return {}, kinds, dropped
    parallel = fields.flag("parallel_tool_calls", True)
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}, kinds, dropped


def _form(fields: Fields) -> dict[str, Any]:
    """Return the structured output that a body demands."""
    text = fields.object("text")
    form = text.object("format")
    found: dict[str, Any] = {"verbosity": text.name("verbosity")} if "verbosity" in text else {}
    kind = form.text("type", "text")
    if kind == "json_schema":
        schema = {"name": form.name("name", "answer"), "schema": form.object("schema").values}
        found["response_format"] = {"type": kind, "json_schema": schema}
    elif kind != "text":
        found["response_format"] = {"type": kind}
    return found


def _reasoning(fields: Fields) -> dict[str, Any]:
    """Return how much the model is to think: ``none`` is not at all."""
    reasoning = fields.object("reasoning")
    if "effort" not in reasoning:
        return {}
    effort = reasoning.name("effort")
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
