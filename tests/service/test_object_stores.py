"""Repositories in object stores, beneath the server: what is fetched, what is kept, and what is said when it fails."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from nerite.core.errors import Internal, Unavailable
from nerite.repository.remote import repository_at
from nerite.repository.remote import store as remote_store
from nerite.repository.remote.repository import RemoteRepository
from object_store import (
    BUCKET,
    KEYS,
    Application,
    Environ,
    ObjectStore,
    Respond,
    breaking,
    dripping,
    is_read,
    listing,
    object_store,
    refusing,
)
from serving import PATIENCE

LARGE = bytes(range(256)) * 12_000
"""Three pieces of a download, and a bit."""


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(running: ObjectStore) -> ObjectStore:
    running.reset()
    running.put("models/m/config.pbtxt", "backend: 'python'")
    running.put("models/m/1/model.py", "pass")
    return running


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., RemoteRepository]]:
    """Opens repositories with a cache of the test's own."""
    made: list[RemoteRepository] = []

    def make(location: str, **environment: str) -> RemoteRepository:
        repository = repository_at(location, {**KEYS, **environment}, str(tmp_path / "cache"))
        made.append(repository)
        return repository

    yield make
    for repository in made:
        repository.close()


Opens = Callable[..., RemoteRepository]


@pytest.fixture
def drip(store: ObjectStore) -> Iterator[Callable[[str], None]]:
    """Has the store answer some requests byte by byte, until the test ends."""
    ended = threading.Event()

    def begin(part: str) -> None:
        store.door = dripping(part, ended)

    yield begin
    ended.set()


def content(directory: Path | None) -> dict[str, bytes]:
    assert directory is not None
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_models_are_the_directories(store: ObjectStore, opened: Opens) -> None:
    store.put("models/other/1/model.py", "pass")
    store.put("models/.hidden/1/model.py", "pass")
    store.put("models/readme.txt", "a file")
    store.put("models-of-others/no/1/model.py", "pass")
    assert opened(store.location).models() == ["m", "other"]
    assert opened(f"s3://{store.url}/{BUCKET}").models() == ["models", "models-of-others"]


def test_a_model_is_a_directory_of_its_name(store: ObjectStore, opened: Opens) -> None:
    directory = opened(store.location).fetch("m")
    assert content(directory) == {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}
    assert directory is not None and directory.name == "m"


@pytest.mark.parametrize("name", ["nothing", "m/1", "..", ".", ""])
def test_there_is_no_such_model(store: ObjectStore, opened: Opens, name: str) -> None:
    assert opened(store.location).fetch(name) is None


def test_empty_objects_that_stand_for_directories(store: ObjectStore, opened: Opens) -> None:
    for key in ("models", "models/m", "models/m/1", "models/m/2"):
        store.mark(key)
    store.put("models/m/1/empty.txt", "")
    repository = opened(store.location)
    assert repository.models() == ["m"]
    directory = repository.fetch("m")
    assert directory is not None
    assert sorted(content(directory)) == ["1/empty.txt", "1/model.py", "config.pbtxt"]
    assert (directory / "2").is_dir()


def test_names_with_other_letters(store: ObjectStore, opened: Opens) -> None:
    store.put("models/größe 1%20/1/a b+c.py", "pass")
    repository = opened(store.location)
    assert repository.models() == ["größe 1%20", "m"]
    assert content(repository.fetch("größe 1%20")) == {"1/a b+c.py": b"pass"}


def test_an_unchanged_model_costs_one_listing(store: ObjectStore, opened: Opens) -> None:
    repository = opened(store.location)
    first = repository.fetch("m")
    assert store.downloads == ["models/m/1/model.py", "models/m/config.pbtxt"]
    lists = store.lists
    store.put("models/m/config.pbtxt", "backend: 'python'")
    assert repository.fetch("m") == first
    assert (len(store.reads), store.lists) == (2, lists + 1)


