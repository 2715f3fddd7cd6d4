"""Statistics and metrics: what is counted, and what is not. The order matters: counters only grow."""

from typing import Any

from conformance.exchange import Eventually, Grpc, Http, Scrape, get, grpc_infer, grpc_tensor, infer, tensor
from conformance.exchanges.scenes import SMALL
from nerite.wire import grpc_service as pb

SCENE = SMALL


def echo(rows: int) -> Http:
    return infer("echo", tensor("IN", "INT32", [rows, 2], [0] * 2 * rows))


def told(kind: str) -> Http:
    return infer("trouble", tensor("KIND", "BYTES", [1], [kind]))


def counted(path: str, **expected: int) -> Eventually:
    """Statistics of one model, once its counters have these values: they may lag behind the answer."""

    def arrived(answer: dict[str, Any]) -> bool:
        stats = answer["json"]["model_stats"][0]
        durations = stats["inference_stats"]
        return all(
            (durations[key]["count"] if key in durations else stats[key]) == value for key, value in expected.items()
        )

    return Eventually(get(path), arrived)


def successes(model: str, count: int) -> Eventually:
    def arrived(answer: dict[str, Any]) -> bool:
        values = answer["families"]["nv_inference_request_success"]["values"]
        return any(f"model={model}" in name and value == count for name, value in values.items())

    return Eventually(Scrape("nv_inference_"), arrived)


EXCHANGES = {
    "before the first request": get("/v2/models/echo/stats"),
    "before the first request, a version": get("/v2/models/versions/versions/3/stats"),
    "before the first request, all versions": get("/v2/models/versions/stats"),
    "before the first request, all models": get("/v2/models/stats"),
    "metrics before the first request": Scrape("nv_inference_"),
    "after one": [echo(1), counted("/v2/models/echo/stats", success=1)],
    "after batches of other sizes": [
        echo(1),
        echo(3),
        echo(8),
        echo(3),
        counted("/v2/models/echo/stats", success=5),
    ],
    "over gRPC they count as well": [
        grpc_infer("echo", grpc_tensor("IN", "INT32", [1, 2], {"int_contents": [1, 2]})),
        counted("/v2/models/echo/stats", success=6),
        Grpc("ModelStatistics", pb.ModelStatisticsRequest(name="echo")),
    ],
    "refused requests do not count": [
        infer("echo", tensor("IN", "INT32", [1, 3], [0, 0, 0])),
        infer("echo"),
        infer("echo", tensor("IN", "INT32", [9, 2], [0] * 18)),
        get("/v2/models/echo/stats"),
    ],
    "a version of a model": [
        infer("versions/versions/1", tensor("IN", "INT32", [1, 1], [0])),
        counted("/v2/models/versions/versions/1/stats", success=1),
        get("/v2/models/versions/stats"),
    ],
    "a model without batching": [
        infer("pair", tensor("A", "INT32", [4], [0] * 4), tensor("B", "INT32", [4], [0] * 4)),
        counted("/v2/models/pair/stats", success=1),
    ],
    "an exception": [told("raise"), counted("/v2/models/trouble/stats", fail=1)],
    "an error as answer": [told("error"), counted("/v2/models/trouble/stats", success=1)],
    "a wrong number of answers": [told("too few"), counted("/v2/models/trouble/stats", fail=2)],
    "unknown model": get("/v2/models/none/stats"),
    "unknown version": get("/v2/models/versions/versions/2/stats"),
    "version that is no number": get("/v2/models/versions/versions/x/stats"),
    "all models over gRPC": Grpc("ModelStatistics", pb.ModelStatisticsRequest()),
    "a version of no model over gRPC": Grpc("ModelStatistics", pb.ModelStatisticsRequest(version="1")),
    "a version over gRPC": Grpc("ModelStatistics", pb.ModelStatisticsRequest(name="versions", version="3")),
    "metrics": successes("echo", 6),
    "metrics of the machine": [Scrape("nv_cpu_"), Scrape("nv_pinned_")],
}
