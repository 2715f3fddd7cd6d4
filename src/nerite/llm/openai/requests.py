"""Parses the bodies of completions and chat completions: fields, messages and tools. Pure.

A body becomes a typed request or an ``ApiError`` for the first mistake in it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.tensor import Buffer
from nerite.llm.openai import sampling
from nerite.llm.openai.fields import ApiError, Fields, check_count, encoded, missing, wrong_type, wrong_value
from nerite.llm.openai.sampling import Sampling, guided, not_offered
from nerite.llm.openai.text_model import SPECIAL
from nerite.llm.request import MAX_IMAGES, MAX_SEQUENCES

MAX_CHOICES: Final = MAX_SEQUENCES
"""Maximum for all prompts together. Each choice is a request to the model."""
_MAX_LOGPROBS: Final = 20
_LEAST_PRIORITY: Final = 2**31 - 1
DEFAULT_TOKENS: Final = sampling.SamplingSetting(16, "max_tokens")
"""OpenAI's default for completions without a limit."""
IGNORED: Final = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""OpenAI fields that do not affect the answer."""
_IDS: Final = ("prompt_cache_key", "safety_identifier", "user")
"""Ignored fields whose values are identifiers and are validated as such."""
_COMPLETION_KNOWN: Final = frozenset(
    (
        *("model", "prompt", "n", "best_of", "echo", "logprobs", "max_tokens", "stream", "stream_options", "suffix"),
        SPECIAL,
        "priority",
        *sampling.COMMON,
        *IGNORED,
    )
)


class CompletionFields(NamedTuple):
    """Fields that completions and chat completions have in common."""

    model: str
    n: int
    sampling: Sampling
    stream: bool
    usage: bool
    """Whether a stream ends with token counts."""
    logprobs: int
    """Number of likely tokens to report per position; negative: no log probabilities at all."""
    special: bool | None
    """Whether the tokenizer adds special tokens to the prompt; None: the default for this kind of completion."""
    priority: int
    """As in KServe and vLLM: requests with higher numbers may wait longer."""
    user: str = ""
    """The end user, whose requests a route may keep on one arm. Models do not see it."""


class CompletionRequest(NamedTuple):
    """The parsed body of a completion."""

    wanted: CompletionFields
    prompts: Sequence[bytes | memoryview]
    """In UTF-8."""
    echo: bool


def read_completion(body: Buffer) -> CompletionRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_COMPLETION_KNOWN)
    model = fields.name("model")
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    best_of = fields.integer("best_of", n, 1, MAX_CHOICES)
    if best_of != n:
        raise not_offered("best_of", "every choice is returned, so it must equal 'n'.")
    if fields.text("suffix", ""):
        raise not_offered("suffix", "suffix is not currently supported")
    echo = fields.flag("echo")
    count = fields.integer("logprobs", -1, 0, _MAX_LOGPROBS) if "logprobs" in fields else -1
    if echo and count >= 0:
        raise not_offered("echo", "the prompt's own tokens have no 'logprobs' here: remove one of the two.")
    settings = sampling.read(fields, ("max_tokens",))
    prompts = _prompts(fields)
    if len(prompts) * n > MAX_CHOICES:
        raise wrong_value("n", f"no more than {MAX_CHOICES} choices for all {len(prompts)} prompts together", n)
    return CompletionRequest(
        completion_fields(fields, model, n, settings, count), [text.encode() for text in prompts], echo
    )


def completion_fields(
    fields: Fields, model: str, n: int, settings: Sampling, logprobs: int, counted_in: str = "logprobs"
) -> CompletionFields:
    """Return the fields that both kinds have in common. ``counted_in`` is the field with the number of ``logprobs``."""
    ids = {name: fields.name(name, "") for name in _IDS}
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise ApiError("`stream_options` can only be used when `stream` is True", "stream_options", "invalid_parameter")
    options.refuse_unknown(("include_usage", "include_obfuscation"))
    if logprobs >= 0:
        settings["logprobs"] = sampling.SamplingSetting(logprobs, counted_in)
    priority = fields.integer("priority", 0, 0, _LEAST_PRIORITY)
    special = fields.flag(SPECIAL) if SPECIAL in fields else None
    usage = options.flag("include_usage")
    return CompletionFields(model, n, settings, stream, usage, logprobs, special, priority, ids["user"])


def _prompts(fields: Fields) -> list[str]:
    if "prompt" not in fields:
        raise missing("prompt")
    given: Any = fields["prompt"]
    prompts = given if isinstance(given, list) else [given]
    check_count("prompt", prompts, MAX_CHOICES)
    if any(isinstance(prompt, (int, list)) for prompt in prompts):
        raise not_offered("prompt", "a prompt is a string or an array of strings; tokens are not supported.")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise wrong_type("prompt", "a string or an array of strings", given)
    if not prompts or "" in prompts:
        raise ApiError("prompt must be non-empty", "prompt", "invalid_value")
    return prompts


# Chat messages: validated and converted to the form that chat templates expect

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_ROLES: Final = {"developer": "system"}
"""Roles that chat templates know by another name."""
_MESSAGE_KNOWN: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call")
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
            self._message(Fields(each, f"messages[{number}]")) for number, each in enumerate(given)
        ]

    def _message(self, fields: Fields) -> Message:
        fields.refuse_unknown(_MESSAGE_KNOWN)
        if "role" not in fields:
            raise missing(fields.path("role"))
        role = fields.choice("role", "", _ROLES)
        message: Message = {"role": _TEMPLATE_ROLES.get(role, role)}
        calls = fields.array("tool_calls", _MAX_TOOLS) if role == "assistant" else []
        if "content" in fields:
            message["content"] = self._content(fields)
        elif role == "assistant" and (calls or "refusal" in fields):
            message["content"] = fields.text("refusal", "")
        else:
            raise missing(fields.path("content"))
        if "name" in fields:
            message["name"] = fields.name("name")
        if calls:
            path = fields.path("tool_calls")
            message["tool_calls"] = [_call(Fields(each, f"{path}[{at}]")) for at, each in enumerate(calls)]
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
        parts = [self._part(Fields(each, f"{fields.path('content')}[{at}]")) for at, each in enumerate(value)]
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
        tool = Fields(each, f"tools[{number}]")
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
        "priority",
        *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
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


def read_chat(body: Buffer) -> ChatRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_CHAT_KNOWN)
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
    count = fields.integer("top_logprobs", 0, 0, _MAX_LOGPROBS) if likely else -1
    tools, choice = _tools(fields, settings)
    variables = {name: fields.name(name) for name in _FOR_TEMPLATES if name in fields}
    variables |= fields.object("chat_template_kwargs").values
    conversation = ChatMessages(fields)
    given = {**variables, "messages": conversation.messages, "tools": tools or None}
    name = tools[0].name if choice == "named" else ""
    common = completion_fields(
        fields, model, n, settings, count, "top_logprobs" if "top_logprobs" in fields else "logprobs"
    )
    return ChatRequest(common, choice, name, given, conversation.images, conversation.first_image)


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
    if not fields.flag("parallel_tool_calls", True):
        raise not_offered("parallel_tool_calls", "the number of tool calls cannot be limited here.")
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
        settings["guided_decoding"] = guided({"json": _calls_of(tools)}, "tools")
    return tools, choice


def _calls_of(tools: list[ToolDefinition]) -> dict[str, Any]:
    """Return the schema of a non-empty list of calls."""
    one_of = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": tool.parameters},
            "required": ["name", "parameters"],
        }
        for tool in tools
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": one_of}}
