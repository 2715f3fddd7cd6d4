"""The options of a server: one frozen dataclass per component, and the flag that sets each field.

Fields with a ``Flag`` are the table of flags: parsing, environment variables, the options file, help and docs/flags.md
are derived from it (``nerite.cli.flags``). Flags that set no single field are listed there. A string beside the type of
a group of options is the heading of its flags. Nothing here reads a command line, a file or the environment.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Annotated, Final, Literal, get_args

from nerite.config import flag
from nerite.config.flag import (
    COUNT,
    NERITE_GROUP,
    PORT,
    SECONDS,
    BackendSetting,
    Flag,
    HostPolicy,
    RateLimitResource,
    RestrictedKey,
    last_wins,
    nerite_flag,
    union,
)

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
"""Categories of endpoints that can be restricted to clients with a key."""

METRICS_CATEGORY = "metrics"
"""The metrics port, which ``--http-restricted-api`` can restrict as well. Triton cannot."""

GRPC_RESTRICTED_PREFIX = "triton-grpc-protocol-"
"""Prefix of the header of a restricted key when it is sent as gRPC metadata."""

LogFormat = Literal["default", "ISO8601", "json"]
"""``default`` and ``ISO8601`` are Triton's; ``json`` is one object per line."""
ControlMode = Literal["none", "poll", "explicit", "demand"]
LoadFiles = Literal["guarded", "any", "none"]
CompressionLevel = Literal["none", "low", "medium", "high"]

_HTTP_RESTRICTED: Final = flag.restricted("http-restricted-api", "api", "", (*RESTRICTED_CATEGORIES, METRICS_CATEGORY))
_GRPC_RESTRICTED: Final = flag.restricted(
    "grpc-restricted-protocol", "protocol", GRPC_RESTRICTED_PREFIX, RESTRICTED_CATEGORIES
)
_HANDLER_THREADS: Final = flag.in_range(
    2, 128, "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128."
)
_COMPRESSION: Final = flag.choice("grpc_infer_response_compression_level", get_args(CompressionLevel))

# Why a flag has no effect.
_EVENT_LOOP: Final = "one event loop serves every connection"
_NO_POOL: Final = "there is no pool to size"
_BUILT_IN: Final = "the caches 'local' and 'redis' are built in, and others are not loaded"
_AGENTS: Final = "the agent 'checksum' is built in, and others are not loaded"

# The flag of a field stands below its name where it does not fit beside it. The layout is kept by hand.
# fmt: off


@dataclass(frozen=True)
class LogOptions:
    """Content, format and destination of the log."""

    verbose: Annotated[int, Flag(
        "log-verbose", "Level of verbose messages: 0 or false for none, 1 or true and above for more.",
        flag.verbosity)] = 0
    info: Annotated[bool, Flag("log-info", "Log informational messages.")] = True
    warning: Annotated[bool, Flag("log-warning", "Log warnings.")] = True
    error: Annotated[bool, Flag("log-error", "Log errors.")] = True
    format: Annotated[LogFormat, Flag(
        "log-format", "Format of a record: 'default' begins LMMDD hh:mm:ss.ssssss, 'ISO8601' begins "
        "YYYY-MM-DDThh:mm:ssZ L, 'json' is one object per line.",
        flag.choice("log-format", get_args(LogFormat), any_case=False))] = "default"
    file: Annotated[str, Flag("log-file", "File to append the log to, instead of stdout and stderr.")] = ""
    access: Annotated[bool, nerite_flag(
        "access-log", "Log each HTTP request and each gRPC call when it has been answered.")] = False


