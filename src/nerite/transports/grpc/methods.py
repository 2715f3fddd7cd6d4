"""Administrative methods of the gRPC service: each maps a protobuf request to a server call and a reply."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from nerite.core.client_text import checked, checked_name
from nerite.core.errors import InvalidArgument, NeriteError, NotLoaded, Unsupported
from nerite.core.failures import report
from nerite.core.text import MAX_VALUE
from nerite.observability.log import log
from nerite.transports.grpc.load_reports import METHOD
from nerite.transports.settings import Value, change_log_settings, change_trace_settings
from nerite.wire import grpc_service as wire
from nerite.wire.health import HealthCheckResponse

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_SERVICE = "/inference.GRPCInferenceService/"
METHODS: Final[Mapping[str, str]] = {
    f"{_SERVICE}ServerLive": "health",
    f"{_SERVICE}ServerReady": "health",
    f"{_SERVICE}ModelReady": "health",
    "/grpc.health.v1.Health/Check": "health",
    f"{_SERVICE}ServerMetadata": "metadata",
    f"{_SERVICE}ModelMetadata": "metadata",
    f"{_SERVICE}ModelInfer": "inference",
    f"{_SERVICE}ModelStreamInfer": "inference",
    f"{_SERVICE}ModelConfig": "model-config",
    f"{_SERVICE}ModelStatistics": "statistics",
    f"{_SERVICE}RepositoryIndex": "model-repository",
    f"{_SERVICE}RepositoryModelLoad": "model-repository",
    f"{_SERVICE}RepositoryModelUnload": "model-repository",
    f"{_SERVICE}TraceSetting": "trace",
    f"{_SERVICE}LogSettings": "logging",
    f"{_SERVICE}SystemSharedMemoryStatus": "shared-memory",
    f"{_SERVICE}SystemSharedMemoryRegister": "shared-memory",
    f"{_SERVICE}SystemSharedMemoryUnregister": "shared-memory",
    f"{_SERVICE}CudaSharedMemoryStatus": "shared-memory",
    f"{_SERVICE}CudaSharedMemoryRegister": "shared-memory",
    f"{_SERVICE}CudaSharedMemoryUnregister": "shared-memory",
    METHOD: "statistics",
}
"""All methods, with the category by which access to each is restricted."""

Answer: TypeAlias = Callable[[Message | NeriteError], None]
Handler: TypeAlias = Callable[[Any, Answer], Coroutine[Any, Any, None] | None]
"""Answers now or later; returns a coroutine if there is something to await."""


class GrpcAdministration:
    """Handlers of all methods except inference."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._handlers: dict[str, Handler] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "Check": self._check,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "TraceSetting": self._trace_setting,
            "LogSettings": _log_settings,
        }
        self._region_handlers: dict[str, Callable[[str, Any, Answer], Coroutine[Any, Any, None] | None]] = {
            "SystemSharedMemoryStatus": self._regions,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._cuda_regions,
            "CudaSharedMemoryRegister": self._register_cuda,
            "CudaSharedMemoryUnregister": self._unregister_cuda,
        }
        """Those that concern the shared memory of an owner."""

    def handler(self, path: str, owner: str = "") -> Handler:
        """Return the handler of the method at ``path`` for an owner of shared memory."""
        name = path.rpartition("/")[2]
        found = self._handlers.get(name) or partial(self._region_handlers[name], owner)
        return partial(self._handle, found)

    def _handle(self, handler: Handler, request: Any, answer: Answer) -> Coroutine[Any, Any, None] | None:
        try:
            return handler(request, answer)
        except NotLoaded as absent:
            return self._after_load(absent.without_frames(), handler, request, answer)

    async def _after_load(self, absent: NotLoaded, handler: Handler, request: Any, answer: Answer) -> None:
        """Answer a question about a model when it is loaded."""
        try:
            await self._server.waits.until_loaded(absent)
            handler(request, answer)
        except NeriteError as error:
            answer(error)

    def _live(self, request: Any, answer: Answer) -> None:
        answer(wire.ServerLiveResponse(live=self._server.live))

    def _ready(self, request: Any, answer: Answer) -> None:
        self._server.ask_ready(lambda ready: answer(wire.ServerReadyResponse(ready=ready)))

    def _model_ready(self, request: Any, answer: Answer) -> None:
        try:
            self._server.ask_model_ready(
                request.name, request.version, lambda ready: answer(wire.ModelReadyResponse(ready=ready))
            )
        except InvalidArgument:
            raise
        except NeriteError:
            answer(wire.ModelReadyResponse(ready=False))

    def _check(self, request: Any, answer: Answer) -> None:
        def ready(serving: bool) -> None:
            answer(HealthCheckResponse(status="SERVING" if serving else "NOT_SERVING"))

        self._server.ask_ready(ready)

    def _server_metadata(self, request: Any, answer: Answer) -> None:
        answer(ParseDict(self._server.metadata(), wire.ServerMetadataResponse()))

    def _model_metadata(self, request: Any, answer: Answer) -> None:
        answer(ParseDict(self._server.model_metadata(request.name, request.version), wire.ModelMetadataResponse()))

    def _config(self, request: Any, answer: Answer) -> None:
        config = self._server.model_config(request.name, request.version)
        answer(ParseDict({"config": config}, wire.ModelConfigResponse()))

    def _statistics(self, request: Any, answer: Answer) -> None:
        answer(
            ParseDict(
                {"model_stats": self._server.statistics(request.name, request.version)}, wire.ModelStatisticsResponse()
            )
        )

    async def _index(self, request: Any, answer: Answer) -> None:
        reply = wire.RepositoryIndexResponse()
        try:
            _only_repository(request)
            models = await self._server.repository_index(request.ready)
        except NeriteError as error:
            answer(error)
            return
        answer(ParseDict({"models": models}, reply, ignore_unknown_fields=True))

    def _regions(self, owner: str, request: Any, answer: Answer) -> None:
        reply = wire.SystemSharedMemoryStatusResponse()
        for region in self._server.regions.listed(request.name, owner):
            entry = reply.regions[region.name]
            entry.name, entry.key, entry.offset, entry.byte_size = region[:4]
        answer(reply)

    def _register(self, owner: str, request: Any, answer: Answer) -> None:
        self._server.regions.register(request.name, request.key, request.offset, request.byte_size, owner)
        answer(wire.SystemSharedMemoryRegisterResponse())

    def _unregister(self, owner: str, request: Any, answer: Answer) -> None:
        self._server.regions.unregister(request.name, owner)
        answer(wire.SystemSharedMemoryUnregisterResponse())

    def _cuda_regions(self, owner: str, request: Any, answer: Answer) -> None:
        reply = wire.CudaSharedMemoryStatusResponse()
        for region in self._server.regions.listed_cuda(request.name, owner):
            entry = reply.regions[region.name]
            entry.name, entry.device_id, entry.byte_size = region.name, region.device, region.byte_size
        answer(reply)

    async def _register_cuda(self, owner: str, request: Any, answer: Answer) -> None:
        try:
            await self._server.regions.register_cuda(
                request.name, request.raw_handle, request.device_id, request.byte_size, owner
            )
        except NeriteError as error:
            answer(error)
        else:
            answer(wire.CudaSharedMemoryRegisterResponse())

    def _unregister_cuda(self, owner: str, request: Any, answer: Answer) -> None:
        self._server.regions.unregister_cuda(request.name, owner)
        answer(wire.CudaSharedMemoryUnregisterResponse())

    def _trace_setting(self, request: Any, answer: Answer) -> None:
        """Change the trace settings, if any are given, and return them."""

        def read(name: str, value: Any) -> Sequence[str] | None:
            if name != "trace_level" and len(value.value) > 1:
                raise InvalidArgument(f"expect only 1 value for '{name}'")
            return list(value.value) or None

        model = request.model_name
        settings = self._server.trace_settings(model)
        change_trace_settings(settings, model, request.settings, read)
        reply = wire.TraceSettingResponse()
        for name, value in settings.current(model):
            reply.settings[name].value.extend([value] if isinstance(value, str) else value)
        answer(reply)

    async def _load(self, request: Any, answer: Answer) -> None:
        await self._change(
            self._server.load_for_client, _load_parameters, request, wire.RepositoryModelLoadResponse(), answer
        )

    async def _unload(self, request: Any, answer: Answer) -> None:
        await self._change(
            self._server.unload, _unload_parameters, request, wire.RepositoryModelUnloadResponse(), answer
        )

    async def _change(
        self,
        work: Callable[[str, Mapping[str, Any]], Coroutine[Any, Any, None]],
        read: Callable[[Any], dict[str, Any]],
        request: Any,
        done: Message,
        answer: Answer,
    ) -> None:
        try:
            _only_repository(request)
            await work(request.model_name, read(request.parameters))
        except NeriteError as error:
            answer(error)
        except Exception as error:
            answer(report("grpc", error, "in a load or an unload"))
        else:
            answer(done)


