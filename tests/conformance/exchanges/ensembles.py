"""Models that are put together from others: what is asked of them and what they count."""

import struct
from typing import Any

from conformance.exchange import (
    Eventually,
    Grpc,
    Http,
    Stream,
    get,
    grpc_infer,
    grpc_tensor,
    infer,
    infer_message,
    post,
    tensor,
    wanted,
)
from conformance.exchanges.counting import counted
from conformance.exchanges.scenes import ENSEMBLES
from nerite.wire import grpc_service as pb

SCENE = ENSEMBLES
LOADED = (
    "chain",
    "diamond",
    "optional",
    "needed",
    "over_flat",
    "reshaped",
    "expanded",
    "flat_rows",
    "outer",
    "stream",
    "stream_outer",
    "classes",
    "versions",
)
BROKEN = (
    "bad_type",
    "bad_output_type",
    "bad_shape",
    "bad_reshape",
    "bad_between",
    "bad_input",
    "bad_output",
    "bad_unmapped",
    "bad_batch",
    "bad_batch_flat",
    "bad_model",
    "bad_version",
    "bad_part",
    "bad_self",
    "bad_circle",
    "bad_inner",
)
KINDS = ("right", "raise", "error", "nothing", "type", "long", "flat", "row", "rows")


def rows(count: int, name: str = "IN") -> dict[str, Any]:
    return tensor(name, "INT32", [count, 2], list(range(count * 2)))


def counting(model: str, to: int, **more: Any) -> Stream:
    """A request for numbers up to ``to`` from a decoupled ensemble."""
    number = grpc_tensor("COUNT", "INT32", [1], {"int_contents": [to]})
    return Stream((infer_message(model, number, id="r", **more),))


def told(kind: str) -> dict[str, Any]:
    return tensor("KIND", "BYTES", [1], [kind])


def asked(ensemble: str) -> list[Http]:
    return [get(f"/v2/models/{ensemble}"), get(f"/v2/models/{ensemble}/ready")]


def ran(model: str, count: int) -> Eventually:
    return counted(f"/v2/models/{model}/stats", success=count)


