"""The one door: everything that can be asked of the server, whichever protocol asks.

Transports call it, and so can a program that embeds it. Inference is a plain call with a reply sink; what touches files
is a coroutine. All of it belongs to the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from nerite import __version__
from nerite.admission.tenants import TenantAdmission
from nerite.cache.interface import ResponseCache
from nerite.config.options import LOAD, ServerOptions, open_ports, remedy, rights
from nerite.core.client_text import checked
from nerite.core.engine_report import EngineReport
from nerite.core.errors import Forbidden, InvalidArgument, NeriteError, Unsupported
from nerite.core.failures import report
from nerite.core.model_calls import ChildRequest
from nerite.core.request import InferenceRequest, ReplySink, RequestHeader, SharedMemoryInput, SharedMemoryRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import ALIGNMENT, Buffer
from nerite.core.text import MAX_VALUE
from nerite.dispatch.interface import ServerEntry
from nerite.instances.instance import all_ready
from nerite.models.running_version import RunningVersion
from nerite.observability.custom_metrics import Reading
from nerite.observability.exposition import MetricFamily
from nerite.observability.model_metrics import MeteredVersion
from nerite.observability.trace import TraceSettings
from nerite.observability.tracing import Tracing
from nerite.regions import SharedMemoryRegions
from nerite.repository import refusals
from nerite.repository.catalogue import ModelState, version_origin
from nerite.repository.descriptions import Descriptions
from nerite.repository.manager import ModelManager
from nerite.repository.repositories import LoadOverrides, RegisteredRepository, check_file_names
from nerite.workers.helper_pool import HelperPool
from nerite.workers.ipc.shared_memory import MIN_SIZE

_NOT_OVER_HTTP = "HTTP end point doesn't support models with decoupled transaction policy"
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class InferenceServer:
    """Loads models and answers for them."""

    def __init__(
        self,
        options: ServerOptions,
        manager_of: Callable[[ServerEntry, Callable[[], None]], ModelManager],
        cache: ResponseCache | None = None,
        tenant_admission: TenantAdmission | None = None,
        helpers: HelperPool | None = None,
    ) -> None:
        """``manager_of`` makes the model manager, given this door and what to call when models come and go."""
        self._options = options
        self._epoch = object()
        self._cache = cache
        self._tenant_admission = tenant_admission
        self.regions = SharedMemoryRegions(allowed=options.device.allow_client_shared_memory)
        """The shared memory that clients have registered."""
        self.tracing = Tracing(options.trace, self._trace_running)
        """What is noted of requests."""
        self._helpers = helpers
        self._manager = manager_of(self, self._changed)
        self._descriptions = Descriptions(self._manager)
        self._starting = True
        self._leaving = False
        """It stops once what is there is answered."""
        self._stopping = False

    @property
    def manager(self) -> ModelManager:
        """The models."""
        return self._manager

    @property
    def helpers(self) -> HelperPool:
        """Processes for what would hold up the event loop."""
        assert self._helpers is not None
        return self._helpers

    def _changed(self) -> None:
        """Forget where headers led: a version came or went."""
        self._epoch = object()
        self._trace_running()
        if self._cache is not None:
            self._renew_origins(lasting=self._cache.shared)

    def _renew_origins(self, *, lasting: bool) -> None:
        """Have the cache ask where answers come from now: those of an ensemble from what came or went, perhaps."""

        def origin_of(running: RunningVersion) -> str:
            return version_origin(running, self._manager.find, lasting=lasting)

        for record in self._manager.records:
            for running in record.running.values():
                running.renew_origin(origin_of)

    def _trace_running(self) -> None:
        """Have those versions traced that are to be, and no others."""
        for record in self._manager.records:
            tracing = self.tracing if self.tracing.wants(record.name) else None
            for running in record.running.values():
                running.trace(tracing)

    # Inference

    def infer(self, request: InferenceRequest, decoupled: str = _NOT_OVER_HTTP) -> None:
        """Answer a request through ``request.respond``: always, and with ``final`` once.

        ``decoupled`` is what is said where the model may have several answers to it.
        """
        route = request.header.route
        if route is None or route[0] is not self._epoch:
            try:
                route = self._resolve(request, decoupled)
            except NeriteError as error:
                request.respond(InferenceResponse.failed(error))
                return
        try:
            route[1].submit(request)
        except Exception as error:
            where = f"of a request to model '{request.header.model_name}'"
            request.respond(InferenceResponse.failed(report("admission", error, where, request.id)))

    def request(
        self,
        header: RequestHeader,
        data: Sequence[Buffer | SharedMemoryInput],
        sink: ReplySink,
        arrived_ns: int,
        request_id: str,
    ) -> InferenceRequest:
        """Return a request; ``data`` has a place instead of bytes for each input that is in shared memory.

        Raises Triton's refusals of places that there are not.
        """
        if not header.shared:
            return InferenceRequest(header, cast(Sequence[Buffer], data), sink, arrived_ns, request_id)

        def room(size: int) -> memoryview | None:
            if size < MIN_SIZE:
                return None
            return self.receive_buffer(header.model_name, header.model_version, size, 0)

        regions = self.regions
        inputs = [regions.read(each, room) if isinstance(each, SharedMemoryInput) else each for each in data]
        request = SharedMemoryRequest(header, inputs, sink, arrived_ns, request_id)
        places = {output.name: output.place for output in header.outputs if output.place}
        request.places = {name: regions.output(place) for name, place in places.items()}
        regions.use(request, [each for each in (*data, *places.values()) if isinstance(each, SharedMemoryInput)])
        return request

    def version_of(self, request: InferenceRequest) -> RunningVersion:
        """Return where a request goes whose sink takes any number of responses. Raises ``NeriteError``."""
        route = request.header.route
        if route is None or route[0] is not self._epoch:
            route = self._resolve(request)
        return cast(RunningVersion, route[1])

    def _resolve(self, request: InferenceRequest, decoupled: str = "") -> tuple[object, RunningVersion]:
        header = request.header
        if self._stopping and not isinstance(request, ChildRequest):
            raise refusals.stopping()
        version = self.find(header.model_name, header.model_version, decoupled, header.namespace)
        version.signature.bind(header, request.id)
        header.route = (self._epoch, version)
        return self._epoch, version

    def find(self, model: str, version: str, decoupled: str = _NOT_OVER_HTTP, namespace: str = "") -> RunningVersion:
        """Return where a request for a model goes, by its name alone if there is no ``namespace``.

        Raises Triton's refusals. ``decoupled`` is the one for a model that may have several answers, empty if those
        are taken.
        """
        running = self._manager.find(model, version, namespace)
        if decoupled and running.decoupled:
            raise Unsupported(decoupled)
        return running

    def signature(self, model: str, version: str) -> Signature:
        """Return the signature of what a request would go to. Raises Triton's refusals."""
        return self._manager.find(model, version).signature

    def signature_of(self, request: InferenceRequest) -> Signature:
        """Return the signature of the version that a request went to."""
        return self.went_to(request).signature

    def went_to(self, request: InferenceRequest) -> RunningVersion:
        """Return the version that a request was submitted to."""
        assert request.header.route is not None
        return cast(RunningVersion, request.header.route[1])

    def version_directory(self, running: RunningVersion) -> Path | None:
        """Return where the files of a version are, None if it has none any more."""
        loaded = self._manager.meant(running.name).loaded
        return None if loaded is None else loaded.polled.directory / running.label

    def receive_buffer(self, model: str, version: str, size: int, data_at: int) -> memoryview | None:
        """Return memory for a large request that the model's instances can read in place, or None.

        ``data_at`` is where in the request the tensors begin; they will be aligned.
        """
        try:
            running = self._manager.find(model, version)
        except NeriteError:
            return None  # the request will be refused when it is complete, with the reason
        padding = -data_at % ALIGNMENT
        buffer = running.receive_buffer(size + padding)
        return None if buffer is None else buffer[padding:]

    # Health

    @property
    def live(self) -> bool:
        """The server runs."""
        return not self._stopping

    def started(self) -> None:
        """Note that the models that are loaded at start-up are."""
        self._starting = False

    def ask_ready(self, answered: Callable[[bool], None]) -> None:
        """Tell whether requests can be served: with strict readiness, by every version that a load was tried of.

        A model whose configuration cannot be read has none, and does not count, as with Triton. A repository that could
        never be read does.
        """
        if self._starting or self._leaving or self._manager.unread:
            answered(False)
            return
        if not self._options.repository.strict_readiness:
            answered(True)
            return
        running: list[RunningVersion] = []
        for record in self._manager.records:
            for state in record.states.values():
                if state.state is not ModelState.READY and state.reason != "unloaded":
                    answered(False)
                    return
            running += record.running.values()
        all_ready([version.ask_ready for version in running], answered)

    def ask_model_ready(self, model: str, version: str, answered: Callable[[bool], None]) -> None:
        """Tell whether one model can be served: not if there is none. Raises Triton's refusals of the version."""
        try:
            record = self._manager.meant(model)
        except NeriteError:
            answered(False)
        else:
            record.find(version).ask_ready(answered)

    # Description

    def metadata(self) -> dict[str, Any]:
        """Return the server's name, version and extensions."""
        return {"name": self._options.id, "version": __version__, "extensions": list(EXTENSIONS)}

    def model_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's versions and signature."""
        return self._descriptions.metadata(model, version)

    def model_config(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's complete configuration in Triton's JSON form."""
        return self._descriptions.config(model, version)

    def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model's ready versions; of all models if ``model`` is empty."""
        return self._descriptions.statistics(model, version)

    def metrics(self) -> Iterator[MeteredVersion]:
        """Yield every version that runs now as the metrics page reads it, when its turn comes."""
        return self._descriptions.metrics()

    def instances(self) -> Iterator[dict[str, Any]]:
        """Yield each instance of the versions that run now, when its turn comes: where it is and how it does."""
        return self._descriptions.instances()

    async def custom_metrics(self) -> list[Reading]:
        """Return what models count themselves, as each process that runs some has it."""
        return await self._descriptions.custom_metrics()

    def engine_reports(self, model: str) -> list[EngineReport]:
        """Return how the engines of a model are, or of all models if ``model`` is empty: none where there are none."""
        return self._descriptions.engine_reports(model)

    def cache_metrics(self) -> list[MetricFamily]:
        """Return the metrics of the response cache, if there is one."""
        return self._cache.families() if self._cache is not None else []

    def quota(self) -> dict[str, Any]:
        """Return what tenants have used of which model, and what they have left."""
        return self._tenant_admission.quota() if self._tenant_admission is not None else {}

    def admission_metrics(self) -> list[MetricFamily]:
        """Return the metrics of letting requests in; none where nobody has to be let in."""
        return self._tenant_admission.families() if self._tenant_admission is not None else []

    def trace_settings(self, model: str) -> TraceSettings:
        """Return what is traced. Raises Triton's refusal of a model that does not run; an empty name is for all."""
        if model and not self._descriptions.running(model):
            raise InvalidArgument(f"Request for unknown model : {model}")
        return self.tracing.settings

    # Repository

    async def repository_index(self, ready_only: bool) -> list[dict[str, str]]:
        """Return every model of the repositories with the state of its versions.

        A model that still runs although its directory is gone is not among them, as with Triton.
        """
        return await self._manager.index(ready_only=ready_only)

    async def load_for_client(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Do as ``load``, for a client: files that it sends are refused where anybody could send some."""
        self._require_explicit()
        sent = next((name for name in parameters if name.startswith("file:")), None)
        if sent is not None and (reason := self._files_refused()):
            raise Forbidden(f"load parameter '{sent}' is refused: {reason}")
        await self.load(model, parameters)

    def _files_refused(self) -> str:
        """Return why clients may not send files, and what to do; empty where they may."""
        allowed = self._options.repository.load_files
        if allowed == "none":
            return "this server takes no files of models from clients (--model-load-files=none)"
        ports = [port for port in open_ports(self._options) if LOAD in port.categories]
        if allowed == "any" or not ports:
            return ""
        return (
            f"files of a model may be programs, and {rights(ports)}. {remedy(ports)} "
            "With --model-load-files=any files are taken from anybody."
        )

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model by hand: from its files, or from the configuration and files in ``parameters``."""
        self._require_explicit()
        if not model:
            raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
        checked(model, "the name of a model")
        check_file_names(parameters)
        for name, value in parameters.items():
            checked(name, "the name of a load parameter")
            if isinstance(value, str):
                checked(value, f"load parameter '{name}'", MAX_VALUE)
        if "/" in model or ".." in model:
            raise InvalidArgument(
                f"invalid model name '{model}', model name must not contain path traversal characters"
            )
        try:
            delivery = LoadOverrides.of(parameters)
        except InvalidArgument as error:
            raise refusals.not_polled(model, error.message) from None
        await self._manager.load(model, delivery)

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model by hand."""
        self._require_explicit()
        await self._manager.unload(model, dependents=bool(parameters.get("unload_dependents")))

    async def add_repository(self, repository: RegisteredRepository, model: str) -> None:
        """Serve a model of one more repository, from now until ``remove_repository``."""
        if not self.is_controlled_by_hand:
            raise Unsupported("repository registration is not allowed if model control mode is not EXPLICIT")
        await self._manager.register(repository, model)

    async def remove_repository(self, repository: RegisteredRepository) -> None:
        """Unload what a repository has, and forget it. Returns when the models are gone."""
        await self._manager.unregister(repository)

    @property
    def is_controlled_by_hand(self) -> bool:
        """Whether models are loaded and unloaded when somebody says so."""
        return self._options.repository.control_mode == "explicit"

    @property
    def control_note(self) -> str:
        """How models come where they are not loaded and unloaded by calls; else nothing."""
        return refusals.control_note(self._options.repository.control_mode)

    def _require_explicit(self) -> None:
        if not self.is_controlled_by_hand:
            raise refusals.not_by_hand(self._options.repository.control_mode)

    # Stopping

    def announce_stop(self) -> None:
        """Take note, and tell the models, that the server stops once what is there is answered."""
        self._leaving = True
        for record in self._manager.records:
            for running in record.running.values():
                running.server_stops()
        if self._tenant_admission is not None:
            self._tenant_admission.stop()

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        self._leaving = self._stopping = True
        self._changed()

    @property
    def in_flight(self) -> list[tuple[str, str, int]]:
        """Model, version and number of requests for each version that holds any."""
        return [
            (running.name, running.label, running.in_flight)
            for running in self._descriptions.running()
            if running.in_flight
        ]
