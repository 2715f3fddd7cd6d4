"""The image, built and served from for real: ``make exam-image``. Needs root, buildah, podman, runc, and debootstrap.

No registry is asked: Debian's base image is made by debootstrap, from the mirror that this machine uses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import onnx_models
from ports import free_ports
from serving import HELD, IDENTITY, eventually, let_go, pbtxt, python_model
from tools import require

ROOT = Path(__file__).resolve().parents[2]
BASE = "docker.io/library/debian:bookworm-slim"
PREFIX = "localhost/nerite-exam"
PODMAN = ["podman", "--log-level=fatal", "--runtime=runc", "--cgroup-manager=cgroupfs"]
# As docs/docker.md; limits are those that a machine without CAP_SYS_RESOURCE can grant, and nothing runs timers here.
RUN = [*PODMAN, "run", "--network=host", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL"]
RUN += ["--security-opt=no-new-privileges", "--ulimit=nofile=20000:20000", "--ulimit=nproc=4096:4096"]
RUN += ["--health-interval=disable"]
pytestmark = pytest.mark.timeout(3000)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command, which must succeed; return what it printed."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def build(tag: str, *arguments: str, file: str = "deploy/docker/Dockerfile", context: Path = ROOT) -> str:
    """Build an image; return its name."""
    name = f"{PREFIX}:{tag}"
    ways = ["--isolation=chroot", "--network=host", "--format=docker", "--pull-never", "--timestamp=0"]
    run("buildah", "build", *ways, *arguments, f"--file={file}", f"--tag={name}", ".", cwd=context)
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


class Container:
    """A container with a server. ``seconds``: from the command to when it was ready."""

    def __init__(self, image: str, options: list[str], command: list[str], ports: list[int]) -> None:
        began = time.monotonic()
        self.name = f"nerite-exam-{os.getpid()}-{ports[0]}"
        self.http, self.grpc = (f"127.0.0.1:{port}" for port in ports[:2])
        run(*RUN, "--detach", f"--name={self.name}", *options, image, *command)
        try:
            self.client = tritonclient.http.InferenceServerClient(self.http)
            eventually(self._ready)
        except BaseException:
            print(run(*PODMAN, "logs", self.name)[-3000:])
            self.remove()
            raise
        self.seconds = time.monotonic() - began

    def _ready(self) -> bool:
        try:
            return bool(self.client.is_server_ready())
        except OSError:
            return False

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
