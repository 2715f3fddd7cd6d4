"""A router that speaks TLS to its clients and to its members, over HTTP and gRPC."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from test_tls import Certificates, array

from routing import ROUTER, routing
from serving import IDENTITY, Serving, eventually, python_model, serving


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def member(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that wants a certificate of its clients."""
    folder = tmp_path_factory.mktemp("tls_member")
    python_model(folder / "models", "identity", IDENTITY)
    with serving(folder / "models", folder / "log", *certificates.flags(mutual=True)) as running:
        yield running


def pool(member: Serving, tls: str) -> str:
    return (
        f'[[pool]]\nname = "main"\nmembers = [{{ http = "{member.http}", grpc = "{member.grpc}" }}]\n'
        f'health-interval = "200ms"\ntls = {tls}\n'
    )


def shown(certificates: Certificates, **more: str) -> str:
    """Return the settings of TLS with which the member takes the router."""
    folder = certificates.folder
    keys = {"ca": certificates.authority, "certificate": folder / "client.pem", "key": folder / "client.key", **more}
    return "{ " + ", ".join(f'{key} = "{value}"' for key, value in keys.items()) + " }"


def test_both_sides_show_certificates(member: Serving, certificates: Certificates, tmp_path: Path) -> None:
    folder = certificates.folder
    tls = f'[router.tls]\ncertificate = "{folder}/server.pem"\nkey = "{folder}/server.key"\n'
    tls += f'client-ca = "{certificates.authority}"\n'
    tensor = httpclient.InferInput("INPUT0", [1, 50_000], "FP32")
    tensor.set_data_from_numpy(array(50_000))
    with routing(tmp_path, pool(member, shown(certificates)), router=ROUTER + tls) as router:
        eventually(lambda: "is ready with 1 models" in router.text)
        context = ssl.create_default_context(cafile=certificates.authority)
        context.load_cert_chain(folder / "client.pem", folder / "client.key")
        http = httpclient.InferenceServerClient(
            router.http, ssl=True, ssl_context_factory=lambda: context, network_timeout=30
        )
        for _ in range(3):
            np.testing.assert_array_equal(http.infer("identity", [tensor]).as_numpy("OUTPUT0"), array(50_000))
        http.close()
        grpc = grpcclient.InferenceServerClient(
            router.grpc,
            ssl=True,
            root_certificates=str(certificates.authority),
            private_key=str(folder / "client.key"),
            certificate_chain=str(folder / "client.pem"),
        )
        other = grpcclient.InferInput("INPUT0", [1, 50_000], "FP32")
        other.set_data_from_numpy(array(50_000))
        for _ in range(3):
            np.testing.assert_array_equal(grpc.infer("identity", [other]).as_numpy("OUTPUT0"), array(50_000))
        grpc.close()
        assert answer_to_a_stranger(router, certificates) == b""


def answer_to_a_stranger(router: Serving, certificates: Certificates) -> bytes:
    context = ssl.create_default_context(cafile=certificates.authority)
    with socket.create_connection(("127.0.0.1", router.ports["HTTPService"]), timeout=10) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as secured:
                secured.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return secured.recv(100)
        except (ssl.SSLError, ConnectionError):
            return b""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"server-name": "elsewhere.example"}, "has no certificate that is trusted: Hostname mismatch"),
        ({"ca": ""}, "has no certificate that is trusted"),
        (None, "closed the connection without an answer"),
    ],
)
def test_a_member_that_is_not_trusted_gets_no_requests(
    member: Serving, certificates: Certificates, tmp_path: Path, changes: dict[str, str] | None, told: str
) -> None:
    tls = f'{{ ca = "{certificates.authority}" }}' if changes is None else shown(certificates, **changes)
    with routing(tmp_path, pool(member, tls.replace('ca = "", ', ""))) as router:
        eventually(lambda: told in router.text)
        assert router.ask("POST", "/v2/models/identity/infer", b"{}")[0] == 503


def test_a_file_that_is_no_certificate(certificates: Certificates, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing of the kind")
    table = f'[[pool]]\nname = "main"\nmembers = ["127.0.0.1:1"]\ntls = {{ ca = "{wrong}" }}\n'
    with pytest.raises(RuntimeError, match=r"pool 'main': tls.ca: cannot use"), routing(tmp_path, table, clean=False):
        pass
    tls = f'[router.tls]\ncertificate = "{wrong}"\n'
    with (
        pytest.raises(RuntimeError, match="cannot use the certificate"),
        routing(tmp_path, '[[pool]]\nname = "main"\nmembers = ["127.0.0.1:1"]\n', router=ROUTER + tls, clean=False),
    ):
        pass