@dataclass(frozen=True)
class RepositoryOptions:
    """Model repositories, and when models are loaded from them."""

    paths: Annotated[tuple[str, ...], Flag(
        "model-repository", "Directory with the models to serve, or a location in an object store: s3://…, gs://… or "
        "as://…. May be repeated.", flag.PATHS, union)] = ()
    """Sorted, without duplicates."""
    exit_on_error: Annotated[bool, Flag("exit-on-error", "Exit if a model cannot be loaded at start.")] = True
    auto_complete: Annotated[bool, Flag(
        "disable-auto-complete-config", "Do not complete configurations: every model needs a complete config.pbtxt.",
        flag.SWITCH_OFF)] = True
    strict_readiness: Annotated[bool, Flag(
        "strict-readiness", "Report ready only while every model is ready; if false, as soon as the server answers.",
        )] = True
    standby: Annotated[bool, nerite_flag(
        "standby", "Open the ports and prepare the load of the models, but load them only when POST "
        "/v2/repository/wake asks for it (docs/autoscaling.md).", flag.SWITCH)] = False
    control_mode: Annotated[ControlMode, Flag(
        "model-control-mode", "When models are loaded: 'none' loads all at start; 'poll' also reloads them when files "
        "change; 'explicit' loads those of --load-model, and those that clients request; 'demand' loads a model when "
        "a request needs it, and unloads the least recently used when memory is short (docs/demand.md).")] = "none"
    poll_secs: Annotated[int, Flag(
        "repository-poll-secs", "Seconds between two checks of the files in control modes 'poll' and 'demand'.",
        COUNT)] = 15
    """Zero in other control modes, once the command line has been read."""
    startup_models: Annotated[tuple[str, ...], Flag(
        "load-model", "Model to load at start in control mode 'explicit'; '*' alone loads all. In control mode "
        "'demand' it also stays in memory. May be repeated.",
        flag.NAMES, union)] = ()
    """Sorted; ``("*",)`` stands for all models."""
    host_budget: Annotated[int, nerite_flag(
        "demand-host-memory", "Memory of the machine that models which are loaded on demand may take, as in 16GiB; 0 "
        "is 80% of the machine's, or of the container's.", flag.SIZE, default="80% of what there is")] = 0
    gpu_budget: Annotated[int, nerite_flag(
        "demand-gpu-memory", "Memory of each GPU that models which are loaded on demand may take, as in 20GiB; 0 is "
        "90% of the GPU's.", flag.SIZE, default="90% of what there is")] = 0
    keep_alive_seconds: Annotated[float, nerite_flag(
        "demand-keep-alive", "Seconds without a request after which a model that was loaded on demand is unloaded; 0 "
        "keeps it until its memory is needed. KEEP_ALIVE_SECONDS of a model takes precedence.", SECONDS)] = 0
    demand_wait_seconds: Annotated[float, nerite_flag(
        "demand-wait-seconds", "Maximum seconds that a request waits for its model to be loaded.",
        SECONDS)] = 120.0
    demand_max_waiting: Annotated[int, nerite_flag(
        "demand-max-waiting", "Maximum number of requests that wait for models to be loaded, in each process that "
        "serves connections; further ones are refused with status 503.", flag.AT_LEAST_ONE)] = 1000
    config_name: Annotated[str, Flag(
        "model-config-name", "Use configs/<name>.pbtxt of a model instead of config.pbtxt where it exists.",
        flag.config_name)] = ""
    load_files: Annotated[LoadFiles, nerite_flag(
        "model-load-files", "Whether a load request may contain files ('file:…'), which may be programs: 'any' always; "
        "'none' never; 'guarded' while no port lets other machines load models without a key.")] = "guarded"
    load_threads: Annotated[int, Flag(
        "model-load-thread-count", "Maximum number of models that load at the same time.", flag.AT_LEAST_ONE)] = 4
    load_retries: Annotated[int, Flag(
        "model-load-retry-count", "Number of retries when a model fails to load.", COUNT)] = 0
    namespacing: Annotated[bool, Flag(
        "model-namespacing", "Let models in different repositories have the same name.")] = False
    cache_directory: Annotated[str, nerite_flag(
        "repository-cache-directory", "Directory for the files of models in object stores.",
        default="nerite/repositories in the user's cache directory")] = ""


