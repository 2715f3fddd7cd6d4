"""All that is known of the rollouts of one model: the last one, the decisions so far, and what is pinned."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nerite.rollouts.rollout import RolloutDecision, RolloutReason
from nerite.rollouts.run import RolloutRun

MAX_HISTORY: Final = 200
"""Decisions that are kept for each model."""


class RolloutRecord:
    """The rollouts of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.run: RolloutRun | None = None
        """The present or the last rollout."""
        self.history: deque[dict[str, Any]] = deque(maxlen=MAX_HISTORY)
        self.pinned = ""
        """The version that serves after the last rollout, whatever the version policy selects; empty for none."""
        self.declared: dict[str, Any] | None = None
        """What ``rollout.toml``, or the cluster file of a router, asked for when it was last acted on."""
        self.undone: RolloutDecision | None = None
        """A decision that has not taken effect, because that failed."""
        self.decisions: Counter[RolloutReason] = Counter(dict.fromkeys(RolloutReason, 0))
        """Decisions since the server started, by reason."""

    @property
    def active(self) -> RolloutRun | None:
        """The rollout that is under way."""
        return self.run if self.run is not None and self.run.active else None

    def note(self, decision: RolloutDecision, at: str) -> dict[str, Any]:
        """Add a decision to the history with its evidence; return the entry. ``at`` is the time of day."""
        run = self.run
        assert run is not None
        run.text = decision.text
        self.decisions[decision.reason] += 1
        entry = {
            "at": at,
            "model": self.model,
            "id": run.id,
            "from": run.spec.baseline,
            "to": run.spec.to,
            "state": str(decision.state),
            "step": decision.step,
            "weight": decision.weight,
            "reason": str(decision.reason),
            "text": decision.text,
            "evidence": run.evidence(),
        }
        self.history.append(entry)
        return entry

    def past(self) -> list[dict[str, Any]]:
        """Return the last decision of each rollout before ``run``, the oldest first, without evidence."""
        present = self.run.id if self.run is not None else ""
        last = {entry["id"]: entry for entry in self.history if entry["id"] != present}
        return [{key: value for key, value in entry.items() if key != "evidence"} for entry in last.values()]

    def keeps(self) -> tuple[Iterable[int], int] | None:
        """Return the versions that must be loaded, and which of them serves; None if the version policy decides."""
        run = self.active
        if run is not None:
            return (int(run.spec.baseline), int(run.spec.to)), int(run.spec.baseline)
        return ((int(self.pinned),), int(self.pinned)) if self.pinned else None

    def as_json(self) -> dict[str, Any]:
        """Return everything that outlives a restart of the server; ``of_json`` restores it."""
        return {
            "run": None if self.run is None else self.run.as_json(),
            "history": list(self.history),
            "pinned": self.pinned,
            "declared": self.declared,
        }

    @classmethod
    def of_json(cls, model: str, document: Mapping[str, Any], now_ns: int) -> RolloutRecord:
        """Restore a record. Raises ``NeriteError`` or an exception of Python for a document of another form."""
        record = cls(model)
        if document["run"] is not None:
            record.run = RolloutRun.of_json(model, document["run"], now_ns)
        record.history.extend(dict(entry) for entry in document["history"])
        record.pinned = str(int(document["pinned"])) if document["pinned"] else ""
        declared = document["declared"]
        record.declared = None if declared is None else dict(declared)
        return record
