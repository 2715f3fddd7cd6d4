"""The image, built and served from for real: ``make exam-image``. Needs root, buildah, podman, runc, and debootstrap.

The commands of docs/docker.md and docs/kubernetes.md are run as they are, by a ``docker`` that calls these. No registry
is asked: Debian's base image is made by debootstrap, from the mirror that this machine uses.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml

import onnx_models
from pages import Page
from ports import free_ports
from serving import HELD, IDENTITY, eventually, let_go, pbtxt, python_model
from tools import require

ROOT = Path(__file__).resolve().parents[2]
BASE = "docker.io/library/debian:bookworm-slim"
PREFIX = "localhost/nerite-exam"
PODMAN = ["podman", "--log-level=fatal", "--runtime=runc", "--cgroup-manager=cgroupfs"]
BUILD = ["buildah", "build", "--isolation=chroot", "--network=host", "--format=docker", "--pull-never", "--timestamp=0"]
# Limits are those that a machine without CAP_SYS_RESOURCE can grant, and nothing runs timers here.
RUNTIME = [*PODMAN, "run", "--network=host", "--health-interval=disable"]
RUNTIME += ["--ulimit=nofile=20000:20000", "--ulimit=nproc=4096:4096"]
# As docs/docker.md.
RUN = [*RUNTIME, "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
pytestmark = pytest.mark.timeout(3000)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command, which must succeed; return what it printed."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def build(tag: str, *arguments: str, file: str = "deploy/docker/Dockerfile", context: Path = ROOT) -> str:
    """Build an image; return its name."""
    name = f"{PREFIX}:{tag}"
    run(*BUILD, *arguments, f"--file={file}", f"--tag={name}", ".", cwd=context)
    return name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian's slim image, or what is as good; with the authorities and the mirror of this machine."""
    require("buildah", "podman", "runc", "debootstrap")
    if subprocess.run(["podman", "image", "exists", BASE], check=False).returncode:
        root = tmp_path_factory.mktemp("base") / "root"
        run("debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", root)
        for left in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(root / left, ignore_errors=True)
        for file in Path("/usr/local/share/ca-certificates").glob("*.crt"):
            shutil.copy(file, root / file.relative_to("/"))
        if (mirror := Path("/etc/apt/sources.list.d/debian.sources")).exists():
            shutil.copy(mirror, root / mirror.relative_to("/"))
            (root / "etc/apt/sources.list").write_text("")
        run("chroot", root, "update-ca-certificates")
        run("tar", "-C", root, "--sort=name", "--numeric-owner", "-cf", root.with_suffix(".tar"), ".")
        run("podman", "import", root.with_suffix(".tar"), BASE)
    return BASE


DOCKER = f"""#!/bin/sh
podman() {{ command {shlex.join(PODMAN)} "$@"; }}
case "$1" in
build) shift; exec {shlex.join(BUILD)} "$@" ;;
run) shift; exec {shlex.join(RUNTIME)} "$@" ;;
inspect) for name; do :; done; podman healthcheck run "$name" > /dev/null 2>&1; podman "$@" ;;
push) podman image exists "$2" ;;
*) podman "$@" ;;
esac
"""
"""Docker as podman and buildah. Health is checked when somebody inspects it, and images are pushed nowhere."""


