"""``nerite.client`` with a real server."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trustme

from client_models import CONFIG, COUNTS, TRIPLES
from nerite.client import Client, ClientError
from serving import IDENTITY, IN_PROCESS, Serving, eventually, pbtxt, python_model, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("client")
    models = folder / "models"
    python_model(models, "numbers", IDENTITY)
    python_model(models, "texts", IDENTITY, pbtxt(datatype="TYPE_STRING", parameters=IN_PROCESS))
    python_model(models, "counts", COUNTS, pbtxt(batch=0, more="model_transaction_policy { decoupled: true }"))
    python_model(models, "spare", IDENTITY)
    flags = ("--model-control-mode=explicit", "--load-model=numbers", "--load-model=texts", "--load-model=counts")
    with serving(models, folder / "log", *flags) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    with Client(server.http, timeout=20) as made:
        yield made


def test_health(client: Client) -> None:
    assert client.live()
    assert client.ready()
    assert client.ready("numbers")
    assert client.ready("numbers", "1")
    assert not client.ready("numbers", "2")
    assert not client.ready("spare")


def test_models(client: Client) -> None:
    entries = {entry.name: entry for entry in client.models()}
    assert (entries["numbers"].version, entries["numbers"].state) == ("1", "READY")
    assert (entries["spare"].version, entries["spare"].state) == ("", "")
    model = client.model("numbers")
    assert [str(tensor) for tensor in model.inputs] == ["INPUT0 (FP32 [-1, -1])"]
    assert (model.versions, model.platform) == (("1",), "python")
    assert client.config("numbers")["max_batch_size"] == 8
    with pytest.raises(ClientError, match="unknown model: 'nobody'") as error:
        client.model("nobody")
    assert error.value.status == 404


def test_infer(client: Client) -> None:
    for value in ([1, 2.5], np.array([[1, 2.5]]), [[1, 2.5]]):
        (array,) = client.infer("numbers", {"INPUT0": value}).values()
        assert (array.dtype, array.tolist()) == (np.float32, [[1, 2.5]])
    array[0, 0] = 7
    large = np.arange(1_000_000, dtype=np.float32).reshape(4, -1)
    answer = client.infer("numbers", {"INPUT0": large}, outputs=["OUTPUT0"], version="1", parameters={"priority": 1})
    assert np.array_equal(answer["OUTPUT0"], large)
    for text in ("z\u00fcrich", "z\u00fcrich".encode(), ["z\u00fcrich"]):
        assert client.infer("texts", {"INPUT0": text})["OUTPUT0"].tolist() == [["z\u00fcrich".encode()]]


def test_infer_is_refused(client: Client) -> None:
    with pytest.raises(ClientError, match="expected 1 inputs but got 0 inputs") as error:
        client.infer("numbers", {})
    assert error.value.status == 400
    with pytest.raises(ClientError, match="cannot be converted without loss") as error:
        client.infer("numbers", {"INPUT0": np.array([0.1])})
    assert error.value.status is None
    assert client.infer("numbers", {"INPUT0": [1]})["OUTPUT0"].tolist() == [[1]]


def test_stream(client: Client) -> None:
    assert [response["OUTPUT0"] for response in client.stream("counts", {"INPUT0": [3.0]})] == [0, 1, 2]
    responses = client.stream("counts", {"INPUT0": np.array([3], np.float32)}, version="1")
    assert next(responses)["model_name"] == "counts"
    assert client.live()
    with pytest.raises(ClientError, match="unknown model: 'nobody'") as error:
        next(client.stream("nobody", {"INPUT0": [3.0]}))
    assert error.value.status == 404
    assert [one["OUTPUT0"] for one in client.stream("texts", {"INPUT0": "a"})] == ["a"]


def test_load_and_unload(client: Client) -> None:
    client.load("spare")
    assert client.infer("spare", {"INPUT0": [1.5]})["OUTPUT0"].tolist() == [[1.5]]
    # The type of its input is another one afterwards, which the client has to see.
    client.load("spare", config=CONFIG, files={"1/model.py": TRIPLES})
    (array,) = client.infer("spare", {"INPUT0": [2]}).values()
    assert (array.dtype, array.tolist()) == (np.int32, [[6]])
    client.unload("spare", dependents=True)
    eventually(lambda: not client.ready("spare"))
    with pytest.raises(ClientError, match="failed to load 'nobody'") as error:
        client.load("nobody")
    assert error.value.status == 500


def test_a_model_that_somebody_else_has_changed(server: Serving, client: Client) -> None:
    with Client(server.http) as other:
        client.load("spare")
        assert other.infer("spare", {"INPUT0": [1.5]})["OUTPUT0"].dtype == np.float32
        client.load("spare", config=CONFIG, files={"1/model.py": TRIPLES})
        with pytest.raises(ClientError, match="data-type is 'FP32'"):
            other.infer("spare", {"INPUT0": [2]})
        assert other.infer("spare", {"INPUT0": [2]})["OUTPUT0"].tolist() == [[6]]
        client.unload("spare")


def test_statistics(client: Client) -> None:
    (before,) = client.statistics("numbers", "1")
    for _ in range(3):
        client.infer("numbers", {"INPUT0": [[1], [2]]})
    after = next(version for version in client.statistics() if version.name == "numbers")
    since = after.since(before)
    assert (since.requests, since.fail.count, since.mean_batch) == (3, 0, 2.0)
    assert since.mean_compute_ms > 0


def test_headers(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "numbers", IDENTITY)
    restricted = "--http-restricted-api=inference:x-key=open"
    with serving(tmp_path / "models", tmp_path / "log", restricted) as server:
        with Client(server.http, headers={"x-key": "open"}) as client:
            assert client.infer("numbers", {"INPUT0": [1]})["OUTPUT0"].tolist() == [[1]]
        with Client(server.http) as client, pytest.raises(ClientError, match="restricted") as error:
            client.infer("numbers", {"INPUT0": [1]})
        assert error.value.status == 403


def test_tls(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "numbers", IDENTITY)
    authority = trustme.CA()
    with authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.tempfile(str(tmp_path)) as certificate:
        flags = ["--http-use-ssl=true", f"--http-server-cert={certificate}", f"--http-server-key={certificate}"]
        with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
            context = ssl.create_default_context()
            authority.configure_trust(context)
            with Client(f"https://{server.http}", context=context) as client:
                for number in range(3):
                    assert client.infer("numbers", {"INPUT0": [number]})["OUTPUT0"].tolist() == [[number]]
            with Client(f"https://{server.http}") as client, pytest.raises(ClientError, match="certificate"):
                client.models()
