"""A model without config.pbtxt, that says itself what it takes."""

from conformance.exchange import Grpc, get, infer, tensor
from conformance.exchanges.scenes import SMALL
from nerite.wire import grpc_service as pb

SCENE = SMALL

EXCHANGES = {
    "metadata": get("/v2/models/noconfig"),
    "configuration": get("/v2/models/noconfig/config"),
    "gRPC: configuration": Grpc("ModelConfig", pb.ModelConfigRequest(name="noconfig")),
    "infer": infer("noconfig", tensor("IN", "FP32", [1, 2], [1, 2])),
    "wrong shape": infer("noconfig", tensor("IN", "FP32", [2], [1, 2])),
    "batch too large": infer("noconfig", tensor("IN", "FP32", [17, 1], [0] * 17)),
}
