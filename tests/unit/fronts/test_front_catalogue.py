"""What the core tells a front of its models, and whether the front then refuses with the core's own words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doubles import Caller
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.request import CancelReason, InferenceRequest, RequestHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec
from nerite.fronts.catalogue import (
    CatalogueWriter,
    Description,
    FrontVersion,
    follow,
    signature_from_json,
    signature_to_json,
)
from nerite.repository.catalogue import Catalogue, ModelRecord
from nerite.repository.version_state import ModelState, VersionState

SIGNATURES = [
    Signature("m", 0, [], []),
    Signature(
        "é",
        8,
        [
            SignatureInput("A", dtypes.FP32, (-1, 3)),
            SignatureInput("B", dtypes.BYTES, (), optional=True),
            SignatureInput("C", dtypes.INT8, (6,), ragged=True, reshape=(2, 3)),
            SignatureInput("D", dtypes.INT8, (1,), reshape=()),
        ],
        [
            SignatureOutput("O", dtypes.BOOL, (-1,), ("cat", "dog")),
            SignatureOutput("P", dtypes.UINT64, (4,), (), (2, 2)),
        ],
    ),
]


class Core:
    """The channel to the core."""

    def __init__(self) -> None:
        self.called: list[InferenceRequest] = []
        self.cancel_reason = CancelReason.CANCELLED

    def call(self, request: InferenceRequest) -> None:
        self.called.append(request)

    def receive_buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))


def running(number: int, *, decoupled: bool = False, parameters: dict[str, str] | None = None) -> Any:
    """A running version as the core has it."""
    given = parameters or {}
    return SimpleNamespace(
        number=number,
        label=str(number),
        decoupled=decoupled,
        generates=decoupled,
        stream_input="",
        runtime_adapters=["poet"] if decoupled else [],
        usable=True,
        config_json={"parameters": given},
        parameter=given.__getitem__,
        signature=Signature("m", 0, [SignatureInput("IN", dtypes.INT32, (2,))], []),
    )


def ready(record: ModelRecord, **versions: Any) -> None:
    """Have versions run: ``v1=running(...)``."""
    record.running = {int(name[1:]): version for name, version in versions.items()}
    record.states = {number: VersionState(ModelState.READY) for number in record.running}
    record.latest = max(record.running, default=-1)


def names(descriptions: list[Description]) -> list[str]:
    return [each["name"] for each in descriptions]


@pytest.mark.parametrize("signature", SIGNATURES, ids=["empty", "full"])
def test_a_signature_arrives_as_it_was(signature: Signature) -> None:
    arrived = signature_from_json(json.loads(json.dumps(signature_to_json(signature))))
    for name in ("inputs", "max_batch_size", "model_name", "outputs", "required", "uniform"):
        assert getattr(arrived, name) == getattr(signature, name)
    assert [*arrived.inputs] == [*signature.inputs], "checks are made in this order"
    assert all(isinstance(each.dims, tuple) for each in arrived.inputs.values())


def test_only_changes_are_told() -> None:
    core, writes = Catalogue(), CatalogueWriter()
    first, second = core.open("", "first"), core.open("", "second")
    core.open("", "never tried")
    ready(first, v1=running(1))
    ready(second, v1=running(2))
    assert names(writes.changes(core)) == ["first", "second"]
    assert writes.changes(core) == []
    second.states[1] = VersionState(ModelState.UNAVAILABLE, "unloaded")
    (change,) = writes.changes(core)
    assert (change["name"], change["states"]) == ("second", {1: ["UNAVAILABLE", "unloaded"]})
    ready(first, v1=running(3))  # it was loaded anew
    assert names(writes.changes(core)) == ["first"]
    ready(first, v1=first.running[1], v2=running(4))
    assert names(writes.changes(core)) == ["first"]
    first.latest = 1
    assert names(writes.changes(core)) == ["first"]
    assert names(writes.everything()) == ["first", "second"]


def test_a_model_that_is_gone_is_told_once() -> None:
    core, writes = Catalogue(), CatalogueWriter()
    record = core.open("", "m")
    ready(record, v1=running(1))
    front = Front(writes.changes(core))
    core.forget(record)
    changes = writes.changes(core)
    assert names(changes) == ["m"]
    assert writes.changes(core) == writes.everything() == []
    front.follow(changes)
    with pytest.raises(NeriteError, match="'m' is not found"):
        front.catalogue.find("m", "", "")


class Front:
    """A front that is told of changes."""

    def __init__(self, descriptions: list[Description], *, namespacing: bool = False) -> None:
        self.catalogue = Catalogue(namespacing=namespacing)
        self.core: Any = Core()
        self.follow(descriptions)

    def follow(self, descriptions: list[Description]) -> None:
        follow(self.catalogue, descriptions, self.core)

    def find(self, name: str, version: str = "") -> FrontVersion:
        found: Any = self.catalogue.find(name, version, "")
        return found


def test_versions_are_as_described() -> None:
    core, writes = Catalogue(), CatalogueWriter()
    ready(core.open("", "m"), v1=running(1, parameters={"a": "b"}), v2=running(2, decoupled=True))
    brought: Any = SimpleNamespace(polled=SimpleNamespace(directory=Path("/models/m")))
    core.open("", "m").loaded = brought
    front = Front(writes.changes(core))
    latest, first = front.find("m"), front.find("m", "1")
    assert latest is front.find("m", "2")
    assert (latest.name, latest.version, latest.label, latest.number) == ("m", 2, "2", 2)
    assert (latest.runtime_adapters, first.runtime_adapters) == (["poet"], [])
    assert (latest.decoupled, latest.generates, latest.directory) == (True, True, "/models/m/2")
    assert (first.decoupled, first.generates, first.directory) == (False, False, "/models/m/1")
    assert (first.parameter("a"), first.parameter("b"), latest.parameter("a")) == ("b", "", "")
    assert latest.signature.inputs["IN"].dims == (2,)


def test_a_version_that_did_not_change_is_kept() -> None:
    """Routes of headers refer to it."""
    core, writes = Catalogue(), CatalogueWriter()
    record = core.open("", "m")
    ready(record, v1=running(1), v2=running(2))
    front = Front(writes.changes(core))
    first, second = front.find("m", "1"), front.find("m", "2")
    ready(record, v1=record.running[1], v2=running(3))
    front.follow(writes.changes(core))
    assert front.find("m", "1") is first
    assert front.find("m", "2") is not second


def both_say(core: Catalogue, name: str, version: str, *, namespacing: bool = False) -> None:
    """Check that core and front refuse a request alike."""
    front = Front(CatalogueWriter().changes(core), namespacing=namespacing)
    raised: list[Any] = []
    for catalogue in (core, front.catalogue):
        with pytest.raises(NeriteError) as refused:
            catalogue.find(name, version)
        raised.append((type(refused.value), refused.value.message, refused.value.retry_after))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("name", ["m", "n", "modell", "unloaded", "loading", "failed"])
@pytest.mark.parametrize("version", ["", "1", "2", "3", "x", "-1", "9" * 30])
@pytest.mark.parametrize("namespacing", [False, True])
def test_refusals_are_the_cores_own(name: str, version: str, namespacing: bool) -> None:
    core = Catalogue(namespacing=namespacing)
    ready(core.open("", "model"), v1=running(1))
    ready(core.open("", "m"), v4=running(2))
    core.open("", "m").states[2] = VersionState(ModelState.UNAVAILABLE, "broken")
    core.open("", "unloaded").states[1] = VersionState(ModelState.UNAVAILABLE, "unloaded")
    core.open("", "loading").states[1] = VersionState(ModelState.LOADING)
    core.open("", "failed").states[1] = VersionState(ModelState.UNAVAILABLE, "no such file")
    core.open("", "never tried")
    if (name, version) == ("m", ""):
        return  # it is served
    both_say(core, name, version, namespacing=namespacing)


@pytest.mark.parametrize("name", ["twice", "once", "never"])
def test_namespaces_are_the_cores_own(name: str) -> None:
    core = Catalogue(namespacing=True)
    for number, namespace in enumerate(("/a", "/b")):
        ready(core.open(namespace, "twice"), v1=running(number))
        core.open(namespace, "never").states[1] = VersionState(ModelState.UNAVAILABLE, "unloaded")
    ready(core.open("/b", "once"), v1=running(5))
    if name == "once":
        front = Front(CatalogueWriter().changes(core), namespacing=True)
        assert front.find("once").number == 5
        assert front.catalogue.find("twice", "", "/b").number == 1
    else:
        both_say(core, name, "", namespacing=True)


def request_of(caller: Caller, *data: bytes) -> InferenceRequest:
    header = RequestHeader("m", "", [TensorSpec("S", dtypes.BYTES, (1,))])
    return InferenceRequest(header, data, caller, 0)


def test_data_is_checked_before_it_is_sent() -> None:
    core = Catalogue()
    version = running(1)
    version.signature = Signature("m", 0, [SignatureInput("S", dtypes.BYTES, (1,))], [])
    ready(core.open("", "m"), v1=version)
    front = Front(CatalogueWriter().changes(core))
    caller = Caller()
    front.find("m").submit(request_of(caller, b"\x02\0\0\0ab\x01\0\0\0c"))
    ((_, answer, final),) = caller.answers
    assert final
    assert answer.error is not None
    good = request_of(caller, b"\x02\0\0\0ab")
    front.find("m").submit(good)
    assert front.core.called == [good]


def test_reasons_of_cancellations_are_noted_for_the_channel() -> None:
    core = Catalogue()
    ready(core.open("", "m"), v1=running(1))
    front = Front(CatalogueWriter().changes(core))
    version = front.find("m")
    version.given_up(CancelReason.TOO_LATE)
    assert front.core.cancel_reason is CancelReason.TOO_LATE
    buffer = version.receive_buffer(10)
    assert buffer is not None
    assert len(buffer) == 10
