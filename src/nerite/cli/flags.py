"""The table of all flags: Triton's, under Triton's names, and a few of our own in the group 'Nerite'.

Help, parsing, environment variables, the options file and docs/flags.md all come from here. A flag with ``accepted``
is read and checked but has no effect in this version; the server says so once at start when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from nerite.cli import flag_values as parts
from nerite.cli.flag_values import (
    AT_LEAST_ONE,
    BOOLEAN,
    BYTES,
    CONFIG_NAME,
    COUNT,
    FLOAT,
    HANDLER_THREADS,
    INT64,
    INTEGER,
    NOTHING,
    PATTERN,
    PORT,
    TEXT,
    VERBOSITY,
    ValueKind,
    at_least,
    choice,
    not_negative,
)
from nerite.config.options import LOG_FORMATS, ServerOptions

# One flag of the command line: a row of the table in ``flags``.

_DEFAULTS = ServerOptions()


@dataclass(frozen=True)
class Flag:
    """Name, type, meaning and destination of a flag."""

    name: str
    """Without the dashes."""
    group: str
    kind: ValueKind
    help: str
    field: str = ""
    """Where the value goes in ``ServerOptions``, dotted; empty where ``assembly`` works it out."""
    join: Callable[[Any, Any], Any] | None = None
    """Joins what a repeated flag brought so far with what it brings now. None: the last one wins."""
    accepted: str = ""
    """Why the flag has no effect in this version; empty for a flag that works. Its values are checked all the same."""
    stands_for: str = ""
    """The flag that this one is another name of."""
    deprecated: str = ""
    """Triton's warning whenever the flag is used; ``{value}`` is its value."""
    default_text: str = ""
    """The default in words, where the value in ``ServerOptions`` does not say it well."""

    @property
    def key(self) -> str:
        """The name under which the value is kept."""
        return self.stands_for or self.name

    @property
    def environment(self) -> str:
        """The environment variable that sets this flag."""
        return "NERITE_" + self.name.upper().replace("-", "_")

    @property
    def ours(self) -> bool:
        """Triton has no such flag."""
        return self.group == "Nerite"

    @property
    def default(self) -> str:
        """The default as help shows it."""
        if self.default_text or not self.field:
            return self.default_text
        value = at(_DEFAULTS, self.field)
        if isinstance(value, bool):
            return str(value).lower()
        return "" if value is None or value in ((), {}) else str(value)


def at(options: object, path: str) -> Any:
    """Return the value at a dotted path of ``ServerOptions``."""
    return reduce(getattr, path.split("."), options)


_LOOP = "one event loop serves every connection"
_NO_POOL = "there is no pool to size"
_BUILT_IN = "the caches 'local' and 'redis' are built in, and others are not loaded"
_AGENTS = "the agent 'checksum' is built in, and others are not loaded"
_GPU = "the server itself keeps nothing in GPU memory"

_REMOVED = (
    "Warning: '--{flag}' has been deprecated and will be removed in future releases. Please use '{instead} instead."
)
_STRICT = "Warning: '--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."
_CACHE_SIZE = (
    "Warning: '--response-cache-byte-size' has been deprecated! This will default to the 'local' cache implementation "
    "with the provided byte size for its config. Please use '--cache-config' instead. The equivalent --cache-config "
    "CLI args would be: '--cache-config=local,size={value}'"
)

