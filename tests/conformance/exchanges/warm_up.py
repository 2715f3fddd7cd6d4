"""Samples that models answer before they are ready."""

from conformance.exchange import get, infer, tensor
from conformance.exchanges.repository_explicit import load
from conformance.exchanges.scenes import WARM
from conformance.repositories import repository

SCENE = WARM
MODELS = list(repository(WARM.repository))
ROW = tensor("IN", "INT32", [1, 2], [1, 2])
WHOLE = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}

EXCHANGES = {
    **{name: [load(name), get(f"/v2/models/{name}/ready")] for name in MODELS},
    **{f"what {name} were": infer(name, ROW, parameters=WHOLE) for name in ("sequences", "sequencescontrols")},
    "statistics": get("/v2/models/rows/stats"),
    "an inference afterwards": infer("rows", ROW),
}
