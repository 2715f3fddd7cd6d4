"""Combines the values of single flags into ``ServerOptions``, and rejects flags that contradict each other.

The checks run in Triton's order, so that of several errors the same one is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from nerite.cli.command import UsageError, did_you_mean
from nerite.cli.flags import FLAGS, placed
from nerite.config.flag import METRICS_SETTINGS, PORT, UINT32, BadValue, integer, trace_level, trace_mode
from nerite.config.options import CacheOptions, OpenTelemetryOptions, ServerOptions, TraceOptions

Values = Mapping[str, Any]
"""Value of each flag that is given, by the name of the flag."""


def assemble(values: Values, environment: Mapping[str, str], address: str) -> tuple[ServerOptions, list[str]]:
    """Return the options, and the warnings to print. Raises ``UsageError`` for flags that contradict each other.

    Ports listen on ``address`` by default. Of the environment only the variables of the clouds and of OpenTelemetry are
    read.
    """
    warnings: list[str] = []
    options = _listening(_cloud_defaults(ServerOptions(), environment), values.get("address", ""), address)
    for flag in FLAGS:
        if flag.field and flag.name in values:
            options = placed(options, flag.field, values[flag.name])
    for port in ("http", "grpc"):
        tls = getattr(options, port).tls
        options = placed(options, f"{port}.tls.enabled", tls.enabled or tls.mutual)
    options = _metrics(values, options, warnings)
    options = _repository(values, options, environment)
    options = replace(options, trace=_trace(values, environment, warnings))
    strict = values.get("strict-model-config")
    if strict:
        options = placed(options, "repository.auto_complete", False)
    elif strict is False and not options.repository.auto_complete:
        warnings.append(
            "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of "
            "'--disable-auto-complete-config'!"
        )
    options = replace(options, cache=_cache(values, options.cache))
    _check_ports(options)
    _check_tls(options)
    _check_devices(options)
    _check_server(values, options)
    return _cloud_variables(options, environment), warnings


def _listening(options: ServerOptions, given: str, default: str) -> ServerOptions:
    """Return the options with the address of every port: the one given for all of them, or else the default."""
    # The clouds reach their ports from outside, so the default does not apply to them.
    for port in ("http", "grpc", "sagemaker", "vertex") if given else ("http", "grpc"):
        options = placed(options, f"{port}.address", given or default)
    return options


def _metrics(values: Values, options: ServerOptions, warnings: list[str]) -> ServerOptions:
    metrics = options.metrics
    settings = dict(values.get("metrics-config", {}))
    for name in settings.keys() - METRICS_SETTINGS.keys():
        del settings[name]
        warnings.append(_unknown_setting("metrics", name, METRICS_SETTINGS))
    metrics = replace(
        metrics,
        gpu=metrics.gpu and metrics.enabled,
        cpu=metrics.cpu and metrics.enabled,
        address=values.get("metrics-address") or options.http.address,
        **settings,
    )
    return replace(options, metrics=metrics)


def _unknown_setting(flag: str, name: str, known: Mapping[str, object], prefix: str = "") -> str:
    """Return the warning for a setting that does not exist; Triton ignores it."""
    return f"Warning: --{flag}-config has no setting '{prefix}{name}'. {did_you_mean(name, known)}".rstrip()


def _repository(values: Values, options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    repository = options.repository
    if repository.startup_models and repository.control_mode not in ("explicit", "demand"):
        raise UsageError("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if repository.control_mode not in ("poll", "demand"):
        repository = replace(repository, poll_secs=0)
    if not repository.paths and environment.get("AIP_STORAGE_URI"):
        repository = replace(repository, paths=(environment["AIP_STORAGE_URI"],))
    return replace(options, repository=repository)


def _cache(values: Values, cache: CacheOptions) -> CacheOptions:
    """Return the options of the one cache; a second one is rejected later, after all other errors."""
    size = values.get("response-cache-byte-size")
    settings = values.get("cache-config", ())
    if size is not None:
        if settings:
            raise UsageError(
                "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
                "Please provide one or the other."
            )
        settings = (("local", "size", str(size)),)
    if not settings:
        return cache
    return replace(cache, name=settings[0][0], settings={name: value for _, name, value in settings})


# --trace-config, the deprecated flags for single settings, and the variables of OpenTelemetry.

_Reader = Callable[[str], Any]

_BATCH: Final[Mapping[str, _Reader]] = dict.fromkeys(
    ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"),
    lambda text: integer(text, UINT32),
)
_TRACE_SETTINGS: Final[Mapping[str, Mapping[str, _Reader]]] = {
    "": {"rate": integer, "level": trace_level.read, "mode": trace_mode, "count": integer},
    "triton": {"file": str, "log-frequency": integer},
    "opentelemetry": {"url": str, "resource": str, **_BATCH},
}
"""Settings by the mode that is written before them; those without one apply to all modes."""


def _trace(values: Values, environment: Mapping[str, str], warnings: list[str]) -> TraceOptions:
    """Return the trace settings.

    As in Triton only the settings of the chosen mode are read. OFF in the deprecated flag switches tracing off whatever
    else is given; in ``--trace-config`` it has no effect beside other levels.
    """
    levels = list(values.get("trace-level", ()))
    off = "OFF" in levels
    found = _deprecated_settings(values, "rate", "count")
    for name, value in _trace_settings(values, "", warnings):
        if name == "level":
            levels += value
        else:
            found[name] = value
    if not off:
        found["levels"] = tuple(dict.fromkeys(level for level in levels if level != "OFF"))
    if found.get("mode") != "opentelemetry":
        found |= _deprecated_settings(values, "file", "log-frequency")
        found |= {name.replace("-", "_"): value for name, value in _trace_settings(values, "triton", warnings)}
        return TraceOptions(**found)
    for flag in ("trace-file", "trace-log-frequency"):
        if flag in values:
            warnings.append(f"Warning: '--{flag}' is deprecated and will be ignored with opentelemetry tracing mode.")
    return TraceOptions(**found, opentelemetry=_opentelemetry(values, environment, warnings))


def _deprecated_settings(values: Values, *names: str) -> dict[str, Any]:
    return {name.replace("-", "_"): values[f"trace-{name}"] for name in names if f"trace-{name}" in values}


def _trace_settings(values: Values, mode: str, warnings: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the settings of one mode, in order."""
    readers, prefix = _TRACE_SETTINGS[mode], f"{mode}," if mode else ""
    for given, name, text in values.get("trace-config", ()):
        if given != mode:
            continue
        if name not in readers:
            warnings.append(_unknown_setting("trace", name, readers, prefix))
            continue
        value = _read(f"--trace-config {prefix}{name}", readers[name], text)
        if f"trace-{name}" in values:
            noun = f"{name} value" if name in ("rate", "count") else name
            warnings.append(
                f"Warning: Overriding deprecated '--trace-{name}' in favor of provided {noun} in --trace-config!"
            )
        yield name, value