def test_only_what_changed_is_downloaded(store: ObjectStore, opened: Opens) -> None:
    repository = opened(store.location)
    before = repository.fetch("m")
    store.reads.clear()
    store.put("models/m/1/model.py", "other")
    after = repository.fetch("m")
    assert store.downloads == ["models/m/1/model.py"]
    assert content(after)["1/model.py"] == b"other"
    assert content(before)["1/model.py"] == b"pass", "who serves the old state still has it"


def test_files_have_the_time_of_the_store(store: ObjectStore, opened: Opens) -> None:
    repository = opened(store.location)
    times = []
    for source in ("same", "size"):
        store.put("models/m/1/model.py", source)
        changed = obstore.head(store.client, "models/m/1/model.py")["last_modified"]
        directory = repository.fetch("m")
        assert directory is not None
        times.append((directory / "1" / "model.py").stat().st_mtime_ns)
        assert times[-1] // 10**9 == int(changed.timestamp())
    assert times[0] != times[1], "even in the same second"


def test_a_warm_cache_serves_the_next_process(store: ObjectStore, opened: Opens) -> None:
    first = opened(store.location).fetch("m")
    store.reads.clear()
    assert opened(store.location).fetch("m") == first
    assert store.reads == []


def test_old_states_go_when_nobody_uses_them(store: ObjectStore, opened: Opens, tmp_path: Path) -> None:
    def files() -> int:
        return sum(1 for path in (tmp_path / "cache").rglob("files/*"))

    one, two = opened(store.location), opened(store.location)
    old = one.fetch("m")
    assert old is not None and one.fetch("m") == two.fetch("m") == old
    store.put("models/m/1/model.py", "new")
    new = one.fetch("m")
    assert new is not None
    one.release(old)
    assert old.exists() and files() == 3, "somebody else here uses it"
    one.release(old)
    assert old.exists() and files() == 3, "another process uses it"
    two.release(old)
    one.release(new)
    assert not old.exists() and new.exists() and files() == 2, "it is what there is to load"
    assert one.fetch("m") == new
    store.remove("models/m")
    store.put("models/other/1/model.py", "pass")
    assert one.models() == ["other"]
    assert new.exists(), "it may still be served"
    one.release(new)
    assert not new.exists() and files() == 0


