"""Outputs as the best classes."""

from typing import Any

from conformance.exchange import binary_infer, grpc_infer, grpc_tensor, grpc_wanted, infer, tensor, wanted
from conformance.exchanges.scenes import GOOD

SCENE = GOOD

ROW = tensor("IN", "FP32", [1, 4], [0.25, 0.5, 0.125, 7])
ROWS = tensor("IN", "FP32", [2, 4], [1, 2, 3, 4, -1, -2, -3, 1e-7])


def classified(output: str, count: Any, row: Any = ROW, **parameters: Any) -> Any:
    return infer("classes", row, outputs=[wanted(output, classification=count, **parameters)])


def called(output: str, count: Any) -> Any:
    values = {"fp32_contents": [0.25, 0.5, 0.125, 7]}
    outputs = [grpc_wanted(output, classification=count)]
    return grpc_infer("classes", grpc_tensor("IN", "FP32", [1, 4], values), outputs=outputs)


EXCHANGES = {
    "best of four": classified("SCORES", 1),
    "best two": classified("SCORES", 2),
    "all, one of them without a label": classified("SCORES", 4),
    "more than there are": classified("SCORES", 9),
    "none": classified("SCORES", 0),
    "negative": classified("SCORES", -1),
    "as text": classified("SCORES", "2"),
    "with a fraction": classified("SCORES", 1.5),
    "as bool": classified("SCORES", True),
    "integers": classified("COUNTS", 3),
    "FP64 without labels": classified("PLAIN", 2),
    "FP16": classified("HALF", 2),
    "of texts": classified("TEXTS", 2),
    "two rows": classified("SCORES", 2, ROWS),
    "ties": classified("SCORES", 4, tensor("IN", "FP32", [1, 4], [1, 1, 2, 1])),
    "infinite": classified("SCORES", 4, {**ROW, "data": [float("-inf"), 1.0, float("inf"), -1.0]}),
    "huge and tiny": classified("SCORES", 4, {**ROW, "data": [3e38, -3e38, 1e-30, 123456.789]}),
    "as binary": classified("SCORES", 2, binary_data=True),
    "binary by default": infer(
        "classes", ROW, parameters={"binary_data_output": True}, outputs=[wanted("SCORES", classification=1)]
    ),
    "beside a plain output": infer("classes", ROW, outputs=[wanted("COUNTS"), wanted("SCORES", classification=1)]),
    "without a batch dimension": infer(
        "pair",
        tensor("A", "INT32", [4], [1, 2, 3, 4]),
        tensor("B", "INT32", [4], [4, 3, 2, 9]),
        outputs=[wanted("SUM", classification=2)],
    ),
    "of two dimensions": infer(
        "grid", tensor("IN", "FP32", [2, 2], [1, 2, 3, 0]), outputs=[wanted("OUT", classification=3)]
    ),
    "of a variable dimension": infer(
        "batch",
        tensor("A", "FP32", [2, 2], [1, 2, 3, 4]),
        tensor("B", "FP32", [2, 3], [1, 2, 3, 6, 5, 4]),
        outputs=[wanted("B_OUT", classification=1)],
    ),
    "of no elements": infer("grid", tensor("IN", "FP32", [0, 2], []), outputs=[wanted("OUT", classification=3)]),
    "of BOOL": binary_infer(
        "types", [tensor("IN_BOOL", "BOOL", [2])], b"\x01\x00", outputs=[wanted("OUT_BOOL", classification=2)]
    ),
    "of INT8": binary_infer(
        "types", [tensor("IN_INT8", "INT8", [2])], b"\xff\x01", outputs=[wanted("OUT_INT8", classification=2)]
    ),
    "of UINT64": binary_infer(
        "types", [tensor("IN_UINT64", "UINT64", [2])], b"\xff" * 16, outputs=[wanted("OUT_UINT64", classification=2)]
    ),
    "gRPC": called("SCORES", 2),
    "gRPC: none": called("SCORES", 0),
    "gRPC: negative": called("SCORES", -1),
    "gRPC: as text": called("SCORES", "2"),
    "gRPC: as uint64": called("SCORES", ("uint64", 2)),
    "gRPC: of texts": called("TEXTS", 2),
    "gRPC: integers": called("COUNTS", 2),
}