class Shell:
    """Runs commands of a page, in a copy of the sources at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sources"
        self.folder.mkdir()
        docker = folder / "bin" / "docker"
        docker.parent.mkdir()
        docker.write_text(DOCKER)
        docker.chmod(0o755)
        self._set = f'set -e; PATH="{docker.parent}:$PATH"'
        run("sh", "-c", f"git ls-files -z | xargs -0 cp -d --parents -t {self.folder}")

    def run(self, command: str) -> str:
        return run("sh", "-c", f"{self._set}; {command}", cwd=self.folder)

    @contextmanager
    def serving(self, command: str, port: int = 8000) -> Iterator[None]:
        """Run a server in the foreground, until it has been ready."""
        process = subprocess.Popen(["sh", "-c", f"{self._set}; exec {command}"], cwd=self.folder)
        try:
            with tritonclient.http.InferenceServerClient(f"localhost:{port}") as client:
                eventually(lambda: ready(client))
            yield
        finally:
            process.terminate()
            process.wait(60)


def lines(page: str, part: str) -> list[str]:
    """Return the commands of a block."""
    return Page(page).block(part).replace("\\\n", " ").splitlines()


def test_the_page(base: str, tmp_path: Path) -> None:
    """From nothing to a served model, the other commands of the image, and an image with models."""
    shell = Shell(tmp_path)
    image, models, start, health, ask, stop = lines("docs/docker.md", "docker inspect")
    for command in (image, models, start):
        shell.run(command)
    try:
        eventually(lambda: shell.run(health).strip() == "healthy")
        assert shell.run(ask).count('"text"') == 20
        shell.run(stop)
        assert shell.run("docker inspect --format '{{.State.ExitCode}}' nerite").strip() == "0"
    finally:
        shell.run("docker rm --force nerite")
    check, tritonserver = lines("docs/docker.md", "nerite nerite check /models")
    assert "1 model checked, no mistakes" in shell.run(check)
    with shell.serving(tritonserver, 8080):
        shell.run(ask.replace("8000", "8080"))
    (tmp_path / "elsewhere").mkdir()
    shutil.move(shell.folder / "models", tmp_path / "elsewhere")
    shell.folder = tmp_path / "elsewhere"
    written, built, served = lines("docs/docker.md", "nerite dockerfile models")
    shell.run(f"{written}; {built}")
    with shell.serving(served):
        assert shell.run(ask).count('"text"') == 20
    run("podman", "rmi", "--force", "localhost/my-models")


def test_the_image_of_the_page_about_kubernetes(base: str, tmp_path: Path) -> None:
    """Its commands up to helm, and what a pod of the chart runs in that image."""
    shell = Shell(tmp_path)
    commands = lines("docs/kubernetes.md", "docker push")
    until = next(place for place, command in enumerate(commands) if command.startswith("helm"))
    for command in commands[:until]:
        shell.run(command)
    with container("registry.example.org/babble:1", ["nerite", "serve", "/models"]) as running:
        assert running.client.is_model_ready("babble")
    run("podman", "rmi", "--force", "registry.example.org/babble:1", "localhost/nerite")


@pytest.fixture(scope="module")
def slim(base: str) -> Iterator[str]:
    yield build("slim")
    remove("slim")


@pytest.fixture(scope="module")
def onnx(base: str) -> Iterator[str]:
    yield build("onnx", "--build-arg=EXTRAS=onnx")
    remove("onnx")


def remove(tag: str) -> None:
    run("podman", "rmi", "--force", f"{PREFIX}:{tag}")


def ready(client: tritonclient.http.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except OSError:
        return False


class Container:
    """A container with a server. ``seconds``: from the command to when it was ready."""

    def __init__(self, image: str, options: list[str], command: list[str], ports: list[int]) -> None:
        began = time.monotonic()
        self.name = f"nerite-exam-{os.getpid()}-{ports[0]}"
        self.http, self.grpc = (f"127.0.0.1:{port}" for port in ports[:2])
        run(*RUN, "--detach", f"--name={self.name}", *options, image, *command)
        try:
            self.client = tritonclient.http.InferenceServerClient(self.http)
            eventually(lambda: ready(self.client))
        except BaseException:
            print(run(*PODMAN, "logs", self.name)[-3000:])
            self.remove()
            raise
        self.seconds = time.monotonic() - began

    def healthy(self) -> bool:
        checked = subprocess.run([*PODMAN, "healthcheck", "run", self.name], capture_output=True, check=False)
        return checked.returncode == 0

    def state(self, what: str) -> str:
        return run(*PODMAN, "inspect", self.name, "--format", f"{{{{.State.{what}}}}}").strip()

    def remove(self) -> None:
        run(*PODMAN, "rm", "--force", self.name)


@contextmanager
def container(image: str, program: list[str], models: Path | None = None, *options: str) -> Iterator[Container]:
    ports = free_ports(3)
    names = ("http", "grpc", "metrics")
    flags = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    volumes = [f"--volume={models}:/models:ro"] if models is not None else []
    running = Container(image, [*volumes, *options], [*program, *flags], ports)
    try:
        yield running
    finally:
        running.remove()


def infer(running: Container, model: str, values: list[float]) -> list[float]:
    """Send the values over HTTP and over gRPC; return the answer, which is the same."""
    answers = []
    for kind, url in ((tritonclient.http, running.http), (tritonclient.grpc, running.grpc)):
        with kind.InferenceServerClient(url) as client:
            sent = kind.InferInput("IN", [1, len(values)], "FP32")
            sent.set_data_from_numpy(np.array([values], np.float32))
            answers.append(client.infer(model, [sent]).as_numpy("OUT").tolist()[0])
    assert answers[0] == answers[1]
    found: list[float] = answers[0]
    return found


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository that the user of the image can read."""
    folder = tmp_path / "models"
    folder.mkdir()
    for each in (tmp_path.parent, tmp_path, folder):
        each.chmod(0o755)
    return folder


def echo(models: Path, name: str) -> Path:
    """Write a Python model: OUT = IN."""
    body, config = (text.replace('"INPUT0"', '"IN"').replace('"OUTPUT0"', '"OUT"') for text in (IDENTITY, pbtxt()))
    return python_model(models, name, body, config)


