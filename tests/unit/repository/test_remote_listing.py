from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from nerite.repository.remote.store import RemoteFile, listing_of

THEN = datetime(2026, 11, 21, 20, 0, 0, tzinfo=UTC)


def file(path: str, size: int = 1, etag: str = "e") -> RemoteFile:
    return RemoteFile(path, f"models/m/{path}", size, etag, THEN)


def test_files_and_directories() -> None:
    found = [file("", 0), file("1", 0), file("1/model.py"), file("2", 0), file("configs", 0), file("configs/a.pbtxt")]
    listing = listing_of([*found, file("empty.txt", 0), file("sub/3", 0)])
    assert [file.path for file in listing.files] == ["1/model.py", "configs/a.pbtxt", "empty.txt", "sub/3"]
    assert listing.directories == ("1", "2", "configs")


@pytest.mark.parametrize("path", ["../other", "1/../../x", "1//x", "./x", "1/.", "a\0b", "a\nb", "a\\..\\b", "a" * 256])
def test_names_that_no_file_can_have(path: str) -> None:
    with pytest.raises(ValueError, match="is not a valid file name"):
        listing_of([file(path)])


def test_a_file_with_others_below_it() -> None:
    with pytest.raises(ValueError, match="is a file, but other objects are below it"):
        listing_of([file("1"), file("1/model.py")])


def test_a_name_that_is_listed_twice() -> None:
    with pytest.raises(ValueError, match="lists the object 'models/m/a' twice"):
        listing_of([file("a"), file("b"), file("a")])


@pytest.mark.parametrize("change", [{"etag": "other"}, {"size": 2}, {"key": "models/m/other"}])
def test_what_makes_another_content(change: dict[str, str | int]) -> None:
    changed = replace(file("a"), **change)
    assert changed.identity != file("a").identity
    assert changed.modified_ns != file("a").modified_ns
    assert listing_of([changed]).identity != listing_of([file("a")]).identity


def test_a_new_time_is_no_new_content_where_the_store_names_contents() -> None:
    later = THEN.replace(hour=21)
    assert replace(file("a"), modified=later).identity == file("a").identity
    assert replace(file("a", etag=""), modified=later).identity != file("a", etag="").identity


def test_the_order_of_a_listing_is_no_matter() -> None:
    one, two = file("a"), file("b")
    assert listing_of([one, two]) == listing_of([two, one])
    assert listing_of([one, two]).identity != listing_of([one]).identity
    assert listing_of([one]).identity != listing_of([one, file("1", 0)]).identity