def _log_settings(request: Any, answer: Answer) -> None:
    """Change the log settings, if any are given, and return them."""
    fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}

    def read(name: str, kind: type, value: Any) -> Value:
        if value.WhichOneof("parameter_choice") != fields[kind]:
            called = {bool: "boolean", int: "int32", str: "string"}[kind]
            raise InvalidArgument(f"expect {called} for '{name}'")
        found: Value = getattr(value, fields[kind])
        return found

    def unknown(name: str) -> NeriteError:
        return InvalidArgument(f"invalid argument for log_format, got: {name}")

    change_log_settings(request.settings.items(), read, unknown)
    reply = wire.LogSettingsResponse()
    for name, value in log.settings.items():
        setattr(reply.settings[name], fields[type(value)], value)
    answer(reply)


def _load_parameters(parameters: Any) -> dict[str, Any]:
    """Return the parameters of a load. Raises Triton's errors for unknown ones."""
    values = {}
    for name, value in parameters.items():
        if name != "config" and not name.startswith("file:"):
            raise InvalidArgument(f"unrecognized load parameter '{name}'. Use 'config' or 'file:<path>'.")
        expected = "string_param" if name == "config" else "bytes_param"
        if value.WhichOneof("parameter_choice") != expected:
            raise InvalidArgument(f"invalid value type for load parameter '{name}', expected {expected}.")
        values[name] = getattr(value, expected)
    return values


