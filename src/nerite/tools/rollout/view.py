"""Text forms of a rollout's status: the live view, one line for a log, and tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from nerite.core.durations import duration_text

Status: TypeAlias = Mapping[str, Any]
"""Status of a rollout as the server describes it."""
_UNKNOWN: Final = "-"
_BAR: Final = 16
_ARMS: Final = ("", "Version", "Weight", "Requests", "Errors", "p50 ms", "p99 ms", "First p95")
_GATE_WIDTH: Final = 18


def progress(evidence: float | None, boundary: float | None) -> float:
    """Return how far evidence, a logarithm of an e-value, has grown from 0 towards its boundary, from 0 to 1."""
    return min(1.0, max(0.0, evidence / boundary)) if evidence is not None and boundary else 0.0


def bar(part: float, width: int = _BAR) -> str:
    """Return a bar that is filled to a part from 0 to 1; it is full only at 1."""
    filled = width if part >= 1 else min(width - 1, round(part * width))
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def headline(status: Status) -> str:
    """Return the first line: model, versions, state and weight."""
    return (
        f"{status['model']}: version {status['from']} -> {status['to']}   {status['state'].upper()}   {where(status)}"
    )


def where(status: Status) -> str:
    """Return step and weight as text."""
    steps = status["steps"]
    if status.get("shadowing"):
        return f"answers no client, is sent {status['spec']['shadow']}"
    if status["state"] in ("running", "paused", "inconclusive"):
        return f"step {status['step'] + 1} of {len(steps)}, weight {status['weight']:g} %"
    return f"weight {status['weight']:g} %"


def line(status: Status) -> str:
    """Return a status as one line for a log."""
    arms = status["arms"]
    counts = ", ".join(
        f"{name} {arm['requests']} requests {arm['errors']} errors" for name, arm in arms.items() if arm["requests"]
    )
    gates = ", ".join(
        f"{gate['gate']} harm {progress(gate['worse'], gate['worse_boundary']):.0%} "
        f"proof {progress(gate['not_worse'], gate['not_worse_boundary']):.0%}"
        for gate in status["gates"]
    )
    return "   ".join(filter(None, (f"{status['model']} {status['state']} {where(status)}", counts, gates)))


def frame(status: Status, width: int = 80, note: str = "") -> list[str]:
    """Return the lines of the live view, none longer than ``width``."""
    lines = [headline(status), _path(status), _waiting(status), ""]
    lines += _table([_ARMS, *(_arm(name, arm) for name, arm in status["arms"].items())])
    if status.get("shadow"):
        lines += ["", shadow_line(status["shadow"])]
    if status["gates"]:
        lines += ["", *_gates(status["gates"])]
    lines += ["", status["text"] or "the candidate is being loaded and compared with the baseline"]
    lines += [f"holds the promotion: {hold}" for hold in status.get("holds", ())]
    lines += [f"warning: {warning}" for warning in status.get("warnings", ()) if warning not in status.get("holds", ())]
    for difference in status.get("differences", ()):
        lines.append(difference_line(difference))
    if status.get("recording"):
        lines.append(f"recorded in {status['recording']}")
    if status.get("problem"):
        lines.append(f"warning: {status['problem']}")
    if note:
        lines.append(note)
    return [each[:width] for each in lines]


def _path(status: Status) -> str:
    """Return the steps with a mark at the present one."""
    active = status["state"] in ("running", "paused", "inconclusive")
    last = len(status["steps"]) - 1
    shadowing = status.get("shadowing", False)
    at = -1 if shadowing else status["step"] if active else last if status["state"] == "promoted" else -1
    marks = [f"[{step:g}%]" if index == at else f"{step:g}%" for index, step in enumerate(status["steps"])]
    if share := status["spec"].get("shadow"):
        marks.insert(0, f"[shadow {share}]" if shadowing else f"shadow {share}")
    return "steps: " + " > ".join(marks)


def _waiting(status: Status) -> str:
    """Return times, and what the step waits for."""
    spec = status["spec"]
    took = f"under way {duration_text(round(status['elapsed']))}"
    if spec["deadline"] != "0s":
        took += f" of {spec['deadline']}"
    if status["state"] != "running":
        return took
    held = f"step {duration_text(round(status['in_step']))} of {spec['hold']}"
    counted = f"{status['step_requests']} of {spec['requests']} requests"
    is_last = status["step"] == len(status["steps"]) - 2 and not status.get("shadowing")
    last = ", then proof for promotion" if is_last else ""
    return f"{took}   {held}, {counted}{last}"


def _arm(name: str, arm: Mapping[str, Any]) -> Sequence[str]:
    requests, errors = arm["requests"], arm["errors"]
    return (
        name,
        arm["version"],
        f"{arm['weight']:g} %",
        f"{requests:,}",
        f"{errors / requests:.2%}" if requests else _UNKNOWN,
        *(_UNKNOWN if arm[key] is None else f"{arm[key]:,.2f}" for key in ("p50_ms", "p99_ms", "first_p95_ms")),
    )


def _gates(gates: Iterable[Mapping[str, Any]]) -> list[str]:
    head = f"{'Gate':<{_GATE_WIDTH}} {'Harm: rolls back':<{_BAR + 9}} {'Proof: may promote':<{_BAR + 9}}"
    lines = [head.rstrip()]
    for gate in gates:
        cells = [f"{gate['gate']:<{_GATE_WIDTH}}"[:_GATE_WIDTH]]
        for kind in ("worse", "not_worse"):
            boundary = gate[f"{kind}_boundary"]
            part = progress(gate[kind], boundary)
            cells.append(f"{bar(part)} {part:>4.0%}  " if boundary else f"{'a hard limit':<{_BAR + 9}}")
        lines.append(" ".join(cells).rstrip())
    return lines


def shadow_line(shadow: Mapping[str, Any]) -> str:
    """Return what the comparisons with a shadow have shown as one line."""
    compared = sum(shadow["compared"].values())
    parts = [f"shadow: {compared:,} answers compared"]
    if compared:
        parts.append(f"{shadow['agreement']:.2%} agree")
        parts += [f"{count:,} {name.replace('_', ' ')}" for name, count in shadow["compared"].items()]
    if shadow["label_agreement"] is not None:
        parts.append(f"labels {shadow['label_agreement']:.2%}")
    if shadow["distance_p99"] is not None:
        parts.append(f"distance p99 <= {shadow['distance_p99']:g}")
    if shadow["shared_text_mean"] is not None:
        parts.append(f"shared text {shadow['shared_text_mean']:.0%}")
    if dropped := sum(shadow["dropped"].values()):
        parts.append(f"{dropped:,} not compared")
    return ", ".join(parts)


def difference_line(difference: Mapping[str, Any]) -> str:
    """Return a difference between the versions as one line."""
    change = f"{difference['baseline']} -> {difference['candidate']}"
    return f"{difference['severity']}: {difference['subject']}: {change}: {difference['consequence']}"


def evidence_line(entry: Mapping[str, Any]) -> str:
    """Return a decision of the history as one line."""
    at = entry["at"].replace("T", " ").partition(".")[0].removesuffix("Z")
    return f"{at}  {entry['from']} -> {entry['to']}  {entry['state']:<12} {entry['weight']:>5g} %  {entry['text']}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
