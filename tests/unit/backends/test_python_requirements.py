"""Environments that are made from lists of packages, with real installers and wheels made on the spot."""

from __future__ import annotations

import logging
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

import wheels
from nerite.backends.interface import ModelContext
from nerite.backends.python import environments as environment_store
from nerite.backends.python import environments as installer
from nerite.backends.python.environments import find_interpreter
from nerite.core.errors import InvalidArgument, Unavailable
from python_model_files import model_on_disk
from serving import eventually

LIST = "--no-index\n--find-links {wheels}\ngreeting=={version}\n"
PROJECT = """
[project]
name = "model"
version = "1"
requires-python = ">=3.11"
dependencies = ["greeting>=1", "numpy"]

[tool.uv]
no-index = true
find-links = ["{wheels}"]
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with numpy, and with two versions of a package."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels.wheel_of_installed(folder, "numpy")
    for version in ("1.0", "2.0"):
        wheels.wheel(folder, "greeting", version, f"WORDS = 'hello {version}'\n")
    return folder


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environment_store, "stopped", threading.Event())


def model_with(tmp_path: Path, name: str, text: str, model: str = "m") -> ModelContext:
    path = f"$$TRITON_MODEL_DIRECTORY/{name}"
    parameters = {"EXECUTION_ENV_PATH": {"string_value": path}}
    return model_on_disk(tmp_path, "", {name: text}, name=model, parameters=parameters)


def greeting(context: ModelContext) -> str:
    """Return what the package says in the model's environment."""
    interpreter = find_interpreter(context)
    assert interpreter is not None
    code = "import greeting, numpy; print(greeting.WORDS)"
    return subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def environments() -> list[environment_store.KeptEnvironment]:
    return environment_store.list_environments(environment_store.environments_folder())


@pytest.mark.parametrize("uv", [True, False], ids=["uv", "pip"])
def test_packages_of_a_list(
    uv: bool, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """numpy, which the worker needs, comes with them."""
    if not uv:
        monkeypatch.setattr(installer, "find_uv", lambda: None)
    caplog.set_level(logging.INFO)
    context = model_with(tmp_path, "requirements.txt", LIST.format(wheels=index, version="1.0"))
    assert greeting(context) == "hello 1.0"
    assert f"making an environment from '{tmp_path}/m/requirements.txt' with {'uv' if uv else 'pip'}" in caplog.text
    assert f"environment of '{tmp_path}/m/requirements.txt': Installed" in caplog.text or not uv
    assert "made an environment from" in caplog.text


def test_it_is_made_once_for_its_content(index: Path, tmp_path: Path) -> None:
    one, other = (
        model_with(tmp_path, "requirements.txt", LIST.format(wheels=index, version="1.0"), model) for model in "ab"
    )
    threads = [threading.Thread(target=find_interpreter, args=(each,)) for each in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert find_interpreter(one) == find_interpreter(other)
    (kept,) = environments()
    assert kept.origin in (f"{tmp_path}/a/requirements.txt", f"{tmp_path}/b/requirements.txt")
    newer = model_with(tmp_path, "requirements.txt", LIST.format(wheels=index, version="2.0"), "a")
    assert greeting(newer) == "hello 2.0"
    assert greeting(other) == "hello 1.0"
    assert len(environments()) == 2


def test_included_lists_and_wheels_count(index: Path, tmp_path: Path) -> None:
    text = f"--no-index\n--find-links {index}\n-r more.txt\n./greeting-3.0-py3-none-any.whl\n"
    context = model_with(tmp_path, "requirements.txt", text)
    (tmp_path / "m" / "more.txt").write_text("numpy  # and no more\n")
    wheels.wheel(tmp_path / "m", "greeting", "3.0", "WORDS = 'hello 3.0'\n")
    assert greeting(context) == "hello 3.0"
    wheels.wheel(tmp_path / "m", "greeting", "3.0", "WORDS = 'hello again'\n")
    assert greeting(context) == "hello again"
    (tmp_path / "m" / "more.txt").write_text("numpy>0\n")
    assert greeting(context) == "hello again"
    assert len(environments()) == 3


def test_a_repository_with_a_relative_path(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert greeting(model_with(Path(), "requirements.txt", LIST.format(wheels=index, version="1.0"))) == "hello 1.0"


def test_a_project(index: Path, tmp_path: Path) -> None:
    assert greeting(model_with(tmp_path, "pyproject.toml", PROJECT.format(wheels=index))) == "hello 2.0"


def test_a_locked_project(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_with(tmp_path, "pyproject.toml", PROJECT.format(wheels=index).replace(">=1", "<2"))
    uv = installer.find_uv()
    assert uv is not None
    subprocess.run([uv, "lock", "--quiet", "--offline", "--project", tmp_path / "m"], check=True)
    lock = (tmp_path / "m" / "uv.lock").read_text()
    assert 'version = "1.0"' in lock
    context = model_with(tmp_path, "uv.lock", lock)
    assert greeting(context) == "hello 1.0"
    monkeypatch.setattr(installer, "find_uv", lambda: None)
    (tmp_path / "m" / "uv.lock").write_text(lock + "\n")
    with pytest.raises(InvalidArgument, match=r"can only be read by uv. Install it for the server: pip install uv"):
        find_interpreter(context)


def test_what_the_installer_cannot_do_is_said_in_its_words(index: Path, tmp_path: Path) -> None:
    context = model_with(tmp_path, "requirements.txt", LIST.format(wheels=index, version="9.9"))
    with pytest.raises(InvalidArgument) as refused:
        find_interpreter(context)
    assert refused.value.message.startswith(f"an environment of '{tmp_path}/m/requirements.txt' cannot be made:\n")
    assert "greeting==9.9" in refused.value.message
    assert environments() == []


@pytest.mark.parametrize(
    "text", ["[project", "[tool]\n", "project = 1", "project = []", f"x = {'[' * 5_000}", f"x = {'9' * 5_000}"]
)
def test_a_project_that_is_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"pyproject.toml' has no list of packages at 'dependencies'"):
        find_interpreter(model_with(tmp_path, "pyproject.toml", text))


def test_hashes_are_checked(index: Path, tmp_path: Path) -> None:
    """Where there are some, nothing is added to the list: pip would want hashes of that as well."""
    text = LIST.format(wheels=index, version="1.0").rstrip() + f" --hash=sha256:{'0' * 64}\n"
    with pytest.raises(InvalidArgument, match=r"Hash mismatch for `greeting==1\.0`") as refused:
        find_interpreter(model_with(tmp_path, "requirements.txt", text))
    assert "numpy" not in refused.value.message


def test_a_server_that_stops_ends_what_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, begun = tmp_path / "uv", tmp_path / "begun"
    tool.write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 50\n")
    tool.chmod(0o755)
    monkeypatch.setattr(installer, "find_uv", lambda: str(tool))
    context = model_with(tmp_path, "requirements.txt", "greeting\n")
    refused: list[BaseException] = []

    def load() -> None:
        try:
            find_interpreter(context)
        except InvalidArgument as error:
            refused.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    eventually(begun.exists)
    installer.stop_installer()
    thread.join(20)
    assert "exit status -15" in str(refused[0])
    with pytest.raises(Unavailable, match="the server is stopping"):
        find_interpreter(context)
    assert environments() == []


def test_a_wheel_of_what_is_installed_is_whole(index: Path) -> None:
    """Of the test's own making, so that a failure above is not looked for in the wrong place."""
    (numpy,) = index.glob("numpy-*.whl")
    assert zipfile.ZipFile(numpy).testzip() is None
