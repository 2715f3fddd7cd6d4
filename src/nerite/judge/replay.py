"""Judges recorded events anew: the same gates, or others.

A recording is JSON lines, one event a line, in the order of ``at_ns``, which is in nanoseconds of a monotonic clock:

    {"arm": "candidate", "probability": 0.1, "at_ns": 1, "latency_us": 900, "first_us": 400, "token_us": 20,
     "error": "", "stratum": {"prompt": "<1k", "cached": "none", "tenant": "", "stream": true}, "cluster": 0}
    {"gauge": "memory", "candidate": 17179869184, "baseline": 8589934592, "at_ns": 2}
    {"step": 2, "at_ns": 3}

The first kind is the end of a request, the fields being those of ``Outcome`` with ``arm`` for ``candidate``. It needs
``arm``, ``probability``, ``at_ns`` and ``latency_us``; ``first_us`` is ``latency_us`` where it is missing. The second
is a reading of a gauge, null where it is not known. The third says that the weights change. Other keys are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, Final

from nerite.core.text import bounded
from nerite.judge.gates import Gate
from nerite.judge.judge import Judge
from nerite.judge.outcome import ENDS, Outcome, Stratum
from nerite.judge.verdict import Decision, Verdict

_KEYS: Final = frozenset({"arm", *Outcome._fields} - {"candidate"})
_NUMBERS: Final = ("probability", "at_ns", "latency_us", "first_us", "token_us", "cluster")


class RecordingError(ValueError):
    """An event of a recording that cannot be read."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"event {number} of the recording: {why}")


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return the event of a request, as recordings have it."""
    event = outcome._asdict()
    event["arm"] = "candidate" if event.pop("candidate") else "baseline"
    return {**event, "stratum": outcome.stratum._asdict()}


def outcome_from_json(event: Mapping[str, Any], number: int = 1) -> Outcome:
    """Read the event of a request."""
    if unknown := sorted(set(event) - _KEYS):
        raise RecordingError(number, f"unknown key {bounded(unknown[0])!r}; there are {', '.join(sorted(_KEYS))}")
    if event.get("arm") not in ("candidate", "baseline"):
        raise RecordingError(number, "'arm' is neither 'candidate' nor 'baseline'")
    values: dict[str, Any] = {"token_us": 0.0, "cluster": 0, "first_us": event.get("latency_us"), **event}
    for name in _NUMBERS:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise RecordingError(number, f"{name!r} is no number of at least 0")
    if values["probability"] > 1:
        raise RecordingError(number, "'probability' is more than 1")
    if values.get("error", "") not in ENDS:
        raise RecordingError(number, f"'error' is none of {', '.join(map(repr, ENDS))}")
    stratum = values.get("stratum", {})
    if not isinstance(stratum, Mapping) or set(stratum) - set(Stratum._fields):
        raise RecordingError(number, f"'stratum' has other keys than {', '.join(Stratum._fields)}")
    values |= {"stratum": Stratum(**stratum), "candidate": values.pop("arm") == "candidate"}
    return Outcome(**values)


def replay(
    events: Iterable[Mapping[str, Any]],
    gates: Sequence[Gate],
    *,
    every_ns: int = 10_000_000_000,
    **options: Any,
) -> list[Verdict]:
    """Judge a recording; return a verdict for each ``every_ns`` of it and one at its end, or at the rollback.

    ``options`` are those of ``Judge``. Raise ``RecordingError`` for what cannot be read.
    """
    judge = Judge(gates, **options)
    verdicts = []
    look_ns: int | None = None
    now_ns = 0
    for now_ns, apply in _read(events):
        if look_ns is None:
            look_ns = now_ns + every_ns
        elif now_ns >= look_ns:
            verdicts.append(judge.verdict(look_ns))
            if verdicts[-1].decision is Decision.ROLL_BACK:
                return verdicts
            look_ns = now_ns + every_ns
        apply(judge)
    verdicts.append(judge.verdict(now_ns))
    return verdicts


def _read(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Callable[[Judge], None]]]:
    """Yield the time of each event, and what it tells a judge."""
    for number, event in enumerate(events, 1):
        if not isinstance(event, Mapping):
            raise RecordingError(number, "it is no JSON object")
        now_ns = event.get("at_ns")
        if isinstance(now_ns, bool) or not isinstance(now_ns, int):
            raise RecordingError(number, "'at_ns' is no integer")
        if "gauge" in event:
            yield now_ns, _gauge(event, number, now_ns)
        elif "step" in event:
            yield now_ns, methodcaller("begin_step", now_ns)
        else:
            outcome = outcome_from_json(event, number)
            yield now_ns, methodcaller("observe", outcome)


def _gauge(event: Mapping[str, Any], number: int, now_ns: int) -> Callable[[Judge], None]:
    values = {}
    for arm in ("candidate", "baseline"):
        value = event.get(arm)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise RecordingError(number, f"{arm!r} of a gauge is neither a number nor null")
        values[arm] = math.nan if value is None else float(value)
    name = str(event["gauge"])
    return lambda judge: judge.gauge(name, values["candidate"], values["baseline"], now_ns)