_ORIGIN = ValueKind("origin", parts.cors_origin)
_HOST = ValueKind("name", parts.host_name)
_PATH = ValueKind("path", lambda text: (text,))
_MODEL = ValueKind("name", lambda text: (text,))
_FORMAT = choice("log-format", LOG_FORMATS, any_case=False)
_CONTROL = choice("model-control-mode", ("none", "poll", "explicit"))
_LOAD_FILES = choice("model-load-files", ("guarded", "any", "none"))
_LEVEL = choice("grpc_infer_response_compression_level", ("none", "low", "medium", "high"))
_LIMITER = choice("rate-limit", ("off", "execution_count"))
_INPUT_SIZE = at_least(1, "Error: --http-max-input-size must be greater than 0.", INT64)
_SECONDS = ValueKind("float", not_negative)
_UPLOAD_TIMEOUT = at_least(0, "Error: --http-upload-timeout must not be negative.")
_GRPC_UPLOAD_TIMEOUT = at_least(0, "Error: --grpc-upload-timeout must not be negative.")
_MESSAGE_SIZE = at_least(1, "Error: --grpc-max-message-size must be greater than 0.")
_IN_FLIGHT = at_least(0, "Error: --max-bytes-in-flight must not be negative.", INT64)
_POOL_SIZE = at_least(1, "Error: --grpc-max-response-pool-size must be greater than 0.")
_BACKEND = ValueKind("[backend,]setting=value", parts.backend_config)
_CACHE = ValueKind("cache,setting=value", parts.cache_config)
_TRACE = ValueKind("[mode,]setting=value", parts.trace_config)
_METRICS = ValueKind("setting=value", parts.metrics_config)
_RANGE = ValueKind("first-last", parts.port_range)
_RESOURCE = ValueKind("name:count[:device]", parts.rate_limit_resource)
_POLICY = ValueKind("policy,setting=value", parts.host_policy)
_POOL = ValueKind("device:bytes", parts.device_bytes)
_LIMIT = ValueKind("device:fraction", parts.device_fraction)
_TRACE_LEVEL = ValueKind("OFF|TIMESTAMPS|TENSORS", parts.trace_level)


def _deprecated(flag: str, instead: str) -> str:
    return _REMOVED.format(flag=flag, instead=instead)


