"""Health, metadata, configuration and what is not there, over gRPC."""

from conformance.exchange import Grpc
from conformance.exchanges.scenes import GOOD
from nerite.wire import grpc_service as pb
from nerite.wire import health

SCENE = GOOD


def metadata(name: str, version: str = "") -> Grpc:
    return Grpc("ModelMetadata", pb.ModelMetadataRequest(name=name, version=version))


def config(name: str, version: str = "") -> Grpc:
    return Grpc("ModelConfig", pb.ModelConfigRequest(name=name, version=version))


def ready(name: str, version: str = "") -> Grpc:
    return Grpc("ModelReady", pb.ModelReadyRequest(name=name, version=version))


def checked(service: str) -> Grpc:
    return Grpc("/grpc.health.v1.Health/Check", health.HealthCheckRequest(service=service))


EXCHANGES = {
    "live": Grpc("ServerLive", pb.ServerLiveRequest()),
    "ready": Grpc("ServerReady", pb.ServerReadyRequest()),
    "health": checked(""),
    "health of the service": checked("inference.GRPCInferenceService"),
    "health of an unknown service": checked("nobody"),
    "server": Grpc("ServerMetadata", pb.ServerMetadataRequest()),
    **{f"metadata of {model}": metadata(model) for model in GOOD.models},
    **{f"configuration of {model}": config(model) for model in GOOD.models},
    "metadata of a version": metadata("versions", "3"),
    "metadata of an unknown model": metadata("none"),
    "metadata of an unknown version": metadata("versions", "2"),
    "metadata of a version that is no number": metadata("versions", "x"),
    "metadata of no model": metadata(""),
    "configuration of an unknown model": config("none"),
    "configuration of an unknown version": config("versions", "2"),
    "model ready": ready("echo"),
    "version ready": ready("versions", "1"),
    "unknown model ready": ready("none"),
    "unknown version ready": ready("versions", "2"),
    "ready of a version that is no number": ready("versions", "x"),
    "ready of no model": ready(""),
    "unknown call": Grpc("/inference.GRPCInferenceService/ModelDance", b""),
    "unknown service": Grpc("/inference.Nobody/ModelInfer", b""),
    "unknown path": Grpc("/nothing", b""),
    "not a message": Grpc("ModelInfer", b"\xff\xff\xff"),
    "not a message for metadata": Grpc("ModelMetadata", b"\x0a\x05ab"),
    "name that is not UTF-8": Grpc("ModelMetadata", b"\x0a\x02\xff\xfe"),
    "unknown fields": Grpc("ServerLive", b"\x7a\x01a"),
    "index": Grpc("RepositoryIndex", pb.RepositoryIndexRequest()),
    "index of what is ready": Grpc("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)),
    "index of another repository": Grpc("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="other")),
    "load": Grpc("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="echo")),
    "unload": Grpc("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="echo")),
    "load from another repository": Grpc(
        "RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="other", model_name="echo")
    ),
    "statistics of an unknown model": Grpc("ModelStatistics", pb.ModelStatisticsRequest(name="none")),
    "statistics of an unknown version": Grpc(
        "ModelStatistics", pb.ModelStatisticsRequest(name="versions", version="2")
    ),
    "statistics of a version that is no number": Grpc(
        "ModelStatistics", pb.ModelStatisticsRequest(name="versions", version="x")
    ),
}
