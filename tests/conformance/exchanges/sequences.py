"""Sequences: who may begin, who goes on, what the model is told, and who waits for whom."""

from typing import Any

from google.protobuf.message import Message

from conformance.exchange import (
    Eventually,
    Grpc,
    Http,
    Stream,
    Together,
    get,
    grpc_infer,
    grpc_tensor,
    infer,
    infer_message,
    tensor,
)
from conformance.exchanges.scenes import SEQUENCES

SCENE = SEQUENCES
FLAT = ("named", "plain", "brief", "texts")
START = {"sequence_start": True}
END = {"sequence_end": True}
BOTH = {"sequence_start": True, "sequence_end": True}


def http(
    model: str, of: int | str | None, value: float = 1, *, seconds: float = 0, rows: int = 1, **flags: Any
) -> Http:
    """One request of a sequence."""
    shape = [1] if model in FLAT else [rows, 1]
    inputs = (
        tensor("VALUE", "FP32", shape, [value] * rows),
        tensor("SECONDS", "FP32", shape, [seconds] * rows),
    )
    return infer(model, *inputs, parameters=flags if of is None else {"sequence_id": of, **flags})


def called(model: str, of: int | str, value: float = 1, *, seconds: float = 0, **flags: Any) -> Grpc:
    """The same over gRPC."""
    return grpc_infer(model, *inputs(model, value, seconds), parameters={"sequence_id": of, **flags})


def sent(model: str, of: int | str, value: float = 1, *, id: str = "", **flags: Any) -> Message:
    """The same on a stream."""
    return infer_message(model, *inputs(model, value, 0), id=id, parameters={"sequence_id": of, **flags})


def inputs(model: str, value: float, seconds: float) -> tuple[Any, Any]:
    shape = [1] if model in FLAT else [1, 1]
    return (
        grpc_tensor("VALUE", "FP32", shape, {"fp32_contents": [value]}),
        grpc_tensor("SECONDS", "FP32", shape, {"fp32_contents": [seconds]}),
    )


def whole(model: str, of: int | str) -> list[Http]:
    return [http(model, of, 3, **START), http(model, of, 4), http(model, of, 5, **END)]


def counted(model: str, success: int) -> Eventually:
    def arrived(answer: dict[str, Any]) -> bool:
        count: int = answer["json"]["model_stats"][0]["inference_stats"]["success"]["count"]
        return count == success

    return Eventually(get(f"/v2/models/{model}/stats"), arrived)