@dataclass(frozen=True)
class QueueOptions:
    """Bounds of the queue of a model whose configuration has none; see ``scheduling/load_shedding.py``."""

    max_requests: Annotated[int, nerite_flag(
        "max-queued-requests", "Maximum number of requests that wait for a model; further requests are refused with "
        "status 503. The max_queue_size of a model takes precedence; 0 is no limit, as with Triton.",
        COUNT)] = 10_000
    """Twice what a client is likely to send at once."""
    max_seconds: Annotated[float, nerite_flag(
        "max-queue-seconds", "Maximum length of a queue, in seconds of work, while requests arrive faster than the "
        "model executes them; 0 is no limit, as with Triton.", SECONDS)] = 0.5
    """Enough that instances never run out of work, and that the clients of admitted requests are still waiting when
    they are answered."""
    burst_seconds: Annotated[float, nerite_flag(
        "queue-burst-seconds", "Seconds for which a queue may be longer than --max-queue-seconds before that counts "
        "as overload.", SECONDS)] = 3.0
    """A client sends 5,000 requests in less."""


@dataclass(frozen=True)
class ConnectionOptions:
    """Bounds on what clients use together, over all ports; 0 is no limit, -1 what the machine allows."""

    max_connections: Annotated[int, nerite_flag(
        "max-connections", "Maximum number of open connections, on all ports together. A new one replaces the one that "
        "has been idle longest; if none is idle, the new one is refused with status 503, or a GOAWAY. 0 is no limit.",
        COUNT, default="16384, or fewer where the limit of open files is low")] = -1
    idle_seconds: Annotated[int, nerite_flag(
        "connection-idle-timeout", "Seconds after which a connection without requests is closed; 0 is no limit.",
        COUNT)] = 900
    """Longer than load balancers keep theirs, which is ten minutes at most: the side that closes first loses no
    request."""
    max_bytes_in_flight: Annotated[int, nerite_flag(
        "max-bytes-in-flight", "Maximum bytes of requests that are arriving, waiting or executing, over all "
        "connections; requests beyond it are refused with status 429, or RESOURCE_EXHAUSTED. 0 is no limit.",
        flag.not_negative("max-bytes-in-flight", flag.INT64), default="a quarter of the memory")] = -1


@dataclass(frozen=True)
class TlsOptions:
    """TLS of one port, ``http`` or ``grpc``. Files are paths of PEM files; empty where not given."""

    enabled: Annotated[bool, Flag("{}-use-ssl", "Serve the port over TLS.")] = False
    mutual: Annotated[bool, Flag(
        "{}-use-ssl-mutual", "Serve the port over TLS, and require a certificate of clients.")] = False
    """Implies ``enabled``."""
    server_cert: Annotated[str, Flag("{}-server-cert", "PEM file with the certificate of the server.")] = ""
    server_key: Annotated[str, Flag("{}-server-key", "PEM file with the private key of the server.")] = ""
    root_cert: Annotated[str, Flag(
        "{}-root-cert", "PEM file with the certificate authorities that sign the certificates of clients.")] = ""