@pytest.mark.parametrize("program", [["serve", "/models"], ["tritonserver", "--model-store=/models"]])
def test_serves_as_nobody_in_particular(slim: str, models: Path, program: list[str]) -> None:
    echo(models, "echo")
    with container(slim, program, models) as running:
        assert infer(running, "echo", [1.0, 2.0]) == [1.0, 2.0]
        status = run(*PODMAN, "exec", running.name, "python", "-c", "print(open('/proc/1/status').read())")
        assert "Uid:\t1000\t1000\t1000\t1000" in status
        assert "CapEff:\t0000000000000000" in status
        print(f"slim: {size(slim)} MB, ready after {running.seconds:.1f} s")


def test_starts_by_the_arguments_of_kserve_s_runtime_for_triton(slim: str, models: Path) -> None:
    """As they stand, with the user and rights of its container, and models where its storage initializer puts them."""
    runtime = yaml.safe_load((ROOT / "deploy" / "kserve" / "triton-runtime.yaml").read_text())["spec"]
    echo(models, "echo")
    options = [f"--volume={models}:/mnt/models:ro", "--user=1000"]
    running = Container(slim, options, runtime["containers"][0]["args"], [8080, 9000])
    try:
        assert infer(running, "echo", [1.0, 2.0]) == [1.0, 2.0]
        port, path = (runtime["annotations"][f"prometheus.kserve.io/{each}"] for each in ("port", "path"))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            assert b"nv_inference_request_success" in answer.read()
    finally:
        running.remove()


def test_drains_and_tells_its_health(slim: str, models: Path) -> None:
    model = python_model(models, "held", HELD)
    (model / "1").chmod(0o777)
    with container(slim, ["serve", "/models"], models) as running:
        eventually(running.healthy)
        assert running.state("Healthcheck.Status") == "healthy"
        answers: list[object] = []
        held = threading.Thread(target=lambda: answers.append(ask_held(running)))
        held.start()
        eventually(lambda: "executes" in run(*PODMAN, "logs", running.name))
        run(*PODMAN, "kill", "--signal=TERM", running.name)
        eventually(lambda: not running.healthy())
        assert answers == []
        let_go(model)
        held.join(60)
        assert answers == [[-1.0]]
        eventually(lambda: running.state("Status") == "exited")
        assert running.state("ExitCode") == "0"


def ask_held(running: Container) -> object:
    with tritonclient.http.InferenceServerClient(running.http, network_timeout=100) as client:
        sent = tritonclient.http.InferInput("INPUT0", [1, 1], "FP32")
        sent.set_data_from_numpy(np.array([[-1.0]], np.float32))
        return client.infer("held", [sent]).as_numpy("OUTPUT0").tolist()[0]


def test_onnx(onnx: str, models: Path) -> None:
    onnx_models.save(models / "scaled", onnx_models.scaled())
    with container(onnx, ["serve", "/models"], models) as running:
        assert infer(running, "scaled", [1.0, 2.0, 3.0, 4.0]) == [2.0, 4.0, 6.0, 8.0]
        print(f"onnx: {size(onnx)} MB, ready after {running.seconds:.1f} s")


def test_an_image_with_models(slim: str, models: Path) -> None:
    """A model whose framework is installed, and one with an environment of its own."""
    onnx_models.save(models / "scaled", onnx_models.scaled())
    model = echo(models, "titles")
    code = model / "1" / "model.py"
    code.write_text(code.read_text().replace("import numpy", "import slugify\nimport numpy"))
    environment = (
        'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/requirements.txt" } }'
    )
    (model / "config.pbtxt").write_text(f"{(model / 'config.pbtxt').read_text()}\n{environment}")
    (model / "requirements.txt").write_text("python-slugify==8.0.4\n")
    context = models.parent
    run("nerite", "dockerfile", "models", f"--image={slim}", "--output=Dockerfile", cwd=context)
    image = build("models", file="Dockerfile", context=context)
    with container(image, ["serve", "/models"]) as running:
        assert infer(running, "scaled", [1.0, 2.0, 3.0, 4.0]) == [2.0, 4.0, 6.0, 8.0]
        assert infer(running, "titles", [5.0]) == [5.0]
        reads = "print(open('/opt/nerite/sbom.cdx.json').read())"
        sbom = json.loads(run(*PODMAN, "exec", running.name, "python", "-c", reads))
    remove("models")
    assert {"onnxruntime", "nerite", "libc6"} <= {each["name"] for each in sbom["components"]}


def test_a_build_is_reproducible(slim: str) -> None:
    again = build("again")
    assert layers(again) == layers(slim)
    remove("again")


def layers(image: str) -> list[str]:
    found: list[str] = json.loads(run("podman", "inspect", image))[0]["RootFS"]["Layers"]
    return found


def size(image: str) -> int:
    return round(json.loads(run("podman", "inspect", image))[0]["Size"] / 1e6)
