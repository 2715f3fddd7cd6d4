"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler, as ``tools/build_kubernetes.py`` builds them."""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from serving import eventually
from tools import unavailable

BUILT = Path(os.environ.get("NERITE_KUBERNETES") or Path.home() / ".cache" / "nerite-kubernetes")
TOKEN = "a-token-of-the-exam"
GATEWAY = "10.213.0.1"
"""Where pods reach the host, and so the API server."""
SERVICE_NETWORK = "10.96.0.0/16"
PORT = 6443
_GATES = "--feature-gates=EndpointSliceTerminatingCondition=true"
"""Endpoints that terminate are told, as in all versions since 1.22."""
_SECONDS = 30.0


class ApiError(Exception):
    """The API server has refused a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


class Api:
    """Requests of an administrator to the API server."""

    def __init__(self, authority: Path) -> None:
        self.authority = authority
        self._tls = ssl.create_default_context(cafile=str(authority))

    def get(self, path: str, **query: str) -> Any:
        """Return an object or a list."""
        return self.ask("GET", f"{path}?{urlencode(query)}" if query else path)

    def post(self, path: str, given: dict[str, Any]) -> Any:
        """Create an object."""
        return self.ask("POST", path, given)

    def patch(self, path: str, change: dict[str, Any]) -> Any:
        """Merge a change into an object."""
        return self.ask("PATCH", path, change, "application/merge-patch+json")

    def delete(self, path: str, grace: int = 0) -> None:
        """Delete an object at once; one that is not there is deleted already."""
        try:
            self.ask("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace})
        except ApiError as error:
            if error.status != 404:
                raise

    def ask(self, method: str, path: str, given: Any = None, kind: str = "application/json") -> Any:
        """Send a request; return the answer. Raises ``ApiError`` for a refusal."""
        with closing(self._connect(_SECONDS)) as connection:
            body = None if given is None else json.dumps(given)
            connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status >= 300:
                raise ApiError(answer.status, text.decode(errors="replace"))
            return json.loads(text)

    def follow(self, path: str, **query: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield ADDED, MODIFIED or DELETED with an object, beginning with all that are there, until it breaks off."""
        listed = self.get(path, **query)
        for item in listed["items"]:
            yield "ADDED", item
        more = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": "3600"}
        with closing(self._connect(None)) as connection:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            connection.request("GET", f"{path}?{urlencode({**query, **more})}", headers=headers)
            for line in connection.getresponse():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]

    def _connect(self, seconds: float | None) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(GATEWAY, PORT, timeout=seconds, context=self._tls)

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig of the administrator."""
        pem = base64.b64encode(self.authority.read_bytes()).decode()
        server = {"server": f"https://{GATEWAY}:{PORT}", "certificate-authority-data": pem}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "exam", "cluster": server}],
            "users": [{"name": "exam", "user": {"token": TOKEN}}],
            "contexts": [{"name": "exam", "context": {"cluster": "exam", "user": "exam"}}],
            "current-context": "exam",
        }
        file = folder / "kubeconfig"
        file.write_text(json.dumps(config))
        return file


def _write_keys(folder: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    issued = authority.issue_cert(GATEWAY, "127.0.0.1", "10.96.0.1", "localhost", "kubernetes.default.svc")
    issued.private_key_pem.write_to_path(folder / "server.key")
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(folder / "server.crt", append=number > 0)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = PrivateFormat.TraditionalOpenSSL
    (folder / "accounts.key").write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "accounts.pub").write_bytes(public)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')


def _commands(folder: Path, kubeconfig: Path) -> Iterator[list[str]]:
    yield [
        "etcd", f"--data-dir={folder}/etcd", "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380",
        "--log-level=error",
    ]  # fmt: skip
    yield [
        "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", f"--secure-port={PORT}",
        f"--advertise-address={GATEWAY}", f"--tls-cert-file={folder}/server.crt",
        f"--tls-private-key-file={folder}/server.key", f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=RBAC", f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={folder}/accounts.pub",
        f"--service-account-signing-key-file={folder}/accounts.key", "--enable-aggregator-routing=true",
        f"--cert-dir={folder}", _GATES,
    ]  # fmt: skip
    alone = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--port=0", f"--cert-dir={folder}"]
    yield [
        "kube-controller-manager", *alone, f"--service-account-private-key-file={folder}/accounts.key",
        f"--root-ca-file={folder}/ca.crt", "--horizontal-pod-autoscaler-sync-period=3s", _GATES,
    ]  # fmt: skip
    yield ["kube-scheduler", *alone]


@contextmanager
def control_plane(folder: Path) -> Iterator[Api]:
    """Run the four programs. Their logs are in the folder."""
    if not (BUILT / "built.done").exists():
        unavailable(f"Kubernetes is not built in {BUILT}: make exam-kubernetes")
    _write_keys(folder)
    api = Api(folder / "ca.crt")
    running = []
    try:
        for name, *flags in _commands(folder, api.kubeconfig(folder)):
            with (folder / f"{name}.log").open("wb") as log:
                running.append(subprocess.Popen([str(BUILT / "bin" / name), *flags], stdout=log, stderr=log))
            if name == "kube-apiserver":
                eventually(lambda: _has(api, ""), 90, f"the API server is not ready: see {folder}/{name}.log")
        eventually(lambda: _has(api, "/default"), 90, "the controllers do nothing")
        yield api
    finally:
        for process in reversed(running):
            process.kill()  # asked politely, the API server waits a minute for those who watch
            process.wait(30)


def _has(api: Api, account: str) -> bool:
    time.sleep(0.2)
    try:
        api.get(f"/api/v1/namespaces/default/serviceaccounts{account}")
        return True
    except (OSError, ApiError, http.client.HTTPException):
        return False
