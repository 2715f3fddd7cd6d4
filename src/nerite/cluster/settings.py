"""What a cluster file says, as plain data. Durations are in seconds, sizes in bytes; an empty text means: not given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from nerite.autoscaling.policy import ScalingPolicy
from nerite.balancing.member import Member, ServerKind
from nerite.balancing.model_placement import PlacementPolicy
from nerite.balancing.policy import PoolPolicy
from nerite.cluster.kubernetes_names import ScaleTarget, ServiceReference
from nerite.config.rollout_spec import RolloutSpec, WhenLost
from nerite.core.durations import duration_text

USUALLY_HELD: Final = 1000
"""Requests that a pool holds by default if its models are placed or it is scaled: the wait has an end."""


@dataclass(frozen=True, slots=True)
class PortTls:
    """Table ``[router.tls]``: TLS of the HTTP and gRPC ports. Paths of PEM files."""

    certificate: str
    key: str = ""
    """Empty: the private key is in the file of the certificate."""
    client_ca: str = ""
    """Authorities of clients, which need a certificate then; empty: clients need none."""


@dataclass(frozen=True, slots=True)
class MemberTls:
    """Key ``tls`` of a pool: TLS of the connections to its members. Paths of PEM files."""

    ca: str = ""
    """Authorities that members are trusted by; empty: those of the system."""
    certificate: str = ""
    """Certificate that the router shows; empty: none."""
    key: str = ""
    server_name: str = ""
    """Name that the certificates of members must have; empty: the host of each member's address."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Table ``[router]``."""

    address: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may use on an address of this machine only; others may come from web pages."""
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    policy_file: str = ""
    """Tenants and quotas, as in docs/admission.md."""
    admin_key: str = ""
    """``HEADER=VALUE`` or ``HEADER=@FILE``, for what concerns all tenants: their usage and quotas. Empty: anybody."""
    redis: str = ""
    """URL of the Redis server that counts quotas of all routers together."""
    ledger: str = ""
    """File or URL of the database with a row for each request."""
    member_key_file: str = ""
    """File whose first line is the key by which members of Nerite know the router."""
    batches: str = ""
    """File or URL of the database with batches and their files."""
    batch_files: str = ""
    """Directory of the files; empty: beside the database."""
    batch_concurrency: int = 64
    """Items under way at most."""
    batch_storage_bytes: int = 10 << 30
    batch_lease: float = 15.0
    """Time after which other routers run the batches of one that has failed."""
    max_body: int = 64 << 20
    """Largest body of a request. It is kept until the answer begins."""
    timeout: float = 0.0
    """Time after which a request without an answer fails, unless its own headers say less; 0: no limit."""
    connect_timeout: float = 2.0
    attempts: int = 3
    """Members that a request is sent to at most, one after the other."""
    max_connections: int = 0
    """Connections of clients; 0: as many as the limit of open files allows."""
    max_bytes_in_flight: int = -1
    """Bytes of requests that arrive or wait for their answers; 0: no limit, -1: a quarter of the memory."""
    tls: PortTls | None = None
    """None: the ports are plain."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the HTTP port; ``*``: any."""
    paths: tuple[str, ...] = ()
    """Paths under ``/v1`` that are passed on beside those of endpoints."""
    model_aliases: tuple[tuple[str, str], ...] = ()
    """Patterns of names under ``/v1``, and the models by which members are chosen for them."""
    webhook_allowed_hosts: tuple[str, ...] = ()
    """Hosts that decisions of rollouts may be posted to; empty: any."""
    exit_timeout: float = 30.0
    """Time for requests in progress to end after SIGTERM."""
    exit_keepalive: float = 0.0
    """Time that idle connections over HTTP stay open then; at most half of ``exit_timeout``."""
    access_log: bool = False


@dataclass(frozen=True, slots=True)
class MemberSource:
    """Where the members of a pool come from: exactly one of these is given."""

    members: tuple[Member, ...] = ()
    file: str = ""
    """File with a member on each line; read again when it changes."""
    dns: str = ""
    """``NAME:PORT``, resolved repeatedly: each address is a member."""
    kubernetes: ServiceReference | None = None
    """Service of Kubernetes whose endpoints are members."""
    ray: str = ""
    """``NAME/POOL``: a pool of the cluster that ``nerite ray up`` has started under this name."""
    models: str = ""
    """Model repository that servers are started for: by ``nerite up`` here, by ``nerite ray up`` on nodes of Ray."""
    replicas: int = 1
    """Number of these servers."""
    flags: tuple[str, ...] = ()
    """Flags of ``nerite serve`` for each of them."""


