"""What a completion is asked for. Pure: from the body to what it means, or to the first thing that is wrong."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.tensor import Buffer
from nerite.llm.openai import sampling
from nerite.llm.openai.fields import ApiError, Fields, check_count, missing, wrong_type, wrong_value
from nerite.llm.openai.sampling import Sampling, guided, not_offered
from nerite.llm.openai.text_model import SPECIAL
from nerite.llm.request import MOST_IMAGES, MOST_SEQUENCES

MOST_CHOICES: Final = MOST_SEQUENCES
"""Of all prompts together: each is a request of the model."""
_MOST_LOGPROBS: Final = 20
_LEAST_PRIORITY: Final = 2**31 - 1
DEFAULT_TOKENS: Final = sampling.SamplingSetting(16, "max_tokens")
"""OpenAI's own, for completions that do not say how many."""
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
"""Fields of OpenAI's that do not change what is answered."""
_IDS: Final = ("prompt_cache_key", "safety_identifier", "user")
"""Those of them that name somebody or something."""
_KNOWN: Final = frozenset(
    (
        *("model", "prompt", "n", "best_of", "echo", "logprobs", "max_tokens", "stream", "stream_options", "suffix"),
        SPECIAL,
        "priority",
        *sampling.COMMON,
        *IGNORED,
    )
)


class CompletionFields(NamedTuple):
    """What completions of both kinds have in common."""

    model: str
    n: int
    sampling: Sampling
    stream: bool
    usage: bool
    """A stream ends with the numbers of tokens."""
    logprobs: int
    """So many likely tokens at each place; below 0: not even the chosen ones."""
    special: bool | None
    """Whether the tokenizer adds special tokens to the prompt; None: as is usual with one of this kind."""
    priority: int
    """KServe's and vLLM's: the higher the number, the longer it may wait."""


class CompletionRequest(NamedTuple):
    """A body, understood."""

    wanted: CompletionFields
    prompts: Sequence[bytes | memoryview]
    """As UTF-8."""
    echo: bool


def read_completion(body: Buffer) -> CompletionRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_KNOWN)
    model = fields.name("model")
    n = fields.integer("n", 1, 1, MOST_CHOICES)
    best_of = fields.integer("best_of", n, 1, MOST_CHOICES)
    if best_of != n:
        raise not_offered("best_of", "every choice is returned, so that it can only be what 'n' is.")
    if fields.text("suffix", ""):
        raise not_offered("suffix", "suffix is not currently supported")
    echo = fields.flag("echo")
    count = fields.integer("logprobs", -1, 0, _MOST_LOGPROBS) if "logprobs" in fields else -1
    if echo and count >= 0:
        raise not_offered("echo", "the prompt's own tokens have no 'logprobs' here: leave one of the two out.")
    settings = sampling.read(fields, ("max_tokens",))
    prompts = _prompts(fields)
    if len(prompts) * n > MOST_CHOICES:
        raise wrong_value("n", f"no more than {MOST_CHOICES} choices for all {len(prompts)} prompts together", n)
    return CompletionRequest(
        completion_fields(fields, model, n, settings, count), [text.encode() for text in prompts], echo
    )


def completion_fields(
    fields: Fields, model: str, n: int, settings: Sampling, logprobs: int, counted_in: str = "logprobs"
) -> CompletionFields:
    """Return what both kinds have in common. ``counted_in`` is the field that says how many ``logprobs``."""
    for name in _IDS:
        fields.name(name, "")
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise ApiError("`stream_options` can only be used when `stream` is True", "stream_options", "invalid_parameter")
    options.refuse_unknown(("include_usage", "include_obfuscation"))
    if logprobs >= 0:
        settings["logprobs"] = sampling.SamplingSetting(logprobs, counted_in)
    priority = fields.integer("priority", 0, 0, _LEAST_PRIORITY)
    special = fields.flag(SPECIAL) if SPECIAL in fields else None
    return CompletionFields(model, n, settings, stream, options.flag("include_usage"), logprobs, special, priority)


def _prompts(fields: Fields) -> list[str]:
    if "prompt" not in fields:
        raise missing("prompt")
    given: Any = fields["prompt"]
    prompts = given if isinstance(given, list) else [given]
    check_count("prompt", prompts, MOST_CHOICES)
    if any(isinstance(prompt, (int, list)) for prompt in prompts):
        raise not_offered("prompt", "a prompt is a string, or an array of strings; tokens are the model's business.")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise wrong_type("prompt", "a string or an array of strings", given)
    if not prompts or "" in prompts:
        raise ApiError("prompt must be non-empty", "prompt", "invalid_value")
    return prompts


# The messages of a chat: checked, and put into the form that chat templates expect. Pure.

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_AS: Final = {"developer": "system"}
"""Roles under the name that templates have for them."""
_MESSAGES_KNOWN: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call")
_DATA: Final = "data:"
_MOST_MESSAGES: Final = 2048
_MOST_PARTS: Final = 1024
"""Of one message."""
_MOST_TOOLS: Final = 128
"""Also calls in one message. As with OpenAI."""

Message = dict[str, Any]


