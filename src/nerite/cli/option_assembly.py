"""From the values of single flags to ``ServerOptions``: what flags mean together, and which cannot go together.

The checks run in Triton's order, so that of several mistakes the same one is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import unquote

from nerite.cli.errors import BadValue, UsageError, did_you_mean
from nerite.cli.flag_values import METRICS_SETTINGS, PORT, UINT32, integer, trace_level, trace_mode
from nerite.cli.flags import FLAGS
from nerite.config.options import (
    CacheOptions,
    MetricsOptions,
    OpenTelemetryOptions,
    ServerOptions,
    TlsOptions,
    TraceOptions,
)

# What the trace flags, old and new, mean together.

_Reader = Callable[[str], Any]

_GLOBAL: Mapping[str, _Reader] = {"rate": integer, "level": trace_level, "mode": trace_mode, "count": integer}
_TRITON: Mapping[str, _Reader] = {"file": str, "log-frequency": integer}
_BATCH: Mapping[str, _Reader] = dict.fromkeys(
    ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"),
    lambda text: integer(text, UINT32),
)
_OPENTELEMETRY: Mapping[str, _Reader] = {"url": str, "resource": str, **_BATCH}


def trace_options(values: Mapping[str, Any], environment: Mapping[str, str], warnings: list[str]) -> TraceOptions:
    """Return the trace settings; append to ``warnings``. Raises ``UsageError``.

    As in Triton only the settings of the chosen mode are read. OFF in the old flag switches tracing off whatever
    else is given; in the new one it only adds nothing.
    """
    given: dict[str, list[tuple[str, str]]] = {"": [], "triton": [], "opentelemetry": []}
    for mode, setting, value in values.get("trace-config", ()):
        given[mode].append((setting, value))
    options = _general(values, given[""], warnings)
    if options.mode == "triton":
        return _triton(options, values, given["triton"], warnings)
    for flag in ("trace-file", "trace-log-frequency"):
        if flag in values:
            warnings.append(f"Warning: '--{flag}' is deprecated and will be ignored with opentelemetry tracing mode.")
    return replace(options, opentelemetry=_opentelemetry(given["opentelemetry"], environment, warnings))


def _general(values: Mapping[str, Any], settings: list[tuple[str, str]], warnings: list[str]) -> TraceOptions:
    levels: list[Any] = list(values.get("trace-level", ()))
    off = "OFF" in levels
    found = {name: values[f"trace-{name}"] for name in ("rate", "count") if f"trace-{name}" in values}
    for name, value in _read(settings, _GLOBAL, "", warnings):
        if name in ("rate", "level", "count") and f"trace-{name}" in values:
            noun = "level" if name == "level" else f"{name} value"
            warnings.append(_overriding(f"trace-{name}", noun))
        if name == "level":
            levels.extend(value)
        else:
            found[name] = value
    chosen: tuple[Any, ...] = () if off else tuple(dict.fromkeys(level for level in levels if level != "OFF"))
    return TraceOptions(levels=chosen, **found)


def _triton(
    options: TraceOptions, values: Mapping[str, Any], settings: list[tuple[str, str]], warnings: list[str]
) -> TraceOptions:
    file, frequency = values.get("trace-file", ""), values.get("trace-log-frequency", 0)
    for name, value in _read(settings, _TRITON, "triton,", warnings):
        if f"trace-{name}" in values:
            warnings.append(_overriding(f"trace-{name}", name))
        if name == "file":
            file = value
        else:
            frequency = value
    return replace(options, file=file, log_frequency=frequency)


def _opentelemetry(
    settings: list[tuple[str, str]], environment: Mapping[str, str], warnings: list[str]
) -> OpenTelemetryOptions:
    found = _of_environment(environment, warnings)
    resource = dict(OpenTelemetryOptions().resource)
    resource |= _pairs("OTEL_RESOURCE_ATTRIBUTES", environment)
    if environment.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = environment["OTEL_SERVICE_NAME"]
    for name, value in _read(settings, _OPENTELEMETRY, "opentelemetry,", warnings):
        if name == "resource":
            key, equals, text = value.partition("=")
            if not (equals and key):
                raise _bad("--trace-config opentelemetry,resource", f"expects <key>=<value>. Got {value}")
            resource[key] = text
        else:
            found[name] = value
    return OpenTelemetryOptions(resource=resource, **found)


def _of_environment(environment: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    """Return what OpenTelemetry's own variables say: those for traces count before those for everything."""
    found: dict[str, Any] = {}
    for name, read in _BATCH.items():
        variable = f"OTEL_{name.upper()}"
        if environment.get(variable):
            try:
                found[name] = read(environment[variable])
            except BadValue as error:
                raise _bad(variable, str(error)) from None

    def said(name: str) -> tuple[str, str]:
        """Return the variable that has a setting of the exporter, and its value."""
        for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
            if environment.get(variable):
                return variable, environment[variable]
        return "", ""

    variable, url = said("ENDPOINT")
    if url:
        found["url"] = url if "TRACES" in variable else f"{url.rstrip('/')}/v1/traces"
    variable, _ = said("HEADERS")
    if variable:
        found["headers"] = _pairs(variable, environment)
    found["compress"] = said("COMPRESSION")[1] == "gzip"
    found["certificate"] = said("CERTIFICATE")[1]
    variable, timeout = said("TIMEOUT")
    if timeout:
        try:
            found["timeout"] = integer(timeout, UINT32) / 1000
        except BadValue as error:
            raise _bad(variable, str(error)) from None
    variable, protocol = said("PROTOCOL")
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


