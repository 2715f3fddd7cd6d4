"""Environments that models bring: found, unpacked once, and refused with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from nerite.backends.interface import ModelContext
from nerite.backends.python import environments
from nerite.backends.python.environments import find_interpreter
from nerite.core.errors import InvalidArgument
from python_model_files import model_on_disk

PROGRAM = '#!/bin/sh\nexec {python} "$@"\n'


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "stopped", threading.Event())


def asking_for(tmp_path: Path, environment: object) -> ModelContext:
    parameters = {"EXECUTION_ENV_PATH": {"string_value": str(environment)}}
    return model_on_disk(tmp_path, "", parameters=parameters)


def program(environment: Path, text: str = PROGRAM.format(python=sys.executable)) -> Path:
    """Make ``environment`` one whose Python is a shell script, which takes no time to make."""
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(text)
    python.chmod(0o755)
    return python


def packed(environment: Path, target: Path) -> Path:
    with tarfile.open(target, "w:gz") as tar:
        tar.add(environment, ".")
    return target


def refusal(tmp_path: Path, environment: object) -> str:
    with pytest.raises(InvalidArgument) as refused:
        find_interpreter(asking_for(tmp_path, environment))
    return refused.value.message


def test_a_model_that_does_not_ask(tmp_path: Path) -> None:
    assert find_interpreter(model_on_disk(tmp_path, "")) is None
    assert find_interpreter(asking_for(tmp_path, "")) is None


def test_a_virtual_environment(tmp_path: Path) -> None:
    """The link is not resolved: it is by its own path that Python finds the environment's packages."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    assert "has no numpy" in refusal(tmp_path, environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "numpy.pth").write_text(str(Path(np.__file__).parent.parent))
    assert find_interpreter(asking_for(tmp_path, environment)) == environment / "bin" / "python"


def test_a_directory_of_the_model(tmp_path: Path) -> None:
    python = program(tmp_path / "m" / "env")
    assert find_interpreter(asking_for(tmp_path, "$$TRITON_MODEL_DIRECTORY/env")) == python


def test_an_archive_is_unpacked_once_for_its_content(tmp_path: Path) -> None:
    program(tmp_path / "env")
    one = packed(tmp_path / "env", tmp_path / "one.tar.gz")
    two = tmp_path / "two.tar.gz"
    two.write_bytes(one.read_bytes())
    interpreter = find_interpreter(asking_for(tmp_path, one))
    assert interpreter is not None
    assert interpreter.is_relative_to(tmp_path / "cache/nerite/environments")
    (interpreter.parent / "mark").touch()
    assert find_interpreter(asking_for(tmp_path, two)) == interpreter
    assert (interpreter.parent / "mark").exists()
    (kept,) = environments.list_environments(tmp_path / "cache/nerite/environments")
    assert kept.origin == str(one)


def test_an_archive_that_changes_is_unpacked_again(tmp_path: Path) -> None:
    program(tmp_path / "env")
    target = tmp_path / "env.tar.gz"
    before = find_interpreter(asking_for(tmp_path, packed(tmp_path / "env", target)))
    (tmp_path / "env" / "more").touch()
    after = find_interpreter(asking_for(tmp_path, packed(tmp_path / "env", target)))
    assert before is not None
    assert after is not None
    assert before != after
    assert (after.parent.parent / "more").exists()


def test_conda_unpack_is_run_where_there_is_one(tmp_path: Path) -> None:
    program(tmp_path / "env")
    (tmp_path / "env/bin/conda-unpack").write_text("import pathlib; pathlib.Path(__file__ + '.ran').touch()\n")
    interpreter = find_interpreter(asking_for(tmp_path, packed(tmp_path / "env", tmp_path / "env.tar.gz")))
    assert interpreter is not None
    assert (interpreter.parent / "conda-unpack.ran").exists()


def test_conda_unpack_that_fails_is_told(tmp_path: Path) -> None:
    program(tmp_path / "env")
    (tmp_path / "env/bin/conda-unpack").write_text("raise SystemExit('no prefix to replace')\n")
    with pytest.raises(InvalidArgument, match="no prefix to replace"):
        find_interpreter(asking_for(tmp_path, packed(tmp_path / "env", tmp_path / "env.tar.gz")))
    assert environments.list_environments(environments.environments_folder()) == []


