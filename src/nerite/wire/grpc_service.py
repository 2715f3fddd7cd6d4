"""Messages of the inference service (grpc_service.proto)."""

from nerite.wire.schema import members_of

__getattr__ = members_of("grpc_service")
