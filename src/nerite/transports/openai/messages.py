"""The messages of a chat: checked, and put into the form that chat templates expect. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Final

import orjson

from nerite.backends.llm.images import MOST_IMAGES
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.fields import Fields, check_count, missing, wrong_type, wrong_value
from nerite.transports.openai.sampling import not_offered

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_AS: Final = {"developer": "system"}
"""Roles under the name that templates have for them."""
_KNOWN: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call")
_DATA: Final = "data:"
_MOST_MESSAGES: Final = 2048
_MOST_PARTS: Final = 1024
"""Of one message."""
_MOST_TOOLS: Final = 128
"""Also calls in one message. As with OpenAI."""

Message = dict[str, Any]


class Conversation:
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
        fields.refuse_unknown(_KNOWN)
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


class Tool(dict[str, Any]):
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


def tools(fields: Fields) -> list[Tool]:
    """Return the tools of a body. Raises ``ApiError``."""
    found = []
    for number, each in enumerate(fields.array("tools", _MOST_TOOLS)):
        tool = Fields(each, f"tools[{number}]")
        tool.choice("type", "function", ("function",))
        function = tool.object("function")
        function.name("name")
        function.object("parameters")
        found.append(Tool({"type": "function", "function": function.values}))
    names = set()
    for name in (tool.name for tool in found):
        if name in names:
            raise ApiError(f"There are two tools with the name '{name}'.", "tools", "invalid_value")
        names.add(name)
    return found