def _read(
    settings: list[tuple[str, str]], readers: Mapping[str, _Reader], prefix: str, warnings: list[str]
) -> list[tuple[str, Any]]:
    """Read settings in order. One that does not exist is a warning, as Triton passes over it."""
    read: list[tuple[str, Any]] = []
    for name, text in settings:
        if name not in readers:
            hint = did_you_mean(name, readers)
            warnings.append(f"Warning: --trace-config has no setting '{prefix}{name}'. {hint}".rstrip())
            continue
        try:
            read.append((name, readers[name](text)))
        except BadValue as error:
            raise _bad(f"--trace-config {prefix}{name}", str(error)) from None
    return read


def _bad(label: str, text: str) -> UsageError:
    return UsageError(f'Bad option: "{label}".\n{text}')


def _overriding(flag: str, noun: str) -> str:
    return f"Warning: Overriding deprecated '--{flag}' in favor of provided {noun} in --trace-config!"


# No two services on one address and port.


class PortService(NamedTuple):
    """A service that listens, under the name that messages give it."""

    name: str
    address: str
    port: int
    allowed: tuple[int, int] | None = None
    """The ports it leaves to the other services."""


def services(options: ServerOptions) -> list[PortService]:
    """Return the services that are switched on, in the order in which they are compared."""
    http, grpc, metrics = options.http, options.grpc, options.metrics
    sagemaker, vertex = options.sagemaker, options.vertex
    every = (
        (http.enabled, PortService("HTTP", http.address, http.port)),
        (grpc.enabled, PortService("GRPC", grpc.address, grpc.port)),
        (metrics.enabled, PortService("metrics", metrics.address, metrics.port)),
        (
            sagemaker.enabled,
            PortService("SageMaker", sagemaker.address, sagemaker.port, sagemaker.safe_port_range),
        ),
        (vertex.enabled, PortService("Vertex AI", vertex.address, vertex.port)),
    )
    return [service for enabled, service in every if enabled]


def check_ports(options: ServerOptions) -> None:
    """Raise ``UsageError`` for the first two services in each other's way. Port 0 is in nobody's."""
    found = services(options)
    for index, one in enumerate(found):
        # A range speaks about services before and after; without one, each pair is looked at once.
        for other in found if one.allowed else found[index + 1 :]:
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


# What SageMaker and Vertex AI tell a server by its environment.

