from __future__ import annotations

import pytest

from nerite.repository.catalogue import ModelFingerprint
from nerite.repository.polling import SETTLE_NS, RepositoryChanges, RepositoryWatch

M = ("", "m")
NOTHING = RepositoryChanges([], [])
LATER = 100 * SETTLE_NS


def looks(size: int, changed_ns: int = 0) -> ModelFingerprint:
    return ModelFingerprint((), {1: (("model.py", size, changed_ns),)})


def test_a_new_model_counts_when_two_looks_saw_the_same() -> None:
    watch = RepositoryWatch()
    assert not watch.restless
    assert watch.compare({M: looks(1)}, {}, [], 0) == NOTHING
    assert watch.restless
    assert watch.compare({M: looks(2)}, {}, [], SETTLE_NS) == NOTHING
    assert watch.compare({M: looks(2)}, {}, [], 2 * SETTLE_NS - 1) == NOTHING
    assert watch.compare({M: looks(2)}, {}, [], 2 * SETTLE_NS) == RepositoryChanges([M], [])
    assert not watch.restless
    assert watch.compare({M: looks(2)}, {M: looks(2)}, [M], 3 * SETTLE_NS) == NOTHING


@pytest.mark.parametrize("changed_ns", [0, 2**62])
def test_the_times_of_files_do_not_matter(changed_ns: int) -> None:
    """A clock that was wrong when they were written, or jumps, must not keep a model from being served."""
    watch = RepositoryWatch()
    assert watch.compare({M: looks(1, changed_ns)}, {}, [], 0) == NOTHING
    assert watch.compare({M: looks(1, changed_ns)}, {}, [], SETTLE_NS) == RepositoryChanges([M], [])


def test_a_load_that_failed_is_not_tried_again_before_something_changes() -> None:
    watch = RepositoryWatch()
    assert watch.compare({M: looks(1)}, {M: looks(1)}, [], LATER) == NOTHING
    watch.compare({M: looks(2)}, {M: looks(1)}, [], LATER)
    assert watch.compare({M: looks(2)}, {M: looks(1)}, [], LATER + SETTLE_NS) == RepositoryChanges([M], [])


def test_a_model_that_vanishes_for_a_moment() -> None:
    watch = RepositoryWatch()
    assert watch.compare({}, {M: looks(1)}, [M], LATER) == NOTHING
    assert watch.restless
    assert watch.compare({M: looks(1)}, {M: looks(1)}, [M], LATER) == NOTHING
    assert watch.compare({}, {M: looks(1)}, [M], LATER) == NOTHING
    assert watch.compare({}, {M: looks(1)}, [M], LATER) == RepositoryChanges([], [M])
    assert not watch.restless


def test_a_model_that_is_gone_and_does_not_run() -> None:
    watch = RepositoryWatch()
    for _ in range(3):
        assert watch.compare({}, {M: looks(1)}, [], LATER) == NOTHING
    assert not watch.restless
