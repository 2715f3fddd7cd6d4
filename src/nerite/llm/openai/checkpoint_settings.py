"""What the files of a checkpoint say beside its chat template: sampling defaults, and how it fills gaps in texts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from nerite.core.bounded_files import read_json
from nerite.core.errors import NeriteError
from nerite.llm.openai.chat_templates import checkpoint_directory
from nerite.llm.openai.sampling import Sampling, SamplingSetting
from nerite.llm.sampling_parameters import from_mapping

if TYPE_CHECKING:
    from nerite.core.servable_version import ServableVersion
    from nerite.inference_entry import TransportEntry

_log = logging.getLogger("nerite.http")
FILE: Final = "generation_config.json"
SAMPLING: Final = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""Values of the file that are defaults, as with vLLM."""
_TOKENIZER: Final = "tokenizer_config.json"


class GapFormat(NamedTuple):
    """How the text before and after a gap are put together so that a model fills it in."""

    first: str
    second: str
    last: str
    suffix_first: bool = False
    """Whether the text after the gap comes first."""

    def prompt(self, before: bytes, after: bytes) -> bytes:
        """Return the prompt for a gap between two texts."""
        texts = (after, before) if self.suffix_first else (before, after)
        return b"".join((self.first.encode(), texts[0], self.second.encode(), texts[1], self.last.encode()))


_GAPS: Final = (
    GapFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    GapFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    GapFormat("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    GapFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    GapFormat("[SUFFIX]", "[PREFIX]", "", suffix_first=True),
)
"""Formats of Qwen Coder, StarCoder and Granite, DeepSeek Coder, GLM, and Codestral."""


class CheckpointSettings(NamedTuple):
    """Settings of one model."""

    sampling: Mapping[str, Any] = {}
    """Defaults by the engine's names."""
    gap: GapFormat | None = None
    """None if the model fills in no gaps."""

    def complete(self, sampling: Sampling) -> None:
        """Add the defaults of what a request does not set."""
        for name, value in self.sampling.items():
            sampling.setdefault(name, SamplingSetting(value, name))


def read_settings(name: str, version: Path | None, *, defaults: bool = True) -> CheckpointSettings:
    """Return the settings of the model ``name``. Files that cannot be read are logged and count as missing.

    ``defaults``: take sampling defaults from the files.
    """
    folder = checkpoint_directory(version)
    if folder is None:
        return CheckpointSettings()
    found = _read(name, folder / FILE) if defaults else {}
    sampling = {}
    for each in SAMPLING:
        value = found.get(each)
        if value is None:
            continue
        try:
            from_mapping({each: value})
        except NeriteError as error:
            _log.warning("model '%s': its %s is not used for '%s': %s", name, FILE, each, error.message)
        else:
            sampling[each] = value
    if sampling:
        shown = ", ".join(f"{each}={value}" for each, value in sampling.items())
        _log.info("model '%s': requests under /v1 without them have the defaults of %s: %s", name, FILE, shown)
    tokens = _special_tokens(_read(name, folder / _TOKENIZER))
    gap = next((gap for gap in _GAPS if {gap.first, gap.second} <= tokens), None)
    return CheckpointSettings(sampling, gap)


def _read(name: str, file: Path) -> Mapping[str, Any]:
    try:
        found = read_json(file) if file.exists() else {}
    except (OSError, ValueError) as error:
        _log.warning("model '%s': %s cannot be read: %s", name, file, error)
        return {}
    return found if isinstance(found, dict) else {}


def _special_tokens(tokenizer: Mapping[str, Any]) -> set[str]:
    """Return the texts of the tokens that a tokenizer has beside its vocabulary."""
    added = tokenizer.get("added_tokens_decoder")
    listed = tokenizer.get("additional_special_tokens")
    each = [*(added.values() if isinstance(added, dict) else ()), *(listed if isinstance(listed, list) else ())]
    texts = (one.get("content") if isinstance(one, dict) else one for one in each)
    return {text for text in texts if isinstance(text, str)}


class CheckpointSettingsCache:
    """The settings of loaded models, read with a model's first request."""

    def __init__(self, server: TransportEntry, *, defaults: bool = True) -> None:
        """``defaults``: take sampling defaults from the files."""
        self._server = server
        self._defaults = defaults
        self._known: WeakKeyDictionary[ServableVersion, CheckpointSettings] = WeakKeyDictionary()

    def of(self, running: ServableVersion) -> CheckpointSettings:
        """Return the settings of a model."""
        known = self._known.get(running)
        if known is None:
            known = read_settings(running.name, self._server.version_directory(running), defaults=self._defaults)
            self._known[running] = known
        return known
