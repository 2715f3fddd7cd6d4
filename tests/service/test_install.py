"""The core alone: what ``pip install nerite`` brings is small, and serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import serving
from nerite.backends import registry
from nerite.config.backend_choice import FRAMEWORKS
from serving import IDENTITY, python_model

ROOT = Path(__file__).resolve().parents[2]
MOST_MEGABYTES = 115


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the core and nothing else."""
    environment = tmp_path_factory.mktemp("core") / "venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True, timeout=60)
    python = environment / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, ROOT], check=True, timeout=300)
    yield environment


@pytest.mark.timeout(400)
def test_size(core: Path) -> None:
    (site,) = (core / "lib").glob("python*/site-packages")
    size = sum(
        entry.stat().st_size
        for folder, _, files in os.walk(site)
        for name in files
        if not (entry := Path(folder, name)).is_symlink()
    )
    assert size / 1e6 < MOST_MEGABYTES


def test_serves_a_python_model(core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NERITE", core / "bin" / "nerite")
    python_model(tmp_path / "models", "identity", IDENTITY)
    with serving.serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("identity", [1.0, 2.0]) == [1.0, 2.0]
        assert [server.ask("GET", path)[0] for path in ("/v2/docs", "/ui", "/ui/uPlot.esm.js")] == [200] * 3


def test_a_missing_extra_says_what_to_install(core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NERITE", core / "bin" / "nerite")
    extras = {name: entry.extra for name, entry in registry.ENTRIES.items() if entry.extra}
    for name in extras:
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        platform = next((f'platform: "{each.platform}"' for each in FRAMEWORKS if each.backend == name), "")
        (tmp_path / "models" / name / "config.pbtxt").write_text(f'backend: "{name}" {platform}')
    # What there is decides which engine is missing.
    (tmp_path / "models" / "llm" / "1" / "openvino_model.xml").touch()
    with serving.serving(tmp_path / "models", tmp_path / "log", "--exit-on-error=false") as server:
        entries = server.json("POST", "/v2/repository/index")
    assert {entry["name"]: entry["state"] for entry in entries} == dict.fromkeys(extras, "UNAVAILABLE")
    for entry in entries:
        assert f"pip install 'nerite[{extras[entry['name']]}]'" in entry["reason"]


def test_an_object_store_without_its_extra(core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NERITE", core / "bin" / "nerite")
    with (
        pytest.raises(RuntimeError, match=r"Install it with: pip install 'nerite\[cloud\]'"),
        serving.serving("s3://bucket/models", tmp_path / "log", clean=False),
    ):
        pass