@dataclass(frozen=True)
class HttpOptions:
    """The HTTP port."""

    enabled: Annotated[bool, Flag("allow-http", "Serve HTTP.")] = True
    address: Annotated[str, Flag("http-address", "Address to listen on.", default="that of --address")] = "0.0.0.0"
    port: Annotated[int, Flag(
        "http-port", "Port to listen on; 0 picks a free one.", PORT, default="PORT if Knative sets it, else 8000",
        )] = 8000
    reuse_port: Annotated[bool, Flag(
        "reuse-http-port", "Share the port with other servers that set this flag.")] = False
    header_forward_pattern: Annotated[re.Pattern[str] | None, Flag(
        "http-header-forward-pattern", "Regular expression: headers whose name contains a match become request "
        "parameters.", flag.pattern)] = None
    thread_count: Annotated[int, Flag(
        "http-thread-count", "Threads that handle requests.", no_effect=_EVENT_LOOP)] = 8
    max_input_size: Annotated[int, Flag(
        "http-max-input-size", "Maximum size of a request body in bytes, measured after decompression.",
        flag.positive("http-max-input-size", flag.INT64))] = 1 << 26
    upload_seconds: Annotated[int, nerite_flag(
        "http-upload-timeout", "Seconds within which another 16 KiB of an HTTP request, or its end, must arrive; "
        "0 is no limit.", flag.not_negative("http-upload-timeout"))] = 60
    restricted: Annotated[Mapping[str, RestrictedKey], Flag(
        "http-restricted-api", "Answer these categories of endpoints (comma-separated: health, metadata, inference, "
        "shared-memory, model-config, model-repository, statistics, trace, logging; metrics for the metrics port) only "
        "to requests with this header. '@/path' is a file with the accepted values, one per line, that is read again "
        "when it changes. May be repeated.",
        _HTTP_RESTRICTED, flag.restricted_join("api"))] = field(default_factory=dict)
    """Category to key."""
    json_half_precision: Annotated[bool, nerite_flag(
        "http-json-half-precision", "Accept and return FP16 and BF16 as JSON numbers. Triton refuses them.")] = False
    console: Annotated[bool, nerite_flag(
        "allow-console", "Serve the console, a web page that shows the state of the server, at /ui of the HTTP port "
        "(docs/console.md).")] = True
    cors_origins: Annotated[tuple[str, ...], nerite_flag(
        "http-cors-origin", "Let web pages of this origin, such as https://app.example.com, use the HTTP port (CORS); "
        "'*' is any page. May be repeated.", flag.cors_origin, union)] = ()
    allowed_hosts: Annotated[tuple[str, ...], nerite_flag(
        "http-allowed-host", "Name of the server that clients may send in 'Host', besides localhost and IP addresses; "
        "'*' is any. Other names are refused on every port that speaks HTTP. May be repeated.", flag.host_name, union,
        default="any; none where a port listens on this machine alone")] = ()
    tls: Annotated[TlsOptions, NERITE_GROUP] = TlsOptions()


@dataclass(frozen=True)
class KeepaliveOptions:
    """gRPC's keepalive and connection age. Times in milliseconds."""

    time_ms: Annotated[int, Flag(
        "grpc-keepalive-time", "Milliseconds without data after which the server pings a client.")] = 7_200_000
    timeout_ms: Annotated[int, Flag(
        "grpc-keepalive-timeout", "Milliseconds to wait for the response to a ping before the connection is closed.",
        )] = 20_000
    permit_without_calls: Annotated[bool, Flag(
        "grpc-keepalive-permit-without-calls", "Also ping clients that have no open call.")] = False
    max_pings_without_data: Annotated[int, Flag(
        "grpc-http2-max-pings-without-data", "Maximum number of pings that the server sends without sending data "
        "between them; 0 is no limit.")] = 2
    min_recv_ping_interval_without_data_ms: Annotated[int, Flag(
        "grpc-http2-min-recv-ping-interval-without-data", "Milliseconds that a client must leave between pings while "
        "no data is sent; an earlier ping counts as a strike.")] = 300_000
    max_ping_strikes: Annotated[int, Flag(
        "grpc-http2-max-ping-strikes", "Strikes after which the connection is closed; 0 is no limit.")] = 2
    max_connection_age_ms: Annotated[int, Flag(
        "grpc-max-connection-age", "Milliseconds after which the server asks a client to close the connection; "
        "0 is never.")] = 0
    max_connection_age_grace_ms: Annotated[int, Flag(
        "grpc-max-connection-age-grace", "Milliseconds that such a connection has to finish its calls; 0 is no limit.",
        )] = 0


