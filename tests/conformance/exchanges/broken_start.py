"""A repository most of whose models cannot be loaded, on a server that starts all the same."""

from conformance.exchange import Eventually, Grpc, get, grpc_infer, grpc_tensor, infer, post, tensor
from conformance.exchanges.scenes import BROKEN
from nerite.wire import grpc_service as pb
from nerite.wire import health

SCENE = BROKEN

SOME = ("badfield", "half", "noversion", "otheragent", "raises", "specific")
"""The index tells of all; these stand for the kinds of mistakes."""
ONE = tensor("IN", "INT32", [1], [1])

EXCHANGES = {
    "live": get("/v2/health/live"),
    "ready": get("/v2/health/ready"),
    "index": Eventually(post("/v2/repository/index"), lambda answer: "UNLOADING" not in str(answer["json"])),
    "index of what is ready": post("/v2/repository/index", {"ready": True}),
    "fine": infer("fine", ONE),
    **{f"ready of {model}": get(f"/v2/models/{model}/ready") for model in SOME},
    **{f"metadata of {model}": get(f"/v2/models/{model}") for model in SOME},
    **{f"infer with {model}": infer(model, ONE) for model in (*SOME, "noexecute")},
    "decoupled over infer": infer("stream", tensor("COUNT", "INT32", [1], [1])),
    "decoupled over infer, and a wrong input": infer("stream", ONE),
    "gRPC: decoupled over infer": grpc_infer("stream", grpc_tensor("COUNT", "INT32", [1], {"int_contents": [1]})),
    "version of a model of which another fails": infer("half/versions/1", ONE),
    "version that fails": infer("half/versions/2", ONE),
    "statistics of a model that failed": get("/v2/models/raises/stats"),
    "configuration of a model that failed": get("/v2/models/raises/config"),
    "gRPC: ready": Grpc("ServerReady", pb.ServerReadyRequest()),
    "gRPC: health": Grpc("/grpc.health.v1.Health/Check", health.HealthCheckRequest()),
    "gRPC: ready of a model that failed": Grpc("ModelReady", pb.ModelReadyRequest(name="raises")),
    "gRPC: metadata of a model that failed": Grpc("ModelMetadata", pb.ModelMetadataRequest(name="raises")),
}
