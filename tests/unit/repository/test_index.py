from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nerite.repository.catalogue import Catalogue, index_entries
from nerite.repository.version_state import ModelState, VersionState

READY = VersionState(ModelState.READY)
UNLOADED = VersionState(ModelState.UNAVAILABLE, "unloaded")


def catalogue(**models: dict[int, VersionState]) -> Catalogue:
    made = Catalogue()
    for name, states in models.items():
        record = made.open("", name)
        record.states.update(states)
    return made


def test_every_version_of_every_model_in_order() -> None:
    known = catalogue(b={3: READY, 1: UNLOADED})
    versions = [
        {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "b", "version": "3", "state": "READY"},
    ]
    assert index_entries({"": ["b", "a"]}, known) == [{"name": "a"}, *versions]
    assert index_entries({"": ["b", "a"]}, known, ready_only=True) == versions[1:]


def test_what_cannot_be_read() -> None:
    known = Catalogue()
    known.open("", "a").unreadable = "config.pbtxt:1:1: what is this"
    (entry,) = index_entries({"": ["a"]}, known)
    assert entry == {"name": "a", "state": "UNAVAILABLE", "reason": "config.pbtxt:1:1: what is this"}
    assert index_entries({"": ["a"]}, known, ready_only=True) == []


@pytest.mark.parametrize("ready_only", [False, True])
def test_not_what_only_runs(ready_only: bool) -> None:
    known = catalogue(a={1: READY}, b={1: READY})
    assert index_entries({"": ["a"]}, known, ready_only=ready_only) == [{"name": "a", "version": "1", "state": "READY"}]


@pytest.mark.parametrize("ready_only", [False, True])
def test_what_is_in_several_repositories(ready_only: bool) -> None:
    (entry,) = index_entries({"": ["a", "a"]}, catalogue(a={1: READY}), ready_only=ready_only)
    assert entry == {"name": "a", "state": "UNAVAILABLE", "reason": "model appears in two or more repositories"}


def test_namespaces_one_after_the_other() -> None:
    known = Catalogue(namespacing=True)
    known.open("/second", "a").states[1] = READY
    assert index_entries({"/second": ["a"], "/first": ["b", "a"]}, known) == [
        {"name": "a"},
        {"name": "b"},
        {"name": "a", "version": "1", "state": "READY"},
    ]


def test_a_version_without_a_number() -> None:
    assert index_entries({"": ["a"]}, catalogue(a={-1: UNLOADED})) == [
        {"name": "a", "state": "UNAVAILABLE", "reason": "unloaded"}
    ]


def test_the_content_of_what_is_ready() -> None:
    known = catalogue(a={1: READY, 2: UNLOADED})
    record: Any = known.record("", "a")
    record.running.update({1: SimpleNamespace(content="sha256:1"), 2: SimpleNamespace(content="sha256:2")})
    assert [entry.get("content_hash") for entry in index_entries({"": ["a"]}, known)] == ["sha256:1", None]
