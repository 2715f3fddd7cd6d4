"""Models whose tensors have other shapes than their callers send and get."""

import struct

from conformance.exchange import Http, Json, binary_infer, get, grpc_infer, grpc_tensor, infer, tensor, wanted
from conformance.exchanges.scenes import GOOD

SCENE = GOOD


def square(rows: int = 1) -> Json:
    return tensor("SQUARE", "INT32", [rows, 2, 2], list(range(4 * rows)))


def free(rows: int = 1, first: int = 2, second: int = 1) -> Json:
    return tensor("FREE", "INT32", [rows, 1, first, 3, second], list(range(3 * rows * first * second)))


def scalar(rows: int = 1) -> Json:
    return tensor("SCALAR", "INT32", [rows, 1], list(range(rows)))


def asked(rows: int = 1, first: int = 2, second: int = 1, **more: object) -> Http:
    return infer("reshaped", square(rows), free(rows, first, second), scalar(rows), **more)


EXCHANGES = {
    "a row": asked(),
    "rows": asked(3),
    "free sizes": asked(2, 4, 5),
    "nothing in a free size": asked(1, 0, 5),
    "one output": asked(2, outputs=[wanted("FREE")]),
    "binary": binary_infer(
        "reshaped",
        [tensor("SQUARE", "INT32", [1, 2, 2]), free(), scalar()],
        struct.pack("<4i", 1, 2, 3, 4),
        parameters={"binary_data_output": True},
    ),
    "an input beside them": infer("reshaped", square(), free(), scalar(), tensor("AS_IT_IS", "INT32", [1, 2], [7, 8])),
    "the model's shape instead of the caller's": infer(
        "reshaped", tensor("SQUARE", "INT32", [1, 4], [1, 2, 3, 4]), free(), scalar()
    ),
    "a wrong size": infer("reshaped", tensor("SQUARE", "INT32", [1, 2, 3], [1] * 6), free(), scalar()),
    "a scalar as it is": infer("reshaped", square(), free(), tensor("SCALAR", "INT32", [1], [1])),
    "without a batch": infer("reshaped_whole", tensor("IN", "FP32", [2, 2, 3], [0.5] * 12)),
    "without a batch, a wrong size": infer("reshaped_whole", tensor("IN", "FP32", [2, 2, 4], [0.5] * 16)),
    "gRPC": grpc_infer("reshaped_whole", grpc_tensor("IN", "FP32", [2, 1, 3]), raw=[struct.pack("<6f", *range(6))]),
    "metadata": get("/v2/models/reshaped"),
}
