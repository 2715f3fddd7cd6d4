"""Paths to endpoints."""

from __future__ import annotations

import pytest

from nerite.config.options import RESTRICTED_CATEGORIES
from nerite.transports.http.routes import ENDPOINTS, Endpoint, find_route, route_remedy

MODEL = {"model": "m", "version": ""}
VERSION = {"model": "m", "version": "3"}


@pytest.mark.parametrize(
    ("path", "name", "method", "category", "arguments"),
    [
        ("/v2/health/live", "live", "GET", "health", {}),
        ("/v2/health/ready", "ready", "GET", "health", {}),
        ("/v2/models/m/ready", "model_ready", "GET", "health", MODEL),
        ("/v2/models/m/versions/3/ready", "model_ready", "GET", "health", VERSION),
        ("/v2", "server_metadata", "GET", "metadata", {}),
        ("/v2/docs", "docs", "GET", "metadata", {}),
        ("/v2/docs/openapi.json", "openapi", "GET", "metadata", {}),
        ("/v2/models/m", "model_metadata", "GET", "metadata", MODEL),
        ("/v2/models/m/versions/3", "model_metadata", "GET", "metadata", VERSION),
        ("/v2/models/m/infer", "infer", "POST", "inference", MODEL),
        ("/v2/models/m/versions/3/infer", "infer", "POST", "inference", VERSION),
        ("/v2/systemsharedmemory/status", "regions", "GET", "shared-memory", {"region": ""}),
        ("/v2/systemsharedmemory/region/r/register", "register", "POST", "shared-memory", {"region": "r"}),
        ("/v2/systemsharedmemory/unregister", "unregister", "POST", "shared-memory", {"region": ""}),
        ("/v2/cudasharedmemory/region/r/status", "cuda_regions", "GET", "shared-memory", {"region": "r"}),
        ("/v2/cudasharedmemory/region/r/register", "register_cuda", "POST", "shared-memory", {"region": "r"}),
        ("/v2/cudasharedmemory/unregister", "unregister_cuda", "POST", "shared-memory", {"region": ""}),
        ("/v2/models/m/generate", "generate", "POST", "inference", MODEL),
        ("/v2/models/m/versions/3/generate_stream", "generate_stream", "POST", "inference", VERSION),
        ("/v2/models/m/config", "config", "GET", "model-config", MODEL),
        ("/v2/models/m/versions/3/config", "config", "GET", "model-config", VERSION),
        ("/v2/models/m/stats", "statistics", "GET", "statistics", MODEL),
        ("/v2/models/m/versions/3/stats", "statistics", "GET", "statistics", VERSION),
        ("/v2/models/stats", "all_statistics", "GET", "statistics", {}),
        ("/v2/repository/index", "index", "POST", "model-repository", {"repository": ""}),
        ("/v2/repository/r/index", "index", "POST", "model-repository", {"repository": "r"}),
        ("/v2/repository/models/m/load", "load", "POST", "model-repository", {"repository": "", "model": "m"}),
        ("/v2/repository/r/models/m/load", "load", "POST", "model-repository", {"repository": "r", "model": "m"}),
        ("/v2/repository/models/m/unload", "unload", "POST", "model-repository", {"repository": "", "model": "m"}),
        ("/v2/repository/r/models/m/unload", "unload", "POST", "model-repository", {"repository": "r", "model": "m"}),
        ("/v1/models", "openai_models", "GET", "metadata", {}),
        ("/v1/models/m", "openai_model", "GET", "metadata", {"model": "m"}),
        ("/v1/completions", "completions", "POST", "inference", {}),
        ("/v1/chat/completions", "chat_completions", "POST", "inference", {}),
        ("/v1/embeddings", "embeddings", "POST", "inference", {}),
        # Names are taken as they are written.
        ("/v2/models/a%20b/infer", "infer", "POST", "inference", {"model": "a%20b", "version": ""}),
        ("/v2/models/infer/infer", "infer", "POST", "inference", {"model": "infer", "version": ""}),
        ("/v2/models/stats/stats", "statistics", "GET", "statistics", {"model": "stats", "version": ""}),
        ("/v2/models/versions", "model_metadata", "GET", "metadata", {"model": "versions", "version": ""}),
    ],
)
def test_where_a_path_leads(path: str, name: str, method: str, category: str, arguments: dict[str, str]) -> None:
    route = find_route(path)
    assert route is not None
    assert (route.endpoint.name, route.endpoint.methods, route.endpoint.category) == (name, (method,), category)
    assert route.arguments == arguments
    assert category in RESTRICTED_CATEGORIES