@dataclass(frozen=True)
class GrpcOptions:
    """The gRPC port."""

    enabled: Annotated[bool, Flag("allow-grpc", "Serve gRPC.")] = True
    address: Annotated[str, Flag("grpc-address", "Address to listen on.", default="that of --address")] = "0.0.0.0"
    port: Annotated[int, Flag("grpc-port", "Port to listen on; 0 picks a free one.", PORT)] = 8001
    reuse_port: Annotated[bool, Flag(
        "reuse-grpc-port", "Share the port with other servers that set this flag.")] = False
    header_forward_pattern: Annotated[re.Pattern[str] | None, Flag(
        "grpc-header-forward-pattern", "Regular expression: metadata whose key contains a match becomes request "
        "parameters.", flag.pattern)] = None
    infer_thread_count: Annotated[int, Flag(
        "grpc-infer-thread-count", "Threads that handle inference requests, 2 to 128.", _HANDLER_THREADS,
        no_effect=_EVENT_LOOP)] = 2
    infer_allocation_pool_size: Annotated[int, Flag(
        "grpc-infer-allocation-pool-size", "Request objects kept for reuse.", no_effect=_NO_POOL)] = 8
    max_response_pool_size: Annotated[int, Flag(
        "grpc-max-response-pool-size", "Response objects kept for reuse.", flag.positive("grpc-max-response-pool-size"),
        no_effect=_NO_POOL)] = 2**31 - 1
    tls: TlsOptions = TlsOptions()
    response_compression: Annotated[CompressionLevel, Flag(
        "grpc-infer-response-compression-level", "Compression level of inference responses.", _COMPRESSION)] = "none"
    max_message_size: Annotated[int, nerite_flag(
        "grpc-max-message-size", "Maximum size of a gRPC message from a client in bytes, measured after decompression. "
        "Triton accepts 2147483647.", flag.positive("grpc-max-message-size"))] = 1 << 28
    upload_seconds: Annotated[int, nerite_flag(
        "grpc-upload-timeout", "Seconds within which another 16 KiB of a gRPC message, or its end, must arrive; "
        "0 is no limit.", flag.not_negative("grpc-upload-timeout"))] = 60
    keepalive: KeepaliveOptions = KeepaliveOptions()
    restricted: Annotated[Mapping[str, RestrictedKey], Flag(
        "grpc-restricted-protocol", "Like --http-restricted-api; the key is sent as metadata "
        "'triton-grpc-protocol-<header>'. May be repeated.",
        _GRPC_RESTRICTED, flag.restricted_join("protocol"))] = field(default_factory=dict)
    """Category to key; the header of a key starts with ``GRPC_RESTRICTED_PREFIX``."""


@dataclass(frozen=True)
class SagemakerOptions:
    """The SageMaker port."""

    enabled: Annotated[bool, Flag("allow-sagemaker", "Serve SageMaker's endpoints.")] = False
    address: str = "0.0.0.0"
    port: Annotated[int, Flag("sagemaker-port", "Port to listen on.", PORT)] = 8080
    safe_port_range: Annotated[tuple[int, int] | None, Flag(
        "sagemaker-safe-port-range", "Ports that the other services may use.", flag.PORT_RANGE)] = None
    thread_count: Annotated[int, Flag(
        "sagemaker-thread-count", "Threads that handle requests.", no_effect=_EVENT_LOOP)] = 8
    ping_mode: Literal["ready", "live"] = "ready"
    inference_type: Literal["infer", "generate", "generate_stream"] = "infer"
    """Kind of request that an invocation is."""
    default_model: str = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
    """Model of an invocation that names none. The default is Triton's, and says which variable is missing."""


@dataclass(frozen=True)
class VertexOptions:
    """The Vertex AI port."""

    enabled: Annotated[bool, Flag(
        "allow-vertex-ai", "Serve Vertex AI's endpoints.", default="true if AIP_MODE=PREDICTION, else false")] = False
    address: str = "0.0.0.0"
    port: Annotated[int, Flag(
        "vertex-ai-port", "Port to listen on.", PORT, default="AIP_HTTP_PORT, else 8080")] = 8080
    thread_count: Annotated[int, Flag(
        "vertex-ai-thread-count", "Threads that handle requests.", no_effect=_EVENT_LOOP)] = 8
    default_model: Annotated[str, Flag(
        "vertex-ai-default-model", "Model of predictions, needed if the server has several.")] = ""
    health_route: str = ""
    predict_route: str = ""


@dataclass(frozen=True)
class MetricsOptions:
    """The metrics port, and which metrics it reports."""

    enabled: Annotated[bool, Flag("allow-metrics", "Serve metrics in the Prometheus format.")] = True
    gpu: Annotated[bool, Flag("allow-gpu-metrics", "Report GPUs (needs nvidia-ml-py).")] = True
    cpu: Annotated[bool, Flag("allow-cpu-metrics", "Report processor and memory.")] = True
    address: Annotated[str, Flag(
        "metrics-address", "Address to listen on.", default="that of --http-address")] = "0.0.0.0"
    port: Annotated[int, Flag("metrics-port", "Port to listen on; 0 picks a free one.", PORT)] = 8002
    interval_ms: Annotated[float, Flag(
        "metrics-interval-ms", "Milliseconds between two queries of the GPUs; 100 or more.")] = 2000
    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[tuple[float, float], ...] = (
        (0.5, 0.05), (0.9, 0.01), (0.95, 0.001), (0.99, 0.001), (0.999, 0.001))
    """Pairs of quantile and allowed error."""
    stage_histograms: bool = True


