"""Names of files that stay within their directory, and those that do not."""

from __future__ import annotations

import pytest

from nerite.core.client_text import check_inside_directory, escapes_directory, is_file_path
from nerite.core.errors import InvalidArgument


@pytest.mark.parametrize("name", ["model.py", "a/b", "a/../b", "./a", "", ".", "..a", "...", "a/..", "a\\..\\..\\b"])
def test_names_within(name: str) -> None:
    assert not escapes_directory(name)
    check_inside_directory(name, f"the file '{name}'", "/m")


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "/a", "//a", "./../a", "a\0b", "../m/1/model.py"])
def test_names_that_lead_out(name: str) -> None:
    assert escapes_directory(name)
    with pytest.raises(InvalidArgument, match=r"^the file must stay within /m$"):
        check_inside_directory(name, "the file", "/m")


@pytest.mark.parametrize(
    ("path", "safe"),
    [
        ("a", True), ("a/b.json", True), ("a b/ü", True), ("", False), ("/a", False),
        ("a//b", False), ("a/../b", False), ("..", False), (".", False), ("a/./b", False), ("a\\b", False),
        ("a\nb", False),
        ("a\0b", False), ("a" * 256, False), ("/".join(["abc"] * 400), False), ("ü" * 130, False),
    ],
)  # fmt: skip
def test_paths_of_files(path: str, safe: bool) -> None:
    assert is_file_path(path) == safe
