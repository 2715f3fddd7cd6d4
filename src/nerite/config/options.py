"""The options of the command line as frozen data, and which ports they leave open.

Each package receives only the part it needs. The defaults here are those of the command line: the table of flags reads
them from ``ServerOptions()``. Flags, environment and files are read elsewhere (``cli/option_assembly.py``).
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
"""The groups of endpoints that can require a key."""

METRICS_CATEGORY = "metrics"
"""The metrics port, for which ``--http-restricted-api`` can require a key as well. Triton's cannot."""

GRPC_RESTRICTED_PREFIX = "triton-grpc-protocol-"
"""Prefix of the header of a key in gRPC metadata."""

LOG_FORMATS = ("default", "ISO8601", "json")
"""``default`` and ``ISO8601`` are Triton's; ``json`` is one object per line."""

LogFormat = Literal["default", "ISO8601", "json"]
ControlMode = Literal["none", "poll", "explicit"]
LoadFiles = Literal["guarded", "any", "none"]
CompressionLevel = Literal["none", "low", "medium", "high"]


class RestrictedKey(NamedTuple):
    """The header (or metadata key, with its prefix) that a category requires, and its value."""

    header: str
    value: str
    """If it begins with ``@``, the path of a file with the values, one per line."""

    @property
    def file(self) -> str:
        """The path of the file with the values; empty if the value itself is given."""
        return self.value[1:] if self.value.startswith("@") else ""


class BackendSetting(NamedTuple):
    """One ``--backend-config``; an empty ``backend`` means all backends."""

    backend: str
    name: str
    value: str


class RateLimitResource(NamedTuple):
    """One ``--rate-limit-resource``; ``device`` is -1 if it applies to each device and to global resources."""

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
    """Contents, format and destination of the log. An empty ``file`` means the standard streams."""

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: LogFormat = "default"
    file: str = ""
    access: bool = False
    """Log each HTTP request and gRPC call."""


@dataclass(frozen=True)
class RepositoryOptions:
    """Places of models, and how they are loaded and unloaded."""

    paths: tuple[str, ...] = ()
    """Sorted, without duplicates."""
    exit_on_error: bool = True
    auto_complete: bool = True
    """Complete what config.pbtxt omits (``--disable-auto-complete-config`` turns it off)."""
    strict_readiness: bool = True
    control_mode: ControlMode = "none"
    poll_secs: int = 15
    """Zero unless the control mode is ``poll``, after the command line has been read."""
    startup_models: tuple[str, ...] = ()
    """Sorted; ``("*",)`` means all models."""
    config_name: str = ""
    load_files: LoadFiles = "guarded"
    """When load requests may contain files: while only known clients may load models, always, or never."""
    load_threads: int = 4
    load_retries: int = 0
    namespacing: bool = False
    cache_directory: str = ""
    """For the files of models in object stores; empty: the directory that the environment names."""


@dataclass(frozen=True)
class QueueOptions:
    """Bounds of queues whose models do not configure their own; see ``scheduling/load_shedding.py``."""

    max_requests: int = 10_000
    """Maximum number at any time. Twice what a client is likely to send at once. 0: no limit."""
    max_seconds: float = 0.5
    """Maximum expected wait under overload: long enough that instances never run out of work, short enough that the
    client of an admitted request still waits for its answer. 0: no limit."""
    burst_seconds: float = 3.0
    """Duration of a burst that is admitted in full: a client sends 5,000 requests in less."""


@dataclass(frozen=True)
class ConnectionOptions:
    """Limits for all clients together, over all ports; 0: no limit, -1: as much as the machine allows."""

    max_connections: int = -1
    idle_seconds: int = 900
    """How long a connection may be idle. Longer than load balancers keep theirs, at most ten minutes: the side that
    closes first loses no request."""
    max_bytes_in_flight: int = -1
    """Total size of the requests that are being received, wait or run."""


@dataclass(frozen=True)
class TlsOptions:
    """Certificates of one port, as paths of PEM files; empty if not given."""

    enabled: bool = False
    mutual: bool = False
    """Clients must present a certificate that ``root_cert`` has signed. Implies ``enabled``."""
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""