@dataclass(frozen=True)
class OpenTelemetryOptions:
    """The OTLP collector that spans are exported to, and the size of the batches."""

    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(default_factory=lambda: {"service.name": "triton-inference-server"})
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay: int = 5000
    bsp_max_export_batch_size: int = 512
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of each export request."""
    compress: bool = False
    timeout: float = 10.0
    """Seconds that an export request may take."""
    certificate: str = ""
    """File to verify the certificate of the collector against; empty for the system's authorities."""


@dataclass(frozen=True)
class TraceOptions:
    """The trace settings at start (``--trace-config``)."""

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
    """The response cache (``--cache-config``). An empty ``name`` means none."""

    name: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    directory: Annotated[str, Flag(
        "cache-directory", "Directory of caches.", no_effect=_BUILT_IN)] = "/opt/tritonserver/caches"


@dataclass(frozen=True)
class OpenAiOptions:
    """The APIs of OpenAI and Anthropic under ``/v1``."""

    strict: Annotated[bool, nerite_flag(
        "openai-strict", "Refuse requests under /v1 with fields that are not known here. By default such fields are "
        "passed over, and each is logged once.")] = False
    generation_config: Annotated[str, nerite_flag(
        "generation-config", "Sampling defaults of requests under /v1: 'auto' takes temperature, top_p, top_k, min_p "
        "and repetition_penalty from generation_config.json of the checkpoint, 'vllm' takes none.",
        flag.choice("generation-config", ("auto", "vllm")))] = "auto"
    aliases: Annotated[Mapping[str, str], nerite_flag(
        "model-alias", "Another name of a model or route under /v1, as in claude-*=chat: '*' stands for any text. "
        "A name that a model has is no alias. May be repeated.",
        flag.model_alias, last_wins)] = field(default_factory=dict)
    """Patterns of names, and the models that answer for them, in order."""
    responses: Annotated[str, nerite_flag(
        "responses", "Database that keeps responses of /v1/responses, unless a request says store: false: a path, or "
        "postgresql://USER@HOST/NAME (docs/agents.md).", default="the database of --ledger")] = ""


@dataclass(frozen=True)
class BatchOptions:
    """Files and batches of the OpenAI API. An empty ``database`` means none."""

    database: Annotated[str, nerite_flag(
        "batches", "Database of files and batches of the OpenAI API: a path, or postgresql://USER@HOST/NAME "
        "(docs/batches.md).", default="no batches")] = ""
    directory: Annotated[str, nerite_flag(
        "batch-files", "Directory of the files of batches.", default="beside the database")] = ""
    concurrency: Annotated[int, nerite_flag(
        "batch-concurrency", "Maximum number of items of batches that run at once.", flag.AT_LEAST_ONE)] = 64
    storage_bytes: Annotated[int, nerite_flag(
        "batch-storage-bytes", "Maximum bytes of all files that are uploaded.", flag.BYTES)] = 10 << 30


