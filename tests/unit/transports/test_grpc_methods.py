"""Loads and unloads over gRPC: what reaches the server. What the other methods answer is asked of a running server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.message import Message

from doubles import Incident
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.routes.table import RouteTable
from nerite.transports.grpc.methods import GrpcAdministration
from nerite.wire import grpc_service as wire

SERVICE = "/inference.GRPCInferenceService/"


class FakeServer:
    """Keeps the loads and unloads that it is asked for; raises what it is told to raise."""

    routes = RouteTable()

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        self.raises: Exception | None = None

    async def load_for_client(self, model: str, parameters: Mapping[str, Any]) -> None:
        self.asked.append(("load", model, parameters))
        if self.raises is not None:
            raise self.raises

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        self.asked.append(("unload", model, parameters))


def call(server: FakeServer, method: str, request: Message) -> Message | NeriteError:
    """Return the one answer."""
    asked: Any = server
    answers: list[Message | NeriteError] = []
    work = GrpcAdministration(asked).handler(SERVICE + method)(request, answers.append)
    assert work is not None
    asyncio.run(work)
    (answer,) = answers
    return answer


def load(server: FakeServer, **parameters: Mapping[str, Any]) -> Message | NeriteError:
    return call(server, "RepositoryModelLoad", wire.RepositoryModelLoadRequest(model_name="m", parameters=parameters))


def unload(server: FakeServer, **parameters: Mapping[str, Any]) -> Message | NeriteError:
    request = wire.RepositoryModelUnloadRequest(model_name="m", parameters=parameters)
    return call(server, "RepositoryModelUnload", request)


def test_a_load() -> None:
    server = FakeServer()
    assert load(server) == wire.RepositoryModelLoadResponse()
    load(server, **{"config": {"string_param": "{}"}, "file:1/model.py": {"bytes_param": b"x"}})
    assert server.asked == [("load", "m", {}), ("load", "m", {"config": "{}", "file:1/model.py": b"x"})]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("colour", {"string_param": "red"}, "unrecognized load parameter 'colour'. "),
        ("config", {"int64_param": 1}, "invalid value type for load parameter 'config', expected string_param."),
        ("config", {}, "invalid value type for load parameter 'config', expected string_param."),
        ("file:x", {"string_param": "x"}, "invalid value type for load parameter 'file:x', expected bytes_param."),
    ],
)
def test_a_load_with_parameters_that_cannot_be(name: str, value: dict[str, Any], told: str) -> None:
    server = FakeServer()
    refusal = load(server, **{name: value})
    assert isinstance(refusal, InvalidArgument)
    assert refusal.message.startswith(told)
    assert server.asked == []


def test_an_unload() -> None:
    server = FakeServer()
    assert unload(server) == wire.RepositoryModelUnloadResponse()
    unload(server, unload_dependents={"bool_param": True}, colour={"int64_param": 1})
    assert server.asked == [("unload", "m", {}), ("unload", "m", {"unload_dependents": True})]


@pytest.mark.parametrize("value", [{"string_param": "yes"}, {}])
def test_an_unload_with_dependents_that_are_no_boolean(value: dict[str, Any]) -> None:
    server = FakeServer()
    refusal = unload(server, unload_dependents=value)
    assert isinstance(refusal, InvalidArgument)
    assert refusal.message == "invalid value type for 'unload_dependents' parameter, expected bool_param."
    assert server.asked == []


def test_one_repository_of_several() -> None:
    request = wire.RepositoryModelLoadRequest(repository_name="r", model_name="m")
    assert isinstance(call(FakeServer(), "RepositoryModelLoad", request), Unsupported)


def test_a_mistake_of_ours_is_told(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    server.raises = ValueError("a mistake")
    refusal = load(server)
    assert isinstance(refusal, Internal)
    assert refusal.message == Incident()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
