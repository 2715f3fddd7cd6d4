"""The programs of the image: which server they start, which port the health check asks, what the SBOM says."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nerite.tools.image.entry import MADE, StartCommand, make_repository, start_command
from nerite.tools.image.health import HealthProbe, main, probe_of
from nerite.tools.image.sbom import bill_of_materials, debian_components, python_components

NOWHERE = Path("/nonexistent")
EXPLICIT = "--model-control-mode=explicit"
CLOSED = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")


@pytest.mark.parametrize(
    ("arguments", "environment", "command"),
    [
        ([], {}, StartCommand(("/models",))),
        (["/srv/models", "--http-port=1"], {}, StartCommand(("/srv/models", "--http-port=1"))),
        ([], {"AIP_MODE": "PREDICTION", "AIP_STORAGE_URI": "gs://bucket/models"}, StartCommand()),
        (
            ["--model=/mnt/models", "--served-model-name", "chat", "--port=8080", "--host=::", "--log-verbose=1"],
            {},
            StartCommand((MADE, "--http-port=8080", "--address=::", "--log-verbose=1"), model=("chat", "/mnt/models")),
        ),
        (["--model", "/mnt/llama"], {}, StartCommand((MADE,), model=("llama", "/mnt/llama"))),
        (
            [],
            {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_BIND_TO_PORT": "9000"},
            StartCommand(
                (
                    MADE,
                    EXPLICIT,
                    "--model-namespacing=true",
                    "--allow-sagemaker=true",
                    "--sagemaker-port=9000",
                    *CLOSED,
                ),
                {"SAGEMAKER_TRITON_PING_MODE": "live"},
            ),
        ),
    ],
)
def test_start(arguments: list[str], environment: dict[str, str], command: StartCommand) -> None:
    assert start_command(arguments, environment, NOWHERE) == command


def test_start_of_sagemakers_model(tmp_path: Path) -> None:
    (tmp_path / "double").mkdir()
    arguments = (str(tmp_path), EXPLICIT, "--load-model=double", "--allow-sagemaker=true")
    ping = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "double", "SAGEMAKER_TRITON_PING_MODE": "ready"}
    found = start_command([], {}, tmp_path)
    assert found == StartCommand((*arguments, "--sagemaker-port=8080", *CLOSED), ping)
    (tmp_path / "halve").mkdir()
    with pytest.raises(
        ValueError, match=r"one model, and has: double, halve\. Set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
    ):
        start_command([], {}, tmp_path)
    found = start_command([], {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "halve"}, tmp_path)
    assert "--load-model=halve" in found.arguments


def test_a_model_name_with_slashes_is_refused() -> None:
    with pytest.raises(ValueError, match="a name without slashes, not '/mnt/models' and 'a/b'"):
        start_command(["--model=/mnt/models", "--served-model-name=a/b"], {}, NOWHERE)


def test_the_repository_of_a_directory(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for _ in range(2):  # a container may be started again
        make_repository(tmp_path / "made", ("chat", str(files)))
    assert (tmp_path / "made" / "chat" / "1").resolve() == files
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make_repository(tmp_path / "made", ("other", str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("words", "environment", "probe"),
    [
        ("python /opt/nerite/bin/nerite serve /models", {}, ("127.0.0.1", 8000, "/v2/health/ready")),
        ("tini -- nerite serve /models --http-port=9", {}, ("127.0.0.1", 9, "/v2/health/ready")),
        ("python -I /opt/nerite/bin/serve", {"NERITE_HTTP_PORT": "7"}, ("127.0.0.1", 7, "/v2/health/ready")),
        ("tritonserver --model-store=/mnt/models --http-port 8080", {}, ("127.0.0.1", 8080, "/v2/health/ready")),
        ("tritonserver --model-store=/m --http-address=10.0.0.1", {}, ("10.0.0.1", 8000, "/v2/health/ready")),
        ("python serve", {"SAGEMAKER_MULTI_MODEL": "true"}, ("127.0.0.1", 8080, "/ping")),
        (
            "python serve",
            {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "81", "AIP_HEALTH_ROUTE": "/well", "AIP_PREDICT_ROUTE": "/p"},
            ("127.0.0.1", 81, "/well"),
        ),
    ],
)
def test_probe(words: str, environment: dict[str, str], probe: tuple[str, int, str]) -> None:
    assert probe_of(words.split(), environment) == HealthProbe(*probe)


def test_probe_of_a_router(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[router]\nhttp-port = 9000\n[[pool]]\nname = "main"\nmembers = ["10.0.0.1:8000"]\n')
    assert probe_of(["nerite", "route", "--check", str(file)], {}).port == 9000


def test_probe_with_tls() -> None:
    flags = ["--http-use-ssl=true", "--http-server-cert=c.pem", "--http-server-key=k.pem"]
    assert probe_of(["nerite", "serve", "/models", *flags], {}).tls


@pytest.mark.parametrize("words", ["sleep 5", "nerite serve /models --allow-http=false", "tritonserver --htp-port=1"])
def test_not_ready_without_a_probe(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cmdline").write_text(words.replace(" ", "\0") + "\0")
    assert main(tmp_path / "cmdline") == 1
    assert capsys.readouterr().out.startswith("not ready: ")


STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u14

Package: adduser
Status: deinstall ok config-files
Architecture: all
Version: 3.134
"""


def test_components() -> None:
    components = [
        *python_components([importlib.metadata.distribution("numpy"), importlib.metadata.distribution("orjson")]),
        *debian_components(STATUS, "debian"),
    ]
    assert [each["name"] for each in components] == ["numpy", "orjson", "libc6"]
    assert re.fullmatch(r"pkg:pypi/numpy@[\d.]+", components[0]["purl"])
    assert all(each["licenses"] for each in components[:2])
    assert components[2]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64"


def test_equal_components_make_equal_documents() -> None:
    components = list(debian_components(STATUS, "debian"))
    document = bill_of_materials(components, 1_700_000_000)
    assert document == bill_of_materials(components, 1_700_000_000)
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert document["dependencies"] == [{"ref": "image", "dependsOn": [components[0]["bom-ref"]]}]
    assert document["serialNumber"] != bill_of_materials([], 1_700_000_000)["serialNumber"]


def test_the_sbom_of_this_environment(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    subprocess.run([sys.executable, "-m", "nerite.tools.image.sbom", file], check=True, timeout=60)
    document = json.loads(file.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    names = {each["name"] for each in document["components"] if each["purl"].startswith("pkg:pypi/")}
    assert {"nerite", "numpy", "uvloop"} <= names
    references = [each["bom-ref"] for each in document["components"]]
    assert len(references) == len(set(references))
