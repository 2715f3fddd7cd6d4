"""What a cluster file says, as plain data. Durations are in seconds, sizes in bytes; an empty text means: not given."""

from __future__ import annotations

from dataclasses import dataclass, field

from nerite.autoscaling.policy import ScalingPolicy
from nerite.balancing.member import Member, ServerKind
from nerite.balancing.policy import PoolPolicy
from nerite.cluster.kubernetes_names import ScaleTarget, ServiceReference


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
    redis: str = ""
    """URL of the Redis server that counts quotas of all routers together."""
    ledger: str = ""
    """File or URL of the database with a row for each request."""
    batches: str = ""
    """File or URL of the database with batches and their files."""
    max_body: int = 64 << 20
    """Largest body of a request. It is kept until the answer begins."""
    timeout: float = 0.0
    """Time after which a request without an answer fails, unless its own headers say less; 0: no limit."""
    connect_timeout: float = 2.0
    attempts: int = 3
    """Members that a request is sent to at most, one after the other."""
    max_connections: int = 0
    """Connections of clients; 0: as many as the limit of open files allows."""
    exit_timeout: float = 30.0
    """Time for requests in progress to end after SIGTERM."""
    access_log: bool = False


@dataclass(frozen=True, slots=True)
class MemberSource:
    """Where the members of a pool come from: exactly one of these is given."""

    members: tuple[Member, ...] = ()
    file: str = ""
    """File with a member on each line; read again when it changes."""
    dns: str = ""
    """``NAME:PORT``, resolved again and again: each address is a member."""
    kubernetes: ServiceReference | None = None
    """Service of Kubernetes whose endpoints are members."""
    models: str = ""
    """Model repository that ``nerite up`` starts local servers for."""
    replicas: int = 1
    """Number of these servers."""
    flags: tuple[str, ...] = ()
    """Flags of ``nerite serve`` for each of them."""


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
    """May use members of other pools that are idle."""
    session_header: str = "x-session-id"
    """Lower-case name of the header whose value keeps requests on one member."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A whole cluster file."""

    router: RouterSettings
    pools: tuple[PoolSettings, ...]
    path: str = ""
    """The file; relative paths in it are relative to its directory."""
