"""What the command line decides, as frozen data.

Each room is handed the part it needs and nothing else. The defaults here are the defaults of the command line: the
table of flags reads them from an empty ``ServerOptions()``. Where a value comes from (flag, environment, file) was
settled before; nothing here reads anything.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

RESTRICTED_CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""The groups of endpoints that can be put behind a key."""

METRICS_CATEGORY = "metrics"
"""The metrics port, which ``--http-restricted-api`` can put behind a key as well. Triton cannot."""

GRPC_RESTRICTED_PREFIX = "triton-grpc-protocol-"
"""What stands before a restricted key when it travels as gRPC metadata."""

LOG_FORMATS = ("default", "ISO8601", "json")
"""``default`` and ``ISO8601`` are Triton's; ``json`` is one object a line."""

LogFormat = Literal["default", "ISO8601", "json"]
ControlMode = Literal["none", "poll", "explicit"]
LoadFiles = Literal["guarded", "any", "none"]
CompressionLevel = Literal["none", "low", "medium", "high"]


class RestrictedKey(NamedTuple):
    """The header (or metadata key, prefix included) that opens a category, and the value it must have."""

    header: str
    value: str
    """Behind ``@`` the path of a file with the values, one a line."""

    @property
    def file(self) -> str:
        """The path of the file with the values; empty where the value is given."""
        return self.value[1:] if self.value.startswith("@") else ""


class BackendSetting(NamedTuple):
    """One ``--backend-config``; ``backend`` is empty where it holds for all of them."""

    backend: str
    name: str
    value: str


class RateLimitResource(NamedTuple):
    """One ``--rate-limit-resource``; ``device`` is -1 where it holds for each device, and in all."""

    name: str
    amount: int
    device: int = -1


class HostPolicy(NamedTuple):
    """One ``--host-policy``."""

    policy: str
    setting: str
    value: str


@dataclass(frozen=True)
class LogOptions:
    """What is logged, how and where. An empty ``file`` means the standard streams."""

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: LogFormat = "default"
    file: str = ""
    access: bool = False
    """A line for each HTTP request and gRPC call."""


@dataclass(frozen=True)
class RepositoryOptions:
    """Where models are and how they come and go."""

    paths: tuple[str, ...] = ()
    """Sorted, without duplicates."""
    exit_on_error: bool = True
    auto_complete: bool = True
    """Fill in what config.pbtxt leaves out (``--disable-auto-complete-config`` turns it off)."""
    strict_readiness: bool = True
    control_mode: ControlMode = "none"
    poll_secs: int = 15
    """Zero unless the control mode is ``poll``, once the command line has been read."""
    startup_models: tuple[str, ...] = ()
    """Sorted; ``("*",)`` is all of them."""
    config_name: str = ""
    load_files: LoadFiles = "guarded"
    """When loads of clients may bring files: while loads are for known clients alone, always, or never."""
    load_threads: int = 4
    load_retries: int = 0
    namespacing: bool = False
    cache_directory: str = ""
    """For the files of models in object stores; empty: where the environment says."""


@dataclass(frozen=True)
class QueueOptions:
    """How many requests may wait for a model whose configuration does not say; see ``scheduling/load_shedding.py``."""

    max_requests: int = 10_000
    """Ever. Twice what a client is likely to send at once. 0: any number."""
    max_seconds: float = 0.5
    """That a request may have to wait while more come than the model can do: enough that its instances never run out
    of work, and that whoever is let in still has somebody waiting for the answer. 0: any time."""
    burst_seconds: float = 3.0
    """In which as many may come as will: a client sends 5,000 requests in less."""


@dataclass(frozen=True)
class ConnectionOptions:
    """What clients may have of the server together, over all ports; 0 is no limit, -1 what the machine allows."""

    max_connections: int = -1
    idle_seconds: int = 900
    """How long a connection may be open without a request. Longer than load balancers keep theirs, which is ten minutes
    at most: who closes first has no request lost."""
    max_bytes_in_flight: int = -1
    """Of requests that arrive, wait or run."""


@dataclass(frozen=True)
class TlsOptions:
    """Certificates of one port. Paths of PEM files; empty where not given."""

    enabled: bool = False
    mutual: bool = False
    """Clients must show a certificate that ``root_cert`` vouches for. Implies ``enabled``."""
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""


@dataclass(frozen=True)
class HttpOptions:
    """The HTTP port."""

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    """0 takes a free one."""
    reuse_port: bool = False
    header_forward_pattern: re.Pattern[str] | None = None
    """Headers with a match anywhere in their name (``search``) become request parameters."""
    thread_count: int = 8
    max_input_size: int = 1 << 26
    upload_seconds: int = 60
    """How long a request may arrive without coming on. 0: no limit."""
    restricted: Mapping[str, RestrictedKey] = field(default_factory=dict)
    """Category to key."""
    json_half_precision: bool = False
    console: bool = True
    """The console is at ``/ui``."""
    cors_origins: tuple[str, ...] = ()
    """Whose pages may use the port; ``*`` is anybody's. Empty: CORS is off."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of the server besides those of this machine; ``*`` is any. Empty: any, unless only this machine gets in."""
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True)
class KeepaliveOptions:
    """gRPC's keepalive and connection age. Times in milliseconds."""

    time_ms: int = 7_200_000
    timeout_ms: int = 20_000
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_recv_ping_interval_without_data_ms: int = 300_000
    max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    """0: no limit."""
    max_connection_age_grace_ms: int = 0
    """0: no limit."""


