"""What a model needs for chats besides its tensors: a template for the prompt, and a reader of its tool calls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from nerite.config.near import nearest
from nerite.transports.openai import template_files
from nerite.transports.openai.chat_request import ChatRequest
from nerite.transports.openai.chat_template import ChatTemplate
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.sampling import Sampling, Setting
from nerite.transports.openai.tools import families
from nerite.transports.openai.tools.families import Family
from nerite.transports.openai.tools.guided import GuidedCall, GuidedCalls
from nerite.transports.openai.tools.parser import ToolParser

if TYPE_CHECKING:
    from nerite.execution.running_version import RunningVersion
    from nerite.server import InferenceServer

_log = logging.getLogger("nerite.http")
PARSER: Final = "TOOL_CALL_PARSER"


class ChatModel:
    """One model's template and parser."""

    def __init__(self, name: str, version: Path | None, template: str, family: str) -> None:
        """``template`` and ``family`` are parameters of its configuration. Raises ``ApiError`` for wrong ones."""
        found = template_files.find(version, template)
        if not found.model_s_own:
            _log.warning(
                "model '%s' has no chat template: its prompts are the plain one's. Put chat_template.jinja or "
                "tokenizer_config.json into %s, or name one with the parameter %s",
                name,
                version,
                template_files.PARAMETER,
            )
        self._name = name
        self._template = ChatTemplate(found.source, found.origin, found.words)
        self._with_tools = (
            self._template
            if found.with_tools == found.source
            else ChatTemplate(found.with_tools, found.origin, found.words)
        )
        self._family = self._find(family) if family else None
        self.adds_special = found.plain
        """Whether the tokenizer is to add special tokens to a prompt. Any but the plain template has written them."""

    def _find(self, family: str) -> Family:
        found = families.ALL.get(family)
        if found is None:
            meant = nearest(family, families.ALL)
            hint = f" Did you mean '{meant}'?" if meant else ""
            raise ApiError(
                f"The parameter {PARSER} of model '{self._name}' is '{family}'; it may be "
                f"{', '.join(families.ALL)}.{hint}",
                None,
                "bad_tool_call_parser",
                500,
            )
        return found

    def template(self, asked: ChatRequest) -> ChatTemplate:
        """Return what makes the prompt of a chat. Raises ``ApiError`` for one that the model cannot be asked."""
        if asked.choice == "auto" and self._family is None:
            raise ApiError(
                f'"auto" tool choice requires a tool call parser: set the parameter {PARSER} in the configuration of '
                f"model '{self._name}' to one of {', '.join(families.ALL)}",
                "tools",
                "unsupported_parameter",
            )
        return self._template if asked.choice == "none" else self._with_tools

    def prepare(self, asked: ChatRequest, sampling: Sampling) -> None:
        """Add to what an engine is told.

        A chat that names no limit has none but the context; engines have one for what says nothing. And where what the
        parser looks for is a special token, they leave it out unless they are asked not to.
        """
        sampling.setdefault("max_tokens", Setting(None, "max_tokens"))
        if asked.choice == "auto" and self._family is not None and self._family.special:
            sampling.setdefault("skip_special_tokens", Setting(False, "tools"))

    def parser(self, asked: ChatRequest) -> ToolParser | None:
        """Return what reads the text of one choice, None where it is nothing but text."""
        if asked.choice == "named":
            return GuidedCall(asked.tool, self._new_id)
        if asked.choice == "required":
            return GuidedCalls(self._new_id)
        return self._family.parser() if self._family is not None and asked.choice != "none" else None

    def _new_id(self) -> str:
        return (self._family or families.DEFAULT).new_id()


class ChatModels:
    """Looks up a model's template and parser when its first chat comes, once for each that is loaded."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._known: WeakKeyDictionary[RunningVersion, ChatModel] = WeakKeyDictionary()

    def of(self, running: RunningVersion) -> ChatModel:
        """Return what is known of a model. Raises ``NeriteError`` for files and parameters that are wrong."""
        known = self._known.get(running)
        if known is None:
            parameters = running.config_json.get("parameters", {})

            def parameter(key: str) -> str:
                return str(parameters.get(key, {}).get("string_value", ""))

            version = self._server.version_directory(running)
            known = ChatModel(running.name, version, parameter(template_files.PARAMETER), parameter(PARSER))
            self._known[running] = known
        return known
