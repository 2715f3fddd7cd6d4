"""The environment that the exam on GPUs makes of a kit, without a network, and the commit that it says it measured."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wheels import wheel

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu_parts import environment  # noqa: E402
from gpu_parts.environment import Kit, created, requirements  # noqa: E402

OLDEST = [re.findall(r"^([\w-]+).*?>=([\d.]+)", requirement)[0] for requirement in requirements()]
"""Packages, and the oldest version of each that will do."""


def kit(folder: Path, *, without: str = "") -> Kit:
    made = Kit(folder)
    made.wheels.mkdir(parents=True)
    for name, version in OLDEST:
        if name != without:
            module = name.replace("-", "_")
            wheel(made.wheels, module, version, f"name = {name!r}\n", f"made_{module}")
    return made


def output(*command: object, environment: dict[str, str] | None = None) -> str:
    words = [*map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout


def test_it_is_made_of_the_kit_alone(tmp_path: Path) -> None:
    python = created(kit(tmp_path / "kit"), tmp_path / "venv", isolated=True)
    names = [name for name, _ in OLDEST]
    modules = ", ".join(f"made_{name.replace('-', '_')}" for name in names)
    assert output(python, "-c", f"import {modules}; print(*[each.name for each in ({modules})])").split() == names
    with pytest.raises(subprocess.CalledProcessError):
        output(python, "-c", "import pytest")


def test_packages_of_this_python_are_seen_and_taken(tmp_path: Path) -> None:
    empty = Kit(tmp_path / "kit")
    empty.wheels.mkdir(parents=True)
    python = created(empty, tmp_path / "venv")
    assert output(python, "-c", "import pytest, numpy; print(pytest.__file__)").strip() == pytest.__file__
    # The sources are on the path of what the exam runs; here those that are installed answer.
    assert output(python.with_name("nerite"), "version").startswith("nerite ")


def test_a_kit_that_lacks_a_package_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No matching distribution found for uvloop"):
        created(kit(tmp_path / "kit", without="uvloop"), tmp_path / "venv", isolated=True)


@pytest.mark.parametrize("changed", [False, True])
def test_a_copy_without_its_history_is_at_the_commit_of_the_kit_if_its_sources_are(
    tmp_path: Path, changed: bool
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1\n")
    (tmp_path / "benchmarks" / "gpu_parts").mkdir(parents=True)
    shutil.copy(environment.__file__, tmp_path / "benchmarks" / "gpu_parts")
    program = "import environment as e, pathlib\n"
    program += f"print(e.revision(e.Kit(pathlib.Path({str(tmp_path)!r}))))"
    copied = {"PYTHONPATH": str(tmp_path / "benchmarks" / "gpu_parts"), "PATH": os.environ["PATH"]}

    def revision() -> str:
        return output(sys.executable, "-c", program, environment=copied).strip()

    (tmp_path / "kit.json").write_text(json.dumps({"revision": "0123, sources of another"}))
    sources = revision()
    assert sources.startswith("sources ")
    (tmp_path / "kit.json").write_text(json.dumps({"revision": f"0123, {sources}"}))
    if changed:
        (tmp_path / "src" / "a.py").write_text("a = 2\n")
    assert (revision() == f"0123, {sources}") is not changed