@dataclass(frozen=True)
class DeviceOptions:
    """Memory pools, processors and accelerators."""

    peer_access: Annotated[bool, Flag(
        "enable-peer-access", "Let GPUs read each other's memory.", group="Model Repository",
        no_effect="GPUs read each other's memory wherever that is needed")] = True
    rate_limit: Annotated[Literal["off", "execution_count"], Flag(
        "rate-limit", "'off' runs an instance whenever it is free; 'execution_count' also waits for the resources that "
        "models require.", group="Rate Limiter")] = "off"
    rate_limit_resources: Annotated[tuple[RateLimitResource, ...], Flag(
        "rate-limit-resource", "Available amount of a resource, in total or on one device; 0 of a resource that is not "
        "named. Without this flag the amount is what the most demanding instance needs. May be repeated.",
        flag.rate_limit_resource, add, "Rate Limiter")] = ()
    pinned_pool_bytes: Annotated[int, Flag(
        "pinned-memory-pool-byte-size", "Bytes of pinned memory that requests to models on GPUs are received in, from "
        "the first such model on. 0 for none.", flag.BYTES)] = 1 << 28
    cuda_pool_bytes: Annotated[Mapping[int, int], Flag(
        "cuda-memory-pool-byte-size", "Bytes of GPU memory for tensors that processes exchange, on a device, reserved "
        "when the first is exchanged. 0 for none. May be repeated.",
        flag.DEVICE_BYTES, last_wins, default="64 MiB on each GPU")] = field(default_factory=dict)
    cuda_virtual_address_bytes: Annotated[Mapping[int, int], Flag(
        "cuda-virtual-address-size", "Bytes that the state of a sequence can grow to on a device. May be repeated.",
        flag.DEVICE_BYTES, last_wins, default="1 GiB on each GPU",
        no_effect="states of sequences are kept on the host")] = field(default_factory=dict)
    min_compute_capability: Annotated[float, Flag(
        "min-supported-compute-capability", "Do not use GPUs below this compute capability.")] = 6.0
    buffer_manager_threads: Annotated[int, Flag(
        "buffer-manager-thread-count", "Threads that copy tensors.", COUNT,
        no_effect="tensors are not copied")] = 0
    host_policies: Annotated[tuple[HostPolicy, ...], Flag(
        "host-policy", "Setting numa-node or cpu-cores of a policy that instance groups name. May be repeated.",
        flag.host_policy, add)] = ()
    load_gpu_limits: Annotated[Mapping[int, float], Flag(
        "model-load-gpu-limit", "Fraction of the memory of a device beyond which no model is loaded onto it. May be "
        "repeated.", flag.DEVICE_FRACTION, flag.first_wins)] = field(default_factory=dict)
    allow_client_shared_memory: Annotated[bool, Flag(
        "allow-client-shm", "Let clients pass tensors in shared memory.", group="Shared Memory")] = False


_LARGEST_BATCHES: Final = {"fil": "32768"}
"""Default maximum batch size of models that can batch, by backend, where it is not Triton's 4: a row of a tree model
costs microseconds, and clients send tables of them."""


