"""TLS and mutual TLS on both ports, with certificates made for the test."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import trustme

import tools
from serving import IDENTITY, NERITE, PATIENCE, Serving, eventually, python_model, serving


class Certificates:
    """An authority, the server's certificate and a client's, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.authority = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        for name in ("server", "client"):
            issued = authority.issue_cert("localhost", "127.0.0.1")
            issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
            for number, part in enumerate(issued.cert_chain_pems):
                part.write_to_path(str(folder / f"{name}.pem"), append=number > 0)
        self.folder = folder

    def flags(self, mutual: bool) -> list[str]:
        """Return the server's flags."""
        flags = []
        for port in ("http", "grpc"):
            flags += [
                f"--{port}-use-ssl{'-mutual' if mutual else ''}=true",
                f"--{port}-server-cert={self.folder}/server.pem",
                f"--{port}-server-key={self.folder}/server.key",
                f"--{port}-root-cert={self.authority}",
            ]
        return flags


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mutual"])
def server(
    request: pytest.FixtureRequest, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, bool]]:
    folder = tmp_path_factory.mktemp("tls")
    python_model(folder / "models", "identity", IDENTITY)
    with serving(folder / "models", folder / "log", *certificates.flags(request.param)) as running:
        yield running, request.param


def array(size: int) -> np.ndarray:
    return np.random.default_rng(size).random((1, size), dtype=np.float32)


@pytest.mark.parametrize("size", [16, 300_000])
def test_http(server: tuple[Serving, bool], certificates: Certificates, size: int) -> None:
    running, mutual = server
    context = ssl.create_default_context(cafile=certificates.authority)
    if mutual:
        context.load_cert_chain(certificates.folder / "client.pem", certificates.folder / "client.key")
    client = httpclient.InferenceServerClient(
        running.http, ssl=True, ssl_context_factory=lambda: context, network_timeout=30
    )
    tensor = httpclient.InferInput("INPUT0", [1, size], "FP32")
    tensor.set_data_from_numpy(array(size))
    np.testing.assert_array_equal(client.infer("identity", [tensor]).as_numpy("OUTPUT0"), array(size))
    client.close()


@pytest.mark.parametrize("size", [16, 300_000])
def test_grpc(server: tuple[Serving, bool], certificates: Certificates, size: int) -> None:
    running, mutual = server
    own = {
        "private_key": str(certificates.folder / "client.key"),
        "certificate_chain": str(certificates.folder / "client.pem"),
    }
    client = grpcclient.InferenceServerClient(
        running.grpc, ssl=True, root_certificates=str(certificates.authority), **(own if mutual else {})
    )
    tensor = grpcclient.InferInput("INPUT0", [1, size], "FP32")
    tensor.set_data_from_numpy(array(size))
    np.testing.assert_array_equal(client.infer("identity", [tensor]).as_numpy("OUTPUT0"), array(size))
    client.close()


def test_who_shows_nothing_is_sent_away(server: tuple[Serving, bool], certificates: Certificates) -> None:
    running, mutual = server
    context = ssl.create_default_context(cafile=certificates.authority)
    host, _ = running.http.split(":")
    for port in (running.ports["HTTPService"], running.ports["GRPCInferenceService"]):
        with socket.create_connection((host, port), timeout=10) as plain:
            try:
                with context.wrap_socket(plain, server_hostname="localhost") as secured:
                    secured.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    answered = secured.recv(100) != b""
            except (ssl.SSLError, ConnectionError):
                answered = False
        assert answered is not mutual


def hello(name: bytes) -> bytes:
    """Return the beginning of a handshake that asks for a host."""
    entry = struct.pack(">HHHBH", 0, len(name) + 5, len(name) + 3, 0, len(name)) + name
    more = entry + bytes.fromhex("000d0006000404030804000a00040002001d")
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\4\x13\1\xc0\x2f" + b"\1\0" + struct.pack(">H", len(more)) + more
    shake = b"\1" + len(body).to_bytes(3, "big") + body
    return b"".join(
        b"\x16\3\1" + struct.pack(">H", len(part)) + part
        for part in (shake[at : at + 16_384] for at in range(0, len(shake), 16_384))
    )