class ChatMessages:
    """Messages as templates take them, and the images in them, in their order and in base64."""

    def __init__(self, fields: Fields) -> None:
        """Raises ``ApiError``."""
        self.images: list[bytes] = []
        self.first_image = ""
        """Where the first of them stands."""
        given = fields.array("messages", _MOST_MESSAGES)
        if not given:
            raise missing("messages")
        self.messages: list[Message] = [
            self._message(Fields(each, f"messages[{number}]")) for number, each in enumerate(given)
        ]

    def _message(self, fields: Fields) -> Message:
        fields.refuse_unknown(_MESSAGES_KNOWN)
        if "role" not in fields:
            raise missing(fields.path("role"))
        role = fields.choice("role", "", _ROLES)
        message: Message = {"role": _AS.get(role, role)}
        calls = fields.array("tool_calls", _MOST_TOOLS) if role == "assistant" else []
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
        """Return text, or with images a list of parts, which is what templates of models that see expect."""
        value = fields["content"]
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong_type(fields.path("content"), "a string or an array of parts", value)
        check_count(fields.path("content"), value, _MOST_PARTS)
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
        if len(self.images) > MOST_IMAGES:
            raise wrong_value("messages", f"no more than {MOST_IMAGES} images", len(self.images))
        return {"type": "image"}


def first_image(messages: Sequence[Message]) -> str:
    """Return where the first image stands in messages as templates take them; empty if there is none."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image":
                return f"messages[{number}].content[{at}].type"
    return ""


def not_taken(param: str, kind: str = "image_url") -> ApiError:
    """Return the refusal of a part that is no text."""
    return not_offered(param, f"the model takes no parts of the type '{kind}'.")


def _image(image: Fields) -> bytes:
    """Return the image of a data URL. What lies elsewhere is not fetched: the server asks nobody for clients."""
    url = image.text("url")
    head, comma, data = url.partition(",")
    if not url.startswith(_DATA) or not comma or not head.endswith(";base64"):
        raise wrong_value(image.path("url"), "a URL that has the image in it: data:image/…;base64,…", url)
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise wrong_value(image.path("url"), f"valid base64 ({error})", url) from None
    return data.encode()


def _call(call: Fields) -> dict[str, Any]:
    """Return an earlier call; its arguments as an object, which is what templates write in their own way."""
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
    """A tool as it was given, and as templates take it."""

    @property
    def name(self) -> str:
        """Of its function."""
        name: str = self["function"]["name"]
        return name

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of its arguments; any object where it has none."""
        return self["function"].get("parameters") or {"type": "object"}


def read_tools(fields: Fields) -> list[ToolDefinition]:
    """Return the tools of a body. Raises ``ApiError``."""
    found = []
    for number, each in enumerate(fields.array("tools", _MOST_TOOLS)):
        tool = Fields(each, f"tools[{number}]")
        tool.choice("type", "function", ("function",))
        function = tool.object("function")
        function.name("name")
        function.object("parameters")
        found.append(ToolDefinition({"type": "function", "function": function.values}))
    names = set()
    for name in (tool.name for tool in found):
        if name in names:
            raise ApiError(f"There are two tools with the name '{name}'.", "tools", "invalid_value")
        names.add(name)
    return found


# What a chat completion is asked for. Pure: from the body to what it means, or to the first thing that is wrong.

_MOST_MODALITIES: Final = 16
_LIMITS: Final = ("max_completion_tokens", "max_tokens")
_FOR_TEMPLATES: Final = ("reasoning_effort", "verbosity")
"""Wishes that a chat template may know what to do with."""
_ELSEWHERE: Final = {
    "audio": "models give text.",
    "function_call": "write it as 'tool_choice', as OpenAI has it now.",
    "functions": "write them as 'tools', as OpenAI has it now.",
    "web_search_options": "there is no search here.",
}
_CHAT_REQUEST_KNOWN: Final = frozenset(
    (
        *("model", "messages", "n", "logprobs", "top_logprobs", "stream", "stream_options", "modalities"),
        "priority",
        *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *_LIMITS,
        *_FOR_TEMPLATES,
        SPECIAL,
        *_ELSEWHERE,
        *sampling.COMMON,
        *IGNORED,
    )
)


class ChatRequest(NamedTuple):
    """A body, understood."""

    wanted: CompletionFields
    choice: str
    """Which of the tools is called: ``auto``, ``required``, ``named``, or ``none``."""
    tool: str
    """The one that is named; else nothing."""
    given: dict[str, Any] | Buffer
    """What the chat template is given, or that as JSON."""
    images: Sequence[bytes | memoryview]
    """In base64, in their order."""
    first_image: str
    """Where the first of them stands in the body."""


def read_chat(body: Buffer) -> ChatRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_CHAT_REQUEST_KNOWN)
    for name, why in _ELSEWHERE.items():
        if name in fields:
            raise not_offered(name, why)
    if fields.array("modalities", _MOST_MODALITIES) not in ([], ["text"]):
        raise not_offered("modalities", "models give text.")
    model = fields.name("model")
    n = fields.integer("n", 1, 1, MOST_CHOICES)
    settings = sampling.read(fields, _LIMITS)
    likely = fields.flag("logprobs")
    if "top_logprobs" in fields and not likely:
        raise ApiError("`top_logprobs` can only be used when `logprobs` is True", "top_logprobs", "invalid_parameter")
    count = fields.integer("top_logprobs", 0, 0, _MOST_LOGPROBS) if likely else -1
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
    """Return the tools that may be called, and how; have the model write a call where it must."""
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
        raise not_offered("parallel_tool_calls", "how many tools a model calls is not limited here.")
    if choice == "auto":
        return tools, choice
    if "guided_decoding" in settings:
        raise ApiError("a tool that must be called leaves no room for 'response_format'", "response_format")
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
    """Return the schema of a list of calls, at least one."""
    one_of = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": tool.parameters},
            "required": ["name", "parameters"],
        }
        for tool in tools
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": one_of}}
