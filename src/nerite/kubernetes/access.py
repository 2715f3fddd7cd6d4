"""Where the API server is and how requests to it are authorized: a service account in a pod, or a kubeconfig."""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from nerite.config.watched_file import read_content
from nerite.core.errors import InvalidArgument, Unavailable

_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_MAX_FILE: Final = 4 << 20
_TOKEN_SECONDS: Final = 60.0
"""Age of a token after which its file is read again: tokens of service accounts are replaced every hour."""
_KUBECTL_SECONDS: Final = 20.0


class ApiAccess:
    """Address, TLS and credentials of an API server."""

    def __init__(self, server: str, tls: ssl.SSLContext | None, namespace: str = "default", token: str = "") -> None:
        """``server`` is its URL; ``token`` is sent with each request. Raises ``InvalidArgument`` for a wrong URL."""
        url = urlsplit(server)
        try:
            port = url.port
        except ValueError:
            port = 0
        if url.scheme not in ("https", "http") or not url.hostname or port == 0:
            raise InvalidArgument(f"'{server}' is no URL of a Kubernetes API server, such as https://10.96.0.1:443")
        self.server = server
        self.host = url.hostname
        self.port = port or (443 if url.scheme == "https" else 80)
        self.path = url.path.rstrip("/")
        """Put before the path of each request."""
        self.tls = tls if url.scheme == "https" else None
        self.namespace = namespace
        """The namespace of what names none."""
        self._token = token
        self._token_file = ""
        self._read_at = 0.0

    def token(self) -> str:
        """Return the bearer token; empty without one. Blocks on file I/O once a minute."""
        if self._token_file and time.monotonic() - self._read_at > _TOKEN_SECONDS:
            found = read_content(self._token_file, _MAX_FILE)
            if not found.problem:
                self._token = found.data.decode(errors="replace").strip()
                self._read_at = time.monotonic()
        return self._token

    def read_token_from(self, file: str) -> None:
        """Take the token from a file, which may change."""
        self._token_file = file


def find_access(environment: Mapping[str, str] = os.environ, account: str = _ACCOUNT) -> ApiAccess:
    """Return the access that this process has: ``KUBECONFIG``, else its service account, else ``~/.kube/config``.

    Blocks on file I/O. Raises ``NeriteError`` if there is none.
    """
    if path := environment.get("KUBECONFIG", ""):
        return _of_kubeconfig(path)
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if host:
        return _of_account(host, port, account)
    default = Path(environment.get("HOME", "/")) / ".kube" / "config"
    if default.is_file():
        return _of_kubeconfig(str(default))
    raise Unavailable(
        "there is no access to a Kubernetes API server: run in a pod with a service account, or set KUBECONFIG"
    )


def _of_account(host: str, port: str, account: str) -> ApiAccess:
    try:
        tls = ssl.create_default_context(cafile=f"{account}/ca.crt")
        namespace = Path(account, "namespace").read_text().strip()
    except (OSError, ssl.SSLError) as error:
        raise Unavailable(
            f"the service account in {account} cannot be read: {error}. Set automountServiceAccountToken in the pod"
        ) from None
    access = ApiAccess(f"https://{f'[{host}]' if ':' in host else host}:{port}", tls, namespace)
    access.read_token_from(f"{account}/token")
    return access


def _of_kubeconfig(path: str) -> ApiAccess:
    """Return the access of the current context. Only JSON is read here; kubectl turns anything else into JSON."""
    found = read_content(path, _MAX_FILE)
    try:
        whole = orjson.loads(found.data)
    except orjson.JSONDecodeError:
        whole = _with_kubectl(path)
    context = _named(whole, "contexts", "context", str(whole.get("current-context", "")), path)
    cluster = _named(whole, "clusters", "cluster", str(context.get("cluster", "")), path)
    user = _named(whole, "users", "user", str(context["user"]), path) if context.get("user") else {}
    for key in ("exec", "auth-provider", "username"):
        if key in user:
            raise InvalidArgument(
                f"the kubeconfig '{path}' has '{key}' for its user, which is not supported: use a token or a client "
                "certificate, or kubectl proxy and its address as the server"
            )
    folder = Path(path).parent
    access = ApiAccess(
        str(cluster.get("server", "")),
        _tls(cluster, user, folder, path),
        str(context.get("namespace") or "default"),
        str(user.get("token") or ""),
    )
    if file := user.get("tokenFile"):
        access.read_token_from(str(folder / str(file)))
    return access


def _with_kubectl(path: str) -> dict[str, Any]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise InvalidArgument(
            f"the kubeconfig '{path}' cannot be read, or is not JSON, and there is no kubectl to convert it: write it "
            "by kubectl config view --raw --flatten -o json"
        )
    command = [kubectl, "config", "view", "--raw", "--flatten", "--minify", "--output=json"]
    environment = {**os.environ, "KUBECONFIG": path}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_KUBECTL_SECONDS, check=True)
        whole = orjson.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, orjson.JSONDecodeError) as error:
        raise InvalidArgument(f"kubectl cannot read the kubeconfig '{path}': {error}") from None
    return whole if isinstance(whole, dict) else {}


def _named(whole: Mapping[str, Any], key: str, inner: str, name: str, path: str) -> dict[str, Any]:
    """Return the entry of a list of the kubeconfig that has a name."""
    entries = whole.get(key) if isinstance(whole, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(inner), dict):
            found: dict[str, Any] = entry[inner]
            return found
    raise InvalidArgument(f"the kubeconfig '{path}' has no entry '{name}' in {key}: see kubectl config get-contexts")


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path, path: str) -> ssl.SSLContext:
    """Return the context for connections. Data of certificates are written to files only while they are loaded."""
    try:
        authority = _bytes_of(cluster, "certificate-authority", folder)
        tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        certificate, key = (_bytes_of(user, name, folder) for name in ("client-certificate", "client-key"))
        if certificate and key:
            with tempfile.TemporaryDirectory(prefix="nerite-kubernetes-") as temporary:
                file = Path(temporary, "client.pem")
                file.touch(0o600)
                file.write_bytes(certificate + b"\n" + key)
                tls.load_cert_chain(file)
    except (OSError, ValueError, binascii.Error, ssl.SSLError) as error:
        raise InvalidArgument(f"the certificates in the kubeconfig '{path}' cannot be read: {error}") from None
    return tls


def _bytes_of(table: Mapping[str, Any], key: str, folder: Path) -> bytes:
    if data := table.get(f"{key}-data"):
        return base64.b64decode(str(data), validate=True)
    return (folder / str(table[key])).read_bytes() if table.get(key) else b""
