"""The ids of the requests that the running code is about."""

from __future__ import annotations

import contextvars

import pytest

from doubles import request
from nerite.core.request import at_hand, current_request_ids, request_ids_of


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([], ""),
        (["", ""], ""),
        (["a"], "a"),
        (["a", "", "b"], "a, b"),
        ([str(number) for number in range(8)], "0, 1, 2, 3, 4, 5, 6, 7"),
        ([str(number) for number in range(500)], "0, 1, 2, 3, 4, 5, 6, 7, …"),
    ],
)
def test_told(ids: list[str], told: str) -> None:
    assert request_ids_of(request(id=id) for id in ids) == told


def test_each_context_has_its_own() -> None:
    def work(id: str) -> str:
        at_hand.set([request(id=id)])
        return current_request_ids()

    assert [contextvars.copy_context().run(work, id) for id in ("a", "b")] == ["a", "b"]
    assert current_request_ids() == ""