@pytest.mark.parametrize(
    ("path", "name", "arguments"),
    [
        ("/v2/trace/setting", "trace", {"model": ""}),
        ("/v2/models/m/trace/setting", "trace", {"model": "m"}),
        ("/v2/logging", "logging", {}),
    ],
)
def test_what_is_told_and_changed_on_one_path(path: str, name: str, arguments: dict[str, str]) -> None:
    route = find_route(path)
    assert route is not None
    assert (route.endpoint.name, route.endpoint.methods, route.arguments) == (name, ("GET", "POST"), arguments)
    assert route.endpoint.category in RESTRICTED_CATEGORIES


@pytest.mark.parametrize(
    "path",
    [
        "",
        "//",
        "/v1",
        "/v2/",
        "/v3",
        "/v2/health",
        "/v2/health/live/",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/models/m/",
        "/v2/models/m/infer/",
        "/v2/models/m/n/infer",
        "/v2/models/m/versions/x/infer",
        "/v2/models/m/versions/-1/infer",
        "/v2/models/m/versions//infer",
        "/v2/models/m/versions/3/4",
        "/v2/repository",
        "/v2/repository/a/b/index",
        "/v2/repository/models/m",
        "/v2/repository/models//load",
        "x/v2",
        "/v2/health/live\n",
        "/v2/docs/",
        "/v2/docs/openapiXjson",
        "/v2/models/m/versions/3/trace/setting",
        "/v2/sharedmemory/status",
    ],
)
def test_paths_that_lead_nowhere(path: str) -> None:
    assert find_route(path) is None


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("live", ("/v2/health/live",)),
        ("infer", ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")),
        ("load", ("/v2/repository/models/{model}/load", "/v2/repository/{repository}/models/{model}/load")),
        ("openapi", ("/v2/docs/openapi.json",)),
    ],
)
def test_paths_of_an_endpoint(name: str, paths: tuple[str, ...]) -> None:
    (endpoint,) = [endpoint for endpoint in ENDPOINTS if endpoint.name == name]
    assert endpoint.paths == paths


def test_an_endpoint_is_in_the_table_once() -> None:
    names = [endpoint.name for endpoint in ENDPOINTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v2/", "/v2"),
        ("/helath", "/health"),
        ("/V2/Health/live", "/v2/health/live"),
        ("/v2/health/live/", "/v2/health/live"),
        ("/v2/model/x", "/v2/models/x"),
        ("/v2//models/echo", "/v2/models/echo"),
        ("/models/echo/infer", "/v2/models/echo/infer"),
        ("/v2/models/echo/version/1/infer", "/v2/models/echo/versions/1/infer"),
        ("/v2/models/echo/generate-stream", "/v2/models/echo/generate_stream"),
        ("/v2/repository/models/echo/laod", "/v2/repository/models/echo/load"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
def test_a_path_that_there_is_not_and_what_was_meant(path: str, meant: str) -> None:
    assert find_route(path) is None
    assert find_route(meant) is not None
    assert route_remedy(path) == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/healthz", "/v2/health/ready"),
        ("/v2/health", "/v2/health/ready"),
        ("/readyz", "/v2/health/ready"),
        ("/v2/models", "/v2/repository/index"),
        ("/favicon.ico", "/v2/docs"),
        ("/v2/models/echo/versions/x/infer", "/v2/docs"),
        ("/v2/models/../x", "/v2/docs"),
    ],
)
def test_a_path_that_there_is_not_and_what_there_is(path: str, told: str) -> None:
    assert find_route(path) is None
    assert told in route_remedy(path)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: str(endpoint.name))
def test_no_endpoint_hides_another(endpoint: Endpoint) -> None:
    """The first that matches is taken, so a literal segment comes before an argument in its place."""
    for path in endpoint.paths:
        found = find_route(path.replace("{version}", "1").replace("{", "").replace("}", ""))
        assert found is not None
        assert found.endpoint.name == endpoint.name
