"""Parsers for tool calls in blocks between two markers, whose format is not the usual JSON object.

A block is read when it is complete, so its call arrives at once. Text that is no call after all is returned as text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import orjson

from nerite.llm.openai.tool_calls import Event, MarkerSearch, ToolArguments, ToolCall, new_id

Schemas: TypeAlias = Mapping[str, Any]
"""The schema of the arguments of each tool."""
Block: TypeAlias = list[tuple[str, dict[str, Any]]]
"""The names and arguments of the calls in a block."""
BlockReader: TypeAlias = Callable[[str, Schemas], Block]
"""Reads a block. Raises ``ValueError`` if it has no call."""


class BlockParser:
    """Parser for calls between two markers, within text."""

    def __init__(self, begin: str, end: str, read: BlockReader, schemas: Schemas) -> None:
        """``read`` reads what stands between the markers."""
        self._begin = begin
        self._end = end
        self._read = read
        self._schemas = schemas
        self._search = MarkerSearch(begin)
        self._parts: list[str] | None = None
        """The block so far; None outside of blocks."""
        self._tail = ""
        """The end of the block, as long as the marker may be that is searched for."""

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain."""
        events: list[Event] = []
        rest: str | None = text
        while rest:
            if self._parts is None:
                passed, rest = self._search.feed(rest)
                if passed:
                    events.append(passed)
                if rest is not None:
                    self._parts, self._tail = [], ""
                continue
            self._parts.append(rest)
            searched = self._tail + rest
            if self._end not in searched:
                self._tail = searched[1 - len(self._end) :] if len(self._end) > 1 else ""
                return events
            block, _, rest = "".join(self._parts).partition(self._end)
            self._parts = None
            events += self._calls(block, self._end)
        return events

    def _calls(self, block: str, end: str) -> list[Event]:
        try:
            calls = self._read(block, self._schemas)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return [self._begin + block + end]
        self._search.drop()
        events: list[Event] = []
        for name, arguments in calls:
            events += [ToolCall(new_id(), name), ToolArguments(orjson.dumps(arguments).decode())]
        return events

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text. A block may lack its last marker."""
        if self._parts is not None:
            return self._calls("".join(self._parts), "")
        text = self._search.finish()
        return [text] if text else []


def _value(text: str, schema: Any) -> Any:
    """Return an argument that is written without quotes: JSON, unless the schema says that it is a string."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _properties(schemas: Schemas, name: str) -> Mapping[str, Any]:
    schema = schemas.get(name)
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def _named(name: str) -> str:
    name = name.strip()
    if not name or any(char.isspace() for char in name):
        raise ValueError(f"{name!r} is not the name of a function")
    return name


def _object(text: str) -> dict[str, Any]:
    found = orjson.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the arguments are not an object")
    return found


_FENCE: Final = re.compile(r"^```(?:json)?\s*|\s*```$")
_DEEPSEEK_CALL: Final = "<\uff5ctool▁call▁begin\uff5c>"
_DEEPSEEK_END: Final = "<\uff5ctool▁call▁end\uff5c>"
_DEEPSEEK_NAME: Final = "<\uff5ctool▁sep\uff5c>"
DEEPSEEK: Final = ("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")


def read_deepseek(block: str, schemas: Schemas) -> Block:
    """Read calls of DeepSeek V3 and R1 (``function``, name and a fence of JSON), and of V3.1 (name and JSON)."""
    calls = []
    for part in block.split(_DEEPSEEK_CALL)[1:]:
        head, separator, rest = part.partition(_DEEPSEEK_END)[0].partition(_DEEPSEEK_NAME)
        if not separator:
            raise ValueError("a call has no name")
        if head.strip() == "function":
            head, _, rest = rest.partition("\n")
        calls.append((_named(head), _object(_FENCE.sub("", rest.strip()))))
    if not calls:
        raise ValueError("there is no call")
    return calls


_GLM_PAIR: Final = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
XML: Final = ("<tool_call>", "</tool_call>")


def read_glm(block: str, schemas: Schemas) -> Block:
    """Read a call of GLM 4.5: the name, then pairs of ``<arg_key>`` and ``<arg_value>``."""
    name = _named(block.partition("<arg_key>")[0])
    properties = _properties(schemas, name)
    return [
        (name, {key.strip(): _value(value, properties.get(key.strip())) for key, value in _GLM_PAIR.findall(block)})
    ]


_FUNCTION: Final = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def read_qwen_coder(block: str, schemas: Schemas) -> Block:
    """Read calls of Qwen3-Coder: ``<function=name>`` with ``<parameter=key>`` in it."""
    calls: Block = []
    for name, body in _FUNCTION.findall(block):
        properties = _properties(schemas, name.strip())
        arguments = {key.strip(): _value(value, properties.get(key.strip())) for key, value in _PARAMETER.findall(body)}
        calls.append((_named(name), arguments))
    if not calls:
        raise ValueError("there is no function")
    return calls


FUNCTION_GEMMA: Final = ("<start_function_call>", "<end_function_call>")
_ESCAPE: Final = "<escape>"


def read_function_gemma(block: str, schemas: Schemas) -> Block:
    """Read a call of FunctionGemma: ``call:name{key:<escape>text<escape>,other:1}``."""
    head, brace, rest = block.strip().partition("{")
    if not head.startswith("call:") or not brace or not rest.endswith("}"):
        raise ValueError("it is no call")
    name, rest = _named(head.removeprefix("call:")), rest[:-1]
    properties = _properties(schemas, name)
    arguments: dict[str, Any] = {}
    while rest:
        key, colon, rest = rest.partition(":")
        if not colon:
            raise ValueError("an argument has no value")
        if rest.startswith(_ESCAPE):
            value, _, rest = rest.removeprefix(_ESCAPE).partition(_ESCAPE)
            arguments[key.strip()] = value
            rest = rest.removeprefix(",")
        else:
            value, _, rest = rest.partition(",")
            arguments[key.strip()] = _value(value.strip(), properties.get(key.strip()))
    return [(name, arguments)]


_PYTHONIC: Final = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_BEGINNING: Final = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*)?)?")
_LONGEST_BEGINNING: Final = 1024


class PythonicParser:
    """Parser for an answer that is a list of calls in Python's syntax: ``[look(where="Rome"), …]``.

    An answer that begins like one is held back until its end.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._state = "beginning"

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain."""
        if self._state == "text":
            return [text] if text else []
        self._parts.append(text)
        if self._state == "calls":
            return []
        so_far = "".join(self._parts)
        if _PYTHONIC.match(so_far):
            self._state = "calls"
        elif not _BEGINNING.fullmatch(so_far) or len(so_far) > _LONGEST_BEGINNING:
            self._state, self._parts = "text", []
            return [so_far]
        return []

    def finish(self) -> list[Event]:
        """Return the calls, or the text that is none."""
        text, self._parts = "".join(self._parts), []
        try:
            calls = read_pythonic(text) if self._state == "calls" else []
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            calls = []
        if not calls:
            return [text] if text else []
        events: list[Event] = []
        for name, arguments in calls:
            events += [ToolCall(new_id(), name), ToolArguments(orjson.dumps(arguments).decode())]
        return events


def read_pythonic(text: str) -> Block:
    """Read a list of calls whose arguments are named literals. Raises ``ValueError`` or ``SyntaxError``."""
    listed = ast.parse(text.strip(), mode="eval").body
    if not isinstance(listed, ast.List):
        raise ValueError("it is no list")
    calls: Block = []
    for call in listed.elts:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("an element is no call with named arguments")
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
        calls.append((ast.unparse(call.func), arguments))
    return calls