_SAGEMAKER: Final = {
    "ping_mode": ("SAGEMAKER_TRITON_PING_MODE", ("ready", "live")),
    "inference_type": ("SAGEMAKER_TRITON_INFERENCE_TYPE", ("infer", "generate", "generate_stream")),
    "default_model": ("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ()),
}
"""Options by their variables, with the values that those may have."""
_VERTEX: Final = {"health_route": "AIP_HEALTH_ROUTE", "predict_route": "AIP_PREDICT_ROUTE"}


def cloud_defaults(options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    """Return what holds where no flag says otherwise: on Vertex AI its own port replaces the usual ones."""
    if environment.get("AIP_MODE") == "PREDICTION":
        options = replace(
            options,
            vertex=replace(options.vertex, enabled=True),
            http=replace(options.http, enabled=False),
            grpc=replace(options.grpc, enabled=False),
        )
    port = environment.get("AIP_HTTP_PORT", "")
    if not port:
        return options
    try:
        return replace(options, vertex=replace(options.vertex, port=PORT.read(port)))
    except BadValue as error:
        raise UsageError(f'Bad option: "AIP_HTTP_PORT".\n{error}') from None


def cloud_notes(options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    """Return the options with what only variables say of the ports that are switched on. Raises ``UsageError``."""
    if options.sagemaker.enabled:
        options = replace(options, sagemaker=replace(options.sagemaker, **_sagemaker(environment)))
    if options.vertex.enabled:
        options = replace(options, vertex=replace(options.vertex, **_vertex(environment)))
    return options


def _sagemaker(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for field, (variable, allowed) in _SAGEMAKER.items():
        value = environment.get(variable, "")
        if value and allowed and value not in allowed:
            raise UsageError(
                f'Bad option: "{variable}".\nInvalid option value. Got {value}',
                remedy=f"It may be {', '.join(allowed[:-1])} or {allowed[-1]}.",
                usage=False,
            )
        if value:
            found[field] = value
    return found


def _vertex(environment: Mapping[str, str]) -> dict[str, Any]:
    # In the order in which Triton misses them, and with the name that it calls the first.
    for variable, called in (("AIP_PREDICT_ROUTE", "API_PREDICT_ROUTE"), ("AIP_HEALTH_ROUTE", "AIP_HEALTH_ROUTE")):
        if not environment.get(variable):
            raise UsageError(
                f"failed to start Vertex AI service: Invalid argument - {called} is not defined for Vertex AI endpoint",
                remedy=f"Set {variable} to a path. Vertex AI does; elsewhere: {variable}=/{variable[4:-6].lower()}",
                usage=False,
            )
    return {field: environment[variable] for field, variable in _VERTEX.items()}


Values = Mapping[str, Any]
"""Flag name to value; only what was given."""

_T = TypeVar("_T")


def assemble(values: Values, environment: Mapping[str, str], address: str) -> tuple[ServerOptions, list[str]]:
    """Return the options and the warnings to print. Raises ``UsageError`` for flags that contradict each other.

    ``address`` is where ports listen of which nothing is said. Of the environment only the variables of the clouds and
    of OpenTelemetry are looked at.
    """
    warnings: list[str] = []
    options = _listening(cloud_defaults(ServerOptions(), environment), values.get("address", ""), address)
    for flag in FLAGS:
        if flag.field and flag.key == flag.name and flag.name in values:
            options = _placed(options, flag.field, values[flag.name])
    options = replace(
        options,
        http=replace(options.http, tls=_tls(options.http.tls)),
        grpc=replace(options.grpc, tls=_tls(options.grpc.tls)),
        metrics=_metrics(values, options, warnings),
    )
    options = _repository(values, options, environment)
    options = replace(options, trace=trace_options(values, environment, warnings))
    options = _auto_complete(values, options, warnings)
    options = replace(options, cache=_cache(values, options.cache))
    check_ports(options)
    _check_tls(options)
    _check_devices(options)
    _check_server(values, options)
    return cloud_notes(options, environment), warnings


def _listening(options: ServerOptions, given: str, usual: str) -> ServerOptions:
    """Return the options with the address of every port: what was given for all of them, or else the usual one."""
    address = given or usual
    options = replace(options, http=replace(options.http, address=address), grpc=replace(options.grpc, address=address))
    if not given:  # a cloud reaches its port from outside, always
        return options
    return replace(
        options, sagemaker=replace(options.sagemaker, address=given), vertex=replace(options.vertex, address=given)
    )


def _placed(options: _T, path: str, value: object) -> _T:
    """Return a copy of ``options`` with ``value`` at the dotted ``path``."""
    head, _, rest = path.partition(".")
    change = {head: _placed(getattr(options, head), rest, value) if rest else value}
    changed: _T = replace(cast(Any, options), **change)
    return changed


def _tls(tls: TlsOptions) -> TlsOptions:
    return replace(tls, enabled=tls.enabled or tls.mutual)


def _metrics(values: Values, options: ServerOptions, warnings: list[str]) -> MetricsOptions:
    metrics = options.metrics
    given: Mapping[str, Any] = values.get("metrics-config", {})
    settings = {name: value for name, value in given.items() if name in METRICS_SETTINGS}
    for name in given.keys() - settings.keys():
        warnings.append(
            f"Warning: --metrics-config has no setting '{name}'. {did_you_mean(name, METRICS_SETTINGS)}".rstrip()
        )
    return replace(
        metrics,
        gpu=metrics.gpu and metrics.enabled,
        cpu=metrics.cpu and metrics.enabled,
        address=values.get("metrics-address") or options.http.address,
        **settings,
    )


def _repository(values: Values, options: ServerOptions, environment: Mapping[str, str]) -> ServerOptions:
    repository = options.repository
    if repository.startup_models and repository.control_mode != "explicit":
        raise UsageError("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if repository.control_mode != "poll":
        repository = replace(repository, poll_secs=0)
    if not repository.paths and environment.get("AIP_STORAGE_URI"):
        repository = replace(repository, paths=(environment["AIP_STORAGE_URI"],))
    return replace(options, repository=repository)


def _auto_complete(values: Values, options: ServerOptions, warnings: list[str]) -> ServerOptions:
    strict = values.get("strict-model-config", False)
    if values.get("disable-auto-complete-config", False):
        if values.get("strict-model-config") is False:
            warnings.append(
                "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of "
                "'--disable-auto-complete-config'!"
            )
        strict = True
    return _placed(options, "repository.auto_complete", not strict)


def _cache(values: Values, cache: CacheOptions) -> CacheOptions:
    """Work out the one cache; a second one is refused later, after all other mistakes."""
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


def _check_tls(options: ServerOptions) -> None:
    for protocol, tls in (("http", options.http.tls), ("grpc", options.grpc.tls)):
        if tls.enabled and not (tls.server_cert and tls.server_key):
            raise UsageError(f"--{protocol}-use-ssl needs --{protocol}-server-cert and --{protocol}-server-key")
        if tls.mutual and not tls.root_cert:
            raise UsageError(f"--{protocol}-use-ssl-mutual needs --{protocol}-root-cert")


def _check_devices(options: ServerOptions) -> None:
    for text in _wrong_limits(options.device.load_gpu_limits):
        raise _unbuildable(f"setting model load GPU limit: Invalid argument - {text}")
    for policy in options.device.host_policies:
        if policy.setting not in ("numa-node", "cpu-cores"):
            raise _unbuildable(
                f"setting host policy: Unsupported - Unsupported host policy setting '{policy.setting}' is specified, "
                "supported settings are 'numa-node', 'cpu-cores'"
            )


def _wrong_limits(limits: Mapping[int, float]) -> Iterator[str]:
    for device in sorted(limits):
        if device < 0:
            yield f"expects device ID >= 0, got {device}"
        if not 0.0 <= limits[device] <= 1.0:
            yield f"expects limit fraction to be in range [0.0, 1.0], got {limits[device]:f}"


def _unbuildable(text: str) -> UsageError:
    return UsageError(f"Failed to build Triton option:\nerror: {text}", usage=False)


def _check_server(values: Values, options: ServerOptions) -> None:
    creating = "error: creating server: Invalid argument - "
    if not options.repository.paths:
        raise UsageError(
            f"{creating}--model-repository must be specified",
            remedy="Name the directory your models are in: nerite serve ./models",
            usage=False,
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