EXCHANGES = {
    "index": post("/v2/repository/index", {"ready": True}),
    "index of all": post("/v2/repository/index"),
    "configuration": get("/v2/models/chain/config"),
    "configuration of one with several responses": get("/v2/models/stream/config"),
    "server ready": get("/v2/health/ready"),
    **{f"{name}: what it is": asked(name) for name in LOADED},
    **{f"{name}: is not there": infer(name, rows(1)) for name in BROKEN},
    "one after the other": [infer("chain", rows(1)), ran("chain", 1), ran("twice", 3)],
    "several rows": infer("chain", rows(5), id="several"),
    "too many rows": infer("chain", rows(9)),
    "no rows": infer("chain", tensor("IN", "INT32", [0, 2], [])),
    "wrong shape": infer("chain", tensor("IN", "INT32", [1, 3], [1, 2, 3])),
    "wrong type": infer("chain", tensor("IN", "FP32", [1, 2], [1, 2])),
    "missing input": infer("chain"),
    "unknown output": infer("chain", rows(1), outputs=[wanted("one")]),
    "version": [infer("chain/versions/1", rows(1)), infer("chain/versions/2", rows(1))],
    "over gRPC": [
        grpc_infer("chain", grpc_tensor("IN", "INT32", [1, 2], {"int_contents": [1, 2]}), id="four"),
        grpc_infer("chain", grpc_tensor("IN", "INT32", [1, 2]), raw=[struct.pack("<2i", 1, 2)]),
    ],
    "two ways that meet": [
        infer("diamond", rows(2)),
        infer("diamond", rows(1), outputs=[wanted("SUM")]),
        infer("diamond", rows(1), outputs=[wanted("MORE"), wanted("SUM")]),
    ],
    "only what is wanted runs": [
        infer("branches", rows(1), outputs=[wanted("LEFT")]),
        ran("branches", 1),
        get("/v2/models/told/stats"),
        get("/v2/models/plus/stats"),
        infer("branches", rows(1)),
        ran("branches", 2),
        get("/v2/models/told/stats"),
    ],
    "an output that others are made of": infer("branches", rows(1), outputs=[wanted("RIGHT")]),
    "an output that is made of another": infer("branches", rows(1), outputs=[wanted("TEXT")]),
    "an output of a step that gives others": infer("diamond", rows(1), outputs=[wanted("MORE")]),
    "optional input": [
        infer("optional", rows(1, "A"), rows(1, "B")),
        infer("optional", rows(1, "A")),
    ],
    "an input that is not optional": infer("optional", rows(1, "B")),
    "optional input of a model that needs it": infer("needed", rows(1, "B")),
    "with and without a batch dimension": infer("over_flat", tensor("IN", "INT32", [2], [1, 2])),
    "other shapes inside": [
        infer("reshaped", tensor("IN", "INT32", [2, 4], list(range(8)))),
        infer("reshaped", tensor("IN", "INT32", [1, 2, 2], list(range(4)))),
    ],
    "a step that takes all rows as one": [
        infer("expanded", rows(1)),
        infer("expanded", rows(3)),
        infer("flat_rows", rows(1)),
    ],
    "a step that takes one row as its shape, and gets three": [
        infer("flat_rows", rows(3)),
        grpc_infer("flat_rows", grpc_tensor("IN", "INT32", [3, 2], {"int_contents": [1, 2, 3, 4, 5, 6]})),
    ],
    "a batch dimension inside": [
        infer("batched_end", tensor("IN", "INT32", [2], [1, 2])),
        infer("rows", tensor("IN", "INT32", [1, 2], [1, 2])),
        infer("rows", tensor("IN", "INT32", [3, 2], [1, 2, 3, 4, 5, 6])),
    ],
    "too many rows for a step": infer("rows", tensor("IN", "INT32", [9, 2], [0] * 18)),
    "what steps are told": [
        infer("passes", rows(1)),
        infer("passes", rows(1), id="mine", parameters={"colour": "red", "size": 3, "priority": 2, "timeout": 9000000}),
        infer("passes", rows(1), parameters={"sequence_id": 7, "sequence_start": True}),
        infer("passes", rows(1), parameters={"sequence_id": 7}),
        infer("passes", rows(1), parameters={"sequence_id": 7, "sequence_end": True}),
        infer("passes", rows(1), parameters={"sequence_id": "seven", "sequence_start": True, "sequence_end": True}),
        infer("passes", rows(1), outputs=[wanted("TEXT")], parameters={"sequence_start": True}),
        grpc_infer(
            "passes",
            grpc_tensor("IN", "INT32", [1, 2], {"int_contents": [1, 2]}),
            id="g",
            parameters={"sequence_id": 5, "sequence_start": True, "colour": "red"},
        ),
    ],
    "an ensemble in an ensemble": [
        infer("outer", rows(2)),
        ran("outer", 1),
    ],
    "classification": [
        infer("classes", rows(1), outputs=[wanted("SCORES", classification=2)]),
        infer("classes", rows(2), outputs=[wanted("SCORES", classification=1)]),
        infer("classes_outer", rows(1), outputs=[wanted("SCORES", classification=2)]),
    ],
    "versions of a model": infer("versions", tensor("IN", "INT32", [1], [0])),
    **{f"failing: {kind}": [infer("failing", told(kind)), infer("failing", told(kind), id="mine")] for kind in KINDS},
    **{f"failing before a batch: {kind}": infer("failing_batch", told(kind)) for kind in KINDS},
    **{f"failing at the end: {kind}": infer("failing_end", told(kind)) for kind in KINDS},
    "failing inside": [infer("failing_outer", told(kind)) for kind in ("raise", "error", "nothing", "type")],
    "failures are counted": get("/v2/models/failing_end/stats"),
    "several responses": counting("stream", 3),
    "several responses over HTTP": infer("stream", tensor("COUNT", "INT32", [1], [2])),
    "several responses in one call": grpc_infer(
        "stream", grpc_tensor("COUNT", "INT32", [1], {"int_contents": [2]}), id="r"
    ),
    "several responses and the empty last": counting(
        "stream", 2, parameters={"triton_enable_empty_final_response": True}
    ),
    "no response": counting("stream", 0, parameters={"triton_enable_empty_final_response": True}),
    "several responses from inside": counting(
        "stream_outer", 3, parameters={"triton_enable_empty_final_response": True}
    ),
    "several responses beside an input": counting(
        "stream_and_input", 3, parameters={"triton_enable_empty_final_response": True}
    ),
    "several responses beside one": counting(
        "stream_and_one", 3, parameters={"triton_enable_empty_final_response": True}
    ),
    "several responses of two steps": counting(
        "stream_two_ways", 3, parameters={"triton_enable_empty_final_response": True}
    ),
    "several responses to each of several": counting(
        "stream_of_streams", 4, parameters={"triton_enable_empty_final_response": True}
    ),
    "a part of what several responses have": counting(
        "stream_and_one",
        3,
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="OUT")],
        parameters={"triton_enable_empty_final_response": True},
    ),
    "several responses in a sequence": counting(
        "stream", 2, parameters={"sequence_id": 5, "sequence_start": True, "triton_enable_empty_final_response": True}
    ),
    "statistics": [get(f"/v2/models/{name}/stats") for name in ("chain", "outer", "stream")],
    "statistics over gRPC": Grpc("ModelStatistics", pb.ModelStatisticsRequest(name="chain")),
}
