"""``POST /v2/models/M/rollout/check``: compares two versions of a model, or two models, before a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from nerite.config.mistake import nearest
from nerite.core.client_text import checked_name
from nerite.core.errors import InvalidArgument, Unavailable
from nerite.rollouts.check import CheckLimits, differences
from nerite.rollouts.trials import TrialLimits
from nerite.transports.http import reply
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_LONGEST: Final = 3600.0
_ARMS: Final = ("from", "to")
_LIMITS: Final = ("seconds", "answer_seconds", "cancel_seconds", "memory_limit")


class RolloutChecks:
    """Checks candidates on request, one at a time: each may load a model."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._under_way = ""
        """The model that is checked now; empty if none is."""

    async def answer(self, model: str, document: Mapping[str, Any]) -> Reply:
        """Check the arms that a request names; return the differences. Raises ``NeriteError``."""
        baseline, candidate = (_arm(document, name) for name in _ARMS)
        limits = _limits(document)
        if self._under_way:
            raise Unavailable(f"a check of model '{self._under_way}' is under way: retry when it has ended", 5)
        self._under_way = model
        try:
            found = await differences(self._server, model, baseline, candidate, limits)
        finally:
            self._under_way = ""
        return reply.json_reply({"differences": [each.as_json() for each in found]})


def _arm(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if type(value) is int and value >= 0:
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"'{name}' must be a version, such as 2, or the name of a model")
    return checked_name(value, f"'{name}'")


def _limits(document: Mapping[str, Any]) -> CheckLimits:
    known = (*_ARMS, *_LIMITS)
    for name in document:
        if name not in known:
            meant = nearest(name, known)
            hint = f"Did you mean '{meant}'?" if meant else f"There are: {', '.join(known)}."
            raise InvalidArgument(f"unknown parameter '{checked_name(name, 'a parameter')}' of a rollout check. {hint}")
    default = CheckLimits()
    trials = TrialLimits(
        _seconds(document, "answer_seconds", default.trials.answer),
        _seconds(document, "cancel_seconds", default.trials.cancel),
    )
    memory = document.get("memory_limit", 0)
    if type(memory) is not int or memory < 0:
        raise InvalidArgument("'memory_limit' must be a number of bytes; 0 is no limit")
    return CheckLimits(_seconds(document, "seconds", default.seconds), memory, trials)


def _seconds(document: Mapping[str, Any], name: str, default: float) -> float:
    value = document.get(name, default)
    if type(value) not in (int, float) or not 0 < value <= _LONGEST:
        raise InvalidArgument(f"'{name}' must be a number of seconds, at most {_LONGEST:g}")
    return float(value)
