from __future__ import annotations

from pathlib import Path

from nerite.repository.repositories import FoldersInUse

ONE, TWO = Path("/one"), Path("/two")


def nothing() -> None:
    pass


def other() -> None:
    pass


def test_the_last_user_leaves() -> None:
    folders = FoldersInUse()
    folders.take(ONE, "a load", nothing)
    folders.use(ONE, "version 1")
    assert folders.leave("a load") == []
    assert folders.leave("version 1") == [nothing]
    assert folders.leave("version 1") == []


def test_what_was_taken_again_is_given_back_as_often() -> None:
    folders = FoldersInUse()
    folders.take(ONE, "a load", nothing)
    folders.use(ONE, "version 1")
    assert folders.leave("a load") == []
    for _ in range(3):
        folders.take(ONE, "another load", nothing)
        assert folders.leave("another load") == [nothing]
    assert folders.leave("version 1") == [nothing]


def test_one_user_of_several() -> None:
    folders = FoldersInUse()
    folders.take(ONE, "a load", nothing)
    folders.take(TWO, "a load", other)
    folders.use(TWO, "version 1")
    assert folders.leave("a load") == [nothing]
    assert folders.leave("version 1") == [other]
