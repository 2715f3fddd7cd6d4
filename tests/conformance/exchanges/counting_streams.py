"""Statistics of models that answer by a response sender. The order matters: counters only grow."""

from typing import Any

from conformance.exchange import Eventually, Grpc, Scrape, Stream, get, grpc_tensor, infer, infer_message, tensor
from conformance.exchanges.counting import counted
from conformance.exchanges.scenes import STREAMS_COUNTED
from nerite.wire import grpc_service as pb

SCENE = STREAMS_COUNTED


def asked(model, *words):
    """One stream with a request for each of ``words``."""
    return Stream(
        tuple(
            infer_message(model, grpc_tensor("KIND", "BYTES", [1], {"bytes_contents": [each.encode()]}))
            for each in words
        )
    )


def requests(model: str, executions: int = 0, **expected: int) -> Eventually:
    """The metrics, once they have so many requests of each outcome, and so many executions if that is given."""
    families = {f"nv_inference_request_{outcome}": count for outcome, count in expected.items()}
    if executions:
        families["nv_inference_exec_count"] = executions

    def arrived(answer: dict[str, Any]) -> bool:
        return all(
            sum(value for name, value in answer["families"][family]["values"].items() if f"model={model}" in name)
            == count
            for family, count in families.items()
        )

    return Eventually(Scrape("nv_inference_"), arrived)


EXCHANGES = {
    "one response each: before": get("/v2/models/one/stats"),
    "one response each: returned, sent, and sent with the end": [
        asked("one", "return", "last", "send end"),
        counted("/v2/models/one/stats", success=3, execution_count=3),
    ],
    "one response each: two": [asked("one", "send last"), requests("one", executions=4, success=3, failure=1)],
    "one response each: over HTTP": [
        infer("one", tensor("KIND", "BYTES", [1], ["last"])),
        counted("/v2/models/one/stats", success=4, execution_count=5),
    ],
    "several: before": get("/v2/models/many/stats"),
    "several": [asked("many", "send send last"), requests("many", executions=1, success=1)],
    "several: none at all": [asked("many", "end"), requests("many", executions=2, success=2)],
    "several: an error among them": [asked("many", "send error end"), requests("many", executions=3, success=3)],
    "several: an exception": [asked("many", "send raise"), requests("many", success=3, failure=1)],
    "several: statistics": get("/v2/models/many/stats"),
    "several: statistics over gRPC": Grpc("ModelStatistics", pb.ModelStatisticsRequest(name="many")),
    "several: a last error": [asked("many", "not-found"), Scrape("nv_inference_request_")],
}
