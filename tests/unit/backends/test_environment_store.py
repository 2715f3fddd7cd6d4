"""Keeping environments: made once, by one process at a time, and not removed while in use."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nerite.backends.python import environments as store
from nerite.core.errors import InvalidArgument, Unavailable
from serving import eventually

ORIGIN = Path("/models/m/requirements.txt")
OTHER_PROCESS = """
import sys
from pathlib import Path
from nerite.backends.python import environments

def make(directory, lock):
    print("making", flush=True)
    sys.stdin.readline()
    (directory / "made").write_text("by another process")

print(environments.kept_environments(Path(sys.argv[1]), "key", Path("/elsewhere"), make), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "stopped", threading.Event())
    monkeypatch.setattr(store, "used_environments", {})
    monkeypatch.setattr(store, "LOCK_RETRY", 0.01)


def make(directory: Path, lock: int) -> None:
    (directory / "made").write_text("here")


def never(directory: Path, lock: int) -> None:
    raise AssertionError("it is there already")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let go of the locks, as the end of the process would."""
    for descriptor in store.used_environments.values():
        os.close(descriptor)
    monkeypatch.setattr(store, "used_environments", {})


def test_made_once(tmp_path: Path) -> None:
    directory = store.kept_environments(tmp_path / "new" / "place", "key", ORIGIN, make)
    assert (directory / "made").read_text() == "here"
    assert store.kept_environments(tmp_path / "new" / "place", "key", ORIGIN, never) == directory


def test_a_store_that_cannot_be_written_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container image, where root made it: no lock is taken, and no time of use is noted."""
    directory = store.kept_environments(tmp_path, "key", ORIGIN, make)
    forget(monkeypatch)
    (tmp_path / "key.lock").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode == os.W_OK))
    assert store.kept_environments(tmp_path, "key", ORIGIN, never) == directory
    assert not (tmp_path / "key.lock").exists()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path, lock: int) -> None:
        make(directory, lock)
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument, match="no"):
        store.kept_environments(tmp_path, "key", ORIGIN, fail)
    assert store.list_environments(tmp_path) == []
    assert store.kept_environments(tmp_path, "key", ORIGIN, make).exists()


def test_what_was_not_finished_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "half").touch()
    (kept,) = store.list_environments(tmp_path)
    assert kept.origin == ""
    directory = store.kept_environments(tmp_path, "key", ORIGIN, make)
    assert sorted(os.listdir(directory)) == ["made", "nerite-origin"]


def test_many_threads(tmp_path: Path) -> None:
    """One makes it, and the others find it while it is in use."""
    threads = 8
    made: list[Path] = []
    found: list[Path] = []

    def make_once(directory: Path, lock: int) -> None:
        made.append(directory)

    for key in map(str, range(20)):
        start = threading.Barrier(threads)

        def load(key: str = key, start: threading.Barrier = start) -> None:
            start.wait()
            found.append(store.kept_environments(tmp_path, key, ORIGIN, make_once))

        running = [threading.Thread(target=load) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(20)
    assert len(found) == 20 * threads
    assert sorted(made) == sorted(set(found))


def test_one_that_was_removed_by_hand_is_made_anew(tmp_path: Path) -> None:
    directory = store.kept_environments(tmp_path, "key", ORIGIN, make)
    shutil.rmtree(directory)
    assert store.kept_environments(tmp_path, "key", ORIGIN, make) == directory
    assert (directory / "made").exists()


def test_two_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "making\n"
        found: list[Path] = []
        thread = threading.Thread(target=lambda: found.append(store.kept_environments(tmp_path, "key", ORIGIN, never)))
        thread.start()
        eventually(lambda: "waiting for an environment that another process is making" in caplog.text)
        (unfinished,) = store.list_environments(tmp_path)
        assert not store.remove_environments(unfinished)
        print(file=other.stdin, flush=True)
        thread.join(20)
        assert (found[0] / "made").read_text() == "by another process"
        other.communicate("\n")


def test_who_stops_does_not_wait(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "making\n"
        store.stopped.set()
        with pytest.raises(Unavailable, match="the server is stopping"):
            store.kept_environments(tmp_path, "key", ORIGIN, never)
        other.communicate("\n\n")


def test_what_is_in_use_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.kept_environments(tmp_path, "key", ORIGIN, make)
    store.kept_environments(tmp_path, "key", ORIGIN, never)
    (kept,) = store.list_environments(tmp_path)
    assert (kept.origin, kept.size) == (str(ORIGIN), len("here") + len(str(ORIGIN)))
    assert not store.remove_environments(kept)
    forget(monkeypatch)
    assert store.remove_environments(kept)
    assert os.listdir(tmp_path) == []
    assert store.kept_environments(tmp_path, "key", ORIGIN, make).exists()


def test_listed_by_their_last_use(tmp_path: Path) -> None:
    for key in ("b", "a", "c"):
        os.utime(store.kept_environments(tmp_path, key, ORIGIN, make), (1000, {"a": 1, "b": 2, "c": 3}[key]))
    assert [kept.directory.name for kept in store.list_environments(tmp_path)] == ["a", "b", "c"]
    store.kept_environments(tmp_path, "a", ORIGIN, never)
    assert [kept.directory.name for kept in store.list_environments(tmp_path)] == ["b", "c", "a"]


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument) as refused:
        store.kept_environments(tmp_path / "file" / "place", "key", ORIGIN, make)
    assert refused.value.message == (
        f"cannot store an environment made from '{ORIGIN}' in '{tmp_path}/file/place': Not a directory. Set "
        "--environment-directory to a directory with enough space."
    )


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.environments_folder() == tmp_path / "nerite" / "environments"
    assert store.environments_folder("/somewhere") == Path("/somewhere")
    assert store.list_environments(tmp_path / "nowhere") == []


def test_the_next_server_of_a_process_may_install_after_one_has_stopped(tmp_path: Path) -> None:
    def install(directory: Path, lock: int) -> None:
        store.run_installer([sys.executable, "-c", "open('made', 'w')"], "an environment", directory, lock)

    store.stop_installer()
    with pytest.raises(Unavailable, match="the server is stopping"):
        store.kept_environments(tmp_path, "key", ORIGIN, install)
    store.permit_installers()
    assert (store.kept_environments(tmp_path, "key", ORIGIN, install) / "made").exists()