@dataclass(frozen=True, slots=True)
class ServerResources:
    """Table ``[pool.resources]``: what each server of a pool needs of a node of Ray."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    """Bytes; 0: not said."""
    custom: Mapping[str, float] = field(default_factory=dict)
    """Resources that the nodes were given names for."""
    engine_places_gpus: bool = False
    """The engine asks Ray for its GPUs itself, maybe on several nodes; the server reserves none."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A table ``[pool.placement.models.NAME]``."""

    memory: int | None = None
    """None: as the members measure it, or as for all models."""
    least: int | None = None
    most: int | None = None
    """None: as for all models."""


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """Table ``[pool.placement]``: the router loads and unloads the models of the members."""

    policy: PlacementPolicy = field(default_factory=PlacementPolicy)
    memory: int = 0
    """Bytes for models of members that name none; 0: as their metrics say."""
    least: int = 0
    """Copies of each model that are there without demand, too."""
    most: int = 0
    """Copies of each model at most; 0: as many as there are members."""
    models: Mapping[str, PlacedModel] = field(default_factory=dict)
    """Models for which something else holds."""
    key: str = ""
    """``HEADER=VALUE`` or ``HEADER=@FILE``, for members whose repository API is restricted."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Table ``[pool.rollout]``: versions that the router rolls out on all members together."""

    models: Mapping[str, RolloutSpec]
    unreachable: WhenLost = WhenLost.HOLD
    """What happens while a member cannot be reached."""
    key: str = ""
    """``HEADER=VALUE`` or ``HEADER=@FILE``, for members whose repository API is restricted."""

    @property
    def server_flags(self) -> tuple[str, ...]:
        """Flags of ``nerite serve`` that have a new server serve the baselines until it receives an order."""
        return tuple(f"--rollout-baseline={model}={spec.baseline}" for model, spec in self.models.items())

    @property
    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield each model, and for people what is rolled out of it."""
        for model, spec in self.models.items():
            steps = ", ".join(f"{step:g}" for step in spec.steps)
            held = f"each held for {duration_text(spec.hold)} and {spec.requests} requests"
            end = f"{spec.at_deadline} after {duration_text(spec.deadline)}" if spec.deadline else "no deadline"
            gates = f"gates {', '.join(spec.gates)}"
            yield model, f"version {spec.baseline} to {spec.to}, {steps} % of the requests, {held}, {gates}, {end}"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """A table ``[[pool]]``."""

    name: str
    source: MemberSource
    kind: ServerKind = ServerKind.NERITE
    grpc_port: int = 0
    """Port for gRPC of members whose address has none of its own; 0: they have none."""
    balancing: PoolPolicy = field(default_factory=PoolPolicy)
    scaling: ScalingPolicy | None = None
    """When it gets more or fewer members; None: their number is left alone."""
    scale_target: ScaleTarget | None = None
    """Workload of Kubernetes whose replicas follow ``scaling``; None: somebody else sees to it."""
    health_interval: float = 2.0
    classes: tuple[str, ...] = ()
    """Only requests of these classes (header ``x-nerite-class``) come here; empty: all."""
    serves: tuple[str, ...] = ()
    """Names that its members serve besides the models that they list, such as weighted routes."""
    borrows: bool = False
    """May use members of other pools that lend theirs."""
    lends: float = 1.0
    """Requests for each unit of a member's capacity up to which it takes requests of other pools. 0: it takes none."""
    reserve: int = 0
    """Ready members that are kept free of requests of other pools."""
    preempts: bool = False
    """Its requests come first: those of pools without this are stopped for them, and sent again when there is room."""
    tls: MemberTls | None = None
    """None: connections to members are plain."""
    session_header: str = "x-session-id"
    """Lower-case name of the header whose value keeps requests on one member."""
    metrics_port: int = 0
    """Port for metrics of members whose address has none of its own; 0: not known."""
    hold_requests: int | None = None
    """Requests that may wait for a member or a copy of their model; None: some, if that is worth waiting for."""
    hold_timeout: float = 60.0
    placement: PlacementSettings | None = None
    resources: ServerResources | None = None
    """None: a processor for each server."""
    rollout: RolloutSettings | None = None

    @property
    def most_held(self) -> int:
        """How many requests may wait for a member or a copy of their model."""
        if self.hold_requests is not None:
            return self.hold_requests
        return USUALLY_HELD if self.placement is not None or self.scaling is not None else 0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A whole cluster file."""

    router: RouterSettings
    pools: tuple[PoolSettings, ...]
    path: str = ""
    """The file; relative paths in it are relative to its directory."""