def _unload_parameters(parameters: Any) -> dict[str, Any]:
    """Return the parameters of an unload; unknown ones are ignored, as in Triton. Raises Triton's errors."""
    if "unload_dependents" not in parameters:
        return {}
    value = parameters["unload_dependents"]
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidArgument("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return {"unload_dependents": value.bool_param}


def _only_repository(request: Any) -> None:
    """Reject a request for one of several repositories, as Triton does."""
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


# Length checks for all texts in the message of an administrative method, whatever its fields.

_VALUE_FIELDS: Final = ("string_param", "value")
"""Fields that hold the value of a parameter or setting. All others hold names."""


def check_texts(message: Message, where: str = "") -> None:
    """Raise ``InvalidArgument``, with the path of the field, for a text that is invalid.

    Texts are already known to be UTF-8 from parsing. ``where`` is the path of ``message``.
    """
    for field, value in message.ListFields():
        _check(f"{where}{field.name}", value, names=field.name not in _VALUE_FIELDS)


def _check(path: str, value: Any, *, names: bool) -> None:
    if isinstance(value, str):
        if names:
            checked_name(value, f"'{path}'")
        else:
            checked(value, f"'{path}'", MAX_VALUE)
    elif isinstance(value, Message):
        check_texts(value, f"{path}.")
    elif hasattr(value, "items"):  # a map
        for key, item in value.items():
            _check(f"a key of {path}", key, names=True)
            _check(f"{path}[{key}]", item, names=names)
    elif not isinstance(value, (bytes, int, float)):
        for item in value:
            _check(path, item, names=names)
