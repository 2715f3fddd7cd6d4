"""Where Vertex AI's requests lead, before anybody is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from nerite.config.options import VertexOptions
from nerite.core.errors import InvalidArgument
from nerite.core.work_loop import WorkLoops
from nerite.routes.table import RouteTable
from nerite.transports.access import AccessKeys, Lock
from nerite.transports.clouds import VertexRouter, default_model
from nerite.transports.http import head
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.router import Router

OPTIONS = VertexOptions(health_route="/health", predict_route="/v1/models/7:predict")


class FakeServer:
    """Has the models that it is told to have, all of them ready."""

    routes = RouteTable()
    loops = WorkLoops()

    def __init__(self, *names: str) -> None:
        self.names = names

    async def repository_index(self, ready_only: bool) -> list[dict[str, str]]:
        assert ready_only
        return [{"name": name, "version": "1"} for name in self.names]


def target(
    path: str,
    redirect: str | None = None,
    method: str = "POST",
    metrics: Any = None,
    locks: Mapping[str, Lock] = MappingProxyType({}),
) -> HttpTarget:
    server: Any = FakeServer()
    router = VertexRouter(Router(server, max_input_size=100, locks=locks), OPTIONS, "default", metrics)
    line = "" if redirect is None else f"X-Vertex-AI-Triton-Redirect: {redirect}\r\n"
    return router.target(head.parse_head(f"{method} {path} HTTP/1.1\r\n{line}\r\n".encode()))


def status(found: HttpTarget) -> int:
    answer = found.refusal or found.answer
    return 0 if answer is None else answer.status


def redirected(to: str, method: str = "POST") -> HttpTarget:
    return target(OPTIONS.predict_route, to, method)


def test_predictions_go_to_the_default_model() -> None:
    reader = target(OPTIONS.predict_route).reader
    assert reader is not None
    assert (reader.model_name, reader.model_version) == ("default", "")
    reader = redirected("v2/models/other/versions/3/infer").reader
    assert reader is not None
    assert (reader.model_name, reader.model_version) == ("other", "3")


def test_what_is_compressed_is_left_as_it_is() -> None:
    found = redirected("v2/models/other/infer")
    assert (found.encoding, found.accepts) == ("", "")


@pytest.mark.parametrize("path", ["/", "/v2", "/health/", "/v1/models/7:predict/x", "/v1/models/7xpredict"])
def test_other_paths(path: str) -> None:
    assert status(target(path)) == 400


@pytest.mark.parametrize(
    "to",
    ["v2", "v2/health/live", "v2/models/m", "v2/models/stats", "v2/repository/index", "v2/systemsharedmemory/status"],
)
def test_a_header_leads_to_what_looks(to: str) -> None:
    found = redirected(to)
    assert status(found) == 0
    assert found.call is not None
    assert status(redirected(to, method="GET")) == 405


@pytest.mark.parametrize(
    "to",
    [
        "v2/repository/models/m/load",
        "v2/repository/models/m/unload",
        "v2/systemsharedmemory/region/r/register",
        "v2/systemsharedmemory/unregister",
        "v2/cudasharedmemory/region/r/register",
        "v2/cudasharedmemory/unregister",
    ],
)
def test_no_header_leads_to_what_changes(to: str) -> None:
    assert status(redirected(to)) == 403


@pytest.mark.parametrize("to", ["", "/v2", "v2/", "v2/nothing", "v2/logging", "v2/models/m/generate", "metrics"])
def test_a_header_that_leads_nowhere(to: str) -> None:
    """To the metrics neither, where they are switched off."""
    assert status(redirected(to)) == 400


def test_the_metrics() -> None:
    assert target(OPTIONS.predict_route, "metrics", metrics=object()).call is not None
    locks = {"metrics": Lock("key", AccessKeys([b"secret"]))}
    assert status(target(OPTIONS.predict_route, "metrics", metrics=object(), locks=locks)) == 403


@pytest.mark.parametrize(("models", "named"), [(["only"], ""), (["other", "only"], "only")])
def test_the_default_model(models: list[str], named: str) -> None:
    server: Any = FakeServer(*models)
    assert asyncio.run(default_model(server, named)) == "only"


@pytest.mark.parametrize(
    ("models", "named", "text"),
    [
        ([], "", "Expect the model repository contains only a single model if default model is not specified\n    0 "),
        (["a", "b"], "", "Expect the model repository contains only a single model if default model is not"),
        (["a"], "b", "Expect the default model 'b' is loaded"),
    ],
)
def test_no_default_model(models: list[str], named: str, text: str) -> None:
    server: Any = FakeServer(*models)
    with pytest.raises(InvalidArgument) as caught:
        asyncio.run(default_model(server, named))
    assert caught.value.message.startswith(f"failed to start Vertex AI service: Invalid argument - {text}")