def test_several_that_unpack_at_once(tmp_path: Path) -> None:
    program(tmp_path / "env")
    target = packed(tmp_path / "env", tmp_path / "env.tar.gz")
    barrier, places = threading.Barrier(4), set()

    def unpack() -> None:
        barrier.wait()
        places.add(environments.unpacked_archive(target, environments.environments_folder()))

    threads = [threading.Thread(target=unpack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 1
    assert len(environments.list_environments(environments.environments_folder())) == 1


def test_an_archive_that_reaches_outside(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as tar:
        tar.add(__file__, "../outside.py")
    message = refusal(tmp_path, tmp_path / "bad.tar.gz")
    assert message.startswith(f"EXECUTION_ENV_PATH '{tmp_path}/bad.tar.gz' cannot be unpacked: ")
    assert not list(tmp_path.rglob("outside.py"))
    assert environments.list_environments(environments.environments_folder()) == []


def entry(name: str, link: str = "", kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """A link to ``link``, or a file without it."""
    made = tarfile.TarInfo(name)
    if link:
        made.type, made.linkname = kind, link
    return made


def directory(name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = tarfile.DIRTYPE
    return made


def beyond_any_path() -> list[tarfile.TarInfo]:
    """The archive of CVE-2025-4517: the path that a link means is too long to be resolved by older Pythons."""
    long, members, at = "d" * 247, [], ""
    for letter in "abcdefghijklmnop":
        members += [directory(f"{at}{long}"), entry(f"{at}{letter}", long)]
        at += f"{letter}/"
    chain = "/".join("abcdefghijklmnop")
    members.append(entry(f"{chain}/{'l' * 254}", "../" * 16))
    return [*members, entry("escape", f"{chain}/{'l' * 254}/../../outside")]


HARD = tarfile.LNKTYPE
LEADS_OUT = {
    "a long path": beyond_any_path(),
    "a link up": [entry("l", "..")],
    "a link up from below": [directory("d"), entry("d/l", "../..")],
    "a link through a link": [directory("a/b"), entry("a/l", "b"), entry("m", "a/l/../../x")],
    "a file behind a link": [directory("a"), entry("l", "a"), entry("l/file")],
    "a file in place of a link": [entry("l", "a"), entry("l")],
    "a link to a link": [directory("a/b"), entry("a/b/l", "../.."), entry("l", "a/b/l", HARD)],
    "a link to what comes later": [entry("l", "a/b/m", HARD), entry("a/b/m", "../..")],
    "an absolute link": [entry("l", "/etc")],
    "an absolute hard link": [entry("l", "/etc/passwd", HARD)],
}


@pytest.mark.parametrize("how", LEADS_OUT)
@pytest.mark.parametrize("trusting", [False, True])
def test_links_that_may_lead_out(how: str, trusting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused, also where Python's own filter finds nothing wrong."""
    if trusting:
        monkeypatch.setattr(tarfile, "data_filter", lambda member, _target: member)
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for member in LEADS_OUT[how]:
            tar.addfile(member)
    assert "cannot be unpacked: " in refusal(tmp_path, tmp_path / "bad.tar")
    assert environments.list_environments(environments.environments_folder()) == []


def test_links_of_environments(tmp_path: Path) -> None:
    lib = program(tmp_path / "env").parent.parent / "lib"
    (lib / "deep").mkdir(parents=True)
    (lib / "libz.so.1").write_text("z")
    (lib / "libz.so").symlink_to("libz.so.1")
    (lib / "deep" / "libz.so").symlink_to("../libz.so")
    (lib.parent / "lib64").symlink_to("lib")
    (lib / "hard").hardlink_to(lib / "libz.so.1")
    interpreter = find_interpreter(asking_for(tmp_path, packed(tmp_path / "env", tmp_path / "env.tar.gz")))
    assert interpreter is not None
    found = interpreter.parent.parent
    names = ("lib/libz.so", "lib/deep/libz.so", "lib64/libz.so", "lib/hard")
    assert [(found / name).read_text() for name in names] == ["z"] * 4


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00broken"])
def test_no_archive(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    message = refusal(tmp_path, tmp_path / "file")
    assert "cannot be unpacked" in message
    assert message.endswith("Give a virtual environment, an archive made by conda-pack, or a requirements.txt.")


def test_half_an_archive(tmp_path: Path) -> None:
    program(tmp_path / "env")
    (tmp_path / "env" / "much").write_bytes(os.urandom(100_000))
    whole = packed(tmp_path / "env", tmp_path / "whole.tar.gz").read_bytes()
    (tmp_path / "half.tar.gz").write_bytes(whole[: len(whole) // 2])
    assert "cannot be unpacked" in refusal(tmp_path, tmp_path / "half.tar.gz")
    assert environments.list_environments(environments.environments_folder()) == []


def test_a_python_that_cannot_refuse_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "env")
    archive = packed(tmp_path / "env", tmp_path / "env.tar.gz")
    monkeypatch.delattr(tarfile, "data_filter")
    assert "archives need Python 3.11.4 or newer" in refusal(tmp_path, archive)


def test_nothing_there(tmp_path: Path) -> None:
    assert refusal(tmp_path, tmp_path / "gone") == (
        f"Failed to get the canonical path for {tmp_path}/gone. It is the EXECUTION_ENV_PATH of model 'm', and there "
        "is no such file or directory."
    )


def test_no_python_in_it(tmp_path: Path) -> None:
    (tmp_path / "env" / "lib").mkdir(parents=True)
    message = refusal(tmp_path, tmp_path / "env")
    assert "but that has no bin/python; it has: lib. Give a virtual environment" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '#!/bin/sh\necho \'{"python": [3, 9, 18], "numpy": "1.26"}\'\n',
            "but its Python is 3.9.18. Build it with Python 3.11 or newer, and numpy.",
        ),
        (
            '#!/bin/sh\necho \'{"python": [3, 12, 1], "numpy": ""}\'\n',
            "but it has no numpy. Install it there: {python} -m pip install numpy",
        ),
        ("#!/bin/sh\necho 'libpython is missing' >&2\nexit 127\n", "but its Python does not run: libpython is missing"),
        ("#!/bin/sh\nexit 3\n", "but its Python does not run: exit status 3"),
        ("#!/nowhere/python\n", "but its Python does not run: [Errno 2]"),
        ("#!/bin/sh\necho hello\n", "but its Python does not run: Expecting value"),
    ],
)
def test_a_python_that_cannot_run_models(text: str, expected: str, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    python = program(environment, text)
    message = refusal(tmp_path, environment)
    assert message.startswith(f"EXECUTION_ENV_PATH of model 'm' is '{environment}', ")
    assert expected.replace("{python}", str(python)) in message


def test_our_own_environment_does_not_leak_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    python = program(tmp_path / "env")
    assert find_interpreter(asking_for(tmp_path, tmp_path / "env")) == python
