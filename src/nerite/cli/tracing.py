"""What the trace flags, old and new, mean together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from nerite.cli.compound import trace_level, trace_mode
from nerite.cli.kinds import UINT32, integer
from nerite.cli.suggestion import did_you_mean
from nerite.cli.usage_error import BadValue, UsageError
from nerite.config.options import OpenTelemetryOptions, TraceOptions

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
