"""API of the server, independent of protocols: inference, health, metadata, statistics, model control, shutdown.

Transports call it, and so can a program that embeds it. Inference is a plain call with a reply sink; operations that
access files are coroutines. Not thread-safe: everything must be called on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from nerite import __version__
from nerite.admission.tenants import TenantAdmission
from nerite.cache.interface import ResponseCache
from nerite.config.open_ports import LOAD, open_ports, remedy, rights
from nerite.config.options import ServerOptions
from nerite.core.client_text import checked, checked_name
from nerite.core.engine_report import EngineReport
from nerite.core.errors import Forbidden, InvalidArgument, NeriteError, NotFound, NotLoaded, Unavailable, Unsupported
from nerite.core.request import Caller, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.servable_version import ServableVersion
from nerite.core.text import MAX_VALUE
from nerite.core.work_loop import WorkLoops
from nerite.devices.devices import Devices
from nerite.dispatch.interface import ServerEntry
from nerite.inference_entry import InferenceEntry, refusal_of
from nerite.instances.instance import all_ready
from nerite.ledger.ledger import Ledger
from nerite.ledger.usage import UsageQuery
from nerite.models.running_version import RunningVersion
from nerite.observability.custom_metrics import Reading
from nerite.observability.exposition import Page
from nerite.observability.model_metrics import MeteredVersion
from nerite.observability.trace import TraceSettings
from nerite.observability.tracing import Tracing
from nerite.regions import SharedMemoryRegions
from nerite.repository import refusals
from nerite.repository.catalogue import ModelRecord, loadable_text_models, version_origin
from nerite.repository.descriptions import Descriptions
from nerite.repository.load_waits import LoadWaits
from nerite.repository.manager import ModelManager
from nerite.repository.on_demand import OnDemandModels
from nerite.repository.repositories import LoadOverrides, RegisteredRepository, check_file_names
from nerite.repository.standby import Standby
from nerite.repository.version_state import UNLOADED, ModelState
from nerite.routes.metrics import write_route_metrics
from nerite.routes.observation import ArmFallback
from nerite.routes.shadows import RunningShadows
from nerite.routes.table import RouteTable
from nerite.scheduling.weighted_route import WeightedRoute
from nerite.workers.helper_pool import HelperPool

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


class InferenceServer(InferenceEntry[RunningVersion]):
    """Serves the models of its repositories to all transports."""

    def __init__(
        self,
        options: ServerOptions,
        manager_of: Callable[[ServerEntry, Callable[[], None]], ModelManager],
        cache: ResponseCache | None = None,
        tenant_admission: TenantAdmission | None = None,
        helpers: HelperPool | None = None,
        routes: RouteTable | None = None,
        ledger: Ledger | None = None,
        devices: Devices | None = None,
        loops: WorkLoops | None = None,
    ) -> None:
        """``manager_of`` creates the model manager, given this server and a callback for loaded and unloaded models."""
        regions = SharedMemoryRegions(allowed=options.device.allow_client_shared_memory, devices=devices)
        waits = LoadWaits(options.repository.demand_wait_seconds, options.repository.demand_max_waiting)
        super().__init__(regions, helpers, RouteTable() if routes is None else routes, waits, owns_routes=True)
        self.routes.on_changed = self._routes_changed
        self._shadows = RunningShadows(self.routes, self._running)
        self._options = options
        self.loops = WorkLoops() if loops is None else loops
        """What runs beside the requests."""
        self.devices = devices
        """The GPUs; None without any."""
        self._cache = cache
        self._tenant_admission = tenant_admission
        self._ledger = ledger
        for_routers = ("ledger",) if ledger is not None and options.router_key_file else ()
        self._extensions = [*EXTENSIONS, *for_routers]
        self.tracing = Tracing(options.trace, self._trace_running)
        """Traces of requests."""
        self._manager = manager_of(self, self._models_changed)
        self._descriptions = Descriptions(self._manager)
        self.on_models_changed: Callable[[], None] = lambda: None
        """Called when a version was loaded or unloaded, or a route was changed."""
        self.on_header_names_changed: Callable[[], None] = lambda: None
        """Called when other header fields than before are keys of routes."""
        self._header_names: Sequence[str] = ()
        self._watched: WeakSet[RunningVersion] = WeakSet()
        """Versions that report when they cannot run requests."""
        self.demand: OnDemandModels | None = None
        """Set by ``load_on_demand`` for a server whose models are loaded when requests ask for them."""
        self.on_load_failed: Callable[[str, NeriteError], None] = lambda model, error: None
        """Called when a model that requests in other processes wait for could not be loaded."""
        self.standby: Standby | None = None
        """Set for a server that loads its models when it is told to."""
        self._starting = True
        self._unreadable = False
        self._draining = False
        """A graceful shutdown has begun; requests are still accepted."""

    @property
    def manager(self) -> ModelManager:
        """The model manager."""
        return self._manager

    def load_on_demand(self, demand: OnDemandModels) -> None:
        """Have requests load models from now on."""
        self.demand = demand
        waits = self.waits
        waits.on_wanted = lambda model, claims: demand.want(self, model, claims)
        waits.order_of = self._order_of
        waits.obstacle_to = demand.obstacle_to
        demand.figures.refused = lambda: waits.refused
        demand.figures.waiting = lambda: len(waits)
        demand.figures.waits = lambda: waits.begun
        demand.on_failed = self._load_failed
        demand.on_loaded = self._descriptions.remember

    def _order_of(self, caller: Caller | None) -> int:
        """Return the class of a caller, as the policy has it now."""
        return 0 if self._tenant_admission is None else self._tenant_admission.policy.order_of(caller)

    def _load_failed(self, model: str, error: NeriteError) -> None:
        self.waits.fail(model, error)
        self.on_load_failed(model, error)

    def _models_changed(self) -> None:
        """Invalidate the routes of all headers, because a version was loaded or unloaded, or a weight changed."""
        self.renew_routes()
        self._trace_running()
        if self.routes or self._watched:
            self._watch_versions()
        if self._header_names != self.routes.header_names:
            self._header_names = self.routes.header_names
            self.on_header_names_changed()
        if self._cache is not None:
            self._renew_origins(lasting=self._cache.shared)
        self.on_models_changed()
        self.offer_loaded()

    def _renew_origins(self, *, lasting: bool) -> None:
        """Recompute the origins in cache keys: those of an ensemble depend on the versions of its steps."""

        def find(model: str, version: str, namespace: str) -> RunningVersion:
            if not version and self.routes.get(model) is not None:
                raise NotFound(f"'{model}' is a route: which arm answers differs from request to request")
            return self._manager.find(model, version, namespace)

        def origin_of(running: RunningVersion) -> str:
            return version_origin(running, find, lasting=lasting)

        for record in self._manager.records:
            for running in record.running.values():
                running.renew_origin(origin_of)

    def _trace_running(self) -> None:
        """Enable tracing for the running versions whose settings require it, and disable it for the others."""
        for record in self._manager.records:
            tracing = self.tracing if self.tracing.wants(record.name) else None
            for running in record.running.values():
                running.trace(tracing)

    # Routes

    def _routes_changed(self) -> None:
        self._shadows.follow()
        self._models_changed()
        self._manager.routes_changed()

    def route(self, name: str) -> WeightedRoute:
        """Return the route of a name. Raises ``NotFound`` if it has none."""
        route = self.routes.get(name)
        if route is None:
            raise NotFound(f"'{name}' has no route")
        return route

    def put_route(self, route: WeightedRoute) -> None:
        """Divide the requests to a name, until the next load of it. Raises ``NeriteError`` if no arm is ready."""
        failures: list[NeriteError] = []
        for arm in route.by_weight:
            try:
                self._manager.find(arm.model, arm.version)
            except NotLoaded:  # requests have it loaded
                continue
            except NeriteError as error:
                failures.append(error.without_frames())
        if len(failures) == len(route.by_weight):
            raise failures.pop(0)  # which must not stay in this frame: they would keep each other
        self.routes.put(route)

    def _watch_versions(self) -> None:
        """Have all running versions, which may be arms, report when they cannot run requests."""
        for running in self.running_versions():
            running.routed = self.routes.get(running.name) is not None
            if running not in self._watched:
                self._watched.add(running)
                running.watch(self._usable_changed, self._hand_over)

    def _usable_changed(self, running: RunningVersion) -> None:
        """Route requests around a version whose last instance is down, and to it again once it has one."""
        if self.routes:
            self.renew_routes()
            self.on_models_changed()
            if not running.usable:
                asyncio.get_running_loop().call_soon(self._hand_back, running)

    def _hand_back(self, running: RunningVersion) -> None:
        if not running.usable:
            self.hand_back(running, "has no instance that is up")

    def hand_back(self, running: RunningVersion, why: str) -> None:
        """Have other arms answer the requests to routes that wait for a version. ``why`` is the end of a sentence."""
        error = Unavailable(f"model '{running.name}', version {running.label}, {why}")
        running.hand_back(self._hand_over, error)

    def _hand_over(self, request: InferenceRequest) -> bool:
        """Have another arm answer a request that is about to fail because its own arm has lost it.

        Return False if no other arm can, or one has tried already. A sequence has its state on its arm.
        """
        header = request.header
        if header.assignment is None or header.sequence_id or request.finished:
            return False
        try:
            split = self.split_or_rest(header.assignment.route, header.namespace)
        except NeriteError:
            return False
        if not split.has_other(request):
            return False
        ArmFallback(request, split.again)
        return True

    def infer_all(self, requests: Sequence[InferenceRequest]) -> None:
        """Answer requests that have one header and whose data a front has checked, as ``infer`` does."""
        try:
            version = self.version_of(requests[0])
        except NotLoaded:
            for request in requests:
                self.infer(request, "")
            return
        except Exception as error:
            refusal = refusal_of(error, requests[0])
            for request in requests:
                request.respond(InferenceResponse.failed(refusal))
            return
        version.enqueue(requests)

    def _running(self, model: str, version: str, namespace: str) -> RunningVersion:
        return self._manager.find(model, version, namespace)

    def running_versions(self) -> Iterable[RunningVersion]:
        """Return all versions that take requests, by the names of their models."""
        return (running for record in self._manager.records for running in record.running.values())

    def version_directory(self, running: ServableVersion) -> Path | None:
        """Return the directory of a version's files, or None if it no longer has one."""
        loaded = self._manager.meant(running.name).loaded
        return None if loaded is None else loaded.polled.directory / running.label

    # Health

    @property
    def live(self) -> bool:
        """Liveness: the server accepts requests, and could read its repositories at the start or since."""
        return not (self._stopping or (self._unreadable and (self._starting or self._manager.unread)))

    def cannot_read(self) -> None:
        """Mark the server as one that could not read a repository at the start: a restart may be of help."""
        self._unreadable = True

    def started(self) -> None:
        """Mark the initial load of models as complete."""
        self._starting = False

    async def wake(self) -> None:
        """Load the models of a server that stands by; return when it serves. Raises ``InvalidArgument`` for others."""
        if self.standby is None:
            raise InvalidArgument("the server does not stand by: it was started without --standby")
        await self.standby.wake()

    def ask_ready(self, answered: Callable[[bool], None]) -> None:
        """Report readiness: with strict readiness, every version that was tried to load must be ready.

        As in Triton, a model with an unreadable configuration has no versions and does not count. A repository that was
        never read successfully does. Versions that are only tried, such as the candidate of a rollout, do not count,
        nor do those that are being unloaded. No essential background loop may be stalled.
        """
        if self._starting or self._draining or self._manager.unread or self.loops.obstacle:
            answered(False)
            return
        if not self._options.repository.strict_readiness:
            answered(True)
            return
        running: list[RunningVersion] = []
        for record in self._manager.records:
            for version, state in record.states.items() if self._counts(record) else ():
                if version in record.optional or state.state is ModelState.UNLOADING:
                    continue
                if state.state is not ModelState.READY and not state.reason.startswith(UNLOADED):
                    answered(False)
                    return
            running += (each for version, each in record.running.items() if version not in record.optional)
        all_ready([version.ask_ready for version in running], answered)

    def _counts(self, record: ModelRecord) -> bool:
        """Return whether the server is ready only if a model is: not one that requests have loaded."""
        return not record.on_demand or (self.demand is not None and self.demand.residency.is_pinned(record.name))

    def ask_model_ready(self, model: str, version: str, answered: Callable[[bool], None]) -> None:
        """Report whether a model is ready; False if it does not exist. Raises Triton's errors for the version.

        A model that the next request loads is ready, unless its last load has failed.
        """
        try:
            self._manager.meant(model)
        except NeriteError:
            answered(False)
            return
        try:
            running = self._manager.find(model, version)
        except NotLoaded as absent:
            answered(self.demand is not None and self.demand.can_load(absent.model))
        else:
            running.ask_ready(answered)

    # Metadata and statistics

    def metadata(self) -> dict[str, Any]:
        """Return the server's name, version and extensions."""
        return {"name": self._options.id, "version": __version__, "extensions": self._extensions}

    def model_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's versions and signature."""
        return self._descriptions.metadata(model, version)

    def model_config(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's complete configuration in Triton's JSON form."""
        return self._descriptions.config(model, version)

    def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model's ready versions, or of all models if ``model`` is empty."""
        return self._descriptions.statistics(model, version)

    def metrics(self) -> Iterator[MeteredVersion]:
        """Lazily yield the state of every running version that its metrics are read from."""
        return self._descriptions.metrics()

    def instances(self) -> Iterator[dict[str, Any]]:
        """Lazily yield a description of each instance of the running versions: placement and state."""
        return self._descriptions.instances()

    async def custom_metrics(self) -> list[Reading]:
        """Return the custom metrics of models, one reading per process that runs models."""
        return await self._descriptions.custom_metrics()

    def engine_reports(self, model: str) -> list[EngineReport]:
        """Return the reports of the engines of a model, or of all models if ``model`` is empty."""
        return self._descriptions.engine_reports(model)

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of routes, and of the response cache and admission control if these are enabled."""
        write_route_metrics(self.routes, page)
        self._shadows.write_metrics(page)
        if self._cache is not None:
            self._cache.write_metrics(page)
        if self._tenant_admission is not None:
            self._tenant_admission.write_metrics(page)
        if self._ledger is not None:
            self._ledger.write_metrics(page)
        if self.demand is not None and any(self.demand.residency):
            self.demand.figures.write_metrics(page)

    def quota(self, tenant: str | None = None) -> dict[str, Any]:
        """Return the used and remaining quota of a tenant or of each, by model, and whether there is a ledger."""
        quota = self._tenant_admission.quota(tenant) if self._tenant_admission is not None else {}
        return quota if self._ledger is None else {**quota, "ledger": True}

    async def usage(self, query: UsageQuery) -> dict[str, Any]:
        """Return what the ledger has of a tenant, or of all. Raises ``NeriteError``."""
        if self._ledger is None:
            raise Unsupported("the server has no ledger: start it with --ledger=ledger.db (docs/ledger.md)")
        return query.to_json(await self._ledger.read(query.sums))

    def trace_settings(self, model: str) -> TraceSettings:
        """Return the trace settings. Raises Triton's error if ``model`` is not running; empty means all models."""
        if model and not self._descriptions.running(model):
            raise InvalidArgument(f"Request for unknown model : {model}")
        return self.tracing.settings

    # Repository

    async def repository_index(self, ready_only: bool) -> list[dict[str, str]]:
        """Return every model of the repositories with the state of its versions.

        As in Triton, a running model whose directory was removed is not listed.
        """
        return await self._manager.index(ready_only=ready_only)

    async def load_for_client(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load a model for a client; reject files that it sends if any client could send files."""
        self._require_explicit()
        sent = next((name for name in parameters if name.startswith("file:")), None)
        if sent is not None and (reason := self._files_refused()):
            raise Forbidden(f"load parameter '{sent}' is refused: {reason}")
        await self.load(model, parameters)

    def _files_refused(self) -> str:
        """Return why clients may not send files, with the remedy; empty if they may."""
        allowed = self._options.repository.load_files
        if allowed == "none":
            return "this server does not accept model files from clients (--model-load-files=none)"
        ports = [port for port in open_ports(self._options) if LOAD in port.categories]
        if allowed == "any" or not ports:
            return ""
        return (
            f"model files may contain programs, and {rights(ports)}. {remedy(ports)} "
            "To accept files from any client, use --model-load-files=any."
        )

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model on request, from its files or from the configuration and files in ``parameters``."""
        self._require_explicit()
        if not (bare := model.strip(" ")):
            raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
        checked_name(model, "the name of a model")
        check_file_names(parameters)
        for name, value in parameters.items():
            checked_name(name, "the name of a load parameter")
            if isinstance(value, str):
                checked(value, f"load parameter '{name}'", MAX_VALUE)
        if "/" in model or bare == "..":
            raise InvalidArgument(
                f"invalid model name '{model}', model name must not contain path traversal characters"
            )
        try:
            overrides = LoadOverrides.of(parameters)
        except InvalidArgument as error:
            raise refusals.not_polled(model, error.message) from None
        if self.demand is not None and overrides is None and self.demand.manages(model):
            await self.demand.load(model)
        else:
            await self._manager.load(model, overrides)
            if self.demand is not None:
                self.demand.adopt()

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model on request."""
        self._require_explicit()
        await self._manager.unload(model, dependents=bool(parameters.get("unload_dependents")))

    async def load_adapter(self, model: str, name: str, path: str) -> None:
        """Load the LoRA adapter in the directory ``path`` into a running model. Raises ``NeriteError``."""
        self._require_explicit()
        await self._running(model, "", "").adapters.load(name, path)
        self._manager.changed()

    async def unload_adapter(self, model: str, name: str) -> None:
        """Unload a LoRA adapter that was loaded into a running model. Raises ``NeriteError``."""
        self._require_explicit()
        try:
            await self._running(model, "", "").adapters.unload(name)
        finally:
            self._manager.changed()

    async def add_repository(self, repository: RegisteredRepository, model: str) -> None:
        """Serve a model of an additional repository until ``remove_repository``."""
        if not self.is_controlled_by_hand:
            raise Unsupported("repository registration is not allowed if model control mode is not EXPLICIT")
        await self._manager.register(repository, model)

    async def remove_repository(self, repository: RegisteredRepository) -> None:
        """Unload the models of a repository and remove it. Returns when the models are unloaded."""
        await self._manager.unregister(repository)

    @property
    def is_controlled_by_hand(self) -> bool:
        """Whether API calls may load and unload models (control modes ``explicit`` and ``demand``)."""
        return self._options.repository.control_mode in ("explicit", "demand")

    @property
    def control_note(self) -> str:
        """Explanation of how models are loaded if not by API calls; else empty."""
        return refusals.control_note(self._options.repository.control_mode)

    def _require_explicit(self) -> None:
        if not self.is_controlled_by_hand:
            raise refusals.not_by_hand(self._options.repository.control_mode)

    # Stopping

    def announce_stop(self) -> None:
        """Begin a graceful shutdown: report not ready, and notify models and admission control."""
        self._draining = True
        self._shadows.stop()
        self.renew_routes()
        for record in self._manager.records:
            for running in record.running.values():
                running.server_stops()
        if self._tenant_admission is not None:
            self._tenant_admission.stop()

    def stop_accepting(self) -> None:
        """Reject new requests from now on."""
        self._draining = self._stopping = True
        self.waits.stop(refusals.stopping())
        self._models_changed()

    @property
    def loadable(self) -> dict[str, str]:
        """The models of language that are not loaded and that a request would have loaded, and what each does."""
        return loadable_text_models(self._manager.records)

    @property
    def in_flight(self) -> list[tuple[str, str, int]]:
        """Model, version and number of requests of each version with requests in flight."""
        return [
            (running.name, running.label, running.in_flight)
            for running in self._descriptions.running()
            if running.in_flight
        ]
