"""What becomes of a Python model's answers, right and wrong."""

from typing import Any

from conformance.exchange import Step, grpc_infer, grpc_tensor, infer, tensor, wanted
from conformance.exchanges.scenes import GOOD

SCENE = GOOD

KINDS = (
    "fine",
    "raise",
    "raise unicode",
    "raise triton",
    "arguments of the process",
    "error",
    "error empty",
    "error and outputs",
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "no Y",
    "no outputs",
    "extra output",
    "other order",
    "other type",
    "other shape",
    "empty tensor",
    "scalar tensor",
    "parameters",
    "not a response",
    "none",
    "too few",
    "too many",
    "not a list",
    "nothing",
)


def told(kind: str, **top: Any) -> Step:
    return infer("trouble", tensor("KIND", "BYTES", [1], [kind]), **top)


def called(kind: str, **top: Any) -> Step:
    return grpc_infer("trouble", grpc_tensor("KIND", "BYTES", [1], {"bytes_contents": [kind.encode()]}), **top)


ARGUMENTS = ("model_name", "model_version", "model_instance_name", "model_instance_kind", "model_instance_device_id")

EXCHANGES = {
    **{kind: told(kind) for kind in KINDS},
    **{f"gRPC: {kind}": called(kind) for kind in KINDS},
    "error with an id": told("error", id="seven"),
    "raise with an id": told("raise", id="seven"),
    "no Y, and Y is wanted": told("no Y", outputs=[wanted("Y")]),
    "no Y, and X is wanted": told("no Y", outputs=[wanted("X")]),
    "other type as binary": told("other type", parameters={"binary_data_output": True}),
    "empty tensor as binary": told("empty tensor", parameters={"binary_data_output": True}),
    "all empty as binary": told("empty tensor", outputs=[wanted("X", binary_data=True)]),
    "works after all that": told("fine"),
    **{
        f"argument {key}": infer("arguments", tensor("KEY", "BYTES", [1], [key]))
        for key in (*ARGUMENTS, "model_config", "model_repository")
    },
}
