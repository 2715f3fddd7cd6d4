"""Replies of the Responses API: the response object, and the events by which it grows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import orjson

from nerite.balancing.response_ids import new_response_id
from nerite.core.errors import NeriteError
from nerite.llm.openai.errors import status_of
from nerite.llm.openai.reply_formats import ChoiceOutput, LogprobToken, ReplyFormat, Usage
from nerite.llm.openai.responses.request import sealed_thought
from nerite.llm.openai.responses.tools import call_item
from nerite.llm.openai.tool_calls import Event, ReasoningText, ToolArguments, ToolCall

Item = dict[str, Any]
Kept = Callable[[Mapping[str, Any]], None]
"""Is given a finished response."""
_TEXT: Final = "output_text"
_THOUGHT: Final = "reasoning_text"


class ResponseObjectFormat(ReplyFormat):
    """Format of responses: items of thoughts, text and calls."""

    operation = "chat"

    def __init__(
        self,
        created: int,
        model: str,
        echo: Mapping[str, Any],
        *,
        store: bool,
        keep: Kept,
        sealed: bool = False,
        kinds: Mapping[str, str] = MappingProxyType({}),
        tag: str = "",
    ) -> None:
        """``echo`` are the fields that the response repeats; ``keep`` is given the finished response.

        ``sealed``: reasoning items have ``encrypted_content``, too. ``kinds`` has the types of tools that are no
        functions, by name. ``tag`` is that of the server at its router.
        """
        self.id = new_response_id(tag)
        self._created = created
        self._model = model
        self._echo = echo
        self._store = store
        self._keep = keep
        self._sealed = sealed
        self._kinds = kinds
        self._held: ToolCall | None = None
        """The open call of such a tool, which is sent when it is complete."""
        self._sequence = -1
        """Number of the last event."""
        self._items: list[Item] = []
        """ChoiceOutput items of a stream."""
        self._open: Item | None = None
        """The item of a stream that grows."""
        self._parts: list[str] = []
        """Its text so far."""

    # Events

    def opening(self, choice: ChoiceOutput, usage: Usage | None) -> bytes:
        """Return the events that begin the response."""
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def step(
        self, choice: ChoiceOutput, event: Event, tokens: list[LogprobToken] | None, usage: Usage | None = None
    ) -> bytes:
        """Return the events for an event of a choice."""
        if isinstance(event, ToolCall):
            closed = self._closed("completed")
            if event.name in self._kinds:
                self._held, self._parts = event, []
                return closed
            return closed + self._begun(call_item(event, "", "in_progress", {}))
        if isinstance(event, ToolArguments):
            self._parts.append(event.text)
            if self._held is not None:
                return b""
            return self._delta("response.function_call_arguments.delta", event.text)
        if isinstance(event, ReasoningText):
            begun = self._begun_as("reasoning", _thought_item, _THOUGHT)
            self._parts.append(event.text)
            return begun + self._delta("response.reasoning_text.delta", event.text, content_index=0)
        if not event:
            return b""
        begun = self._begun_as("message", _message_item, _TEXT)
        self._parts.append(event)
        return begun + self._delta("response.output_text.delta", event, content_index=0, logprobs=[])

    def _begun_as(self, kind: str, made: Callable[[str | None, str], Item], part: str) -> bytes:
        """Return the events that begin an item with one part, unless such an item is open."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        begun = self._closed("completed") + self._begun(made(None, "in_progress"))
        return begun + self._item_event("response.content_part.added", content_index=0, part=_part(part, ""))

    def _begun(self, item: Item) -> bytes:
        self._open, self._parts = item, []
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta(self, name: str, delta: str, **more: Any) -> bytes:
        return self._item_event(name, **more, delta=delta)

    def _item_event(self, kind: str, /, **more: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._items), **more)

    def _closed(self, status: str) -> bytes:
        """Return the events that end the open item."""
        if self._held is not None:
            held, self._held = self._held, None
            return self._sent(call_item(held, "".join(self._parts) or "{}", status, self._kinds))
        item = self._open
        if item is None:
            return b""
        text = "".join(self._parts)
        if item["type"] == "function_call":
            item |= {"arguments": text or "{}", "status": status}
            events = self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=text or "{}"
            )
        else:
            kind = _TEXT if item["type"] == "message" else _THOUGHT
            part = _part(kind, text)
            item |= {"content": [part]} | ({"status": status} if kind == _TEXT else self._seal(text))
            more: dict[str, Any] = {"logprobs": []} if kind == _TEXT else {}
            events = self._item_event(f"response.{kind}.done", content_index=0, text=text, **more)
            events += self._item_event("response.content_part.done", content_index=0, part=part)
        events += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return events

    def _sent(self, item: Item) -> bytes:
        """Return the events of a call that is complete."""
        events = self._begun({**item, "status": "in_progress"})
        if item["type"] == "custom_tool_call":
            events += self._delta("response.custom_tool_call_input.delta", item["input"])
            events += self._item_event("response.custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "function_call":
            events += self._delta("response.function_call_arguments.delta", item["arguments"])
            events += self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        events += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return events

    def ending(self, choice: ChoiceOutput, usage: Usage | None = None) -> bytes:
        """Return the events that end the last item."""
        return self._closed("incomplete" if choice.reason == "length" else "completed")

    def closing(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the event that ends the response."""
        response = self._finished(choices[0].reason, self._items, usage)
        return self._event(f"response.{response['status']}", response=response)

    def failing(self, error: NeriteError) -> bytes:
        """Return the event that ends the response with an error."""
        code = "rate_limit_exceeded" if status_of(error) == 429 else "server_error"
        response = self._response("failed", self._items) | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, /, **members: Any) -> bytes:
        self._sequence += 1
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **members})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    # The response

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the whole response."""
        (choice,) = choices
        status = "incomplete" if choice.reason == "length" else "completed"
        items: list[Item] = []
        if thoughts := choice.thoughts:
            items.append(_thought_item(thoughts, status) | self._seal(thoughts))
        if (text := choice.text) or not choice.calls:
            items.append(_message_item(text, status))
        for call, arguments in zip(choice.calls, choice.arguments, strict=True):
            items.append(call_item(call, arguments or "{}", status, self._kinds))
        return orjson.dumps(self._finished(choice.reason, items, usage))

    def _seal(self, thought: str) -> Item:
        return {"encrypted_content": sealed_thought(thought)} if self._sealed else {}

    def _finished(self, reason: str, items: Sequence[Item], usage: Usage | None) -> dict[str, Any]:
        status = "incomplete" if reason == "length" else "completed"
        response = self._response(status, items)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if usage is not None:
            response["usage"] = {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached or 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            }
        self._keep(response)
        return response

    def _response(self, status: str, items: Sequence[Item]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": list(items),
            "error": None,
            "incomplete_details": None,
            "store": self._store,
            "background": False,
            "truncation": "disabled",
            **self._echo,
            "usage": None,  # Last, where routers look for it.
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == _TEXT else {}
    return {"type": kind, "text": text, **more}


def _message_item(text: str | None, status: str) -> Item:
    content = [] if text is None else [_part(_TEXT, text)]
    made = f"msg_{secrets.token_hex(24)}"
    return {"id": made, "type": "message", "role": "assistant", "status": status, "content": content}


def _thought_item(text: str | None, status: str) -> Item:
    content = [] if text is None else [_part(_THOUGHT, text)]
    return {"id": f"rs_{secrets.token_hex(24)}", "type": "reasoning", "summary": [], "content": content}