@dataclass(frozen=True)
class HttpOptions:
    """The HTTP port."""

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    """0: any free port."""
    reuse_port: bool = False
    header_forward_pattern: re.Pattern[str] | None = None
    """Headers whose names match anywhere (``search``) become request parameters."""
    thread_count: int = 8
    max_input_size: int = 1 << 26
    upload_seconds: int = 60
    """How long receiving a request may make no progress. 0: no limit."""
    restricted: Mapping[str, RestrictedKey] = field(default_factory=dict)
    """Keys by category."""
    json_half_precision: bool = False
    console: bool = True
    """Serve the console at ``/ui``."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use the port; ``*`` means all. Empty: CORS is off."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of the server besides those of this machine; ``*``: any. Empty: any, unless only this machine connects."""
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
    """0: any free port."""
    reuse_port: bool = False
    header_forward_pattern: re.Pattern[str] | None = None
    """Metadata keys that match anywhere (``search``) become request parameters."""
    infer_thread_count: int = 2
    infer_allocation_pool_size: int = 8
    max_response_pool_size: int = 2**31 - 1
    response_compression: CompressionLevel = "none"
    max_message_size: int = 1 << 28
    """Maximum size of a message from a client, after decompression. Triton accepts 2 GiB."""
    upload_seconds: int = 60
    """How long receiving a message may make no progress. 0: no limit."""
    keepalive: KeepaliveOptions = KeepaliveOptions()
    restricted: Mapping[str, RestrictedKey] = field(default_factory=dict)
    """Keys by category; the headers of the keys begin with ``GRPC_RESTRICTED_PREFIX``."""
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True)
class MetricsOptions:
    """The metrics port and its metrics."""

    enabled: bool = True
    gpu: bool = True
    cpu: bool = True
    address: str = "0.0.0.0"
    """The address of the HTTP port unless set."""
    port: int = 8002
    """0: any free port."""
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
    """Export of spans: destination and batching."""

    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(default_factory=lambda: {"service.name": "triton-inference-server"})
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay: int = 5000
    bsp_max_export_batch_size: int = 512
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers of each export request."""
    compress: bool = False
    timeout: float = 10.0
    """Seconds per export request."""
    certificate: str = ""
    """File with the certificates that the collector's is verified against; empty: those that the system trusts."""


@dataclass(frozen=True)
class TraceOptions:
    """The trace settings at startup."""

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
    """By device, the used fraction of its memory above which no model is loaded."""
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
    """The range of ports that the other services may use."""
    thread_count: int = 8
    ping_mode: Literal["ready", "live"] = "ready"
    inference_type: Literal["infer", "generate", "generate_stream"] = "infer"
    """The kind of request that an invocation is."""
    default_model: str = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
    """The model of invocations. The default is Triton's, and names the missing setting in error messages."""


@dataclass(frozen=True)
class VertexOptions:
    """The Vertex AI port."""

    enabled: bool = False
    address: str = "0.0.0.0"
    port: int = 8080
    thread_count: int = 8
    default_model: str = ""
    """The model of predictions; empty: the only model in the repository."""
    health_route: str = ""
    predict_route: str = ""


_LARGEST_BATCHES: Final = {"fil": "32768"}
"""Default maximum batch size of a backend if it is not Triton's 4. A row of a tree model costs microseconds, and
clients send tables of rows."""


@dataclass(frozen=True)
class ServerOptions:
    """All options of a server."""

    id: str = "triton"
    exit_timeout_secs: int = 30
    stay_awake_microseconds: int = -1
    """How long the server and its workers may busy-poll; 0: never, negative: depends on the machine."""
    stall_seconds: float = 1.0
    """How long the event loop may be blocked before the stacks of all threads are logged; 0: never logged."""
    log: LogOptions = LogOptions()
    repository: RepositoryOptions = RepositoryOptions()
    queue: QueueOptions = QueueOptions()
    connections: ConnectionOptions = ConnectionOptions()
    policy_file: str = ""
    """File with tenants, quotas and limits. Empty: none."""
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
    """Directory for environments of models and for conversions; empty: in the user's cache directory."""
    repoagent_directory: str = "/opt/tritonserver/repoagents"

    def settings_of(self, backend: str) -> dict[str, str]:
        """Return the settings for ``backend``. General settings override the server's, its own override both."""
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


# Ports that allow anyone to control the server: open to other machines, without a key or a client certificate.

LOAD: Final = "model-repository"
"""The category of endpoints that load models."""
_HTTP: Final = "http-restricted-api"
_GRPC: Final = "grpc-restricted-protocol"
_RIGHTS: Final = {
    LOAD: "load and unload models, and so run code as the user of the server",
    "shared-memory": "register shared memory",
    "trace": "change what is traced",
    "logging": "change what is logged",
}
"""What the categories that change the server allow, the most dangerous first."""


class OpenPort(NamedTuple):
    """A port where anyone can control the server without a key."""

    service: str
    address: str
    port: int
    flag: str
    """The flag with which categories require a key there."""
    categories: tuple[str, ...]
    """The categories that require no key."""

    def __str__(self) -> str:
        """Return service and address as text. Port 0 is not known yet."""
        return f"{self.service} ({self.address}{f':{self.port}' if self.port else ''})"


def is_loopback(address: str) -> bool:
    """Return True if only this machine can connect to ``address``, an IP address or localhost."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_ports(options: ServerOptions) -> list[OpenPort]:
    """Return the ports where anyone may control the server, with the categories that are open there."""
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
    """Return a text about what anyone can do who can connect to one of the ports."""
    listed = "; ".join(_RIGHTS[category] for category in _categories(ports))
    return f"anyone who can connect to {' or '.join(map(str, ports))} may {listed}"


def remedy(ports: Sequence[OpenPort]) -> str:
    """Return the remedy: how to restrict the ports."""
    flags = []
    for flag in dict.fromkeys(port.flag for port in ports):
        categories = _categories([port for port in ports if port.flag == flag])
        flags.append(f"--{flag}={','.join(categories)}:HEADER=@KEYFILE")
    return f"Require a key ({' '.join(flags)}), or accept only connections from this machine (--address=127.0.0.1)."


def _categories(ports: Sequence[OpenPort]) -> list[str]:
    there = {category for port in ports for category in port.categories}
    return [category for category in _RIGHTS if category in there]
