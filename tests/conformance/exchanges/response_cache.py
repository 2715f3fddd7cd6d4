"""The response cache: what is answered from it, and how that is counted. The order matters: what was asked is kept."""

import struct
from typing import Any

from conformance.exchange import (
    Eventually,
    Grpc,
    Http,
    Json,
    Scrape,
    binary_infer,
    get,
    grpc_infer,
    grpc_tensor,
    infer,
    post,
    tensor,
    wanted,
)
from conformance.exchanges.counting import counted
from conformance.exchanges.repository_explicit import load, unload, write
from conformance.exchanges.scenes import CACHED
from conformance.repositories import source
from nerite.wire import grpc_service as pb

SCENE = CACHED

A = tensor("A", "INT32", [2], [1, 2])
B = tensor("B", "INT32", [1], [3])
MODEL = source("counts")


def words(*given: str) -> Json:
    return tensor("IN", "BYTES", [1, len(given)], [*given])


def wide(size: int) -> Http:
    outputs = [wanted("OUT", binary_data=True), wanted("ASKED")]
    return infer("wide", tensor("SIZE", "INT32", [1], [size]), outputs=outputs)


def grid(*shape: int) -> Json:
    return tensor("A", "INT32", shape, [1, 2, 3, 4])


def counted_by_all(**expected: int) -> Eventually:
    """The metrics of the cache, once it has counted this."""

    def arrived(answer: dict[str, Any]) -> bool:
        families = answer["families"]
        return all(families[f"nv_cache_{name}"]["values"][f"nv_cache_{name}"] == n for name, n in expected.items())

    return Eventually(Scrape("nv_cache_"), arrived)


EXCHANGES = {
    "metrics before the first request": Scrape("nv_cache_"),
    "asked twice": [infer("counts", A), infer("counts", A)],
    "with an id": [infer("counts", A, id="me"), infer("counts", A, id="you")],
    "other data": infer("counts", tensor("A", "INT32", [2], [1, 3])),
    "one more input": [infer("counts", A, B), infer("counts", A, B)],
    "inputs in another order": infer("counts", B, A),
    "in another form": [
        binary_infer("counts", [tensor("A", "INT32", [2])], struct.pack("<2i", 1, 2)),
        infer("counts", A, parameters={"binary_data_output": True}),
        infer("counts", A, outputs=[wanted("ASKED", binary_data=True), wanted("SUM", classification=1)]),
    ],
    "with a priority and a timeout": infer("counts", A, parameters={"priority": 2, "timeout": 1_000_000}),
    "over gRPC": grpc_infer("counts", grpc_tensor("A", "INT32", [2], {"int_contents": [1, 2]})),
    "strings": [infer("batched", words("a", "bc")), infer("batched", words("a", "bc"))],
    "strings of the same letters": infer("batched", words("ab", "c")),
    "several rows": [
        infer("batched", tensor("IN", "BYTES", [3, 1], ["a", "b", "c"])),
        infer("batched", tensor("IN", "BYTES", [3, 1], ["a", "b", "c"])),
    ],
    "no elements": [infer("counts", tensor("A", "INT32", [0], [])), infer("counts", tensor("A", "INT32", [0], []))],
    "refused before": [infer("counts"), infer("counts", tensor("A", "INT64", [1], [1]))],
    "larger than the cache": [wide(40_000), wide(40_000)],
    "statistics": counted("/v2/models/counts/stats", success=15, cache_miss=4),
    "statistics of several rows": counted("/v2/models/batched/stats", success=5, cache_miss=3),
    "statistics over gRPC": Grpc("ModelStatistics", pb.ModelStatisticsRequest(name="counts")),
    "metrics of inferences": Scrape("nv_inference_"),
    "metrics": counted_by_all(num_hits=13, num_misses=9),
    "the same bytes in another shape": [infer("shapes", grid(2, 2)), infer("shapes", grid(1, 4))],
    "other outputs": [infer("outputs", grid(2, 2), outputs=[wanted("SUM")]), infer("outputs", grid(2, 2))],
    "other parameters": [infer("parameters", grid(2, 2), parameters={"x": x}) for x in (1, 2)],
    "an error": [infer("fails", tensor("A", "INT32", [1], [-1]))] * 2,
    "an exception": [infer("fails", tensor("A", "INT32", [1], [2_000_000]))] * 2,
    "what was before a reload": [
        infer("forgets", A),
        write("forgets/1/model.py", MODEL.replace("self.asked = 0", "self.asked = 100")),
        load("forgets"),
        infer("forgets", A),
        unload("forgets"),
        Eventually(post("/v2/repository/index"), lambda answer: "UNLOADING" not in str(answer["json"])),
        load("forgets"),
        infer("forgets", A),
    ],
    "of a decoupled model": load("stream"),
    "of sequences": load("sequence"),
    "configuration": get("/v2/models/counts/config"),
}