EXCHANGES = {
    "configuration": [get("/v2/models/direct/config"), get("/v2/models/oldest/config"), get("/v2/models/plain/config")],
    "metadata": get("/v2/models/direct"),
    **{f"{model}: from START to END": whole(model, 5) for model in ("direct", "oldest", "named", "plain")},
    "one request that is all": [http(model, 6, **BOTH) for model in ("direct", "oldest", "named")],
    "over gRPC": [called("direct", 7, 2, **START), called("direct", 7, 2), called("direct", 7, 2, **END)],
    "over both": [http("oldest", 8, 2, **START), called("oldest", 8, 2, **END)],
    "on a stream": Stream(tuple(sent("direct", 9, n, id=str(n), **(START if n == 0 else {})) for n in range(4))),
    "on another stream": Stream((sent("direct", 9, id="end", **END), sent("direct", 9, id="too late"))),
    "two on a stream": Stream(
        (
            sent("oldest", 10, **START),
            sent("oldest", 11, **START),
            sent("oldest", 10, **END),
            sent("oldest", 11, **END),
        ),
        gap=0.1,
    ),
    "without an id": [http("direct", None), http("direct", None, **START), called("direct", 0, **START)],
    "an id that is 0 or empty": [http("direct", 0, **START), http("direct", "", **START)],
    "without START": [http("direct", 20), http("oldest", 20, **END), called("named", "who", **END)],
    "after END": [http("direct", 21, **BOTH), http("direct", 21)],
    "several rows": [http("direct", 22, rows=2, **START), http("direct", None, rows=2)],
    "several rows, gRPC": grpc_infer(
        "oldest",
        grpc_tensor("VALUE", "FP32", [2, 1], {"fp32_contents": [1, 2]}),
        grpc_tensor("SECONDS", "FP32", [2, 1], {"fp32_contents": [0, 0]}),
        parameters={"sequence_id": 3, **START},
    ),
    "flags that are no flags": [
        http("direct", 23, sequence_start="yes"),
        http("direct", 23, sequence_end=1),
        http("direct", 1.5, **START),
        called("direct", 23, sequence_start=1),
        called("direct", 23, sequence_end="x"),
    ],
    "START again": [
        http("direct", 24, 5, **START),
        http("direct", 24, 6, **START),
        http("direct", 24, 7, **END),
    ],
    "ids that are texts": [
        http("named", "a", 1, **START),
        http("named", "b", 2, **START),
        http("named", "a", 3, **END),
        called("named", "b", 4, **END),
    ],
    "a text and its number": [http("named", 30, 1, **START), http("named", "30"), http("named", 30, **END)],
    "numbers that are too large for the control": [http("oldest", 2**32 + 5, **BOTH), http("oldest", 2**31, **BOTH)],
    "the largest number": [http("direct", 2**63 - 1, **BOTH), http("direct", 2**64 - 1, **BOTH)],
    "gaps between slots": [
        http("direct", 41, **START),
        http("direct", 42, **START),
        http("direct", 43, **START),
        http("direct", 42),
        http("direct", 41, **END),
        http("direct", 43),
        http("direct", 44, **START),
        http("direct", 43, **END),
        http("direct", 42, **END),
        http("direct", 44, **END),
    ],
    "all slots taken": Together(
        (
            http("oldest", 61, **START),
            http("oldest", 62, **START),
            http("oldest", 63, **START),
            http("oldest", 64, **BOTH),
            http("oldest", 63, **END),
            http("oldest", 61, **END),
            http("oldest", 62, **END),
        )
    ),
    "too long in the backlog": [
        Together(
            (
                http("oldest", 71, **START),
                http("oldest", 72, **START),
                http("oldest", 73, timeout=600000, **START),
                http("oldest", 73),
                called("oldest", 74, timeout=100000, **BOTH),
            )
        ),
        http("oldest", 73),
        http("oldest", 71, **END),
        http("oldest", 72, **END),
    ],
    "in a slot there is time": Together(
        (http("oldest", 75, seconds=0.5, **START), http("oldest", 75, timeout=1000, **END))
    ),
    "goes on in time": [http("brief", 81, **START), http("brief", 81)],
    "counted": [counted("direct", 28), counted("oldest", 25)],
    "a text for a control that is a number": [
        http("direct", "abc", **BOTH),
        http("direct", "", **BOTH),
        http("direct", "abc", rows=2, **BOTH),
        called("direct", "abc", **BOTH),
    ],
    "a number for a control that is a text": [
        http("texts", 7, **BOTH),
        http("texts", None, **BOTH),
        called("texts", 7, **BOTH),
    ],
    "a text for a control that is a text": [http("texts", "abc", **BOTH), http("texts", "", **BOTH)],
    "gathered while the model works": [
        Together(
            (
                http("direct", 51, seconds=0.8, **START),
                http("direct", 52, **BOTH),
                http("direct", 53, **BOTH),
                called("direct", 54, **BOTH),
            )
        ),
        http("direct", 51, **END),
    ],
    "START after END, before the END has run": Together(
        (http("plain", 76, seconds=0.5, **BOTH), http("plain", 76, 2, **BOTH), http("plain", 76))
    ),
    "longer than a sequence may be idle": [
        http("brief", 82, seconds=1.2, **START),
        http("brief", 82, **END),
    ],
}
