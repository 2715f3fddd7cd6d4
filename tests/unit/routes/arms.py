"""An entry with models that keep the requests that they are given."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from doubles import Caller
from nerite.config.sticky_key import StickyKey
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError, NotFound
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import TensorSpec
from nerite.inference_entry import InferenceEntry
from nerite.regions import SharedMemoryRegions
from nerite.repository.load_waits import LoadWaits
from nerite.routes.table import RouteTable
from nerite.scheduling.weighted_route import RouteArm, WeightedRoute


class FakeVersion:
    """Keeps the requests that it is given."""

    decoupled = generates = False
    runtime_adapters = ()

    def __init__(self, name: str, version: str, dims: int = -1) -> None:
        self.name = name
        self.label = version
        self.usable = True
        self.signature = Signature(name, 8, [SignatureInput("IN", dtypes.BYTES, (dims,))], [])
        self.requests: list[InferenceRequest] = []

    def submit(self, request: InferenceRequest) -> None:
        self.requests.append(request)

    def enqueue(self, requests: Iterable[InferenceRequest]) -> None:
        self.requests += requests


class Entry(InferenceEntry[Any]):
    """An entry for models with the versions 1 and 2."""

    def __init__(self, *models: str, owns: bool = True) -> None:
        self.versions = {(name, number): FakeVersion(name, number) for name in models or ("m",) for number in "12"}
        self.changes = 0
        waits = LoadWaits(60.0, 100)
        super().__init__(SharedMemoryRegions(allowed=False), None, RouteTable(), waits, owns_routes=owns)
        self.routes.on_changed = self._changed

    def _changed(self) -> None:
        self.changes += 1
        self.renew_routes()

    def _running(self, model: str, version: str, namespace: str) -> Any:
        try:
            return self.versions[model, version or "2"]
        except KeyError:
            raise NotFound(f"no {model}:{version}") from None

    @property
    def loadable(self) -> Iterable[str]:
        return ()

    def running_versions(self) -> Iterable[Any]:
        return self.versions.values()

    def version_directory(self, running: Any) -> Path | None:
        return None

    def infer_assigned(self, requests: list[InferenceRequest]) -> None:
        """Enqueue requests of a front, which have one header."""
        self.version_of(requests[0]).enqueue(requests)

    def unload(self, model: str, version: str) -> None:
        del self.versions[model, version]
        self.renew_routes()

    def route(self, *weights: float, sticky: Iterable[str] = (), name: str = "m") -> WeightedRoute:
        arms = tuple(RouteArm("m", str(number), weight) for number, weight in enumerate(weights, 1))
        route = WeightedRoute(name, arms, tuple(map(StickyKey.parse, sticky)))
        self.routes.put(route)
        return route

    def ask(self, head: RequestHeader, text: bytes = b"hello") -> InferenceRequest:
        """Infer with one string, and return the request."""
        request = InferenceRequest(head, [len(text).to_bytes(4, "little") + text], Caller(), 0)
        self.infer(request)
        return request

    def arm(self, head: RequestHeader, text: bytes = b"hello") -> str:
        """Return the version that a request went to."""
        request = self.ask(head, text)
        for version in self.versions.values():
            if request in version.requests:
                return version.label
        raise AssertionError(refusal(request))

    def arms(self, head: RequestHeader, count: int) -> dict[str, int]:
        """Return how many of so many requests went to each version."""
        before = {label: len(version.requests) for (_, label), version in self.versions.items()}
        for _ in range(count):
            self.ask(head)
        return {label: len(each.requests) - before[label] for (_, label), each in self.versions.items()}


def head(model: str = "m", version: str = "", **fields: Any) -> RequestHeader:
    return RequestHeader(model, version, [TensorSpec("IN", dtypes.BYTES, (1, 1))], **fields)


def refusal(request: InferenceRequest) -> NeriteError:
    """Return the error that a request was answered with."""
    sink: Any = request.sink
    while not isinstance(sink, Caller):
        sink = sink.behind
    error = sink.answers[-1][1].error
    assert error is not None
    return error
