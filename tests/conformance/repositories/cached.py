"""Models whose responses are cached, and some that cannot be."""

from __future__ import annotations

from conformance.repositories import Files, python


def cached(program: str, inputs: str, outputs: str, more: str = "", batch: int = 0) -> Files:
    """Return a model with a response cache."""
    cache = "instance_group [{ kind: KIND_CPU }]\nresponse_cache { enable: true }\n"
    return python(program, inputs, outputs, cache + more, batch)


def counts(dims: str = "-1") -> Files:
    """Return a model that counts its executions, with an input of these dimensions."""
    return cached("counts", f"A INT32 {dims}; B INT32 -1 optional: true", "SUM INT32 1; ASKED INT32 1")


MODELS = {
    "batched": cached("batched", "IN STRING -1", "OUT STRING -1; ASKED INT32 1", "dynamic_batching { }", batch=8),
    "counts": counts(),
    "fails": counts(),
    "forgets": counts(),
    "outputs": counts("-1 -1"),
    "parameters": counts("-1 -1"),
    "sequence": cached("refused", "IN INT32 1", "OUT INT32 1", "sequence_batching { }", batch=1),
    "shapes": counts("-1 -1"),
    "stream": cached("refused", "IN INT32 1", "OUT INT32 1", "model_transaction_policy { decoupled: true }"),
    "wide": cached("wide", "SIZE INT32 1", "OUT INT8 -1; ASKED INT32 1"),
}
