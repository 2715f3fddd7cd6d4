"""Names of files that stay within their directory, and those that do not."""

from __future__ import annotations

import pytest

from nerite.core.errors import InvalidArgument
from nerite.core.file_names import check_within, leads_out


@pytest.mark.parametrize("name", ["model.py", "a/b", "a/../b", "./a", "", ".", "..a", "...", "a/..", "a\\..\\..\\b"])
def test_names_within(name: str) -> None:
    assert not leads_out(name)
    check_within(name, f"the file '{name}'", "/m")


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "/a", "//a", "./../a", "a\0b", "../m/1/model.py"])
def test_names_that_lead_out(name: str) -> None:
    assert leads_out(name)
    with pytest.raises(InvalidArgument, match=r"^the file must stay within /m$"):
        check_within(name, "the file", "/m")
