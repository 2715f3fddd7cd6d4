"""Keys in files: changed while the server runs, they count on connections that are open."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from nerite.wire import grpc_service as pb
from serving import IDENTITY, Serving, binary_request, eventually, python_model, serving

METADATA = "/inference.GRPCInferenceService/ServerMetadata"
BODY, HEADERS = binary_request(np.ones((1, 4), np.float32))


class Secret:
    """A volume as Kubernetes mounts one: the file is a link into a folder that is a link, which is what is swapped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys"
        self._folder = folder
        self._count = 0
        folder.mkdir()
        self.path.symlink_to(folder / "..data" / "keys")

    def set(self, text: str) -> None:
        self._count += 1
        there = self._folder / f"..{self._count}"
        there.mkdir()
        (there / "keys").write_text(text)
        link = self._folder / "..new"
        link.symlink_to(there)
        link.rename(self._folder / "..data")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Secret:
    made = Secret(tmp_path_factory.mktemp("secret") / "mounted")
    made.set("first\n")
    return made


@pytest.fixture(scope="module")
def server(secret: Secret, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("keys")
    python_model(folder / "models", "identity", IDENTITY)
    flags = [
        f"--http-restricted-api=inference,health:X-Key=@{secret.path}",
        f"--http-restricted-api=metrics:authorization=@{secret.path}",
        f"--grpc-restricted-protocol=metadata:key=@{secret.path}",
    ]
    with serving(folder / "models", folder / "log", *flags) as running:
        yield running


class Client:
    """A connection that stays open, and asks the same again and again."""

    def __init__(self, server: Serving, key: str) -> None:
        self._connection = http.client.HTTPConnection(server.http, timeout=30)
        self._key = {"x-key": key}

    def close(self) -> None:
        self._connection.close()

    def infer(self) -> int:
        return self._ask("POST", "/v2/models/identity/infer", BODY, HEADERS)

    def live(self) -> int:
        return self._ask("GET", "/v2/health/live", b"", {})

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
        self._connection.request(method, path, body, {**headers, **self._key})
        answer = self._connection.getresponse()
        answer.read()
        return answer.status


def metadata(channel: grpc.Channel, key: str) -> grpc.StatusCode:
    call = channel.unary_unary(
        METADATA,
        request_serializer=pb.ServerMetadataRequest.SerializeToString,
        response_deserializer=pb.ServerMetadataResponse.FromString,
    )
    try:
        call(pb.ServerMetadataRequest(), metadata=[("triton-grpc-protocol-key", key)], timeout=30)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def metrics(server: Serving, key: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["Metrics"], timeout=30)
    connection.request("GET", "/metrics", headers={"Authorization": key})
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_rotation(server: Serving, secret: Secret) -> None:
    with (
        closing(Client(server, "first")) as old,
        closing(Client(server, "second")) as new,
        grpc.insecure_channel(server.grpc) as channel,
    ):

        def allowed() -> tuple[list[int], list[grpc.StatusCode], list[int]]:
            """What the old and the new key open, over connections that stay as they are."""
            return (
                [old.infer(), old.live(), new.infer(), new.live()],
                [metadata(channel, "first"), metadata(channel, "second")],
                [metrics(server, "first"), metrics(server, "second")],
            )

        yes, no = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
        for _ in range(3):  # so that heads and bodies are known
            assert allowed() == ([200, 200, 403, 403], [yes, no], [200, 403])
        secret.set("# both, for a while\nfirst\n\nsecond\n")
        both = ([200] * 4, [yes] * 2, [200] * 2)
        eventually(lambda: allowed() == both, what="the new key never opened")
        for _ in range(3):
            assert allowed() == both
        secret.set("second\n")
        gone = ([403, 403, 200, 200], [no, yes], [403, 200])
        eventually(lambda: allowed() == gone, what="the old key never stopped opening")
    assert "was read: 2 keys in force" in server.text
    assert "was read: 1 key in force" in server.text
    assert "first" not in server.text


def says(server: Serving, words: str) -> bool:
    return words in server.text


def live(server: Serving, key: str) -> int:
    return server.ask("GET", "/v2/health/live", x_key=key)[0]


def test_a_file_without_keys_changes_nothing(server: Serving, secret: Secret) -> None:
    secret.set("here\n")
    eventually(lambda: live(server, "here") == 200)
    for text, problem in (("", "contains no keys"), (None, "cannot be read")):
        if text is None:
            secret.path.unlink()
        else:
            secret.set(text)
        eventually(partial(says, server, problem))
        assert live(server, "here") == 200
    assert "Its last valid content (1 key) stays in force" in server.text
    secret.path.write_text("plain\n")
    eventually(lambda: live(server, "plain") == 200)
    assert live(server, "here") == 403


def test_a_start_without_keys(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    flag = f"--grpc-restricted-protocol=health:key=@{tmp_path}/none"
    with (
        pytest.raises(RuntimeError, match=r"cannot restrict access: the key file '.*/none' cannot be read: No such"),
        serving(tmp_path / "models", tmp_path / "log", flag, clean=False),
    ):
        pass
