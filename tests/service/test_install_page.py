"""docs/install.md is followed: from source, as a wheel, with extras; its sizes are those of what is installed here."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pages import ROOT, Page

PAGE = Page("docs/install.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_HERE = {"audio", "ray", "tensorrt", "dev"}
"""Extras that the tests' environment does not have."""
NOT_BESIDE = ("env", "dist", "wheels", ".venv*", ".git", "node_modules", "*.onnx", "*.npy", "docent", "__pycache__")

pytestmark = pytest.mark.timeout(400)


def followed(commands: str, folder: Path, **environment: str) -> str:
    """Run commands of the page in a clone; return what they print."""
    said = ""
    for command in commands.splitlines():
        program, _, rest = command.partition(" ")
        if program == "python3":
            program = sys.executable
        done = subprocess.run(
            f"{program} {rest}",
            shell=True,
            cwd=folder,
            # What is installed is hardly run, so it need not be compiled: that takes longer than all else.
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_COMPILE": "0", **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        said += done.stdout
    return said


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with Nerite installed from them as the page says."""
    folder = tmp_path_factory.mktemp("install") / "nerite"
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns(*NOT_BESIDE))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    said = followed(PAGE.block("env/bin/pip install .\n"), folder)
    assert said.strip().endswith(f"nerite {PROJECT.get('version') or importlib.metadata.version('nerite')}")
    return folder


def installed(folder: Path, package: str) -> bool:
    return bool(list((folder / "env" / "lib").glob(f"python*/site-packages/{package}")))


def test_as_a_wheel(clone: Path) -> None:
    followed(PAGE.block("pip wheel --no-deps"), clone)
    (wheel,) = (clone / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), "it needs no compiler"


def test_extras_of_what_is_installed(clone: Path) -> None:
    assert not installed(clone, "jinja2")
    followed(PAGE.block("[openai,redis]"), clone)
    assert installed(clone, "jinja2")
    assert installed(clone, "hiredis")


def test_without_an_index(clone: Path) -> None:
    collect, install = PAGE.block("--find-links").splitlines()
    followed(collect, clone)
    followed(f"python3 -m venv env\n{install}", clone, PIP_NO_INDEX="1")
    assert all("none-any" in wheel.name or "manylinux" in wheel.name for wheel in (clone / "wheels").iterdir())


def test_torch_for_processors(clone: Path) -> None:
    """As PyTorch documents it. Its index is asked where it can be reached."""
    torch, extra = PAGE.block("download.pytorch.org").splitlines()
    assert torch.endswith("pip install torch --index-url https://download.pytorch.org/whl/cpu")
    assert extra.endswith("pip install 'nerite[torch]'")
    try:
        socket.create_connection(("download.pytorch.org", 443), 3).close()
    except OSError:
        pytest.skip("PyTorch's index cannot be reached")
    followed(f"{torch} --dry-run --no-deps", clone)


# Sizes


def own_size(package: str) -> int:
    """Return the bytes of a package's files."""
    distribution = importlib.metadata.distribution(package)
    files = [path for path in distribution.files or () if "__pycache__" not in str(path)]
    places = [Path(str(distribution.locate_file(path))) for path in files]
    return sum(place.stat().st_size for place in places if place.is_file())


def closure(requirements: list[str], known: set[tuple[str, frozenset[str]]]) -> None:
    """Add what these requirements bring: names, with the extras in which they are wanted."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "nerite":
            for extra in requirement.extras:
                closure(PROJECT["optional-dependencies"][extra], known)
            continue
        key = (name, frozenset(requirement.extras))
        if key in known:
            continue
        known.add(key)
        for text in importlib.metadata.distribution(name).requires or ():
            needed = Requirement(text)
            marker, needed.marker = needed.marker, None
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                closure([str(needed)], known)


def megabytes(requirements: list[str], without: set[str]) -> float:
    known: set[tuple[str, frozenset[str]]] = set()
    closure(requirements, known)
    return sum(map(own_size, {name for name, _ in known} - without)) / 1e6


def test_sizes() -> None:
    """All extras are in the table; those that are here differ by less than a third from what it says."""
    core: set[tuple[str, frozenset[str]]] = set()
    closure(PROJECT["dependencies"], core)
    base = {name for name, _ in core}
    table: dict[str, str] = {}
    for names, sizes in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", (ROOT / "docs/install.md").read_text(), re.M
    ):
        table |= dict(zip(re.findall(r"\w+", names), sizes.split("; "), strict=True))
    assert set(table) == set(PROJECT["optional-dependencies"])
    wrong = {}
    for extra, told in table.items():
        if extra not in NOT_HERE:
            measured = megabytes([f"nerite[{extra}]"], base)
            if not 0.67 < measured / float(told.replace(",", "")) < 1.5:
                wrong[extra] = (told, measured)
    assert wrong == {}


def test_every_block_is_known_here() -> None:
    parts = ("env/bin/pip install .\n", "--no-deps", "--find-links", "[openai,redis]", "download.pytorch.org")
    assert len(PAGE.blocks) == len(parts)
    for part in parts:
        PAGE.block(part)
