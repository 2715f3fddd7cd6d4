from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import InvalidArgument, NotFound, Unavailable
from nerite.repository.catalogue import ModelRecord, version_number
from nerite.repository.version_state import ModelState, VersionState


def record(**states: ModelState) -> ModelRecord:
    """A record with versions ``v1``, ``v2`` … in these states."""
    made = ModelRecord("M")
    for name, state in states.items():
        number = int(name[1:])
        made.states[number] = VersionState(state)
        if state is ModelState.READY:
            running: Any = f"version {number}"
            made.running[number] = running
    made.latest = max(made.running, default=-1)
    return made


def test_without_a_version_the_latest_that_runs() -> None:
    assert record(v1=ModelState.READY, v3=ModelState.READY, v20=ModelState.LOADING).find("") == "version 3"


def test_a_version_by_its_number() -> None:
    of = record(v1=ModelState.READY, v3=ModelState.READY)
    assert of.find("1") == "version 1"
    assert of.find("03") == "version 3"


def test_no_version_runs() -> None:
    with pytest.raises(NotFound) as caught:
        record(v1=ModelState.UNAVAILABLE).find("")
    assert caught.value.message == "Request for unknown model: 'M' has no available versions"


@pytest.mark.parametrize("state", [ModelState.LOADING, ModelState.UNLOADING, ModelState.UNAVAILABLE])
def test_a_version_that_is_not_ready(state: ModelState) -> None:
    with pytest.raises(Unavailable) as caught:
        record(v1=ModelState.READY, v2=state).find("2")
    assert caught.value.message == "Request for unknown model: 'M' version 2 is not at ready state"


def test_a_version_that_is_not_there() -> None:
    for known, ready in (
        (record(v1=ModelState.READY, v3=ModelState.READY), "1, 3"),
        (record(v1=ModelState.LOADING), "none"),
    ):
        with pytest.raises(NotFound) as caught:
            known.find("2")
        assert caught.value.message == (
            f"Request for unknown model: 'M' version 2 is not found (versions that are ready: {ready})"
        )


def test_a_model_is_known_once_a_version_has_a_state() -> None:
    assert not ModelRecord("M").known
    assert record(v1=ModelState.UNAVAILABLE).known


def test_a_model_is_gone_once_all_of_it_leaves() -> None:
    assert not ModelRecord("M").gone
    assert not record(v1=ModelState.LOADING, v2=ModelState.UNLOADING).gone
    assert not record(v1=ModelState.UNAVAILABLE).gone, "its load failed"
    leaving = record(v1=ModelState.READY)
    leaving.going = True
    assert leaving.gone
    left = record(v1=ModelState.UNLOADING)
    assert left.gone
    left.states[1] = VersionState(ModelState.UNAVAILABLE, "unloaded")
    assert left.gone


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("1", 1), ("007", 7), ("9223372036854775807", 2**63 - 1)])
def test_versions_that_are_numbers(text: str, number: int) -> None:
    assert version_number(text) == number


@pytest.mark.parametrize("text", ["x", "1.5", "1x", "9223372036854775808", "1" * 100])
def test_versions_that_are_no_numbers(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        version_number(text)
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


def test_a_negative_version() -> None:
    with pytest.raises(InvalidArgument) as caught:
        version_number("-1")
    assert caught.value.message == "invalid model version specified '-1' , version should be an integral value > 0"


def test_progress_is_the_reason_of_what_loads() -> None:
    of = record(v1=ModelState.READY, v2=ModelState.LOADING)
    for version in (1, 2, 3):
        of.note_progress(version, "making an environment")
    assert {version: state.reason for version, state in of.states.items()} == {1: "", 2: "making an environment"}
