"""``nerite dockerfile``: what goes into the image of models, layer by layer, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnx_models
from nerite.tools.image.command import run
from serving import IDENTITY, pbtxt, python_model

ENVIRONMENT = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/%s" } }'


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build context with an empty repository, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    return tmp_path


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(["models", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments or ["models"]) == 1
    return capsys.readouterr().err


def test_a_python_model_needs_nothing(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python_model(context / "models", "identity", IDENTITY)
    assert lines_of(capsys) == [
        "# Written by: nerite dockerfile models",
        "ARG IMAGE=nerite",
        "",
        "FROM ${IMAGE}",
        "USER 0",
        'COPY ["models/identity", "/models/identity"]',
        "USER 1000:1000",
    ]


def test_frameworks_come_from_the_configuration(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx_models.save(context / "models" / "scaled", onnx_models.scaled())
    lines = lines_of(capsys, "--image=registry.example.com/nerite:1", "--package=pillow>=10.3")
    assert "ARG IMAGE=registry.example.com/nerite:1" in lines
    (install,) = [line for line in lines if "constraints.txt" in line]
    assert install.endswith("--constraint /opt/nerite/constraints.txt 'nerite[onnx]' 'pillow>=10.3'")
    assert lines.index("FROM ${IMAGE} AS packages") < lines.index(install) < lines.index("FROM packages")
    assert lines[-2].startswith('RUN ["/opt/nerite/bin/python", "-m", "nerite.tools.image.sbom"')


def test_environments_are_made_from_the_repository(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, environment in (("titles", "requirements.txt"), ("locked", "uv.lock")):
        model = python_model(context / "models", name, IDENTITY, pbtxt(parameters=ENVIRONMENT % environment))
        (model / environment).write_text("")
    lines = lines_of(capsys)
    assert "FROM ${IMAGE} AS environments" in lines
    command = lines.index("RUN --mount=type=bind,source=models,target=/build/0 \\")
    assert lines[command + 1].strip() == "nerite environments --create /build/0"
    assert any(line.endswith("constraints.txt uv") for line in lines)
    final = lines[lines.index("FROM ${IMAGE}") :]
    assert final[2:4] == [
        "COPY --from=environments /opt/environments /opt/environments",
        "ENV NERITE_ENVIRONMENT_DIRECTORY=/opt/environments",
    ]


def test_an_environment_brings_the_framework(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx_models.save(context / "models" / "scaled", onnx_models.scaled())
    (context / "models" / "scaled" / "config.pbtxt").write_text(ENVIRONMENT % "requirements.txt")
    (context / "models" / "scaled" / "requirements.txt").write_text("onnxruntime\n")
    text = "\n".join(lines_of(capsys))
    assert "nerite[" not in text
    assert "nerite environments --create" in text


def test_large_versions_are_layers_of_their_own(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = python_model(context / "models", "big", IDENTITY)
    python_model(context / "models", "big", IDENTITY, version=2)
    (model / "2" / "weights.bin").write_bytes(bytes(16_000_000))
    (model / "labels.txt").write_text("cat\n")
    python_model(context / "models", "a", IDENTITY)
    assert [line for line in lines_of(capsys) if line.startswith("COPY")] == [
        'COPY ["models/big/2", "/models/big/2"]',
        'COPY ["models/a", "/models/a"]',
        'COPY ["models/big/1", "/models/big/1"]',
        'COPY ["models/big/config.pbtxt", "models/big/labels.txt", "/models/big/"]',
    ]


def test_a_backend_in_python_goes_along(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python_model(context / "backends", "mine", IDENTITY).joinpath("1", "model.py").rename("backends/mine/model.py")
    (context / "models" / "uses" / "1").mkdir(parents=True)
    (context / "models" / "uses" / "config.pbtxt").write_text(pbtxt().replace('"python"', '"mine"'))
    lines = lines_of(capsys, "--backend-directory", str(context / "backends"))
    assert 'COPY ["backends/mine", "/opt/tritonserver/backends/mine"]' in lines


def test_imports_are_remarked(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = python_model(context / "models", "vision", IDENTITY)
    code = model / "1" / "model.py"
    code.write_text("import os\nimport torchvision.io\nfrom . import beside\n" + code.read_text())
    assert run(["models"]) == 0
    found = capsys.readouterr().err.splitlines()
    assert found == [
        "note: models/vision/1/model.py:2: imports 'torchvision'. If the image does not have it, install it with "
        "--package, or give the model a requirements.txt (docs/environments.md)."
    ]


def test_the_file_is_written_where_it_is_to_be(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python_model(context / "models", "identity", IDENTITY)
    assert lines_of(capsys, "--output=Dockerfile") == [
        "Dockerfile is written. Build it: docker build --file Dockerfile --tag models ."
    ]
    assert (context / "Dockerfile").read_text().startswith("# Written by")
    assert "cannot write 'missing/Dockerfile'" in refused(capsys, "models", "--output=missing/Dockerfile")


def test_mistakes_have_their_places(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python_model(context / "models", "identity", IDENTITY, "max_batch: 8")
    assert "models/identity/config.pbtxt:1:1" in refused(capsys)


def test_what_the_image_could_not_have(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = python_model(context / "models", "identity", IDENTITY)
    (model / "inside.txt").symlink_to("config.pbtxt")
    (model / "outside.txt").symlink_to(context / "elsewhere")
    (model / "1" / "secret.bin").touch(0o600)
    error = refused(capsys)
    assert "inside.txt" not in error
    assert f"outside.txt: a symbolic link to '{context}/elsewhere', which the image does not have" in error
    assert "secret.bin: the server in the image runs as another user, who cannot read it (mode 0600)" in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["s3://bucket/models"], "'s3://bucket/models' is not a directory"),
        (["models", "--context=models/identity"], "is outside of the build context 'models/identity'"),
        (["models", "--image=a b"], "--image 'a b' is not the name of an image"),
        (["my models"], "'my models' cannot be mounted by a Dockerfile"),
        (["nowhere"], "failed to open directory nowhere"),
    ],
)
def test_refused(context: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    python_model(context / "models", "identity", IDENTITY)
    (context / "my models").mkdir()
    assert text in refused(capsys, *arguments)


def test_too_many_layers(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(101):
        python_model(context / "models", f"m{number}", IDENTITY)
    assert "the image would have 101 layers" in refused(capsys)
