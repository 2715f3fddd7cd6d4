"""What was used and what was refused, by tenant and class: for metrics, bills and ``nerite quota``."""

from __future__ import annotations

from dataclasses import dataclass, field

from nerite.scheduling.tokens.refusal import Limit


@dataclass(slots=True)
class Use:
    """The counts of one tenant in one class, since the beginning. For reading."""

    offered: int = 0
    """Requests that came."""
    admitted: int = 0
    input_tokens: int = 0
    """Of admitted requests that were not refused after all; bytes of a model that is no LLM."""
    output_tokens: int = 0
    wasted_tokens: int = 0
    """Of ``output_tokens``: those that were generated when the client had gone."""
    joined: int = 0
    """Requests that got the answer of an earlier one with the same key. They are not among ``offered``."""
    retries: int = 0
    """Of ``offered``: those that said they were."""
    refused: dict[Limit, int] = field(default_factory=dict)
    withdrawn: int = 0
    """Clients that gave up while they waited."""
    finished: dict[str, int] = field(default_factory=dict)
    """Admitted requests that ended, by the reason they were told with."""
    finished_tokens: dict[str, int] = field(default_factory=dict)
    """Their output tokens, by the same reason: what was answered in part shows here."""

    def refuse(self, limit: Limit) -> None:
        """Count a refusal."""
        self.refused[limit] = self.refused.get(limit, 0) + 1

    def finish(self, reason: str, tokens: int) -> None:
        """Count an ending."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.finished_tokens[reason] = self.finished_tokens.get(reason, 0) + tokens


class Usage:
    """The counts of one model."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], Use] = {}

    def of(self, tenant: str, level: str) -> Use:
        """Return the counts of a tenant in a class, to be added to."""
        use = self._uses.get((tenant, level))
        if use is None:
            use = self._uses[tenant, level] = Use()
        return use

    def items(self) -> list[tuple[str, str, Use]]:
        """Return tenant, class and counts of all that were seen."""
        return [(tenant, level, use) for (tenant, level), use in self._uses.items()]