@dataclass(frozen=True)
class ServerOptions:
    """All options of one server."""

    id: Annotated[str, Flag("id", "Name of this server in its metadata.", group="Server")] = "triton"
    exit_timeout_secs: Annotated[int, Flag(
        "exit-timeout-secs", "Seconds that inferences in flight have to finish when the server stops.", COUNT,
        group="Server")] = 30
    exit_keepalive_secs: Annotated[int, nerite_flag(
        "exit-keepalive-secs", "Seconds that idle HTTP connections stay open when the server stops, at most half of "
        "--exit-timeout-secs: a client may be about to send a request on one. Its reply ends the connection. 0 closes "
        "them after 0.15 s.", COUNT)] = 0
    stay_awake_microseconds: Annotated[int, nerite_flag(
        "stay-awake-microseconds", "Microseconds for which the server and its workers poll for the next message, if it "
        "mostly arrives that soon; 0 is never. Waking up takes longer than a small model, but polling uses a core.",
        default="400; 0 on one core, or under a limit of processor time")] = -1
    """-1: the machine decides."""
    front_processes: Annotated[int, nerite_flag(
        "front-processes", "Processes that own the connections of the HTTP and gRPC ports: they parse requests and "
        "encode responses, and one more process schedules them. 1 is a single process for both; 'auto' chooses by the "
        "number of processors (docs/front-processes.md).", flag.front_processes, default="1")] = 1
    """``flag.AUTO``: the machine decides."""
    stall_seconds: Annotated[float, nerite_flag(
        "stall-seconds", "Log the stacks of all threads when the event loop makes no progress for this many seconds, "
        "or a worker executes one batch for 60 times as long, and a GPU that completes no call for 10 times as long; "
        "0 is never.", SECONDS)] = 1.0
    log: Annotated[LogOptions, "Logging"] = LogOptions()
    repository: Annotated[RepositoryOptions, "Model Repository"] = RepositoryOptions()
    queue: QueueOptions = QueueOptions()
    connections: ConnectionOptions = ConnectionOptions()
    policy_file: Annotated[str, nerite_flag(
        "policy-file", "TOML file with tenants, quotas and limits (docs/admission.md). It is read again when it "
        "changes.", default="everybody is admitted, until queues are full")] = ""
    quota_redis: Annotated[str, nerite_flag(
        "quota-redis", "Redis over which servers share the quotas in --policy-file, as in redis://10.0.0.1:6379/0, "
        "instead of the one that the file names (docs/admission.md#several-servers).",
        default="the one that the policy file names")] = ""
    ledger: Annotated[str, nerite_flag(
        "ledger", "Database in which each request gets a row with what it cost: a path (SQLite), or "
        "postgresql://USER@HOST/NAME (docs/ledger.md).", default="nothing is recorded")] = ""
    router_key_file: Annotated[str, nerite_flag(
        "router-key-file", "File with keys of routers, one on each line: a router with one of them says which tenant "
        "has sent a request (docs/ledger.md#routers). It is read again when it changes.",
        default="no router is accepted")] = ""
    rollout_state: Annotated[str, nerite_flag(
        "rollout-state", "Directory in which the state of rollouts outlives the server (docs/rollouts.md).",
        default="nerite/rollouts in the user's state directory")] = ""
    rollout_baselines: Annotated[Mapping[str, str], nerite_flag(
        "rollout-baseline", "Version of a model that is served until a rollout of it is known, as in resnet=1 "
        "(docs/rollout-fleet.md). May be repeated.", flag.model_baseline, last_wins,
        default="what its version policy selects")] = field(default_factory=dict)
    webhook_allowed_hosts: Annotated[tuple[str, ...], nerite_flag(
        "webhook-allowed-host", "Host that decisions of rollouts may be posted to; '*' is any. May be repeated. "
        "Without it, a URL out of a request must be that of a public host, and one out of rollout.toml may be any.",
        flag.host_name, union, default="public hosts, and those that rollout.toml names")] = ()
    batches: BatchOptions = BatchOptions()
    openai: OpenAiOptions = field(default_factory=OpenAiOptions)
    http: Annotated[HttpOptions, "HTTP"] = field(default_factory=HttpOptions)
    grpc: Annotated[GrpcOptions, "GRPC"] = field(default_factory=GrpcOptions)
    sagemaker: Annotated[SagemakerOptions, "Sagemaker"] = SagemakerOptions()
    vertex: Annotated[VertexOptions, "Vertex"] = VertexOptions()
    metrics: Annotated[MetricsOptions, "Metrics"] = MetricsOptions()
    trace: TraceOptions = field(default_factory=TraceOptions)
    backend_directory: Annotated[str, Flag(
        "backend-directory", "Directory of backends written in Python: <name>/model.py in it serves models with "
        "backend: '<name>'.", group="Backend")] = "/opt/tritonserver/backends"
    backend_settings: Annotated[tuple[BackendSetting, ...], Flag(
        "backend-config", "Setting of one backend, or of all if none is named. May be repeated.",
        flag.backend_config, add, "Backend")] = ()
    repoagent_directory: Annotated[str, Flag(
        "repoagent-directory", "Directory of repository agents.", group="Repository Agent",
        no_effect=_AGENTS)] = "/opt/tritonserver/repoagents"
    cache: Annotated[CacheOptions, "Response Cache"] = field(default_factory=CacheOptions)
    device: Annotated[DeviceOptions, "Memory/Device Management"] = field(default_factory=DeviceOptions)
    environment_directory: Annotated[str, nerite_flag(
        "environment-directory", "Directory for files made for models: Python environments, converted checkpoints.",
        default="nerite/environments in the user's cache directory")] = ""

    def settings_of(self, backend: str) -> dict[str, str]:
        """Return the settings of ``backend``: the server's, overridden by those of all backends, then by its own."""
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
