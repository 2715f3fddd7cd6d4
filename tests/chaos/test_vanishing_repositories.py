"""Repositories that vanish, and come back: what serves goes on, and what needs the files says what is the matter."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import Bystanders, mounted, needs_mounts
from serving import IDENTITY, Serving, adds, eventually, python_model, serving

POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    python_model(tmp_path / "models", "other", IDENTITY)
    return tmp_path / "models"


def vanishes(
    server: Serving, models: Path, mode: str, why: str, vanish: Callable[[], None], come_back: Callable[[], None]
) -> None:
    """See a server through the absence of its repository."""
    with Bystanders(server):
        vanish()
        status, _, error = server.ask("POST", "/v2/repository/index")
        assert status == 500
        assert why in error.decode() and str(models) in error.decode()
        status, _, error = server.ask("POST", "/v2/repository/models/other/load")
        assert status == (500 if mode == "explicit" else 503)
        if mode == "explicit":
            assert "failed to load 'other'" in error.decode() and why in error.decode()
        come_back()
        eventually(lambda: server.state("other") == "READY")
        if mode == "explicit":
            assert server.ask("POST", "/v2/repository/models/other/load")[0] == 200


@pytest.mark.parametrize("mode", ["none", "explicit"])
def test_a_repository_that_is_moved_away_or_may_not_be_read(models: Path, tmp_path: Path, mode: str) -> None:
    away = tmp_path / "away"
    # The server's user is root perhaps, who may read anything unless that is taken from him.
    humble = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
    if shutil.which("setpriv") is None or subprocess.run([*humble, "true"], check=False).returncode:
        humble = ()
    with serving(models, tmp_path / "log", *(EXPLICIT if mode == "explicit" else ()), within=humble) as server:
        vanishes(
            server, models, mode, "no such directory", lambda: models.rename(away), lambda: away.rename(models) and None
        )
        if humble or os.geteuid():
            vanishes(server, models, mode, "Permission denied", lambda: models.chmod(0), lambda: models.chmod(0o755))


def looks(server: Serving, second: Path, tmp_path: Path, number: int) -> None:
    """Return when the server has looked at its repositories, and at what it has seen a second time."""
    name = f"new{number}"
    python_model(tmp_path, name, adds(number))
    (tmp_path / name).rename(second / name)
    eventually(lambda: server.infer(name, [1.0]) == [1.0 + number] if server.ready(name) else False)


def test_polling(models: Path, tmp_path: Path) -> None:
    """The others are followed meanwhile."""
    second, away = tmp_path / "second", tmp_path / "away"
    python_model(second, "fixed", IDENTITY)
    with serving(models, tmp_path / "log", f"--model-repository={second}", *POLL) as server, Bystanders(server):
        looks(server, second, tmp_path, 1)
        models.rename(away)
        for number in (2, 3):
            looks(server, second, tmp_path, number)
        assert "failed to poll the model repository: failed to stat file" in server.text
        assert server.ready("other")
        python_model(away, "late", IDENTITY)
        away.rename(models)
        eventually(lambda: server.ready("late"))
        shutil.rmtree(models / "late")
        eventually(lambda: not server.ready("late"))
        assert server.ready("other")


def test_polling_a_repository_that_is_unmounted(models: Path, tmp_path: Path) -> None:
    """What is left is an empty directory, and its models are not meant to be unloaded."""
    volume, second = tmp_path / "volume", tmp_path / "second"
    volume.mkdir()
    needs_mounts(volume)
    python_model(second, "fixed", IDENTITY)
    within = mounted(volume, "1m", f'cp -r "{models}/." "{volume}"')
    with serving(
        volume, tmp_path / "log", f"--model-repository={second}", *POLL, within=within
    ) as server, Bystanders(server):  # fmt: skip
        looks(server, second, tmp_path, 1)

        def inside(*command: str) -> None:
            there = ("nsenter", f"--target={server.process.pid}", "--user", "--mount", "--preserve-credentials")
            subprocess.run([*there, *command], check=True)

        inside("umount", "--lazy", str(volume))
        for number in (2, 3):
            looks(server, second, tmp_path, number)
        assert f"{volume} is empty and on a different file system than before: was it unmounted?" in server.text
        assert server.ready("other")
        inside("mount", "-t", "tmpfs", "tmpfs", str(volume))
        inside("cp", "-r", f"{models}/.", str(volume))
        eventually(lambda: server.state("other") == "READY")
