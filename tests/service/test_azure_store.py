"""A repository in Azure Blob Storage: Azurite, Microsoft's own emulator, stands for it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import obstore
import pytest
from obstore.store import AzureStore

from nerite.core.errors import Internal
from nerite.repository.remote import repository_at
from serving import eventually
from tools import install_node_packages

AZURITE = Path(__file__).with_name("azurite")
pytestmark = pytest.mark.timeout(240)  # it may have to be installed
ACCOUNT, KEY, CONTAINER = "someone", base64.b64encode(b"a key").decode(), "models"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with an account that has an empty container."""
    install_node_packages(AZURITE)
    log = tmp_path_factory.mktemp("azurite") / "log"
    command = [AZURITE / "node_modules" / ".bin" / "azurite-blob", "--inMemoryPersistence", "--skipApiVersionCheck"]
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [*command, "--blobHost", "127.0.0.1", "--blobPort", "0"],
            cwd=log.parent,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: b"successfully listens" in log.read_bytes() or server.poll() is not None)
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text().rpartition("listen")[2])
        assert found, log.read_text()
        make_container(f"{found[0]}/{ACCOUNT}")
        yield f"{found[0]}/{ACCOUNT}"
    finally:
        server.terminate()
        server.wait(20)


def make_container(endpoint: str) -> None:
    """Make the container, which the library that we read with has no call for."""
    headers = {"x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": "2021-08-06"}
    resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items()) + resource
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    url = f"{endpoint}/{CONTAINER}?restype=container"
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=20).close()


@pytest.fixture
def location(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    client = AzureStore(CONTAINER, account_name=ACCOUNT, account_key=KEY, client_options={"allow_http": True})
    obstore.put(client, "deep/m/config.pbtxt", b"backend: 'python'")
    obstore.put(client, "deep/m/1/model.py", b"pass")
    return f"as://{ACCOUNT}/{CONTAINER}/deep"


def test_a_model(location: str, tmp_path: Path) -> None:
    repository = repository_at(location, {"AZURE_STORAGE_KEY": KEY}, str(tmp_path))
    assert repository.models() == ["m"]
    directory = repository.fetch("m")
    assert directory is not None
    assert (directory / "1" / "model.py").read_text() == "pass"
    assert (directory / "config.pbtxt").read_text() == "backend: 'python'"
    assert repository.fetch("m") == directory
    assert repository.fetch("nothing") is None
    repository.close()


@pytest.mark.parametrize(
    ("container", "key", "text"),
    [
        (CONTAINER, "b3RoZXI=", "access was denied with the credentials of AZURE_STORAGE_KEY"),
        (CONTAINER, "", "access was denied without credentials"),
        ("nowhere", KEY, "there is no container 'nowhere': ContainerNotFound"),
    ],
)
def test_what_a_refusal_says(location: str, tmp_path: Path, container: str, key: str, text: str) -> None:
    place = location.replace(CONTAINER, container)
    repository = repository_at(place, {"AZURE_STORAGE_KEY": key}, str(tmp_path))
    with pytest.raises(Internal, match=re.escape(text)):
        repository.models()
    repository.close()
