"""Names of models that are fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.core.errors import InvalidArgument
from nerite.sources.name import HubName, MlflowName, StoreName, parse_bare_name, parse_name

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf://Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf:Qwen/Qwen3-0.6B@main", HubName("Qwen/Qwen3-0.6B", "main")),
        ("hf:a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        (f"hf:a/b@{COMMIT}", HubName("a/b", COMMIT)),
        ("hf:a/b/c.gguf", HubName("a/b", "", "c.gguf")),
        ("hf:a/b/q4/c.gguf@v1.0", HubName("a/b", "v1.0", "q4/c.gguf")),
        ("mlflow:models:/iris/1", MlflowName("models:/iris/1")),
        ("s3://bucket/model", StoreName("s3://bucket/model")),
        ("gs://bucket/model.onnx", StoreName("gs://bucket/model.onnx")),
    ],
)
def test_names_with_a_scheme(text: str, name: object) -> None:
    assert parse_name(text) == name
    assert parse_name(str(name)) == name


@pytest.mark.parametrize("text", ["model.onnx", "models", "app.py:double", "https://a/b", "/hf:a/b", "ORG/NAME", ""])
def test_what_has_no_scheme(text: str) -> None:
    assert parse_name(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "hf:", "hf:gpt2", "hf:/b", "hf:a/", "hf:../b", "hf:a/..", "hf:.a/b", "hf:a/b.", "hf:a b/c", "hf:a/b@",
        "hf:a/b@../x",
        "hf:a/b@x//y", "hf:a/b@-x", "hf:a/b/", "hf:a/b/../../etc/passwd", "hf:a/b//c", "hf:a/b/c\\d",
        "hf:a/b\n",
        f"hf:a/{'b' * 97}", f"hf:a/b/{'c' * 256}", f"hf:a/b@{'c' * 2000}", "hf:ä/b", "mlflow:", "mlflow:a\0b",
    ],
)  # fmt: skip
def test_what_names_nothing(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"hf:|mlflow:"):
        parse_name(text)


def test_pinned() -> None:
    assert HubName("a/b", COMMIT).is_pinned
    assert not HubName("a/b", COMMIT[:12]).is_pinned
    assert not HubName("a/b").is_pinned
    assert str(HubName("a/b", "main", "c.gguf").at(COMMIT)) == f"hf:a/b/c.gguf@{COMMIT}"
    assert HubName("Qwen/Qwen3-0.6B").model == "Qwen3-0.6B"


def test_bare_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_bare_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    assert parse_bare_name("Qwen/Qwen3-0.6B@v1") == HubName("Qwen/Qwen3-0.6B", "v1")
    for path in ("models", "./models/a", "../a", "a/b/c", "/a/b", "a/", "a/b@", "a/b@..", ".a/b", "a/.b", "a/b:c"):
        assert parse_bare_name(path) is None, path
    (tmp_path / "models").mkdir()
    assert parse_bare_name("models/misspelt") is None, "a path below a directory that is there"
