"""The families of models by how they write tool calls: what ``TOOL_CALL_PARSER`` may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from nerite.transports.openai.tools.hermes import HermesParser
from nerite.transports.openai.tools.llama3 import Llama3Parser
from nerite.transports.openai.tools.mistral import MistralParser, mistral_id
from nerite.transports.openai.tools.parser import ToolParser, new_id


class Family(NamedTuple):
    """How a family writes calls."""

    parser: Callable[[], ToolParser]
    """Makes the parser of one choice."""
    new_id: Callable[[], str] = new_id
    special: bool = False
    """The marker is a special token, which engines leave out of text unless they are told not to."""


ALL: Final = {
    "hermes": Family(HermesParser),
    "qwen": Family(HermesParser),
    "llama3": Family(Llama3Parser, special=True),
    "mistral": Family(MistralParser, mistral_id, special=True),
}
DEFAULT: Final = ALL["hermes"]
"""For calls that are not the model's choice, of a model of which nothing is known."""
