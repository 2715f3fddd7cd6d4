"""AccessKeys: what is in a file, and when it counts."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from nerite.config.flag import RestrictedKey
from nerite.core.errors import InvalidArgument
from nerite.transports.access import (
    AccessKeys,
    KeyFile,
    KeyFileChange,
    Lock,
    check_key_files,
    locks_of,
    open_files,
    parse_key_file,
)

ONE = KeyFileChange((b"one",))
TWO = KeyFileChange((b"one", b"two"))
GONE = KeyFileChange((), "is gone")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (b"one", (b"one",)),
        (b"one\n", (b"one",)),
        (b"one\r\ntwo\r\n", (b"one", b"two")),
        (b"# last week's\n\n  one \n\t\n#two\nthr#ee\n", (b"one", b"thr#ee")),
        (b"Bearer a b\n", (b"Bearer a b",)),
        ("schlüssel".encode(), ("schlüssel".encode(),)),
    ],
)
def test_keys_in_a_text(text: bytes, keys: tuple[bytes, ...]) -> None:
    assert parse_key_file(text) == KeyFileChange(keys)


@pytest.mark.parametrize("text", [b"", b"\n \n", b"# nothing\n"])
def test_a_text_without_keys(text: bytes) -> None:
    assert parse_key_file(text) == KeyFileChange((), "contains no keys")


def test_what_opens_a_lock() -> None:
    lock = Lock("X-Key", AccessKeys([b"one", b"two"]))
    assert [lock.opens(given) for given in (b"one", b"two")] == [True, True]
    assert [lock.opens(given) for given in (None, b"", b"on", b"one ", b"One", b"three")] == [False] * 6


def test_a_change_counts_when_it_was_seen_twice() -> None:
    file = KeyFile("keys", ONE)
    assert not file.see(ONE)
    assert not file.see(TWO)
    assert not file.include(b"two")
    assert file.see(TWO)
    assert file.include(b"two")
    assert file.news() == "the key file 'keys' was read: 2 keys in force"
    assert not file.see(TWO)


def test_half_a_key_never_counts() -> None:
    file = KeyFile("keys", ONE)
    for found in (KeyFileChange((), "contains no keys"), KeyFileChange((b"tw",)), KeyFileChange((b"two",))):
        assert not file.see(found)
        assert file.include(b"one")
    assert file.see(KeyFileChange((b"two",)))
    assert not file.include(b"one")
    assert not file.include(b"tw")


def test_the_last_good_keys_stay_while_the_file_is_gone() -> None:
    file = KeyFile("keys", TWO)
    assert not file.see(GONE)
    assert file.see(GONE)
    assert file.include(b"two")
    assert file.news() == (
        "the key file 'keys' is gone. It must contain one key per line; empty lines and lines starting with '#' "
        "are ignored. Its last valid content (2 keys) stays in force"
    )
    assert not file.see(GONE)
    assert not file.see(ONE)
    assert file.see(ONE)
    assert (file.problem, file.include(b"two")) == ("", False)
    assert file.news() == "the key file 'keys' was read: 1 key in force"


def test_a_file_that_was_away_between_two_looks_is_no_news() -> None:
    file = KeyFile("keys", ONE)
    assert [file.see(found) for found in (GONE, ONE, ONE, GONE, ONE)] == [False] * 5


def test_looks_at_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert check_key_files(str(path)).problem == "cannot be read: No such file or directory"
    assert check_key_files(str(tmp_path)).problem == "is not a regular file"
    path.write_bytes(b"x" * 70_000)
    assert check_key_files(str(path)).problem == "is larger than 65536 bytes"
    path.write_text("one\n")
    assert check_key_files(str(path)) == ONE


@pytest.mark.parametrize(("text", "problem"), [(None, "cannot be read: No such file"), ("# none", "contains no keys")])
def test_at_the_start_there_must_be_keys(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        open_files([RestrictedKey("x-key", f"@{path}")])
    assert caught.value.message.startswith(f"cannot restrict access: the key file '{path}' {problem}")


def test_a_file_is_shared_by_all_that_name_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one")
    restricted = {
        "health": RestrictedKey("X-Key", f"@{path}"),
        "metadata": RestrictedKey("X-Other", f"@{path}"),
        "inference": RestrictedKey("X-Key", "literal"),
    }
    files = open_files(restricted.values())
    (file,) = files.values()
    made = locks_of(restricted, files)
    assert made["health"] == ("X-Key", file)
    assert made["metadata"] == ("X-Other", file)
    assert made["inference"].opens(b"literal")
    assert not made["inference"].opens(b"one")


def test_the_time_of_a_look_does_not_tell_which_key_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(key: bytes, given: bytes) -> bool:
        compared.append(key)
        return hmac.compare_digest(key, given)

    monkeypatch.setattr("nerite.transports.access.compare_digest", compare)
    for given in (b"one", b"two", b"three"):
        AccessKeys([b"one", b"two"]).include(given)
    assert compared == [b"one", b"two"] * 3