@dataclass(frozen=True)
class GrpcOptions:
    """The gRPC port."""

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8001
    """0 takes a free one."""
    reuse_port: bool = False
    header_forward_pattern: re.Pattern[str] | None = None
    """Metadata keys with a match anywhere (``search``) become request parameters."""
    infer_thread_count: int = 2
    infer_allocation_pool_size: int = 8
    max_response_pool_size: int = 2**31 - 1
    response_compression: CompressionLevel = "none"
    max_message_size: int = 1 << 28
    """Of one message that a client sends, after decompression. Triton takes 2 GiB."""
    upload_seconds: int = 60
    """How long a message may arrive without coming on. 0: no limit."""
    keepalive: KeepaliveOptions = KeepaliveOptions()
    restricted: Mapping[str, RestrictedKey] = field(default_factory=dict)
    """Category to key; the key's header carries ``GRPC_RESTRICTED_PREFIX``."""
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True)
class MetricsOptions:
    """The metrics port and what it reports."""

    enabled: bool = True
    gpu: bool = True
    cpu: bool = True
    address: str = "0.0.0.0"
    """That of the HTTP port unless set."""
    port: int = 8002
    """0 takes a free one."""
    interval_ms: float = 2000
    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[tuple[float, float], ...] = (
        (0.5, 0.05),
        (0.9, 0.01),
        (0.95, 0.001),
        (0.99, 0.001),
        (0.999, 0.001),
    )
    """Pairs of quantile and allowed error."""
    stage_histograms: bool = True


@dataclass(frozen=True)
class OpenTelemetryOptions:
    """Where spans go, and the batches they go in."""

    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(default_factory=lambda: {"service.name": "triton-inference-server"})
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay: int = 5000
    bsp_max_export_batch_size: int = 512
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of each message."""
    compress: bool = False
    timeout: float = 10.0
    """Seconds that a message may take."""
    certificate: str = ""
    """A file with what the collector's certificate is checked against; empty for what the system trusts."""


@dataclass(frozen=True)
class TraceOptions:
    """The trace settings at start-up."""

    mode: Literal["triton", "opentelemetry"] = "triton"
    levels: tuple[Literal["TIMESTAMPS", "TENSORS"], ...] = ()
    """Empty: tracing is off."""
    rate: int = 1000
    count: int = -1
    file: str = ""
    log_frequency: int = 0
    opentelemetry: OpenTelemetryOptions = field(default_factory=OpenTelemetryOptions)


@dataclass(frozen=True)
class CacheOptions:
    """The response cache. An empty ``name`` means none."""

    name: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    directory: str = "/opt/tritonserver/caches"


@dataclass(frozen=True)
class DeviceOptions:
    """Memory pools, processors and accelerators."""

    peer_access: bool = True
    pinned_pool_bytes: int = 1 << 28
    cuda_pool_bytes: Mapping[int, int] = field(default_factory=dict)
    cuda_virtual_address_bytes: Mapping[int, int] = field(default_factory=dict)
    min_compute_capability: float = 6.0
    buffer_manager_threads: int = 0
    host_policies: tuple[HostPolicy, ...] = ()
    load_gpu_limits: Mapping[int, float] = field(default_factory=dict)
    """Device to the fraction of its memory beyond which no model is loaded."""
    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resources: tuple[RateLimitResource, ...] = ()
    allow_client_shared_memory: bool = False


@dataclass(frozen=True)
class SagemakerOptions:
    """The SageMaker port."""

    enabled: bool = False
    address: str = "0.0.0.0"
    port: int = 8080
    safe_port_range: tuple[int, int] | None = None
    """Ports that the other services may use."""
    thread_count: int = 8
    ping_mode: Literal["ready", "live"] = "ready"
    inference_type: Literal["infer", "generate", "generate_stream"] = "infer"
    """What an invocation is."""
    default_model: str = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
    """Whom invocations are asked of. Triton's name for none, which says what is missing."""


@dataclass(frozen=True)
class VertexOptions:
    """The Vertex AI port."""

    enabled: bool = False
    address: str = "0.0.0.0"
    port: int = 8080
    thread_count: int = 8
    default_model: str = ""
    """Whom predictions are asked of; empty: the only model there is."""
    health_route: str = ""
    predict_route: str = ""


_LARGEST_BATCHES: Final = {"fil": "32768"}
"""By backend, for models that can batch and do not say how much, where it is not Triton's 4: a row of a tree model
costs microseconds, and clients send tables of them."""


