"""From the values of single flags to ``ServerOptions``: what flags mean together, and which cannot go together.

The checks run in Triton's order, so that of several mistakes the same one is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from nerite.cli import clouds
from nerite.cli.compound import METRICS_SETTINGS
from nerite.cli.flags import FLAGS
from nerite.cli.ports import check_ports
from nerite.cli.suggestion import did_you_mean
from nerite.cli.tracing import trace_options
from nerite.cli.usage_error import UsageError
from nerite.config.options import CacheOptions, MetricsOptions, ServerOptions, TlsOptions

Values = Mapping[str, Any]
"""Flag name to value; only what was given."""

_T = TypeVar("_T")


def assemble(values: Values, environment: Mapping[str, str], address: str) -> tuple[ServerOptions, list[str]]:
    """Return the options and the warnings to print. Raises ``UsageError`` for flags that contradict each other.

    ``address`` is where ports listen of which nothing is said. Of the environment only the variables of the clouds and
    of OpenTelemetry are looked at.
    """
    warnings: list[str] = []
    options = _listening(clouds.defaults(ServerOptions(), environment), values.get("address", ""), address)
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
    return clouds.told(options, environment), warnings


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
