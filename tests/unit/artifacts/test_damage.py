"""What is said of files that are plainly not what a model needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.artifacts.damage import damage_explained
from nerite.core.errors import Internal, NeriteError, Unavailable

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456\n"


def refusal(folder: Path, filename: str, error: NeriteError | None = None) -> str:
    """Return the refusal of a version whose backend says ``error``."""
    with pytest.raises(NeriteError) as raised, damage_explained(folder, filename):
        if error is not None:
            raise error
    assert isinstance(raised.value, type(error) if error is not None else Internal)
    return raised.value.message


@pytest.mark.parametrize(
    ("filename", "file"),
    [
        ("model.py", "model.py"),
        ("model.onnx", "model.onnx"),
        ("model.xml", "model.bin"),
        ("model.onnx", "model.onnx.data"),
        ("model.savedmodel", "model.savedmodel/saved_model.pb"),
        ("model.savedmodel", "model.savedmodel/variables/variables.index"),
    ],
)
def test_a_pointer_of_git_lfs_is_not_opened(tmp_path: Path, filename: str, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(POINTER)
    assert refusal(tmp_path, filename) == (
        f"'{path}' is a Git LFS pointer, not the file itself. Fetch the file, in its Git repository: git lfs "
        f"pull --include '{path.name}'"
    )


@pytest.mark.parametrize(("filename", "file"), [("model.py", "model.pt"), ("model.onnx", "weights.bin"), ("", "x.ubj")])
def test_a_pointer_that_may_not_matter_is_told_where_something_fails(tmp_path: Path, filename: str, file: str) -> None:
    (tmp_path / (filename or file)).touch()
    (tmp_path / file).write_bytes(POINTER)
    with damage_explained(tmp_path, filename):
        pass
    told = refusal(tmp_path, filename, Internal("it fails"))
    assert told.startswith(f"it fails. '{tmp_path / file}' is a Git LFS pointer, not the file")


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "the file is empty. Save the model again, or copy the file again."),
        (b"<!DOCTYPE html><html>", "this is a web page, not a model. The link leads to a page about the file, or"),
        (b"\x08\x08\x3a\xff\x01abc", "the file is truncated: 252 bytes are missing. Copy or download it again and"),
    ],
)
def test_a_refusal_goes_on_with_what_is_wrong(tmp_path: Path, content: bytes, note: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert refusal(tmp_path, path.name, Internal("it fails")).startswith(f"it fails. {path}: {note}")


def test_a_model_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "resnet.onnx").touch()
    (tmp_path / "notes.txt").touch()
    assert refusal(tmp_path, "model.onnx", Unavailable("it is not there")) == (
        "it is not there. Found 'resnet.onnx' instead: rename it to model.onnx, or set default_model_filename: "
        '"resnet.onnx"'
    )
    assert refusal(tmp_path, "model.pt", Unavailable("it is not there")) == "it is not there"
    assert refusal(tmp_path / "nowhere", "model.pt", Unavailable("it is not there")) == "it is not there"


def test_a_refusal_of_files_that_are_right_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1\n")
    assert refusal(tmp_path, "model.py", Internal("it fails")) == "it fails"
