"""What reading a configuration brought: the configuration as far as it could be read, and the mistakes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nerite.config.mistake import Mistake, Source
from nerite.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Parsed:
    """A configuration that was read, with everything that is wrong with its text."""

    config: ModelConfig
    source: Source = field(default_factory=Source)
    mistakes: tuple[Mistake, ...] = ()
    doubtful: frozenset[str] | None = frozenset()
    """The fields of the configuration that may not say what was meant; None: any of them."""

    def trusts(self, fields: Iterable[str]) -> bool:
        """Return True if all of ``fields`` say what was meant, so that it makes sense to judge them."""
        return self.doubtful is not None and self.doubtful.isdisjoint(fields)