def test_a_download_that_breaks_off_is_resumed(
    store: ObjectStore, opened: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("models/large/1/weights", LARGE)
    store.door = breaking(1_500_000, times=1)
    with caplog.at_level(logging.INFO, "nerite"):
        assert content(opened(store.location).fetch("large")) == {"1/weights": LARGE}
    first, second = store.reads
    assert first.range == ""
    begin = int(second.range.removeprefix("bytes=").removesuffix("-"))
    assert 0 < begin <= 1_500_000
    assert first.condition == second.condition != ""
    assert "downloading 'models/large/1/weights' failed, retrying" in caplog.text
    assert "1 file, 3.1 MB" in caplog.messages[0]
    assert "downloaded model 'large'" in caplog.messages[-1]


def test_what_another_process_began_is_resumed(store: ObjectStore, opened: Opens) -> None:
    store.put("models/large/1/weights", LARGE)
    breaks, refuses = breaking(1_500_000, times=1), refusing("403 Forbidden", "AccessDenied")

    def door(environ: Environ, respond: Respond, moto: Application) -> Iterable[bytes]:
        return (refuses if len(store.reads) > 1 else breaks)(environ, respond, moto)

    store.door = door
    with pytest.raises(Internal, match="access was denied"):
        opened(store.location).fetch("large")
    store.reads.clear()
    store.door = breaking(0, times=0)
    assert content(opened(store.location).fetch("large")) == {"1/weights": LARGE}
    (read,) = store.reads
    assert read.range.startswith("bytes=")


def test_content_that_changes_meanwhile_is_not_mixed(store: ObjectStore, opened: Opens) -> None:
    store.put("models/large/1/weights", LARGE)
    breaks = breaking(1_500_000, times=1)

    def door(environ: Environ, respond: Respond, moto: Application) -> Iterable[bytes]:
        answer = breaks(environ, respond, moto)
        if is_read(environ) and len(store.reads) == 1:
            store.put("models/large/1/weights", LARGE[::-1])
        return answer

    store.door = door
    assert content(opened(store.location).fetch("large")) == {"1/weights": LARGE[::-1]}


def test_a_model_that_never_rests(store: ObjectStore, opened: Opens) -> None:
    def door(environ: Environ, respond: Respond, moto: Application) -> Iterable[bytes]:
        if is_read(environ):
            store.put("models/m/1/model.py", f"state {len(store.reads)}")
        return moto(environ, respond)

    store.door = door
    with pytest.raises(Internal, match="Load it after it has been uploaded completely"):
        opened(store.location).fetch("m")


def test_passing_failures_are_tried_again(store: ObjectStore, opened: Opens, caplog: pytest.LogCaptureFixture) -> None:
    store.door = refusing("503 Slow Down", "SlowDown", times=2)
    assert opened(store.location).models() == ["m"]
    assert caplog.text.count("retrying") == 2


@pytest.mark.parametrize(
    ("status", "code", "texts"),
    [
        ("403 Forbidden", "InvalidAccessKeyId", ["access was denied with the credentials of AWS_ACCESS_KEY_ID",
                                                 "InvalidAccessKeyId: says the store", "Set AWS_ACCESS_KEY_ID and"]),
        ("401 Unauthorized", "", ["access was denied", "AWS_PROFILE"]),
        ("404 Not Found", "NoSuchBucket", ["there is no bucket 'bucket'", "Check the name"]),
        ("301 Moved", "", ["Set AWS_DEFAULT_REGION to the region of the bucket"]),
        ("400 Bad Request", "AuthorizationHeaderMalformed", ["Set AWS_DEFAULT_REGION to the region of the bucket"]),
        ("400 Bad Request", "InvalidRequest", ["InvalidRequest: says the store (HTTP status 400)"]),
    ],
)  # fmt: skip
def test_what_a_refusal_says(store: ObjectStore, opened: Opens, status: str, code: str, texts: list[str]) -> None:
    store.door = refusing(status, code)
    repository = opened(store.location)
    for ask in (repository.models, lambda: repository.fetch("m")):
        with pytest.raises(Internal) as caught:
            ask()
        assert caught.value.message.startswith(f"failed to read model repository '{store.location}': ")
        for text in texts:
            assert text in caught.value.message


def test_a_refusal_of_one_file(store: ObjectStore, opened: Opens) -> None:
    refuse = refusing("403 Forbidden", "AccessDenied")

    def door(environ: Environ, respond: Respond, moto: Application) -> Iterable[bytes]:
        return refuse(environ, respond, moto) if is_read(environ) else moto(environ, respond)

    store.door = door
    with pytest.raises(Internal, match="access was denied"):
        opened(store.location).fetch("m")


def test_a_path_with_nothing_below_it(store: ObjectStore, opened: Opens) -> None:
    location = f"s3://{store.url}/{BUCKET}/modles"
    with pytest.raises(Internal, match=f"failed to stat file {location}: there is no object below 'modles'"):
        opened(location).models()


def test_a_cache_that_cannot_be_written(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    repository = repository_at(store.location, KEYS, str(tmp_path / "file"))
    with pytest.raises(Internal, match="--repository-cache-directory"):
        repository.fetch("m")
    repository.close()


def test_who_waits_for_another_server_can_be_stopped(store: ObjectStore, opened: Opens) -> None:
    held, waiting = opened(store.location), opened(store.location)
    reading, go_on = threading.Event(), threading.Event()

    def door(environ: Environ, respond: Respond, moto: Application) -> Iterable[bytes]:
        if is_read(environ):
            reading.set()
            assert go_on.wait(PATIENCE)
        return moto(environ, respond)

    store.door = door
    with ThreadPoolExecutor(1) as thread:
        fetched = thread.submit(held.fetch, "m")
        assert reading.wait(PATIENCE)
        timer = threading.Timer(0.1, waiting.close)
        timer.start()
        with pytest.raises(Unavailable, match="the server is stopping"):
            waiting.fetch("m")
        timer.join()
        go_on.set()
        fetched.result()


def test_without_credentials_requests_are_not_signed(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    environment = {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    repository = repository_at(store.location, environment, str(tmp_path / "cache"))
    assert repository.models() == ["m"]
    store.door = refusing("403 Forbidden", "AccessDenied")
    with pytest.raises(Internal, match="access was denied without credentials"):
        repository.models()
    repository.close()


def test_google(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public objects without credentials, and others with the key of an account."""
    environment = {"HOME": str(tmp_path), "STORAGE_EMULATOR_HOST": store.url, "GCE_METADATA_HOST": "127.0.0.1:1"}
    place = f"gs://{BUCKET}/models"
    repository = repository_at(place, environment, str(tmp_path / "public"))
    assert repository.models() == ["m"]
    with pytest.raises(Internal, match=r"access was denied without credentials.* Set GOOGLE_APPLICATION_CREDENTIALS"):
        repository.fetch("m")
    repository.close()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    account = {
        "type": "service_account",
        "client_email": "reader@example.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    }
    (tmp_path / "key.json").write_text(json.dumps(account))
    environment["GOOGLE_APPLICATION_CREDENTIALS"] = str(tmp_path / "key.json")
    repository = repository_at(place, environment, str(tmp_path / "signed"))
    assert content(repository.fetch("m")) == {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}
    assert store.reads[-1].authorization.startswith("Bearer ")
    repository.close()


# A store that is hostile, or broken.


@pytest.mark.parametrize("part", ["models/m/1/model.py", "prefix=models/m"])
def test_a_store_that_sends_a_byte_now_and_then(
    store: ObjectStore, opened: Opens, drip: Callable[[str], None], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(remote_store, "TRIES", 2)
    store.put("models/m/1/model.py", LARGE)
    repository = opened(store.location)
    drip(part)
    with pytest.raises(Internal, match=r"failed 2 times: the store has not answered, or has sent too little, for 0.1"):
        repository.fetch("m")


@pytest.mark.parametrize("part", ["models/slow/", "prefix=models/slow"])
def test_a_model_that_does_not_arrive_holds_up_no_other_and_not_the_end(
    store: ObjectStore, opened: Opens, drip: Callable[[str], None], part: str
) -> None:
    for number in range(20):
        store.put(f"models/slow/{number}", LARGE)
    drip(part)
    repository = opened(store.location)
    with ThreadPoolExecutor(1) as other:
        arriving = other.submit(repository.fetch, "slow")
        assert content(repository.fetch("m")) == {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}
        assert not arriving.done()
        repository.close()
        with pytest.raises(Unavailable, match=r"the server is stopping|was cancelled"):
            arriving.result(PATIENCE)


def test_a_listing_without_end(store: ObjectStore, opened: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "MOST_OBJECTS", 5000)
    store.door = listing(lambda page: (f"models/m/{page}/{number}" for number in range(100)), endless=True)
    with pytest.raises(Internal, match="the store lists more than 5000 objects below 'models/m'"):
        opened(store.location).fetch("m")
    assert store.lists < 100


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("models/m/../../x", "Rename the object"),
        ("models/m//etc/x", "Rename the object"),
        ("models/m/a\tb", "Rename the object"),
        (f"models/m/{'a' * 300}", "is not a valid file name"),
        ("models/m/..\\x", "is not a valid file name"),
        ("models/n/x", "is not below 'models/m'"),
        ("models/mx", "is not below 'models/m'"),
    ],
)
def test_names_that_lead_out(store: ObjectStore, opened: Opens, tmp_path: Path, key: str, text: str) -> None:
    store.door = listing(lambda _: ["models/m/config.pbtxt", key])
    with pytest.raises(Internal, match=text):
        opened(store.location).fetch("m")
    assert store.lists == 1, "tried again"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
