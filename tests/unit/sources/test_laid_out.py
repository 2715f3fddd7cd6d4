"""The repository that ``nerite serve ORG/NAME`` serves, and what arguments become of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nerite.core.errors import AlreadyExists, InvalidArgument
from nerite.sources.fetching import FetchedModel
from nerite.sources.serving import lay_out, named_models, served_name


def openvino_files(folder: Path) -> Path:
    folder.mkdir()
    for name in ("openvino_model", "openvino_tokenizer", "openvino_detokenizer"):
        (folder / f"{name}.xml").write_text("<net/>")
        (folder / f"{name}.bin").write_bytes(b"x")
    (folder / "config.json").write_text("{}")
    return folder


def test_the_directory_itself_is_the_version(tmp_path: Path) -> None:
    found = FetchedModel(openvino_files(tmp_path / "files"), "Chat-0.5B", "hf:org/Chat-0.5B@0123")
    (tmp_path / "models").mkdir()
    assert lay_out(found, tmp_path / "models", trusted=False) == "Chat-0.5B"
    model = tmp_path / "models" / "Chat-0.5B"
    assert (model / "1").resolve() == (tmp_path / "files").resolve()
    assert (model / "config.pbtxt").read_text() == (
        '# language model for OpenVINO, from hf:org/Chat-0.5B@0123\nbackend: "llm"\n'
    )
    with pytest.raises(AlreadyExists, match=r"two of the models that are to be served have the name 'Chat-0.5B'"):
        lay_out(found, tmp_path / "models", trusted=False)


def test_a_model_directory_with_versions(tmp_path: Path) -> None:
    model = tmp_path / "m"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "python"')
    (tmp_path / "models").mkdir()
    lay_out(FetchedModel(model, "m", "mlflow:x"), tmp_path / "models", trusted=False)
    assert (tmp_path / "models" / "m" / "config.pbtxt").read_text() == 'backend: "python"'


def test_what_cannot_be_served_is_named_as_the_user_did(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text(json.dumps({"model_type": "x", "architectures": ["X"]}))
    (tmp_path / "models").mkdir()
    with pytest.raises(InvalidArgument, match=r"^hf:org/x@0 cannot be served: .*the weights are missing"):
        lay_out(FetchedModel(tmp_path / "files", "x", "hf:org/x@0"), tmp_path / "models", trusted=False)
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(
    ("suggested", "name"),
    [("Qwen3-0.6B", "Qwen3-0.6B"), ("a b/c", "a_b_c"), ("..", "model"), (".hidden", "hidden"), ("ü", "model")],
)
def test_names(suggested: str, name: str) -> None:
    assert served_name(suggested) == name


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["models", "--http-port=0"],
        ["models", "--http-port", "8000", "s3://bucket/models"],
        ["app.py:double", "--reload"],
        ["--model-repository", "org/name"],
        ["--load-model=org/name", "models"],
        ["--no-such-flag", "org/name"],
        ["--", "models"],
        ["models", "--offline"],
    ],
)
def test_other_arguments_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with named_models(arguments, {}) as rest:
        assert rest == arguments


def test_a_model_file_becomes_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.xml").write_text('<?xml version="1.0"?><net><layers></layers></net>')
    with named_models(["net.xml", "--http-port=0", "models"], {}) as rest:
        assert rest[:2] == ["--http-port=0", "models"]
        assert (Path(rest[2]) / "net" / "1" / "model.xml").is_file()
    assert not Path(rest[2]).exists()
