"""Parses the bodies of chat completions: fields, messages and tools. Pure.

A body becomes a typed request or an ``ApiError`` for the first mistake in it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.tensor import Buffer
from nerite.llm.images import MAX_IMAGES
from nerite.llm.openai import sampling
from nerite.llm.openai.completion_requests import (
    IGNORED,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_TOKEN_ID,
    CompletionFields,
    completion_fields,
)
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, check_count, encoded, missing, wrong_type, wrong_value
from nerite.llm.openai.sampling import Sampling, guided, not_offered
from nerite.llm.openai.text_model import SPECIAL

# Messages: validated and converted to the form that chat templates expect

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_ROLES: Final = {"developer": "system"}
"""Roles that chat templates know by another name."""
_THOUGHTS: Final = ("reasoning_content", "reasoning")
"""The two names under which servers return what a model thought, and clients send it back."""
_MESSAGE_KNOWN: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", *_THOUGHTS)
_DATA: Final = "data:"
_MAX_MESSAGES: Final = 2048
_MAX_PARTS: Final = 1024
"""Parts per message."""
_MAX_TOOLS: Final = 128
"""Maximum number of tools, and of calls per message, as with OpenAI."""

Message = dict[str, Any]


class ChatMessages:
    """Messages in the form that templates take, and their images in order, in base64."""

    def __init__(self, fields: Fields) -> None:
        """Raises ``ApiError``."""
        self.images: list[bytes] = []
        self.first_image = ""
        """Path of the first image in the body; empty if there is none."""
        given = fields.array("messages", _MAX_MESSAGES)
        if not given:
            raise missing("messages")
        self.messages: list[Message] = [
            self._message(fields.within(each, f"messages[{number}]")) for number, each in enumerate(given)
        ]

    def _message(self, fields: Fields) -> Message:
        fields.pass_over_unknown(_MESSAGE_KNOWN)
        if "role" not in fields:
            raise missing(fields.path("role"))
        role = fields.choice("role", "", _ROLES)
        message: Message = {"role": _TEMPLATE_ROLES.get(role, role)}
        calls = fields.array("tool_calls", _MAX_TOOLS) if role == "assistant" else []
        thought = next((name for name in _THOUGHTS if role == "assistant" and name in fields), "")
        if thought:
            message["reasoning_content"] = fields.text(thought)
        if "content" in fields:
            message["content"] = self._content(fields)
        elif role == "assistant" and (calls or thought or "refusal" in fields):
            message["content"] = fields.text("refusal", "")
        else:
            raise missing(fields.path("content"))
        if "name" in fields:
            message["name"] = fields.name("name")
        if calls:
            path = fields.path("tool_calls")
            message["tool_calls"] = [_call(fields.within(each, f"{path}[{at}]")) for at, each in enumerate(calls)]
        if role == "tool":
            message["tool_call_id"] = fields.name("tool_call_id")
        return message

    def _content(self, fields: Fields) -> Any:
        """Return text, or a list of parts if some are images, as templates of multimodal models expect."""
        value = fields["content"]
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong_type(fields.path("content"), "a string or an array of parts", value)
        check_count(fields.path("content"), value, _MAX_PARTS)
        path = fields.path("content")
        parts = [self._part(fields.within(each, f"{path}[{at}]")) for at, each in enumerate(value)]
        if any(part["type"] == "image" for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)

    def _part(self, part: Fields) -> dict[str, Any]:
        kind = part.choice("type", "", ("text", "refusal", "image_url", "input_audio", "file"))
        if kind in ("text", "refusal"):
            return {"type": "text", "text": part.text(kind)}
        if kind != "image_url":
            raise not_taken(part.path("type"), kind)
        self.first_image = self.first_image or part.path("type")
        self.images.append(_image(part.object("image_url")))
        if len(self.images) > MAX_IMAGES:
            raise wrong_value("messages", f"no more than {MAX_IMAGES} images", len(self.images))
        return {"type": "image"}


def first_image(messages: Sequence[Message]) -> str:
    """Return the path of the first image in messages in the form of templates; empty if there is none."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image":
                return f"messages[{number}].content[{at}].type"
    return ""


def not_taken(param: str, kind: str = "image_url") -> ApiError:
    """Return the error for a message part that is not text."""
    return not_offered(param, f"the model takes no parts of the type '{kind}'.")


def _image(image: Fields) -> bytes:
    """Return the image in a data URL. Other URLs are not fetched: the server sends no requests on behalf of clients."""
    url = image.text("url")
    head, comma, data = url.partition(",")
    if not url.startswith(_DATA) or not comma or not head.endswith(";base64"):
        raise wrong_value(image.path("url"), "a data URL with the image: data:image/…;base64,…", url)
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise wrong_value(image.path("url"), f"valid base64 ({error})", url) from None
    return data.encode()