HOSTILE = {
    "random": random.Random(1).randbytes(5000),
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    "long record": b"\x16\3\1\xff\xff" + bytes(1 << 20),
    "long handshake": b"\x16\3\1\x40\0\1\xff\xff\xff" + bytes(16_380) + (b"\x16\3\1\x40\0" + bytes(16_384)) * 60,
    "controls in the host": hello(b"a\r\nb\0\x1b[31m"),
    "long host": hello(b"a" * 60_000),
    "cut off": hello(b"localhost")[:30],
}


@pytest.mark.parametrize("port", ["HTTPService", "GRPCInferenceService"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_handshake_is_sent_away_and_others_are_served(
    server: tuple[Serving, bool], certificates: Certificates, port: str, kind: str
) -> None:
    running, _ = server
    with contextlib.ExitStack() as stack:
        place = ("127.0.0.1", running.ports[port])
        hostile = [stack.enter_context(socket.create_connection(place, timeout=PATIENCE)) for _ in range(10)]
        for each in hostile:
            with contextlib.suppress(ConnectionError):  # it is closed before all has arrived
                each.sendall(HOSTILE[kind])
        test_http(server, certificates, 16)
        for each in hostile:
            with contextlib.suppress(OSError):  # it has been reset
                each.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                answer = b"".join(iter(lambda each=each: each.recv(4096), b""))  # type: ignore[misc]
                assert not answer or answer[:1] == b"\x15", "nothing but an alert"
    assert "HTTP/1.1" not in running.text


def test_a_handshake_in_the_middle_of_a_connection_is_refused(
    server: tuple[Serving, bool], certificates: Certificates
) -> None:
    running, mutual = server
    tools.require("openssl")
    command = ["openssl", "s_client", "-connect", running.http, "-tls1_2", "-CAfile", str(certificates.authority)]
    if mutual:
        command += ["-cert", f"{certificates.folder}/client.pem", "-key", f"{certificates.folder}/client.key"]
    done = subprocess.run(command, input=b"R\n" * 5, capture_output=True, timeout=PATIENCE, check=False)
    assert b"no renegotiation" in done.stderr
    test_http(server, certificates, 16)


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing of the kind")
    flags = ["--http-use-ssl=true", f"--http-server-cert={wrong}", f"--http-server-key={wrong}"]
    with (
        pytest.raises(RuntimeError, match="cannot use the certificate"),
        serving(tmp_path / "models", tmp_path / "log", *flags, clean=False),
    ):
        pass


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_bench(server: tuple[Serving, bool], certificates: Certificates, protocol: str) -> None:
    running, mutual = server
    if mutual:
        pytest.skip("it has no certificate of its own")
    address = running.grpc if protocol == "grpc" else running.http
    command = [str(NERITE), "bench", "identity", "--url", f"https://{address}", "--protocol", protocol]
    command += ["--concurrency", "3", "--warm-up", "0.1", "--window", "0.1", "--windows", "3"]
    for authority, status, said in ((certificates.authority, 0, "Requests/s"), (None, 1, "SSL_CERT_FILE")):
        environment = {**os.environ, **({"SSL_CERT_FILE": str(authority)} if authority else {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        assert said in done.stdout + done.stderr
        assert "failed at" not in done.stdout


def test_handshakes_that_are_not_finished_count_as_connections(certificates: Certificates, tmp_path: Path) -> None:
    """They are busy, so that they are not displaced, and a new one is refused; they end by themselves after 10 s."""
    python_model(tmp_path / "models", "identity", IDENTITY)
    context = ssl.create_default_context(cafile=certificates.authority)
    flags = (*certificates.flags(False), "--max-connections=4")

    def answered() -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", running.ports["HTTPService"]), timeout=PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return client.recv(1024).startswith(b"HTTP/1.1 200")
        return False

    with serving(tmp_path / "models", tmp_path / "log", *flags) as running, contextlib.ExitStack() as silent:
        assert answered()
        for _ in range(4):
            silent.enter_context(socket.create_connection(("127.0.0.1", running.ports["HTTPService"])))
        eventually(lambda: not answered())
        eventually(answered)

        def refused() -> bool:
            with contextlib.suppress(ValueError):  # the scrape may be refused itself
                return running.metrics()['nerite_connections_closed_total{reason="refused"}'] > 0
            return False

        eventually(refused)