@dataclass(frozen=True)
class ServerOptions:
    """Everything one server is told when it starts."""

    id: str = "triton"
    exit_timeout_secs: int = 30
    stay_awake_microseconds: int = -1
    """How long the server and its workers may wait awake; 0 is never, below that the machine decides."""
    stall_seconds: float = 1.0
    """How long the event loop may stand still before the log says where everybody is; 0 is any time."""
    log: LogOptions = LogOptions()
    repository: RepositoryOptions = RepositoryOptions()
    queue: QueueOptions = QueueOptions()
    connections: ConnectionOptions = ConnectionOptions()
    policy_file: str = ""
    """Who is let in. Empty: everybody."""
    http: HttpOptions = field(default_factory=HttpOptions)
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    metrics: MetricsOptions = MetricsOptions()
    trace: TraceOptions = field(default_factory=TraceOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    sagemaker: SagemakerOptions = SagemakerOptions()
    vertex: VertexOptions = VertexOptions()
    backend_directory: str = "/opt/tritonserver/backends"
    backend_settings: tuple[BackendSetting, ...] = ()
    environment_directory: str = ""
    """Where environments of models and conversions are kept; empty: in the user's directory of caches."""
    repoagent_directory: str = "/opt/tritonserver/repoagents"

    def settings_of(self, backend: str) -> dict[str, str]:
        """Return the settings that ``backend`` sees: the server's own, then the general, then its own ones."""
        settings = {
            "auto-complete-config": str(self.repository.auto_complete).lower(),
            "backend-directory": self.backend_directory,
            "min-compute-capability": f"{self.device.min_compute_capability:f}",
            "default-max-batch-size": _LARGEST_BATCHES.get(backend, "4"),
            "environment-directory": self.environment_directory,
        }
        for wanted in ("", backend):
            settings.update((s.name, s.value) for s in self.backend_settings if s.backend == wanted)
        return settings


# Which ports allow anybody to command the server: open to other machines, without a key or a client certificate.

LOAD: Final = "model-repository"
"""The category of what loads models."""
_HTTP: Final = "http-restricted-api"
_GRPC: Final = "grpc-restricted-protocol"
_RIGHTS: Final = {
    LOAD: "load and unload models, and so run code as the user of the server",
    "shared-memory": "register shared memory",
    "trace": "change what is traced",
    "logging": "change what is logged",
}
"""What the categories that change the server allow. The worst first."""


class OpenPort(NamedTuple):
    """A port where the server can be commanded without a key."""

    service: str
    address: str
    port: int
    flag: str
    """Puts categories behind a key there."""
    categories: tuple[str, ...]
    """Those that need no key there."""

    def __str__(self) -> str:
        """Return service and address, for people. A port 0 is not known yet."""
        return f"{self.service} ({self.address}{f':{self.port}' if self.port else ''})"


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches what listens at ``address``: an IP address, or localhost."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_ports(options: ServerOptions) -> list[OpenPort]:
    """Return the ports where anybody may command the server, with what may be commanded there."""
    commands = [
        category
        for category, offered in (
            (LOAD, options.repository.control_mode == "explicit"),
            ("shared-memory", options.device.allow_client_shared_memory),
            ("trace", True),
            ("logging", True),
        )
        if offered
    ]
    http, grpc, sagemaker = options.http, options.grpc, options.sagemaker
    ports = []
    if http.enabled and not http.tls.mutual:
        ports.append(OpenPort("HTTP", http.address, http.port, _HTTP, _unlocked(commands, http.restricted)))
    if grpc.enabled and not grpc.tls.mutual:
        ports.append(OpenPort("gRPC", grpc.address, grpc.port, _GRPC, _unlocked(commands, grpc.restricted)))
    if sagemaker.enabled and LOAD in commands:
        locked = _unlocked([LOAD], http.restricted)
        ports.append(OpenPort("SageMaker", sagemaker.address, sagemaker.port, _HTTP, locked))
    return [port for port in ports if port.categories and not is_loopback(port.address)]


def _unlocked(categories: Sequence[str], locked: Collection[str]) -> tuple[str, ...]:
    return tuple(category for category in categories if category not in locked)


def rights(ports: Sequence[OpenPort]) -> str:
    """Return what anybody may do who reaches one of the ports."""
    listed = "; ".join(_RIGHTS[category] for category in _categories(ports))
    return f"anybody who reaches {' or '.join(map(str, ports))} may {listed}"


def remedy(ports: Sequence[OpenPort]) -> str:
    """Return how to close the ports."""
    flags = []
    for flag in dict.fromkeys(port.flag for port in ports):
        categories = _categories([port for port in ports if port.flag == flag])
        flags.append(f"--{flag}={','.join(categories)}:HEADER=@KEYFILE")
    return f"Have it need a key ({' '.join(flags)}), or listen for this machine alone (--address=127.0.0.1)."


def _categories(ports: Sequence[OpenPort]) -> list[str]:
    there = {category for port in ports for category in port.categories}
    return [category for category in _RIGHTS if category in there]
