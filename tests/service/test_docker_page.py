"""docs/docker.md and deploy/: the images' Dockerfiles, command lines, Compose, KServe, and systemd, without containers.

The image itself is built, and served from, by ``make exam-image``.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import yaml

from nerite.cli.command_line import NERITE as SERVE
from nerite.cli.command_line import TRITON, parse_command_line
from nerite.tools.image import health
from nerite.tools.image.entry import start_command
from pages import ROOT, Page, run
from ports import free_ports
from serving import IDENTITY, NERITE, PATIENCE, Serving, eventually, python_model
from tools import install_node_packages, require

PAGE = Page("docs/docker.md")
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
CHECKER = Path(__file__).with_name("dockerfiles")
COMMANDS = [
    line
    for language, text in PAGE.blocks
    if language == "sh"
    for line in text.replace("\\\n", " ").splitlines()
    if line
]
TEXT = """
@staticmethod
def auto_complete_config(config):
    config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
    config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]})
    config.set_model_transaction_policy({"decoupled": True})
    return config

def execute(self, requests):
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input")
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text.as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def options_of(command: str, name: str) -> list[str]:
    """Return the values of an option in a command line."""
    words = shlex.split(command)
    return [value for word, value in itertools.pairwise(words) if word == f"--{name}"]


def in_image(command: str) -> list[str]:
    """Return what a ``docker run`` starts in the container: what follows its options and the name of the image."""
    words = shlex.split(command)[2:]
    while words[0].startswith("--"):
        words = words[1 if words[0] in ("--rm", "--detach", "--read-only") else 2 :]
    return words[1:]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_there_is(command: str) -> None:
    """Files exist, build arguments are the Dockerfile's, and what runs in the container can be parsed."""
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.M))
    for file in [
        *options_of(command, "file"),
        *options_of(command, "filename"),
        *re.findall(r"cp (?:-r )?(\S+)", command),
    ]:
        assert (ROOT / file).exists(), file
    for argument in options_of(command, "build-arg"):
        assert argument.partition("=")[0] in arguments
    extras = re.search(
        r"^\[project.optional-dependencies\]$(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert extras is not None
    for argument in options_of(command, "build-arg"):
        if argument.startswith("EXTRAS="):
            assert set(argument.removeprefix("EXTRAS=").split(",")) <= set(re.findall(r"^(\w+) = ", extras[1], re.M))
    if command.startswith("docker run"):
        match in_image(command):
            case ["tritonserver", *flags]:
                assert parse_command_line(flags, {}, TRITON).options.repository.paths == ("/models",)
            case ["nerite", "check", "/models"]:
                pass
            case words:
                assert words == []


def test_an_image_with_models(tmp_path: Path) -> None:
    """The first command of the block runs; the second and third are the exam's."""
    python_model(tmp_path / "models", "identity", IDENTITY)
    run(PAGE.block("nerite dockerfile models").splitlines()[0], cwd=tmp_path)
    assert 'COPY ["models/identity", "/models/identity"]' in (tmp_path / "Dockerfile").read_text()


def test_dockerfiles_have_no_mistakes(tmp_path: Path) -> None:
    install_node_packages(CHECKER)
    model = python_model(tmp_path / "models", "identity", IDENTITY)
    environment = (
        'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/requirements.txt" } }'
    )
    (model / "config.pbtxt").write_text(f"{(model / 'config.pbtxt').read_text()}\n{environment}")
    (model / "requirements.txt").write_text("python-slugify\n")
    run([str(NERITE), "dockerfile", "models", "--package=pillow", "--output=Dockerfile"], cwd=tmp_path)
    (tmp_path / "wrong").write_text("FROM nerite\nRUNN true\n")
    checked = [DOCKERFILE, tmp_path / "Dockerfile", tmp_path / "wrong"]
    command = ["node", "validate.cjs", *map(str, checked)]
    found = subprocess.run(command, cwd=CHECKER, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert found.stdout.splitlines() == [f"{tmp_path / 'wrong'}:2: Unknown instruction: RUNN"]


def test_the_image_needs_no_privilege_and_no_shell() -> None:
    final = DOCKERFILE.read_text().rpartition("FROM ${BASE}")[2]
    assert re.findall(r"^USER (.*)$", final, re.M) == ["1000:1000"]
    assert not re.search(r"^ENTRYPOINT", final, re.M)
    assert all(text.startswith("[") for text in re.findall(r"^\s*(?:HEALTHCHECK.*\\\n\s*)?CMD (.*)$", final, re.M))


def test_compose() -> None:
    file = DEPLOY / "docker" / "compose.yml"
    services = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", file.read_text()))["services"]
    assert sorted(services) == ["grafana", "nerite", "prometheus"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        binds = [volume["source"] for volume in service["volumes"] if volume["type"] == "bind"]
        assert [each for each in binds if each.startswith(".") and "examples" not in each] == binds[: len(binds)] or (
            service is services["nerite"]
        )
        for bind in binds:
            assert "examples" in bind or (file.parent / bind).exists(), bind
    assert services["nerite"]["read_only"] and services["nerite"]["cap_drop"] == ["ALL"]
    build = services["nerite"]["build"]
    assert (file.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    targets = yaml.safe_load((DEPLOY / "docker" / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert targets == [{"targets": ["nerite:8002"]}]


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    require("systemd-analyze")
    unit = tmp_path / "nerite.service"
    unit.write_text((DEPLOY / "systemd" / "nerite.service").read_text().replace("/opt/nerite/bin/nerite", str(NERITE)))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=PATIENCE)
    assert (verified.returncode, verified.stderr) == (0, "")
    (command,) = re.findall(r"^ExecStart=\S+ serve (.*)$", unit.read_text(), re.M)
    assert parse_command_line(command.split(), {}, SERVE).options.repository.paths == ("/srv/models",)


def runtime(name: str) -> dict[str, Any]:
    """Return the specification of a runtime of KServe's."""
    specification: dict[str, Any] = yaml.safe_load((DEPLOY / "kserve" / f"{name}.yaml").read_text())["spec"]
    return specification


@contextmanager
def started(command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Serving]:
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
    server = Serving(process, log)
    try:
        server.wait()
        yield server
    finally:
        assert server.stop() == 0


@contextmanager
def as_kserve_starts(name: str, models: Path, log: Path) -> Iterator[Serving]:
    """Run the command line of a runtime, with other ports and another place of the models."""
    http, grpc, metrics = map(str, free_ports(3))
    words = " ".join(runtime(name)["containers"][0]["args"])
    for text, other in (("/mnt/models", str(models)), ("8080", http), ("9000", grpc), ("{{.Name}}", "chat")):
        words = words.replace(text, other)
    program, *flags = words.split()
    programs = {
        "tritonserver": [str(NERITE.with_name("tritonserver"))],
        "serve": [sys.executable, str(DEPLOY / "docker" / "serve")],
    }
    flags += [f"--metrics-port={metrics}", *([] if "--grpc-port" in words else [f"--grpc-port={grpc}"])]
    with started([*programs[program], *flags], log, {**os.environ, "NERITE_ADDRESS": "0.0.0.0"}) as server:
        yield server


@pytest.mark.parametrize("name", ["triton-runtime", "nerite-runtime"])
def test_kserve_starts_a_repository(name: str, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    with as_kserve_starts(name, tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("identity", [1.0, 2.0]) == [1.0, 2.0]
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            sent = tritonclient.grpc.InferInput("INPUT0", [1, 2], "FP32")
            sent.set_data_from_numpy(np.array([[3, 4]], np.float32))
            assert client.infer("identity", [sent]).as_numpy("OUTPUT0").tolist() == [[3, 4]]
        assert " 0.0.0.0:" in server.text


def test_kserve_starts_a_language_model(tmp_path: Path) -> None:
    python_model(tmp_path / "files", "any", TEXT, " ")
    with as_kserve_starts("nerite-llm-runtime", tmp_path / "files" / "any" / "1", tmp_path / "log") as server:
        assert [model["id"] for model in server.json("GET", "/v1/models")["data"]] == ["chat"]
        answer = server.json("POST", "/v1/completions", {"model": "chat", "prompt": "hello"})
        assert answer["choices"][0]["text"] == "hello"


def test_runtimes_are_what_kserve_takes() -> None:
    """The names of fields are those of KServe's API; Triton's runtime has what KServe's own has."""
    for file in (DEPLOY / "kserve").glob("*.yaml"):
        document = yaml.safe_load(file.read_text())
        assert (document["apiVersion"], document["kind"]) == ("serving.kserve.io/v1alpha1", "ClusterServingRuntime")
        specification = document["spec"]
        assert set(specification) <= {
            "annotations",
            "supportedModelFormats",
            "protocolVersions",
            "containers",
            "volumes",
        }
        for each in specification["supportedModelFormats"]:
            assert {"name"} <= set(each) <= {"name", "version", "autoSelect", "priority"}
        (container,) = specification["containers"]
        assert container["name"] == "kserve-container"
        assert container["securityContext"]["runAsUser"] == 1000
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert runtime("triton-runtime")["containers"][0]["args"] == [
        "tritonserver",
        "--model-store=/mnt/models",
        "--grpc-port=9000",
        "--http-port=8080",
        "--allow-grpc=true",
        "--allow-http=true",
    ]


def test_the_health_check_follows_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unwell = tmp_path / "unwell"
    checked = f"def is_ready(self):\n    return not os.path.exists('{unwell}')\n"
    python_model(tmp_path / "models", "identity", f"{IDENTITY}\n{checked}")
    http, grpc, metrics = free_ports(3)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    command = ["nerite", "serve", str(tmp_path / "models"), *ports]
    words = tmp_path / "cmdline"
    words.write_text("\0".join(command) + "\0")
    assert health.main(words) == 1
    with started([str(NERITE), *command[1:]], tmp_path / "log"):
        assert health.main(words) == 0
        unwell.touch()
        eventually(lambda: health.main(words) == 1)
    assert health.main(words) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"ready: port {http} answered /v2/health/ready with 200" in said


def test_a_container_of_sagemaker_serves_its_model(tmp_path: Path) -> None:
    """What ``serve`` starts there is run, but for its port and the place of the model."""
    python_model(tmp_path / "model", "identity", IDENTITY)
    (port,) = free_ports(1)
    command = start_command([], {"SAGEMAKER_BIND_TO_PORT": str(port)}, tmp_path / "model")
    with started(
        [str(NERITE), "serve", *command.arguments], tmp_path / "log", {**os.environ, **command.environment}
    ) as server:
        assert server.ask("GET", "/ping", service="Sagemaker HTTPService")[0] == 200
