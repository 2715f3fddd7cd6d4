"""Models that call other models, and those that they call."""

from __future__ import annotations

from conformance.repositories import Files, python

CPU = "instance_group [{ kind: KIND_CPU }]\n"


def called(program: str, output: str = "OUT FP32 -1", more: str = "") -> Files:
    """Return a model that is called."""
    return python(program, "IN FP32 -1", output, CPU + more)


MODELS = {
    "alab": python("alab", "PROGRAM STRING 1", "SAID STRING 1", CPU),
    "counter": called("counter", more="model_transaction_policy { decoupled: true }"),
    "echo": called("echo"),
    "errs": called("errs"),
    "fails": called("fails"),
    "info": called("info", "OUT STRING 1"),
    "lab": python("lab", "PROGRAM STRING 1", "SAID STRING 1", CPU),
    "late": called("late"),
}
