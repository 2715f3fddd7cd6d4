"""What was found out about a model that was added: for people, and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from nerite.cli.progress import megabytes
from nerite.config.json_form import to_json
from nerite.config.loading import CONFIG_FILE
from nerite.intake.measurement import Latency
from nerite.intake.outcome import Outcome
from nerite.observability.table import render, terminal_width


def as_text(outcome: Outcome, *, placed: bool) -> str:
    """Return the whole report; ``placed``: it is in the repository."""
    target = outcome.destination
    artifact = outcome.artifact
    lines = [f"{artifact.source}: {artifact.kind}, {megabytes(artifact.size)}"]
    versions = ", ".join(map(str, artifact.versions)) or str(target.version)
    several = "versions" if len(artifact.versions) > 1 else "version"
    done = "Added" if placed else "It would be added"
    lines.append(f"{done} as model '{target.name}', {several} {versions}, in {target.repository}.")
    if outcome.signature is not None:
        lines += [f"  input   {tensor}" for tensor in outcome.signature.inputs]
        lines += [f"  output  {tensor}" for tensor in outcome.signature.outputs]
        lines.append(_loaded(outcome))
    if outcome.latencies:
        lines.append(_measured(outcome))
    if outcome.proposal is not None and outcome.proposal.advice:
        lines.append(proposed(outcome))
        lines.append(_written(outcome))
    lines += outcome.remarks
    if placed:
        lines.append(f"Serve it:  nerite serve {shlex.quote(str(target.repository))}")
        lines.append(f"Ask it:    nerite client infer {shlex.quote(target.name)} --random")
    return "\n".join(lines)


def proposed(outcome: Outcome) -> str:
    """Return the settings that follow from the figures."""
    assert outcome.proposal is not None
    rows = [(each.setting, each.value or "left out", each.reason) for each in outcome.proposal.advice]
    return render(("Setting", "Proposed", "Why"), rows, terminal_width())


def as_json(outcome: Outcome, *, placed: bool) -> dict[str, Any]:
    """Return the whole report as JSON data."""
    target, signature, proposal = outcome.destination, outcome.signature, outcome.proposal
    tensors: dict[str, Any] = {}
    if signature is not None:
        for side, described in (("inputs", signature.inputs), ("outputs", signature.outputs)):
            tensors[side] = [
                {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)} for tensor in described
            ]
    return {
        "model": target.name,
        "versions": [*outcome.artifact.versions] or [target.version],
        "repository": str(target.repository),
        "placed": placed,
        "source": str(outcome.artifact.source),
        "kind": outcome.artifact.kind,
        "bytes": outcome.artifact.size,
        **tensors,
        "load_seconds": round(outcome.load_seconds, 3),
        "memory_bytes": outcome.memory,
        "memory_at_work_bytes": outcome.memory_at_work,
        "latencies": _latencies(outcome.latencies),
        "rivals": [{"backend": rival.backend, "latencies": _latencies(rival.latencies)} for rival in outcome.rivals],
        "instances": [
            {"count": each.instances, "per_second": round(each.per_second, 1)} for each in outcome.throughputs
        ],
        "proposal": [
            {"setting": each.setting, "value": each.value or None, "reason": each.reason}
            for each in (proposal.advice if proposal is not None else ())
        ],
        "accepted": outcome.accepted,
        "config": to_json(outcome.config),
        "remarks": outcome.remarks,
    }


def _loaded(outcome: Outcome) -> str:
    said = f"Loaded in {outcome.load_seconds:.1f} s"
    if outcome.memory:
        said += f"; it takes {megabytes(outcome.memory)} of memory"
        if outcome.latencies:
            said += f", and {megabytes(outcome.memory_at_work)} more after its largest batch"
    return f"{said}."


def _latencies(measured: Sequence[Latency]) -> list[dict[str, Any]]:
    return [
        {"batch": each.batch, "ms": round(each.ms, 3), "compute_ms": round(each.compute_ms, 3)} for each in measured
    ]


def _measured(outcome: Outcome) -> str:
    header = ("Batch", "Latency ms", "Of that computing", "Inferences/s")
    own = [_row(each) for each in outcome.latencies]
    if not outcome.rivals:
        return render(header, own, terminal_width())
    rows = [(outcome.artifact.config.backend, *row) for row in own]
    for rival in outcome.rivals:
        rows += [(rival.backend, *_row(each)) for each in rival.latencies]
    return render(("Backend", *header), rows, terminal_width())


def _row(each: Latency) -> tuple[str, ...]:
    return str(each.batch), f"{each.ms:.2f}", f"{each.compute_ms:.2f}", f"{each.per_second:,.0f}"


def _written(outcome: Outcome) -> str:
    file = outcome.destination.directory / CONFIG_FILE
    if outcome.accepted:
        return f"These settings are in {file}."
    if outcome.artifact.finished or outcome.destination.joins:
        return f"{file} stays as it was made."
    return f"These settings are not in {file}; --yes writes them."
