"""``nerite serve s3://…``: the control modes, reloads, downloads that break off, and caches that are warm."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from object_store import BUCKET, KEYS, Application, Environ, ObjectStore, Respond, breaking, is_read, object_store
from serving import NERITE, Serving, adds, eventually, pbtxt, python_model, serving


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """What is in the bucket, on our side."""
    python_model(tmp_path / "models", "adder", adds(1))
    return tmp_path / "models"


@pytest.fixture
def store(running: ObjectStore, models: Path) -> ObjectStore:
    running.reset()
    running.upload(models)
    return running


def serves(store: ObjectStore, tmp_path: Path, *flags: str, clean: bool = True) -> AbstractContextManager[Serving]:
    place = f"--repository-cache-directory={tmp_path / 'cache'}"
    return serving(store.location, tmp_path / "log", place, *flags, environment=KEYS, clean=clean)


def test_all_models_at_start(store: ObjectStore, tmp_path: Path) -> None:
    with serves(store, tmp_path) as server:
        assert server.infer("adder", [1.0]) == [2.0]
        (entry,) = server.json("POST", "/v2/repository/index")
        assert (entry["name"], entry["state"]) == ("adder", "READY")
        assert "downloaded model 'adder'" in server.text
        assert any(each.is_file() for each in (tmp_path / "cache").rglob("*"))


def test_loaded_by_hand(store: ObjectStore, tmp_path: Path, models: Path) -> None:
    with serves(store, tmp_path, "--model-control-mode=explicit") as server:
        assert server.json("POST", "/v2/repository/index") == [{"name": "adder"}]
        assert store.reads == []
        load = ("POST", "/v2/repository/models/adder/load")
        assert server.ask(*load)[0] == 200
        assert server.infer("adder", [0.0]) == [1.0]
        reads = len(store.reads)
        workers = server.workers()
        assert server.ask(*load)[0] == 200
        assert (len(store.reads), server.workers()) == (reads, workers), "nothing changed"
        python_model(models, "adder", adds(2), version=2)
        store.upload(models)
        assert server.ask(*load)[0] == 200
        assert server.infer("adder", [0.0]) == [2.0]
        assert [read.key for read in store.reads[reads:]] == ["models/adder/2/model.py"]
        assert server.ask("POST", "/v2/repository/models/adder/unload")[0] == 200
        eventually(lambda: server.workers() == {})
        assert server.ask(*load)[0] == 200
        assert len(store.reads) == reads + 1
        status, _, body = server.ask("POST", "/v2/repository/models/nothing/load")
        assert (status, body) == (
            500,
            b'{"error":"failed to load \'nothing\', failed to poll from model repository"}',
        )


def test_only_the_version_that_changed_is_loaded_anew(store: ObjectStore, tmp_path: Path, models: Path) -> None:
    config = pbtxt() + "version_policy: { all {} }\n"
    for version in (1, 2):
        python_model(models, "adder", adds(version), config, version=version)
    store.upload(models)
    with serves(store, tmp_path, "--model-control-mode=explicit", "--load-model=adder") as server:
        python_model(models, "adder", adds(20), config, version=2)
        store.upload(models)
        assert server.ask("POST", "/v2/repository/models/adder/load")[0] == 200
        assert server.infer("adder/versions/2", [0.0]) == [20.0]
        assert (server.text.count("loading: adder:1"), server.text.count("loading: adder:2")) == (1, 2)
        assert server.infer("adder/versions/1", [0.0]) == [1.0]
        states = [path.name for path in (tmp_path / "cache").glob("*/adder/states/*")]
        assert len(states) == 2, "version 1 runs from the old state"


def test_polling_follows_the_bucket(store: ObjectStore, tmp_path: Path, models: Path) -> None:
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serves(store, tmp_path, *flags) as server:
        assert server.infer("adder", [0.0]) == [1.0]
        python_model(models, "adder", adds(2))
        python_model(models, "late", adds(3))
        store.upload(models)
        eventually(lambda: server.infer("adder", [0.0]) == [2.0])
        eventually(lambda: server.ready("late"))
        store.remove("models/late")
        eventually(lambda: not server.ready("late"))
        eventually(lambda: not list((tmp_path / "cache").glob("*/late/files/*")), what="what is gone is kept")
        eventually(lambda: len(list((tmp_path / "cache").glob("*/adder/states/*"))) == 1, what="old states are kept")
        assert server.infer("adder", [0.0]) == [2.0]


def test_a_store_that_is_away_changes_nothing(store: ObjectStore, tmp_path: Path) -> None:
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serves(store, tmp_path, *flags) as server:

        def door(environ: Environ, respond: Respond, moto: Application) -> Iterable[bytes]:
            respond("403 Forbidden", [("Content-Length", "0")])
            return [b""]

        store.door = door
        eventually(lambda: "access was denied with the credentials of AWS_ACCESS_KEY_ID" in server.text)
        assert server.infer("adder", [0.0]) == [1.0]
        assert server.ready()


def test_a_download_that_breaks_off_at_start(store: ObjectStore, tmp_path: Path) -> None:
    weights = os.urandom(3_000_000)
    store.put("models/adder/1/weights", weights)
    store.door = breaking(1_500_000, times=2)
    with serves(store, tmp_path) as server:
        assert server.infer("adder", [0.0]) == [1.0]
        assert "retrying" in server.text
    (staged,) = (tmp_path / "cache").rglob("weights")
    assert staged.read_bytes() == weights
    assert any(read.range for read in store.reads)


def test_restart_from_a_warm_cache(store: ObjectStore, tmp_path: Path) -> None:
    with serves(store, tmp_path) as server:
        assert server.infer("adder", [0.0]) == [1.0]
    store.reads.clear()
    with serves(store, tmp_path) as server:
        assert server.infer("adder", [0.0]) == [1.0]
        assert "downloading" not in server.text
    assert store.reads == []


def test_a_signal_ends_a_download(store: ObjectStore, tmp_path: Path) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(pieces: Iterable[bytes]) -> Iterator[bytes]:
        yield b"".join(pieces)[:-1]
        reading.set()
        go_on.wait(30)

    def door(environ: Environ, respond: Respond, moto: Application) -> Iterable[bytes]:
        answer = moto(environ, respond)
        return slow(answer) if is_read(environ) else answer

    store.door = door
    command = [str(NERITE), "serve", store.location, f"--repository-cache-directory={tmp_path / 'cache'}"]
    ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    process = subprocess.Popen([*command, *ports], env={**os.environ, **KEYS}, stdout=subprocess.DEVNULL)
    try:
        assert reading.wait(30)
        process.terminate()
        go_on.set()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def refused(location: str, tmp_path: Path, **environment: str) -> str:
    """What a server says that does not start."""
    log = tmp_path / "refused"
    with (
        pytest.raises(RuntimeError, match="the server did not start"),
        serving(location, log, environment={**KEYS, **environment}, clean=False),
    ):
        pass
    return log.read_text()


def test_what_a_server_says_that_cannot_start(store: ObjectStore, tmp_path: Path) -> None:
    nowhere = f"s3://{store.url}/nowhere/models"
    assert f"failed to read model repository '{nowhere}': there is no bucket 'nowhere'" in refused(nowhere, tmp_path)
    wrong = f"s3://{store.url}/{BUCKET}/modles"
    assert f"failed to stat file {wrong}: there is no object below 'modles'" in refused(wrong, tmp_path)
    assert "cannot read the location 's3://'. Write it as s3://bucket/path or" in refused("s3://", tmp_path)
    file = str(tmp_path / "none.json")
    text = refused(store.location, tmp_path, TRITON_CLOUD_CREDENTIAL_PATH=file)
    assert f"cannot read '{file}', which TRITON_CLOUD_CREDENTIAL_PATH names" in text


def test_two_repositories_one_of_them_local(store: ObjectStore, tmp_path: Path, models: Path) -> None:
    shutil.rmtree(models)
    python_model(models, "other", adds(5))
    with serves(store, tmp_path, f"--model-repository={models}") as server:
        assert server.infer("adder", [0.0]) == [1.0]
        assert server.infer("other", [0.0]) == [5.0]