def _read(label: str, read: _Reader, text: str) -> Any:
    try:
        return read(text)
    except BadValue as error:
        raise _bad(label, str(error)) from None


def _bad(label: str, text: str) -> UsageError:
    return UsageError(f'Bad option: "{label}".\n{text}')


def _opentelemetry(values: Values, environment: Mapping[str, str], warnings: list[str]) -> OpenTelemetryOptions:
    found = _exporter_variables(environment, warnings)
    resource = dict(OpenTelemetryOptions().resource)
    resource |= _pairs("OTEL_RESOURCE_ATTRIBUTES", environment)
    if environment.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = environment["OTEL_SERVICE_NAME"]
    for name, value in _trace_settings(values, "opentelemetry", warnings):
        if name == "resource":
            key, equals, text = value.partition("=")
            if not (equals and key):
                raise _bad("--trace-config opentelemetry,resource", f"expects <key>=<value>. Got {value}")
            resource[key] = text
        else:
            found[name] = value
    return OpenTelemetryOptions(resource=resource, **found)


def _exporter_variables(environment: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    """Return the settings of OpenTelemetry's own variables; one for traces takes precedence over a general one."""
    found: dict[str, Any] = {}
    for name, read in _BATCH.items():
        variable = f"OTEL_{name.upper()}"
        if environment.get(variable):
            found[name] = _read(variable, read, environment[variable])

    def lookup(name: str) -> tuple[str, str]:
        """Return the variable that has a setting of the exporter, and its value."""
        for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
            if environment.get(variable):
                return variable, environment[variable]
        return "", ""

    variable, url = lookup("ENDPOINT")
    if url:
        found["url"] = url if "TRACES" in variable else f"{url.rstrip('/')}/v1/traces"
    variable, _ = lookup("HEADERS")
    if variable:
        found["headers"] = _pairs(variable, environment)
    found["compress"] = lookup("COMPRESSION")[1] == "gzip"
    found["certificate"] = lookup("CERTIFICATE")[1]
    variable, timeout = lookup("TIMEOUT")
    if timeout:
        found["timeout"] = _read(variable, lambda text: integer(text, UINT32), timeout) / 1000
    variable, protocol = lookup("PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        warnings.append(f"Warning: {variable} is {protocol}; traces are sent by http/protobuf all the same")
    return found


def _pairs(variable: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return names and values of a variable that lists them: ``a=b,c=d``, with %-escapes in values."""
    pairs: dict[str, str] = {}
    for entry in filter(str.strip, environment.get(variable, "").split(",")):
        name, equals, value = entry.partition("=")
        if not (equals and name.strip()):
            raise _bad(variable, f"expects <key>=<value>,… Got {entry.strip()}")
        pairs[name.strip()] = unquote(value.strip())
    return pairs


# Checks of the options as a whole.


class _Service(NamedTuple):
    name: str
    address: str
    port: int
    allowed: tuple[int, int] | None = None
    """Ports that the other services may use."""


def _check_ports(options: ServerOptions) -> None:
    """Reject two services on one address and port. Port 0 conflicts with none."""
    sagemaker = options.sagemaker
    services = [
        _Service(name, service.address, service.port, sagemaker.safe_port_range if service is sagemaker else None)
        for name, service in (
            ("HTTP", options.http),
            ("GRPC", options.grpc),
            ("metrics", options.metrics),
            ("SageMaker", sagemaker),
            ("Vertex AI", options.vertex),
        )
        if service.enabled
    ]
    for index, one in enumerate(services):
        # A range applies to the services before and after; without one, each pair is compared once.
        for other in services if one.allowed else services[index + 1 :]:
            if other is one:
                continue
            if one.allowed and not one.allowed[0] <= other.port <= one.allowed[1]:
                first, last = one.allowed
                raise UsageError(
                    f"The server cannot listen to {other.name} requests at port {other.port}, "
                    f"allowed port range is [{first}, {last}]"
                )
            if other.address == one.address and one.port == other.port != 0:
                raise UsageError(
                    f"The server cannot listen to {one.name} requests and {other.name} requests at the same "
                    f"address and port {one.address}:{one.port}"
                )


def _check_tls(options: ServerOptions) -> None:
    for protocol, tls in (("http", options.http.tls), ("grpc", options.grpc.tls)):
        if tls.enabled and not (tls.server_cert and tls.server_key):
            raise UsageError(f"--{protocol}-use-ssl needs --{protocol}-server-cert and --{protocol}-server-key")
        if tls.mutual and not tls.root_cert:
            raise UsageError(f"--{protocol}-use-ssl-mutual needs --{protocol}-root-cert")


def _check_devices(options: ServerOptions) -> None:
    build = "Failed to build Triton option:\nerror: setting "
    for device, limit in sorted(options.device.load_gpu_limits.items()):
        invalid = f"{build}model load GPU limit: Invalid argument - expects "
        if device < 0:
            raise UsageError(f"{invalid}device ID >= 0, got {device}", usage=False)
        if not 0.0 <= limit <= 1.0:
            raise UsageError(f"{invalid}limit fraction to be in range [0.0, 1.0], got {limit:f}", usage=False)
    for policy in options.device.host_policies:
        if policy.setting not in ("numa-node", "cpu-cores"):
            raise UsageError(
                f"{build}host policy: Unsupported - Unsupported host policy setting '{policy.setting}' is specified, "
                "supported settings are 'numa-node', 'cpu-cores'",
                usage=False,
            )


_MODEL_NAMES: Final = ("hf:", "mlflow:")
"""How the names of models begin that ``nerite serve`` and ``nerite add`` fetch."""


def _check_server(values: Values, options: ServerOptions) -> None:
    creating = "error: creating server: Invalid argument - "
    if not options.repository.paths:
        raise UsageError(
            f"{creating}--model-repository must be specified",
            remedy="Name the directory your models are in: nerite serve ./models",
            usage=False,
        )
    for path in options.repository.paths:
        named = path.startswith(_MODEL_NAMES) and not Path(path).exists()
        if named or Path(path).is_file():
            raise UsageError(
                f"{creating}'{path}' is {'the name of a model' if named else 'a file'}, and --model-repository takes "
                "directories of models",
                remedy=f"Serve it: nerite serve {path}; or put it into a repository: nerite add {path}",
                usage=False,
            )
    if options.quota_redis and not options.policy_file:
        raise UsageError(
            "--quota-redis has no effect without --policy-file",
            remedy="Write the tenants and their quotas to a policy file (docs/admission.md), and name it.",
        )
    if len({cache for cache, _, _ in values.get("cache-config", ())}) > 1:
        raise UsageError(
            f"{creating}found multiple cache configurations, but only a single cache is currently supported",
            usage=False,
        )
    if "*" in options.repository.startup_models and len(options.repository.startup_models) > 1:
        raise UsageError(
            f"{creating}Wildcard model name '*' must be the ONLY startup model if specified at all.", usage=False
        )


# The variables that SageMaker, Vertex AI and Knative set.

_SAGEMAKER: Final = {
    "ping_mode": ("SAGEMAKER_TRITON_PING_MODE", ("ready", "live")),
    "inference_type": ("SAGEMAKER_TRITON_INFERENCE_TYPE", ("infer", "generate", "generate_stream")),
    "default_model": ("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ()),
}
"""Variable of each field, and the values that it may have."""
_VERTEX: Final = {
    "predict_route": ("AIP_PREDICT_ROUTE", "API_PREDICT_ROUTE"),
    "health_route": ("AIP_HEALTH_ROUTE", "AIP_HEALTH_ROUTE"),
}
"""Variable of each field, and Triton's name for it in the error, in the order in which Triton checks them."""


def _cloud_defaults(options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    """Return the defaults. On Vertex AI its own port replaces those for HTTP and gRPC; Knative names the HTTP port."""
    if environment.get("K_SERVICE") and (port := environment.get("PORT")):
        options = placed(options, "http.port", _read("PORT", PORT.read, port))
    if environment.get("AIP_MODE") == "PREDICTION":
        options = placed(options, "vertex.enabled", True)
        options = placed(options, "http.enabled", False)
        options = placed(options, "grpc.enabled", False)
    if port := environment.get("AIP_HTTP_PORT"):
        options = placed(options, "vertex.port", _read("AIP_HTTP_PORT", PORT.read, port))
    return options


def _cloud_variables(options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    """Return the options with the variables of the clouds whose ports are enabled."""
    if options.sagemaker.enabled:
        for field, (variable, allowed) in _SAGEMAKER.items():
            value = environment.get(variable, "")
            if value and allowed and value not in allowed:
                raise UsageError(
                    f'Bad option: "{variable}".\nInvalid option value. Got {value}',
                    remedy=f"It may be {', '.join(allowed[:-1])} or {allowed[-1]}.",
                    usage=False,
                )
            if value:
                options = placed(options, f"sagemaker.{field}", value)
    if options.vertex.enabled:
        for field, (variable, called) in _VERTEX.items():
            if not environment.get(variable):
                raise UsageError(
                    f"failed to start Vertex AI service: Invalid argument - {called} is not defined for Vertex AI "
                    "endpoint",
                    remedy=f"Set {variable} to a path. Vertex AI does; elsewhere: {variable}=/{variable[4:-6].lower()}",
                    usage=False,
                )
            options = placed(options, f"vertex.{field}", environment[variable])
    return options
