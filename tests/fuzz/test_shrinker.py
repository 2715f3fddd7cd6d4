"""The least of an input that still fails, and the text that it is kept as."""

from __future__ import annotations

import json

import pytest

from fuzz import case as cases
from fuzz import shrinker, surfaces
from fuzz.case import Case
from fuzz.mutators import documents


def test_the_fewest_of_many() -> None:
    asked = []

    def fails(kept: list[int]) -> bool:
        asked.append(kept)
        return {17, 801} <= set(kept)

    assert shrinker.run(shrinker.fewest(range(1_000)), fails) == [17, 801]
    assert len(asked) < 120


def test_nothing_is_needed() -> None:
    assert shrinker.run(shrinker.fewest([1, 2, 3]), lambda kept: True) == []
    assert shrinker.run(shrinker.fewest([]), lambda kept: True) == []
    assert shrinker.run(shrinker.fewest([1, 2, 3]), lambda kept: False) == [1, 2, 3]


def test_the_simplest_tree() -> None:
    document = {"inputs": [{"name": "a" * 100, "shape": [1, 2, -5]}, {"name": "b"}], "id": "x", "other": {"deep": [[]]}}

    def fails(tree: object) -> bool:
        return b"-5" in documents.dumped(tree)

    tree = shrinker.run(shrinker.simplest(documents.thawed(document)), fails)
    assert json.loads(documents.dumped(tree)) == {"inputs": [{"shape": [-5]}]}


def test_texts_are_shrunk_inside_of_trees() -> None:
    tree = shrinker.run(
        shrinker.simplest(documents.thawed({"a": "some\ud800thing"})), lambda tree: b"ud800" in documents.dumped(tree)
    )
    assert documents.dumped(tree) == b'{"a":"\\ud800"}'


@pytest.mark.parametrize(
    ("parts", "sign", "least"),
    [
        ((b"POST /x\nA: b", b'{"a": [1, 2, {"b": -7}], "c": 1}'), b"-7", (b"POST /x", b'{"a":[{"b":-7}]}')),
        ((b"POST /x", b"\x00\x01\xff\x02"), b"\xff", (b"POST /x", b"\xff")),
        ((b"POST /x", b'{"a": not JSON \xff'), b"\xff", (b"POST /x", b"\xff")),
        ((b"POST /x", b'{"a":' + b"[" * 700 + b"-7" + b"]" * 700 + b"}"), b"-7", (b"POST /x", b"-7")),
        ((b"/call", b"one", b"two\xff", b"three"), b"\xff", (b"/call", b"\xff")),
        ((b"/call\na: b\nc: \xff", b"one"), b"c: \xff", (b"/call\nc: \xff",)),
    ],
)
def test_an_input(parts: tuple[bytes, ...], sign: bytes, least: tuple[bytes, ...]) -> None:
    fails = lambda case: any(sign in part for part in case.parts)  # noqa: E731
    made = shrinker.run(shrinker.least(Case("json", parts, 5), 1), fails)
    assert made == Case("json", least, 5)


def test_the_text_of_a_case_comes_back() -> None:
    kept = [Case("http", (b"GET / HTTP/1.1\r\n\r\n", b"\0\xff\\n\xc3\xa9", b"")), Case("policy", (b"a = 1\n",))]
    text = cases.written(kept, "what\nis wrong", "guarded")
    assert text.isascii()
    assert cases.read(text) == cases.Kept(tuple(kept), "guarded")
    with pytest.raises(ValueError, match="line 1 is no"):
        cases.read("part: x")


def test_the_corpus_can_be_read() -> None:
    for name, kept in cases.corpus():
        assert kept.cases, name
        assert all(len(each.parts) >= surfaces.SURFACES[each.surface].fixed for each in kept.cases), name
