"""What a chat completion is asked for. Pure: from the body to what it means, or to the first thing that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nerite.core.tensor import Buffer
from nerite.transports.openai import messages, sampling
from nerite.transports.openai.completion_request import IGNORED, MOST_CHOICES, Wanted, wanted
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.fields import Fields, wrong_value
from nerite.transports.openai.messages import Conversation, Tool
from nerite.transports.openai.sampling import Sampling, guided, not_offered
from nerite.transports.openai.text_model import SPECIAL

_MOST_LOGPROBS: Final = 20
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
_KNOWN: Final = frozenset(
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

    wanted: Wanted
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


def read(body: Buffer) -> ChatRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_KNOWN)
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
    conversation = Conversation(fields)
    given = {**variables, "messages": conversation.messages, "tools": tools or None}
    name = tools[0].name if choice == "named" else ""
    common = wanted(fields, model, n, settings, count, "top_logprobs" if "top_logprobs" in fields else "logprobs")
    return ChatRequest(common, choice, name, given, conversation.images, conversation.first_image)


def _tools(fields: Fields, settings: Sampling) -> tuple[list[Tool], str]:
    """Return the tools that may be called, and how; have the model write a call where it must."""
    tools = messages.tools(fields)
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


def _calls_of(tools: list[Tool]) -> dict[str, Any]:
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
