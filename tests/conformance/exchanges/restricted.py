"""Endpoints that need a key."""

from google.protobuf.message import Message

from conformance.exchange import Grpc, get, grpc_infer, grpc_tensor, infer, post, tensor
from conformance.exchanges.scenes import RESTRICTED
from nerite.wire import grpc_service as pb
from nerite.wire import health

SCENE = RESTRICTED

ROW = tensor("IN", "INT32", [1, 2], [1, 2])
CALL = grpc_infer("echo", grpc_tensor("IN", "INT32", [1, 2], {"int_contents": [1, 2]}))


def called(call: str, message: Message | bytes, **metadata: str) -> Grpc:
    return Grpc(call, message, tuple((name.replace("_", "-"), value) for name, value in metadata.items()))


EXCHANGES = {
    "health": get("/v2/health/live"),
    "health with the key": get("/v2/health/live", x_key="open"),
    "health with a wrong key": get("/v2/health/live", x_key="shut"),
    "health with the key in capitals": get("/v2/health/live", X_KEY="open"),
    "health with the value in capitals": get("/v2/health/live", x_key="OPEN"),
    "health with the key of others": get("/v2/health/live", x_admin="sesame"),
    "model ready": get("/v2/models/echo/ready"),
    "model ready with the key": get("/v2/models/echo/ready", x_key="open"),
    "infer": infer("echo", ROW),
    "infer with the key": infer("echo", ROW, headers={"x-key": "open"}),
    "infer of an unknown model": infer("none", ROW),
    "infer of bad JSON": post("/v2/models/echo/infer", b"{"),
    "infer by GET": get("/v2/models/echo/infer"),
    "generate": post("/v2/models/echo/generate", b"{}"),
    "metadata": get("/v2"),
    "model metadata": get("/v2/models/echo"),
    "configuration": get("/v2/models/echo/config"),
    "index": post("/v2/repository/index"),
    "index with the key": post("/v2/repository/index", x_admin="sesame"),
    "index by GET": get("/v2/repository/index"),
    "load": post("/v2/repository/models/echo/load"),
    "unload": post("/v2/repository/models/echo/unload"),
    "statistics": get("/v2/models/stats"),
    "statistics of a model": get("/v2/models/echo/stats"),
    "statistics with the key": get("/v2/models/none/stats", x_admin="sesame"),
    "unknown path": get("/v2/nothing"),
    "gRPC infer": CALL,
    "gRPC infer with the key": called("ModelInfer", CALL.message, triton_grpc_protocol_key="open"),
    "gRPC infer with a wrong key": called("ModelInfer", CALL.message, triton_grpc_protocol_key="shut"),
    "gRPC infer with the key's plain name": called("ModelInfer", CALL.message, key="open"),
    "gRPC health": called("ServerLive", pb.ServerLiveRequest()),
    "gRPC health check": called("/grpc.health.v1.Health/Check", health.HealthCheckRequest()),
    "gRPC metadata": called("ServerMetadata", pb.ServerMetadataRequest()),
    "gRPC metadata with the key": called(
        "ModelMetadata", pb.ModelMetadataRequest(name="echo"), triton_grpc_protocol_key="open"
    ),
    "gRPC index": called("RepositoryIndex", pb.RepositoryIndexRequest()),
    "gRPC index with the key": called(
        "RepositoryIndex", pb.RepositoryIndexRequest(), triton_grpc_protocol_admin="sesame"
    ),
    "gRPC configuration": called("ModelConfig", pb.ModelConfigRequest(name="none")),
}
