"""Models whose code is in the backend directory, and those whose backend is nowhere."""

from typing import Any

from conformance.exchange import Step, get, grpc_infer, grpc_tensor, infer, post, tensor
from conformance.exchanges.scenes import SHARED_CODE

SCENE = SHARED_CODE

MODELS = ("short", "own_code", "named", "by_name.teller")
KNOWN = (
    "word",
    "directory",
    "module",
    "file",
    "on the path",
    "the backend's on the path",
    "model_name",
    "model_version",
    "model_instance_name",
    "model_instance_kind",
    "model_repository",
    "model_config",
)


def told(model: str, what: str, **top: Any) -> Step:
    return infer(model, tensor("ASKED", "BYTES", [1, 1], [what]), **top)


EXCHANGES = {
    **{f"load {model}": post(f"/v2/repository/models/{model}/load") for model in MODELS},
    **{f"configuration of {model}": get(f"/v2/models/{model}/config") for model in MODELS},
    **{f"metadata of {model}": get(f"/v2/models/{model}") for model in MODELS},
    **{f"word of {model}": told(model, "word") for model in MODELS},
    **{f"knows its {what}": told("own_code", what) for what in KNOWN},
    "raises": told("short", "raise"),
    "gRPC: word": grpc_infer("short", grpc_tensor("ASKED", "BYTES", [1, 1], {"bytes_contents": [b"word"]})),
    "more than a batch": infer("short", tensor("ASKED", "BYTES", [5, 1], ["word"] * 5)),
    "statistics": get("/v2/models/short/stats"),
    **{
        f"load {model}": post(f"/v2/repository/models/{model}/load")
        for model in ("no_word", "nobody", "nobody_in_python", "library")
    },
}
