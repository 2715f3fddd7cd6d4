"""One rollout as a pure state machine: it is given the time, findings and commands, and returns decisions.

A rollout goes from step to step while the candidate shows no harm. Only the promotion needs a proof: that the candidate
is not worse by more than the margins of the gates. Harm ends the rollout in every state, paused ones included.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from nerite.config.rollout_spec import AtDeadline, RolloutSpec
from nerite.core.durations import duration_text
from nerite.core.errors import Conflict

UNREADY_NS: Final = 10_000_000_000
"""Time for which the candidate may be not ready, in all, before it is rolled back. Restarts of a crash loop add up."""
_SECOND: Final = 1_000_000_000


class RolloutState(StrEnum):
    """State of a rollout."""

    CHECKING = "checking"
    """The candidate is loaded and compared with the baseline. It gets no requests."""
    RUNNING = "running"
    PAUSED = "paused"
    """Stays at its step. Harm still rolls it back."""
    INCONCLUSIVE = "inconclusive"
    """The evidence was not sufficient by the deadline: stays at its step. Harm still rolls it back."""
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"

    @property
    def is_end(self) -> bool:
        """Whether nothing follows: one of the versions gets all requests."""
        return self in _ENDS


_ENDS: Final = frozenset((RolloutState.PROMOTED, RolloutState.ROLLED_BACK, RolloutState.ABORTED))
_SERVING: Final = frozenset((RolloutState.RUNNING, RolloutState.PAUSED, RolloutState.INCONCLUSIVE))
"""States in which the candidate gets requests."""


class RolloutReason(StrEnum):
    """Why a decision was made."""

    CHECKED = "checked"
    """The check has found nothing that blocks the rollout."""
    BLOCKED = "blocked"
    """The check has found a difference that blocks the rollout, or the candidate could not be loaded."""
    HELD = "held"
    """The step lasted as long as it had to, and the candidate showed no harm."""
    NOT_WORSE = "not_worse"
    WORSE = "worse"
    NOT_READY = "not_ready"
    DEADLINE = "deadline"
    OPERATOR = "operator"
    FORCED = "forced"
    """An operator promoted the candidate without sufficient evidence."""
    SUPERSEDED = "superseded"
    """``rollout.toml``, or the cluster file, asks for something else."""


class RolloutCommand(StrEnum):
    """What an operator may ask of a rollout."""

    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ABORT = "abort"


class RolloutFindings(NamedTuple):
    """What is known of both versions at one moment."""

    requests: int = 0
    """Requests that the candidate has answered since the rollout began."""
    ready: bool = True
    """The candidate can serve."""
    worse: str = ""
    """Why the candidate is worse, as a sentence; empty if that is not shown."""
    not_worse: str = ""
    """Why the candidate is not worse, as a sentence; empty if that is not shown."""
    shadowed: int = 0
    """Requests that were also sent to the candidate, whose answers were compared."""
    agreement: str = ""
    """What the comparisons have shown, as the beginning of a sentence."""
    hold: str = ""
    """Why the rollout must stay at its step, as a sentence; empty if it may go on. Harm rolls it back nevertheless."""


class RolloutDecision(NamedTuple):
    """A change of a rollout."""

    state: RolloutState
    step: int
    """Index of the step."""
    weight: float
    """Percent of the requests that the candidate gets from now on."""
    reason: RolloutReason
    text: str
    """What was decided and why, as one sentence."""


class Rollout:
    """A rollout from ``spec.baseline`` to ``spec.to``. Times are nanoseconds of a monotonic clock.

    While it runs, weights go up by the steps and never down; at its end they are 0 or 100, and it has one reason.
    """

    def __init__(self, spec: RolloutSpec) -> None:
        """``spec`` names both versions."""
        self.spec = spec
        self.state = RolloutState.CHECKING
        self.step = 0
        self.shadowing = spec.shadow > 0
        """Before its first step the candidate is sent some requests without answering them."""
        self.reason: RolloutReason | None = None
        """Reason of the last decision."""
        self._last_ns: int | None = None
        """Time of the last call; None after a restart of the server, whose downtime does not count."""
        self._elapsed_ns = 0
        """Time under way: that of pauses and of the server's downtime does not count."""
        self._in_step_ns = 0
        self._unready_ns = 0
        self.requests_before = 0
        """Requests that the candidate had answered when the step began."""

    @property
    def weight(self) -> float:
        """Percent of the requests that the candidate gets."""
        if self.state in _SERVING:
            return 0.0 if self.shadowing else self.spec.steps[self.step]
        return 100.0 if self.state is RolloutState.PROMOTED else 0.0

    @property
    def shadow(self) -> float:
        """Percent of the requests that are also sent to the candidate without being answered by it."""
        return self.spec.shadow if self.shadowing and self.state in _SERVING else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds under way."""
        return self._elapsed_ns / _SECOND

    @property
    def in_step(self) -> float:
        """Seconds under way in this step."""
        return self._in_step_ns / _SECOND

    def status(self) -> dict[str, Any]:
        """Return state, versions, steps and weight as clients get them."""
        return {
            "state": str(self.state),
            "reason": str(self.reason or ""),
            "from": self.spec.baseline,
            "to": self.spec.to,
            "steps": list(self.spec.steps),
            "step": self.step,
            "weight": self.weight,
        }

    def begin(self, now_ns: int) -> RolloutDecision:
        """Begin the first step: the check has found nothing that blocks the rollout."""
        self._expect("begin", RolloutState.CHECKING)
        self._last_ns = now_ns
        text = f"version {self.spec.to} gets {self.spec.steps[0]:g} % of the requests"
        if self.shadowing:
            text = f"{self.spec.shadow:g} % of the requests are also sent to version {self.spec.to}, which answers none"
        return self._decide(RolloutState.RUNNING, RolloutReason.CHECKED, text)

    def block(self, why: str) -> RolloutDecision:
        """End the rollout before its first request."""
        self._expect("block", RolloutState.CHECKING)
        return self._decide(RolloutState.ABORTED, RolloutReason.BLOCKED, why)

    def follow(self, lead: Rollout, text: str) -> RolloutDecision | None:
        """Take the state of the rollout of a whole fleet; return it as a decision, or None if it was the same."""
        self._elapsed_ns, self._in_step_ns = lead._elapsed_ns, lead._in_step_ns
        if lead.state is RolloutState.CHECKING or (self.state, self.step) == (lead.state, lead.step):
            return None
        self.step = lead.step
        return self._decide(lead.state, lead.reason or RolloutReason.OPERATOR, text)

    def end(self, state: RolloutState, reason: RolloutReason, text: str) -> RolloutDecision:
        """End the rollout because one of its replicas has ended it."""
        self._expect("end", RolloutState.CHECKING, *_SERVING)
        return self._decide(state, reason, text)

    def advance(self, now_ns: int, found: RolloutFindings, *, led: bool = False) -> RolloutDecision | None:
        """Decide what follows from the time and the findings; None if nothing changes.

        ``led``: a fleet decides on steps and on the promotion; nothing but harm changes anything here.
        """
        if self.state not in _SERVING:
            return None
        passed = 0 if self._last_ns is None else max(0, now_ns - self._last_ns)
        self._last_ns = now_ns
        running = self.state is RolloutState.RUNNING
        if running:
            self._elapsed_ns += passed
            self._in_step_ns += passed
        if not found.ready:
            self._unready_ns += passed
        if found.worse:
            return self._decide(RolloutState.ROLLED_BACK, RolloutReason.WORSE, found.worse)
        if self._unready_ns >= UNREADY_NS:
            text = f"version {self.spec.to} was not ready for {duration_text(self._unready_ns // _SECOND)} in all"
            return self._decide(RolloutState.ROLLED_BACK, RolloutReason.NOT_READY, text)
        if not running or led:
            return None
        return self._next_step(found) or self._at_deadline(found)

    def _next_step(self, found: RolloutFindings) -> RolloutDecision | None:
        spec = self.spec
        if self.shadowing:
            if self.in_step < spec.hold or found.shadowed < spec.requests or not found.ready:
                return None
            self.shadowing = False
            self._in_step_ns = 0
            text = f"{found.agreement}: version {spec.to} gets {spec.steps[0]:g} % of the requests"
            return self._decide(RolloutState.RUNNING, RolloutReason.HELD, text)
        if self.in_step < spec.hold or found.requests - self.requests_before < spec.requests or not found.ready:
            return None
        if found.hold:
            return None
        if self.step + 2 < len(spec.steps):
            self.step += 1
            self._in_step_ns = 0
            self.requests_before = found.requests
            text = f"no harm was shown: version {spec.to} gets {spec.steps[self.step]:g} % of the requests"
            return self._decide(RolloutState.RUNNING, RolloutReason.HELD, text)
        if found.not_worse:
            return self._decide(RolloutState.PROMOTED, RolloutReason.NOT_WORSE, found.not_worse)
        return None

    def _at_deadline(self, found: RolloutFindings) -> RolloutDecision | None:
        deadline = self.spec.deadline
        if not deadline or self.elapsed < deadline:
            return None
        state = {
            AtDeadline.STAY: RolloutState.INCONCLUSIVE,
            AtDeadline.PROMOTE: RolloutState.PROMOTED,
            AtDeadline.ROLL_BACK: RolloutState.ROLLED_BACK,
        }[self.spec.at_deadline]
        text = f"the evidence was not sufficient within {duration_text(deadline)}"
        if found.hold and state is RolloutState.PROMOTED:
            state, text = RolloutState.INCONCLUSIVE, f"{text}, and {found.hold}"
        return self._decide(state, RolloutReason.DEADLINE, text)

    def command(self, command: RolloutCommand, found: RolloutFindings, *, force: bool = False) -> RolloutDecision:
        """Carry out a command. ``force``: promote without sufficient evidence. Raises ``Conflict``."""
        operator, state = RolloutReason.OPERATOR, self.state
        if command is RolloutCommand.PAUSE:
            self._expect("pause", RolloutState.RUNNING)
            return self._decide(RolloutState.PAUSED, operator, "an operator paused the rollout")
        if command is RolloutCommand.RESUME:
            self._expect("resume", RolloutState.PAUSED, RolloutState.INCONCLUSIVE)
            if state is RolloutState.INCONCLUSIVE:
                self._elapsed_ns = 0
            return self._decide(RolloutState.RUNNING, operator, "an operator resumed the rollout")
        if command is RolloutCommand.ABORT:
            self._expect("abort", RolloutState.CHECKING, *_SERVING)
            return self._decide(RolloutState.ABORTED, operator, "an operator aborted the rollout")
        self._expect("promote", *_SERVING)
        if found.worse and not force:
            raise Conflict(f"the candidate is worse: {found.worse}. To promote it anyway, use force")
        if found.not_worse and not found.worse:
            return self._decide(
                RolloutState.PROMOTED, operator, f"an operator promoted the candidate: {found.not_worse}"
            )
        if not force:
            raise Conflict("it is not shown that the candidate is not worse. To promote it anyway, use force")
        text = "an operator promoted the candidate without sufficient evidence"
        return self._decide(RolloutState.PROMOTED, RolloutReason.FORCED, text)

    def supersede(self, declaration: str = "rollout.toml") -> RolloutDecision:
        """End the rollout because ``rollout.toml``, or another declaration, asks for something else."""
        self._expect("supersede", RolloutState.CHECKING, *_SERVING)
        return self._decide(RolloutState.ABORTED, RolloutReason.SUPERSEDED, f"{declaration} asks for something else")

    def _decide(self, state: RolloutState, reason: RolloutReason, text: str) -> RolloutDecision:
        self.state = state
        self.reason = reason
        return RolloutDecision(state, self.step, self.weight, reason, text)

    def _expect(self, command: str, *states: RolloutState) -> None:
        if self.state not in states:
            allowed = " or ".join(sorted(states))
            raise Conflict(f"cannot {command} a rollout that is {self.state}: it must be {allowed}")

    def as_json(self) -> dict[str, Any]:
        """Return the whole state; ``of_json`` restores it."""
        return {
            "spec": self.spec.as_json(),
            "state": str(self.state),
            "step": self.step,
            "shadowing": self.shadowing,
            "reason": str(self.reason or ""),
            "elapsed_ns": self._elapsed_ns,
            "in_step_ns": self._in_step_ns,
            "unready_ns": self._unready_ns,
            "requests_before": self.requests_before,
        }

    @classmethod
    def of_json(cls, document: Mapping[str, Any], spec: RolloutSpec) -> Rollout:
        """Restore a rollout. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a document of another form."""
        rollout = cls(spec)
        rollout.state = RolloutState(document["state"])
        rollout.reason = RolloutReason(document["reason"]) if document["reason"] else None
        rollout.step = _count(document["step"])
        rollout.shadowing = bool(document.get("shadowing", False))
        if rollout.step > len(spec.steps) - 2:
            raise ValueError("the rollout has no such step")
        rollout._elapsed_ns = _count(document["elapsed_ns"])
        rollout._in_step_ns = _count(document["in_step_ns"])
        rollout._unready_ns = _count(document["unready_ns"])
        rollout.requests_before = _count(document["requests_before"])
        return rollout


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("not a number of 0 or more")
    return value
