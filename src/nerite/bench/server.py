"""The server that is measured, as one asks it before and after: its models, its counts, its view of shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Protocol

from google.protobuf.json_format import MessageToDict

from nerite.bench.forms.grpc import framed
from nerite.bench.generator.grpc_line import Call, GrpcLine
from nerite.bench.generator.grpc_slot import header_block
from nerite.bench.plan import Plan
from nerite.client import ClientError, Model, ModelStatistics, ModelVersion
from nerite.client.error import Unreachable
from nerite.wire import grpc_service

_PREFIX: Final = 5


class Server(Protocol):
    """What a ``Client`` does over HTTP. Every method raises ``ClientError`` where the server does not do as asked."""

    def model(self, name: str, version: str = "") -> Model:
        """Return the metadata of a model."""

    def config(self, name: str, version: str = "") -> Mapping[str, Any]:
        """Return the configuration of a model."""

    def models(self) -> list[ModelVersion]:
        """Return what there is."""

    def statistics(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Return what the server has counted of each version."""

    def register_shared_memory(self, region: str, key: str, size: int) -> None:
        """Have the server know a region of shared memory."""

    def unregister_shared_memory(self, region: str) -> None:
        """Have the server forget it."""


class GrpcServer:
    """The same over gRPC."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def model(self, name: str, version: str = "") -> Model:
        """Return the metadata of a model."""
        return Model.read(self._ask("ModelMetadata", name=name, version=version))

    def config(self, name: str, version: str = "") -> Mapping[str, Any]:
        """Return the configuration of a model."""
        config: Mapping[str, Any] = self._ask("ModelConfig", name=name, version=version)["config"]
        return config

    def models(self) -> list[ModelVersion]:
        """Return what there is."""
        return [ModelVersion.read(entry) for entry in self._ask("RepositoryIndex").get("models", ())]

    def statistics(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Return what the server has counted of each version."""
        document = self._ask("ModelStatistics", name=model, version=version)
        return [ModelStatistics.read(entry) for entry in document.get("model_stats", ())]

    def register_shared_memory(self, region: str, key: str, size: int) -> None:
        """Have the server know a region of shared memory."""
        self._ask("SystemSharedMemoryRegister", name=region, key=key, offset=0, byte_size=size)

    def unregister_shared_memory(self, region: str) -> None:
        """Have the server forget it."""
        self._ask("SystemSharedMemoryUnregister", name=region)

    def _ask(self, method: str, **fields: Any) -> dict[str, Any]:
        request = getattr(grpc_service, f"{method}Request")(**fields)
        response = getattr(grpc_service, f"{method}Response")
        received = asyncio.run(self._call(method, framed(request.SerializeToString())))
        # Numbers of 64 bits become texts here, which those who read them know.
        return MessageToDict(response.FromString(received[_PREFIX:]), preserving_proto_field_name=True)

    async def _call(self, method: str, message: bytes) -> bytes:
        plan = self._plan
        line = GrpcLine(plan.address, plan.context(), header_block(plan.address, method, plan.headers))
        call = _Answer()
        line.open(call, message, last=True)
        try:
            return await asyncio.wait_for(call.whole, plan.timeout)
        except TimeoutError:
            raise ClientError(f"no answer from {plan.address} in {plan.timeout:g} seconds") from None
        finally:
            line.close()


class _Answer(Call):
    """A call whose answer is awaited."""

    def __init__(self) -> None:
        super().__init__(reads=True)
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._received = bytearray()

    def received(self, data: bytes) -> None:
        """Keep it."""
        self._received += data

    def ended(self, reason: str) -> None:
        """Hand it over, or raise what is wrong where it is awaited."""
        if self.whole.done():
            return
        if reason:
            unreachable = reason.startswith("cannot reach")
            self.whole.set_exception(Unreachable(reason) if unreachable else ClientError(reason))
        else:
            self.whole.set_result(bytes(self._received))