# One row a flag: name, group, kind, meaning, destination. The rows are kept by hand.
# fmt: off
FLAGS: tuple[Flag, ...] = (
    Flag("help", "", NOTHING, "Show this text and exit."),

    Flag("id", "Server", TEXT, "Name of this server in its metadata.", "id"),
    Flag("exit-timeout-secs", "Server", COUNT,
         "Seconds that inferences in flight get to finish when the server stops.", "exit_timeout_secs"),

    Flag("log-verbose", "Logging", VERBOSITY,
         "Level of verbose messages: 0 or false for none, 1 or true and above for more.", "log.verbose"),
    Flag("log-info", "Logging", BOOLEAN, "Log what happens.", "log.info"),
    Flag("log-warning", "Logging", BOOLEAN, "Log what looks wrong.", "log.warning"),
    Flag("log-error", "Logging", BOOLEAN, "Log what went wrong.", "log.error"),
    Flag("log-format", "Logging", _FORMAT,
         "How a record looks: 'default' begins LMMDD hh:mm:ss.ssssss, 'ISO8601' begins YYYY-MM-DDThh:mm:ssZ L, "
         "'json' is one object a line.", "log.format"),
    Flag("log-file", "Logging", TEXT, "File to append the log to, in place of stdout and stderr.", "log.file"),

    Flag("model-store", "Model Repository", _PATH, "Another name of --model-repository.", "repository.paths",
         parts.union, stands_for="model-repository"),
    Flag("model-repository", "Model Repository", _PATH,
         "Directory with the models to serve, or a place in an object store: s3://…, gs://… or as://…. "
         "May be repeated.", "repository.paths", parts.union),
    Flag("exit-on-error", "Model Repository", BOOLEAN,
         "Exit if a model cannot be loaded at start.", "repository.exit_on_error"),
    Flag("disable-auto-complete-config", "Model Repository", NOTHING,
         "Fill in nothing: every model needs a complete config.pbtxt."),
    Flag("strict-readiness", "Model Repository", BOOLEAN,
         "Report ready only while every model is ready; if false, as soon as the server answers.",
         "repository.strict_readiness"),
    Flag("model-control-mode", "Model Repository", _CONTROL,
         "When models are loaded: 'none' at start, all of them; 'poll' also whenever files change; 'explicit' those "
         "of --load-model, and what clients ask for.", "repository.control_mode"),
    Flag("repository-poll-secs", "Model Repository", COUNT,
         "Seconds between two looks at the files in control mode 'poll'.", "repository.poll_secs"),
    Flag("load-model", "Model Repository", _MODEL,
         "Model to load at start in control mode 'explicit'; '*' alone loads all. May be repeated.",
         "repository.startup_models", parts.union),
    Flag("model-config-name", "Model Repository", CONFIG_NAME,
         "Use configs/<name>.pbtxt of a model in place of config.pbtxt where it exists.", "repository.config_name"),
    Flag("model-load-thread-count", "Model Repository", AT_LEAST_ONE,
         "How many models may load at the same time.", "repository.load_threads"),
    Flag("model-load-retry-count", "Model Repository", COUNT,
         "How often to try again when a model fails to load.", "repository.load_retries"),
    Flag("model-namespacing", "Model Repository", BOOLEAN,
         "Let models in different repositories have the same name.", "repository.namespacing"),
    Flag("enable-peer-access", "Model Repository", BOOLEAN,
         "Let GPUs read each other's memory.", "device.peer_access", accepted=_GPU),

    Flag("allow-http", "HTTP", BOOLEAN, "Serve HTTP.", "http.enabled"),
    Flag("http-address", "HTTP", TEXT, "Address to listen on.", "http.address", default_text="that of --address"),
    Flag("http-port", "HTTP", PORT, "Port to listen on; 0 takes a free one.", "http.port"),
    Flag("reuse-http-port", "HTTP", BOOLEAN, "Share the port with other servers that set this.", "http.reuse_port"),
    Flag("http-header-forward-pattern", "HTTP", PATTERN,
         "Regular expression: headers whose name it matches become request parameters.",
         "http.header_forward_pattern"),
    Flag("http-thread-count", "HTTP", INTEGER, "Threads that handle requests.", "http.thread_count", accepted=_LOOP),
    Flag("http-max-input-size", "HTTP", _INPUT_SIZE,
         "Largest request body in bytes, measured after decompression.", "http.max_input_size"),
    Flag("http-restricted-api", "HTTP", parts.HTTP_RESTRICTED,
         "Answer these categories of endpoints (comma-separated: health, metadata, inference, shared-memory, "
         "model-config, model-repository, statistics, trace, logging; metrics for the metrics port) only to requests "
         "with this header. '@/path' is a file with the values, one a line, that is looked at again and again. "
         "May be repeated.", "http.restricted", parts.JOIN_HTTP_RESTRICTED),

    Flag("allow-grpc", "GRPC", BOOLEAN, "Serve gRPC.", "grpc.enabled"),
    Flag("grpc-address", "GRPC", TEXT, "Address to listen on.", "grpc.address", default_text="that of --address"),
    Flag("grpc-port", "GRPC", PORT, "Port to listen on; 0 takes a free one.", "grpc.port"),
    Flag("reuse-grpc-port", "GRPC", BOOLEAN, "Share the port with other servers that set this.", "grpc.reuse_port"),
    Flag("grpc-header-forward-pattern", "GRPC", PATTERN,
         "Regular expression: metadata whose key it matches becomes request parameters.",
         "grpc.header_forward_pattern"),
    Flag("grpc-infer-thread-count", "GRPC", HANDLER_THREADS,
         "Threads that handle inference requests, 2 to 128.", "grpc.infer_thread_count", accepted=_LOOP),
    Flag("grpc-infer-allocation-pool-size", "GRPC", INTEGER,
         "Request objects kept for reuse.", "grpc.infer_allocation_pool_size", accepted=_NO_POOL),
    Flag("grpc-max-response-pool-size", "GRPC", _POOL_SIZE,
         "Response objects kept for reuse.", "grpc.max_response_pool_size", accepted=_NO_POOL),
    Flag("grpc-use-ssl", "GRPC", BOOLEAN, "Serve gRPC over TLS.", "grpc.tls.enabled"),
    Flag("grpc-use-ssl-mutual", "GRPC", BOOLEAN,
         "Serve gRPC over TLS, and ask clients for a certificate.", "grpc.tls.mutual"),
    Flag("grpc-server-cert", "GRPC", TEXT, "PEM file with the server's certificate.", "grpc.tls.server_cert"),
    Flag("grpc-server-key", "GRPC", TEXT, "PEM file with the server's private key.", "grpc.tls.server_key"),
    Flag("grpc-root-cert", "GRPC", TEXT,
         "PEM file with the authorities that vouch for clients.", "grpc.tls.root_cert"),
    Flag("grpc-infer-response-compression-level", "GRPC", _LEVEL,
         "How hard to compress inference responses.", "grpc.response_compression"),
    Flag("grpc-keepalive-time", "GRPC", INTEGER,
         "Milliseconds of silence before the server pings a client.", "grpc.keepalive.time_ms"),
    Flag("grpc-keepalive-timeout", "GRPC", INTEGER,
         "Milliseconds to wait for the answer to a ping before the connection is closed.",
         "grpc.keepalive.timeout_ms"),
    Flag("grpc-keepalive-permit-without-calls", "GRPC", BOOLEAN,
         "Ping clients that have no call open, too.", "grpc.keepalive.permit_without_calls"),
    Flag("grpc-http2-max-pings-without-data", "GRPC", INTEGER,
         "Pings the server sends in a row without sending data; 0 is no limit.",
         "grpc.keepalive.max_pings_without_data"),
    Flag("grpc-http2-min-recv-ping-interval-without-data", "GRPC", INTEGER,
         "Milliseconds a client must leave between pings while nothing is sent; sooner is a strike.",
         "grpc.keepalive.min_recv_ping_interval_without_data_ms"),
    Flag("grpc-http2-max-ping-strikes", "GRPC", INTEGER,
         "Strikes before the connection is closed; 0 is no limit.", "grpc.keepalive.max_ping_strikes"),
    Flag("grpc-max-connection-age", "GRPC", INTEGER,
         "Milliseconds after which a connection is asked to end; 0 is never.",
         "grpc.keepalive.max_connection_age_ms"),
    Flag("grpc-max-connection-age-grace", "GRPC", INTEGER,
         "Milliseconds such a connection gets to finish its calls; 0 is no limit.",
         "grpc.keepalive.max_connection_age_grace_ms"),
    Flag("grpc-restricted-protocol", "GRPC", parts.GRPC_RESTRICTED,
         "Like --http-restricted-api; the key travels as metadata 'triton-grpc-protocol-<header>'. May be repeated.",
         "grpc.restricted", parts.JOIN_GRPC_RESTRICTED),

    Flag("allow-sagemaker", "Sagemaker", BOOLEAN, "Serve SageMaker's endpoints.", "sagemaker.enabled"),
    Flag("sagemaker-port", "Sagemaker", PORT, "Port to listen on.", "sagemaker.port"),
    Flag("sagemaker-safe-port-range", "Sagemaker", _RANGE,
         "Ports that the other services may use.", "sagemaker.safe_port_range"),
    Flag("sagemaker-thread-count", "Sagemaker", INTEGER,
         "Threads that handle requests.", "sagemaker.thread_count", accepted=_LOOP),

    Flag("allow-vertex-ai", "Vertex", BOOLEAN, "Serve Vertex AI's endpoints.", "vertex.enabled",
         default_text="true if AIP_MODE=PREDICTION, else false"),
    Flag("vertex-ai-port", "Vertex", PORT, "Port to listen on.", "vertex.port",
         default_text="AIP_HTTP_PORT, else 8080"),
    Flag("vertex-ai-thread-count", "Vertex", INTEGER,
         "Threads that handle requests.", "vertex.thread_count", accepted=_LOOP),
    Flag("vertex-ai-default-model", "Vertex", TEXT,
         "Model that predictions are asked of, where there are several.", "vertex.default_model"),

    Flag("allow-metrics", "Metrics", BOOLEAN, "Serve metrics in Prometheus's format.", "metrics.enabled"),
    Flag("allow-gpu-metrics", "Metrics", BOOLEAN, "Report GPUs (needs nvidia-ml-py).", "metrics.gpu"),
    Flag("allow-cpu-metrics", "Metrics", BOOLEAN, "Report processor and memory.", "metrics.cpu"),
    Flag("metrics-address", "Metrics", TEXT, "Address to listen on.", "metrics.address",
         default_text="that of --http-address"),
    Flag("metrics-port", "Metrics", PORT, "Port to listen on; 0 takes a free one.", "metrics.port"),
    Flag("metrics-interval-ms", "Metrics", FLOAT,
         "Milliseconds between two looks at GPUs; 100 or more.", "metrics.interval_ms"),
    Flag("metrics-config", "Metrics", _METRICS,
         "counter_latencies, histogram_latencies, summary_latencies and stage_histograms (true or false), "
         "summary_quantiles (<quantile>:<error>,...). May be repeated.", join=parts.last_wins,
         default_text="counter_latencies=true, histogram_latencies=false, summary_latencies=false, "
         "stage_histograms=true, summary_quantiles=0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"),

    Flag("trace-config", "Tracing", _TRACE,
         "For all modes: mode, level, rate, count. For triton: file, log-frequency. For opentelemetry: url, resource, "
         "bsp_max_queue_size, bsp_schedule_delay, bsp_max_export_batch_size (nothing is exported yet). "
         "May be repeated.", join=add,
         default_text="mode=triton, level=OFF, rate=1000, count=-1"),

    Flag("backend-directory", "Backend", TEXT,
         "Directory of backends written in Python: <name>/model.py in it serves models with backend: '<name>'.",
         "backend_directory"),
    Flag("backend-config", "Backend", _BACKEND,
         "Setting of one backend, or of all where none is named. May be repeated.", "backend_settings", add),

    Flag("repoagent-directory", "Repository Agent", TEXT,
         "Directory of repository agents.", "repoagent_directory", accepted=_AGENTS),

    Flag("cache-config", "Response Cache", _CACHE,
         "Setting of the response cache: local,size=<bytes>, or redis,host=<name> and redis,port=<number>. "
         "May be repeated, for one cache.", join=add),
    Flag("cache-directory", "Response Cache", TEXT, "Directory of caches.", "cache.directory", accepted=_BUILT_IN),

    Flag("rate-limit", "Rate Limiter", _LIMITER,
         "'off' runs an instance whenever it is free; 'execution_count' also waits for the resources that models "
         "ask for.", "device.rate_limit"),
    Flag("rate-limit-resource", "Rate Limiter", _RESOURCE,
         "How much there is of a resource, in all or on one device: of one that is not named, nothing. Without this "
         "flag there is as much as the instance that needs most of it needs. May be repeated.",
         "device.rate_limit_resources", add),

    Flag("pinned-memory-pool-byte-size", "Memory/Device Management", BYTES,
         "Bytes of pinned memory to keep.", "device.pinned_pool_bytes", accepted=_GPU),
    Flag("cuda-memory-pool-byte-size", "Memory/Device Management", _POOL,
         "Bytes of GPU memory to keep on a device. May be repeated.", "device.cuda_pool_bytes", parts.last_wins,
         default_text="64 MiB on each GPU", accepted=_GPU),
    Flag("cuda-virtual-address-size", "Memory/Device Management", _POOL,
         "Room that the state of a sequence can grow into on a device. May be repeated.",
         "device.cuda_virtual_address_bytes", parts.last_wins, default_text="1 GiB on each GPU", accepted=_GPU),
    Flag("min-supported-compute-capability", "Memory/Device Management", FLOAT,
         "Leave GPUs below this compute capability alone.", "device.min_compute_capability"),
    Flag("buffer-manager-thread-count", "Memory/Device Management", COUNT,
         "Threads that copy tensors.", "device.buffer_manager_threads", accepted="tensors are not copied"),
    Flag("host-policy", "Memory/Device Management", _POLICY,
         "numa-node or cpu-cores of a policy that instance groups name. May be repeated.", "device.host_policies",
         add),
    Flag("model-load-gpu-limit", "Memory/Device Management", _LIMIT,
         "Fraction of a device's memory beyond which no model is loaded onto it. May be repeated.",
         "device.load_gpu_limits", parts.first_wins),

    Flag("allow-client-shm", "Shared Memory", BOOLEAN,
         "Let clients pass tensors in shared memory.", "device.allow_client_shared_memory"),

    Flag("options-file", "Nerite", TEXT,
         "TOML file with more options: each key is a flag without its dashes, a repeated flag is a list."),
    Flag("address", "Nerite", TEXT,
         "Address that every port listens on whose own flag says nothing else. 0.0.0.0 is all of this machine's "
         "networks.",
         default_text="127.0.0.1; as `tritonserver` 0.0.0.0"),
    Flag("model-load-files", "Nerite", _LOAD_FILES,
         "Whether a load by a client may bring files ('file:…'), which may be programs: 'any'; 'none'; 'guarded' while "
         "no port lets other machines load models without a key.", "repository.load_files"),
    Flag("repository-cache-directory", "Nerite", TEXT,
         "Directory for the files of models in object stores.", "repository.cache_directory",
         default_text="nerite/repositories in the user's directory of caches"),
    Flag("environment-directory", "Nerite", TEXT,
         "Directory for what is made for models: environments, converted checkpoints.", "environment_directory",
         default_text="nerite/environments in the user's directory of caches"),
    Flag("access-log", "Nerite", BOOLEAN,
         "Log each HTTP request and each gRPC call, when it is answered.", "log.access"),
    Flag("stay-awake-microseconds", "Nerite", INTEGER,
         "How long the server and its workers wait awake for what comes next, when it mostly comes that soon; "
         "0 is never. Being woken takes longer than a small model, but who stays awake uses a core.",
         "stay_awake_microseconds", default_text="400; 0 on one core, or under a limit of processor time"),
    Flag("stall-seconds", "Nerite", _SECONDS,
         "Log the stacks of all threads when the event loop stands still for so long, or a worker is at one batch for "
         "60 times as long; 0 is never.", "stall_seconds"),
    Flag("max-queued-requests", "Nerite", COUNT,
         "Requests that may wait for a model; more are refused with status 503. A model's max_queue_size, if it has "
         "one, holds instead; 0 is no limit, as with Triton.", "queue.max_requests"),
    Flag("max-queue-seconds", "Nerite", _SECONDS,
         "How long a queue may be, in seconds of work, while more requests come than the model can do; 0 is no limit, "
         "as with Triton.", "queue.max_seconds"),
    Flag("queue-burst-seconds", "Nerite", _SECONDS,
         "For how long a queue may grow beyond --max-queue-seconds before that means that more come than the model "
         "can do.", "queue.burst_seconds"),
    Flag("policy-file", "Nerite", TEXT,
         "TOML file with who may use how much of which model (docs/admission.md). It is looked at again and again.",
         "policy_file", default_text="everybody may, until queues are full"),
    Flag("allow-console", "Nerite", BOOLEAN,
         "Serve the console, a page that shows what the server does, at /ui of the HTTP port (docs/console.md).",
         "http.console"),
    Flag("http-json-half-precision", "Nerite", BOOLEAN,
         "Take and give FP16 and BF16 as JSON numbers. Triton refuses them.", "http.json_half_precision"),
    Flag("http-upload-timeout", "Nerite", _UPLOAD_TIMEOUT,
         "Seconds that an HTTP request may arrive without coming on by 16 KiB or being complete; 0 is no limit.",
         "http.upload_seconds"),
    Flag("grpc-upload-timeout", "Nerite", _GRPC_UPLOAD_TIMEOUT,
         "Seconds that a gRPC message may arrive without coming on by 16 KiB or being complete; 0 is no limit.",
         "grpc.upload_seconds"),
    Flag("grpc-max-message-size", "Nerite", _MESSAGE_SIZE,
         "Largest gRPC message in bytes, measured after decompression. Triton takes 2147483647.",
         "grpc.max_message_size"),
    Flag("max-connections", "Nerite", COUNT,
         "Connections that may be open, on all ports together. The longest idle one makes room for a new one; if none "
         "is idle, the new one is refused with status 503, or a GOAWAY. 0 is no limit.", "connections.max_connections",
         default_text="16384, or fewer where the limit of open files is low"),
    Flag("connection-idle-timeout", "Nerite", COUNT,
         "Seconds that a connection may be open without a request; 0 is no limit.", "connections.idle_seconds"),
    Flag("max-bytes-in-flight", "Nerite", _IN_FLIGHT,
         "Bytes of requests that may arrive, wait or run, over all connections; requests for which there is no room "
         "are refused with status 429, or RESOURCE_EXHAUSTED. 0 is no limit.", "connections.max_bytes_in_flight",
         default_text="a quarter of the memory"),
    Flag("http-cors-origin", "Nerite", _ORIGIN,
         "Let web pages of this origin, such as https://app.example.com, use the HTTP port (CORS); '*' is any page. "
         "May be repeated.", "http.cors_origins", parts.union),
    Flag("http-allowed-host", "Nerite", _HOST,
         "Name by which clients may call the server in 'Host', besides localhost and IP addresses; '*' is any. Other "
         "names are refused on every port that speaks HTTP. May be repeated.", "http.allowed_hosts", parts.union,
         default_text="any; none where a port listens on this machine alone"),
    Flag("http-use-ssl", "Nerite", BOOLEAN, "Serve HTTP over TLS.", "http.tls.enabled"),
    Flag("http-use-ssl-mutual", "Nerite", BOOLEAN,
         "Serve HTTP over TLS, and ask clients for a certificate.", "http.tls.mutual"),
    Flag("http-server-cert", "Nerite", TEXT, "PEM file with the server's certificate.", "http.tls.server_cert"),
    Flag("http-server-key", "Nerite", TEXT, "PEM file with the server's private key.", "http.tls.server_key"),
    Flag("http-root-cert", "Nerite", TEXT,
         "PEM file with the authorities that vouch for clients.", "http.tls.root_cert"),

    Flag("strict-model-config", "DEPRECATED", BOOLEAN, "Use --disable-auto-complete-config.", default_text="false",
         deprecated=_STRICT),
    Flag("response-cache-byte-size", "DEPRECATED", BYTES, "Use --cache-config local,size=<bytes>.",
         default_text="0", deprecated=_CACHE_SIZE),
    Flag("trace-file", "DEPRECATED", TEXT, "Use --trace-config triton,file=<path>.",
         deprecated=_deprecated("trace-file", "--trace-config triton,file=<filepath>")),
    Flag("trace-level", "DEPRECATED", _TRACE_LEVEL, "Use --trace-config level=<level>.", join=add,
         deprecated=_deprecated("trace-level", "--trace-config level=<OFF|TIMESTAMPS|TENSORS>")),
    Flag("trace-rate", "DEPRECATED", INTEGER, "Use --trace-config rate=<number>.",
         deprecated=_deprecated("trace-rate", "--trace-config rate=<rate value>")),
    Flag("trace-count", "DEPRECATED", INTEGER, "Use --trace-config count=<number>.",
         deprecated=_deprecated("trace-count", "--trace-config count=<count value>")),
    Flag("trace-log-frequency", "DEPRECATED", INTEGER, "Use --trace-config triton,log-frequency=<number>.",
         deprecated=_deprecated("trace-log-frequency", "--trace-config triton,log-frequency=<log frequency value>")),
)
# fmt: on

BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(flag.group for flag in FLAGS))
"""In the order of help. The first, of ``--help`` itself, has no title."""
