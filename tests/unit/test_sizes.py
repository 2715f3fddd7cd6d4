"""Sizes of memory as people write them."""

from __future__ import annotations

import pytest

from nerite.core.sizes import size_of, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (1024, 1024),
        ("1024", 1024),
        ("16GiB", 16 << 30),
        ("1.5 GiB", 3 << 29),
        ("80GB", 80 * 10**9),
        ("2kB", 2000),
    ],
)
def test_what_people_write(text: object, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize(
    "text", [-1, True, 1.5, None, "", "GiB", "1 gib", "1KB", "1iB", "-1GiB", "1e9", "9" * 30, 2**61]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="must be a size of memory, as in 512MiB or 16GiB"):
        size_of(text)


def test_sizes_for_people() -> None:
    assert [size_text(size) for size in (5, 1 << 10, 3 << 29, 1 << 40)] == ["5 B", "1 KiB", "1.5 GiB", "1 TiB"]