def _call(call: Fields) -> dict[str, Any]:
    """Return an earlier tool call, with its arguments as an object, which each template formats in its own way."""
    function = call.object("function")
    given = function.text("arguments", "") or "{}"
    try:
        arguments = orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise wrong_value(function.path("arguments"), f"JSON in a string ({error})", given) from None
    return {
        "id": call.name("id"),
        "type": "function",
        "function": {"name": function.name("name"), "arguments": arguments},
    }


class ToolDefinition(dict[str, Any]):
    """A tool in the form of the request, which is also the form that templates take."""

    @property
    def name(self) -> str:
        """Name of the tool's function."""
        name: str = self["function"]["name"]
        return name

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of the arguments; any object if the tool has none."""
        return self["function"].get("parameters") or {"type": "object"}


def read_tools(fields: Fields) -> list[ToolDefinition]:
    """Return the tools of a body. Raises ``ApiError``."""
    found = []
    for number, each in enumerate(fields.array("tools", _MAX_TOOLS)):
        tool = fields.within(each, f"tools[{number}]")
        tool.choice("type", "function", ("function",))
        function = tool.object("function")
        function.name("name")
        function.object("parameters")
        found.append(ToolDefinition({"type": "function", "function": function.values}))
    names = set()
    for name in (tool.name for tool in found):
        if name in names:
            raise ApiError(f"Two tools have the name '{name}'.", "tools", "invalid_value")
        names.add(name)
    return found


# Chat completions

_MAX_MODALITIES: Final = 16
_LIMITS: Final = ("max_completion_tokens", "max_tokens")
_FOR_TEMPLATES: Final = ("reasoning_effort", "verbosity")
"""Fields that are passed to the chat template, which may use them."""
_UNSUPPORTED: Final = {
    "audio": "models generate text only.",
    "function_call": "use 'tool_choice', which replaced it in OpenAI's API.",
    "functions": "use 'tools', which replaced it in OpenAI's API.",
    "web_search_options": "this server has no web search.",
}
_CHAT_KNOWN: Final = frozenset(
    (
        *("model", "messages", "n", "logprobs", "top_logprobs", "stream", "stream_options", "modalities"),
        *("priority", "return_token_ids", "add_generation_prompt", "continue_final_message", "include_reasoning"),
        "thinking_token_budget",
        *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "enable_thinking"),
        *_LIMITS,
        *_FOR_TEMPLATES,
        SPECIAL,
        *_UNSUPPORTED,
        *sampling.COMMON,
        *IGNORED,
    )
)


def chat_opening(given: dict[str, Any] | Buffer, size: int) -> bytes:
    """Return what a conversation begins with, of ``size`` bytes or more: the contents of its messages."""
    variables = given if isinstance(given, dict) else orjson.loads(given)
    opening = b""
    for message in variables["messages"]:
        if len(opening) >= size:
            break
        content = message.get("content")
        opening += content.encode() if isinstance(content, str) else encoded("messages", content)
    return opening


class ChatRequest(NamedTuple):
    """The parsed body of a chat completion."""

    wanted: CompletionFields
    choice: str
    """How tools are called: ``auto``, ``required``, ``named`` or ``none``."""
    tool: str
    """The tool that is named; otherwise empty."""
    given: dict[str, Any] | Buffer
    """Variables of the chat template, possibly as JSON."""
    images: Sequence[bytes | memoryview]
    """In base64, in order."""
    first_image: str
    """Path of the first image in the body; empty if there is none."""
    schemas: Mapping[str, Any] = {}
    """The schema of the arguments of each tool that may be called."""
    single: bool = False
    """Whether the model may call one tool at a time only."""
    thoughts: bool = True
    """Whether what the model thinks is returned."""
    budget: int = 0
    """Tokens that the model may think; 0: as many as it wants."""
    continued: str | None = None
    """The end of the last message, if the model is to continue it."""

    def open_ended(self, prompt: bytes | memoryview) -> bytes | memoryview:
        """Return a rendered prompt without what the template writes behind a message that is to be continued.

        Raises ``ApiError`` if the template changes the message.
        """
        if self.continued is None:
            return prompt
        text, end = bytes(prompt), self.continued.encode()
        at = text.rfind(end)
        if at < 0:
            raise ApiError(
                "The chat template changes the last message, so it cannot be continued.",
                "continue_final_message",
                "invalid_value",
            )
        return text[: at + len(end)]


def read_chat(body: Buffer) -> ChatRequest:
    """Read a body. Raises ``ApiError``."""
    return chat_request(Fields.of_body(body))


def chat_request(fields: Fields) -> ChatRequest:
    """Return the request that the fields of a body describe. Raises ``ApiError``."""
    fields.pass_over_unknown(_CHAT_KNOWN)
    for name, why in _UNSUPPORTED.items():
        if name in fields:
            raise not_offered(name, why)
    if fields.array("modalities", _MAX_MODALITIES) not in ([], ["text"]):
        raise not_offered("modalities", "models generate text only.")
    model = fields.name("model")
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    settings = sampling.read(fields, _LIMITS)
    likely = fields.flag("logprobs")
    if "top_logprobs" in fields and not likely:
        raise ApiError("`top_logprobs` can only be used when `logprobs` is True", "top_logprobs", "invalid_parameter")
    count = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS) if likely else -1
    tools, choice = _tools(fields, settings)
    variables: dict[str, Any] = {name: fields.name(name) for name in _FOR_TEMPLATES if name in fields}
    if "enable_thinking" in fields:
        variables["enable_thinking"] = fields.flag("enable_thinking")
    variables |= fields.object("chat_template_kwargs").values
    conversation = ChatMessages(fields)
    continued = _continued(fields, conversation.messages)
    if "add_generation_prompt" in fields or continued is not None:
        variables["add_generation_prompt"] = fields.flag("add_generation_prompt", continued is None)
    given = {**variables, "messages": conversation.messages, "tools": tools or None}
    name = tools[0].name if choice == "named" else ""
    common = completion_fields(
        fields, model, n, settings, count, "top_logprobs" if "top_logprobs" in fields else "logprobs"
    )
    schemas = {tool.name: tool.parameters for tool in tools}
    single = bool(tools) and not fields.flag("parallel_tool_calls", True)
    thoughts = fields.flag("include_reasoning", True)
    budget = fields.integer("thinking_token_budget", 0, 1, MAX_TOKEN_ID) if "thinking_token_budget" in fields else 0
    return ChatRequest(
        *(common, choice, name, given, conversation.images, conversation.first_image),
        *(schemas, single, thoughts, budget, continued),
    )


def _continued(fields: Fields, messages: Sequence[Message]) -> str | None:
    """Return the text that the model is to continue, or None."""
    if not fields.flag("continue_final_message"):
        return None
    if fields.flag("add_generation_prompt"):
        raise ApiError(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true: a message is continued or begun",
            "continue_final_message",
            "invalid_parameter",
        )
    last = messages[-1]
    text = last.get("content")
    if last["role"] != "assistant" or not isinstance(text, str) or not text.strip():
        raise wrong_value(
            "continue_final_message",
            "a last message of the role 'assistant' with text",
            fields["continue_final_message"],
        )
    return text.strip()


def _tools(fields: Fields, settings: Sampling) -> tuple[list[ToolDefinition], str]:
    """Return the tools that may be called, and how; constrain the model's output if it must call one."""
    tools = read_tools(fields)
    choice: Any = fields.values.get("tool_choice", "auto" if tools else "none")
    name = ""
    if isinstance(choice, dict):
        name = fields.object("tool_choice").object("function").name("name")
        choice = "named"
    elif choice not in ("none", "auto", "required"):
        raise wrong_value("tool_choice", "'none', 'auto', 'required' or the name of a function", choice)
    if choice in ("named", "required") and not tools:
        which = "Named" if name else '"required"'
        raise ApiError(f"{which} tool choice requires CreateChatCompletionRequest.tools to be provided", "tool_choice")
    if not tools or choice == "none":
        return [], "none"
    if choice == "auto":
        return tools, choice
    if "guided_decoding" in settings:
        raise ApiError("'response_format' cannot be combined with a tool that must be called", "response_format")
    if choice == "named":
        place = next((place for place, tool in enumerate(tools) if tool.name == name), None)
        if place is None:
            raise wrong_value("tool_choice", "the name of one of the tools", name)
        tools = [tools[place]]
        settings["guided_decoding"] = guided({"json": tools[0].parameters}, f"tools[{place}].function.parameters")
    else:
        most = 1 if not fields.flag("parallel_tool_calls", True) else _MAX_TOOLS
        settings["guided_decoding"] = guided({"json": _calls_of(tools, most)}, "tools")
    return tools, choice


def _calls_of(tools: list[ToolDefinition], most: int) -> dict[str, Any]:
    """Return the schema of a list of one to ``most`` calls."""
    one_of = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": tool.parameters},
            "required": ["name", "parameters"],
        }
        for tool in tools
    ]
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": one_of}}
