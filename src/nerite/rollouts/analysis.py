"""What the judge of a rollout says, in the forms that Argo Rollouts and Flagger ask for.

Argo Rollouts reads a JSON document (metric provider ``web``), and compares a value in it with its conditions. Flagger
posts a document and reads the status code only; what it asks is in the ``metadata`` of its webhook, which it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from nerite.core.errors import InvalidArgument
from nerite.core.text import quoted_text
from nerite.judge.verdict import Decision
from nerite.rollouts.rollout import RolloutState
from nerite.rollouts.run import RolloutRun

_ENDS: Final = {
    RolloutState.PROMOTED: Decision.NOT_WORSE,
    RolloutState.ROLLED_BACK: Decision.ROLL_BACK,
    RolloutState.ABORTED: Decision.ROLL_BACK,
}
QUESTIONS: Final[Mapping[str, Callable[[str], bool]]] = {
    "harmless": lambda decision: decision != Decision.ROLL_BACK,
    "not-worse": lambda decision: decision == Decision.NOT_WORSE,
    "harmful": lambda decision: decision == Decision.ROLL_BACK,
}
"""By the value of ``ask`` in the metadata of Flagger's webhook: whether a decision of the judge means yes."""


def analysis_of(run: RolloutRun) -> dict[str, Any]:
    """Return what Argo Rollouts reads: the decision of the judge, that of the whole fleet if one leads the rollout."""
    state = run.rollout.state
    if state in _ENDS:
        decision, reason = str(_ENDS[state]), run.text
    elif run.lead is not None and run.lead.order.verdict:
        told = run.lead.order.verdict
        decision, reason = told.get("decision", str(Decision.CONTINUE)), told.get("reason", "")
    elif run.verdict is not None:
        decision, reason = str(run.verdict.decision), run.verdict.reason
    else:
        decision, reason = str(Decision.CONTINUE), "no request was compared yet"
    return {
        "model": run.model,
        "id": run.id,
        "from": run.spec.baseline,
        "to": run.spec.to,
        "state": str(state),
        "weight": run.rollout.weight,
        "decision": decision,
        "reason": reason,
    }


def question_of(payload: object) -> str:
    """Return what a webhook of Flagger asks. Raises ``InvalidArgument``."""
    metadata = payload.get("metadata") if isinstance(payload, dict) else None
    ask = metadata.get("ask") if isinstance(metadata, dict) else None
    if ask not in QUESTIONS:
        there = ", ".join(QUESTIONS)
        given = f"is {quoted_text(ask)!r}" if isinstance(ask, str) else "is missing"
        raise InvalidArgument(f"metadata: ask {given}; set it in the webhook of the Canary to one of: {there}")
    return str(ask)


def answer_of(ask: str, analysis: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status code and document for a question: 200 for yes and 409 for no, which Flagger's client asks once."""
    yes = QUESTIONS[ask](analysis["decision"])
    return 200 if yes else 409, {"ask": ask, "answer": yes, **analysis}
