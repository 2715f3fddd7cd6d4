"""Where Triton cannot run, the reason is told, and nothing is installed."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from conformance import triton_installation


def test_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NERITE_TRITON_HOME", str(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    with pytest.raises(triton_installation.TritonUnavailable, match="Linux on x86-64"):
        triton_installation.installation()
    assert list(tmp_path.iterdir()) == []


def test_python_without_a_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("NERITE_TRITON_HOME", str(tmp_path))
    venv = tmp_path / f"python{triton_installation.PYTHON}"
    venv.mkdir()
    (venv / "ready").touch()
    with pytest.raises(
        triton_installation.TritonUnavailable, match=f"no Python backend for Python {triton_installation.PYTHON}"
    ):
        triton_installation.installation()


def test_installation_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(triton_installation.TritonUnavailable, match=r"/bin/false -m venv .* failed"):
        triton_installation.install(tmp_path / "venv")
    assert not (tmp_path / "venv" / "ready").exists()
