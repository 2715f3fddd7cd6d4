from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import InvalidArgument, NeriteError, NotFound
from nerite.repository.catalogue import Catalogue
from nerite.repository.version_state import ModelState, VersionState

VERSION: Any = object()


def catalogue(*models: tuple[str, str, bool], namespacing: bool = True) -> Catalogue:
    """Models by namespace and name, each tried, and running or not."""
    made = Catalogue(namespacing=namespacing)
    for namespace, name, runs in models:
        record = made.open(namespace, name)
        record.states[1] = VersionState(ModelState.READY if runs else ModelState.UNAVAILABLE)
        if runs:
            record.running[1] = VERSION
            record.latest = 1
    return made


def test_one_that_runs() -> None:
    of = catalogue(("/a", "m", True), ("/b", "other", True))
    assert of.meant("m").namespace == "/a"
    assert of.find("m", "") is VERSION
    assert of.find("m", "1") is VERSION


def test_the_one_that_runs() -> None:
    assert catalogue(("/a", "m", False), ("/b", "m", True)).meant("m").namespace == "/b"


def test_two_that_run() -> None:
    with pytest.raises(
        InvalidArgument, match="There are 2 identifiers of model 'm' in global map, model namespace must"
    ):
        catalogue(("/a", "m", True), ("/b", "m", True)).meant("m")


def test_a_namespace_says_which() -> None:
    of = catalogue(("/a", "m", False), ("/b", "m", True), ("/c", "m", True))
    assert of.find("m", "", "/c") is of.find("m", "1", "/b") is VERSION
    with pytest.raises(NotFound, match=r"^Request for unknown model: 'm' has no available versions$"):
        of.find("m", "", "/a")
    with pytest.raises(InvalidArgument, match=r"^Request for unknown model: 'm' is not found$"):
        of.find("m", "", "/d")


def test_none_that_runs() -> None:
    with pytest.raises(NotFound, match=r"^Identifier of model 'm' is not found in global map$"):
        catalogue(("/a", "m", False)).meant("m")


@pytest.mark.parametrize(("namespacing", "kind"), [(False, NotFound), (True, InvalidArgument)])
def test_unknown(namespacing: bool, kind: type[NeriteError]) -> None:
    of = catalogue(namespacing=namespacing)
    of.open("", "opened, and never tried")
    for name in ("none", "opened, and never tried"):
        with pytest.raises(kind, match=f"^Request for unknown model: '{name}' is not found$"):
            of.meant(name)


def test_a_name_that_is_nearly_one_that_is_known() -> None:
    of = catalogue(("", "resnet_50", True), ("", "bert", False), namespacing=False)
    of.open("", "resnet_51")  # never tried
    for _ in range(2):
        with pytest.raises(NotFound, match=r"unknown model: 'resnet' is not found \(did you mean 'resnet_50'\?\)$"):
            of.meant("resnet")
    record = of.open("", "resnets")
    record.states[1] = VersionState(ModelState.READY)
    with pytest.raises(NotFound, match=r"\(did you mean 'resnets'\?\)$"):
        of.meant("resnet")
    of.forget(record)
    with pytest.raises(NotFound, match=r"\(did you mean 'resnet_50'\?\)$"):
        of.meant("resnet")


def test_without_namespaces_what_does_not_run_is_still_known() -> None:
    of = catalogue(("", "m", False), namespacing=False)
    assert of.meant("m").name == "m"


def test_order() -> None:
    of = catalogue(("/b", "a", True), ("/a", "z", True), ("/a", "b", False))
    assert [(record.namespace, record.name) for record in of] == [("/a", "b"), ("/a", "z"), ("/b", "a")]


def test_a_record_is_opened_once() -> None:
    of = Catalogue()
    assert of.record("", "m") is None
    assert of.open("", "m") is of.open("", "m") is of.record("", "m")
    assert of.all_named("m") == [of.open("", "m")]
    assert of.all_named("none") == []
