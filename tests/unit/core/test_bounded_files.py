"""Files of models: read if they are plain and of bounded size; nothing else is waited for or fills the memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nerite.core.bounded_files import read_bounded, read_json


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b'{"a": [1]}')
    assert read_bounded(file, 10) == b'{"a": [1]}'
    assert read_json(file) == {"a": [1]}
    (tmp_path / "link").symlink_to(file)
    assert read_json(tmp_path / "link") == {"a": [1]}


def test_what_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(11))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name, text in (
        ("large", "it has 11 bytes, and at most 10 are read"),
        ("pipe", "it is not a regular file"),
        ("endless", "it is not a regular file"),
        (".", "Is a directory"),
        ("missing", "No such file"),
    ):
        with pytest.raises(OSError, match=text):
            read_bounded(tmp_path / name, 10)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[", "\0", '{"a": 1' + "0" * 5000 + "}"])
def test_documents_that_are_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=r"too deeply|Expecting|Exceeds"):
        read_json(tmp_path / "file")
