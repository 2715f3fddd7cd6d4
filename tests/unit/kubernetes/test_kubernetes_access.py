"""Names of objects in the cluster file, and where the API server is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trustme

from nerite.cluster.kubernetes_names import ScaleTarget, ServiceReference, scale_target_of, service_of
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.kubernetes.access import find_access


def test_services() -> None:
    assert service_of("models/nerite:http") == ServiceReference("models", "nerite", "http")
    assert service_of("nerite:8000") == ServiceReference("", "nerite", "8000")
    assert [str(service_of(text)) for text in ("a/b:c", "b:1")] == ["a/b:c", "b:1"]


@pytest.mark.parametrize("text", ["nerite", "a/b/c:1", "/b:1", "A/b:1", "b:", "b:0", "b:70000", "../b:1", "b:x_y", 3])
def test_what_is_no_service(text: object) -> None:
    with pytest.raises(ValueError, match="must be NAMESPACE/SERVICE:PORT"):
        service_of(text)


def test_workloads() -> None:
    assert scale_target_of("models/deployment/web") == ScaleTarget("models", "deployment", "web")
    target = scale_target_of("leaderworkerset/large.model")
    assert str(target) == "leaderworkerset/large.model"
    assert target.scale_path("own") == (
        "/apis/leaderworkerset.x-k8s.io/v1/namespaces/own/leaderworkersets/large.model/scale"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("deploment/web", "Did you mean deployment"),
        ("web", "must be KIND/NAME"),
        ("pod/web", "a kind of deployment, statefulset, leaderworkerset"),
        ("/deployment/web", "must be"),
        ("deployment/", "must be"),
        ("deployment/../x", "must be"),
        (None, "must be"),
    ],
)
def test_what_is_no_workload(text: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        scale_target_of(text)


def account(folder: Path, token: str = "first") -> Path:
    folder.mkdir(exist_ok=True)
    trustme.CA().cert_pem.write_to_path(folder / "ca.crt")
    (folder / "namespace").write_text("models\n")
    (folder / "token").write_text(f"{token}\n")
    return folder


def test_a_service_account(tmp_path: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = find_access(environment, str(account(tmp_path)))
    assert (access.host, access.port, access.namespace, access.token()) == ("fd00::1", 6443, "models", "first")
    assert access.tls is not None and access.tls.check_hostname


def test_a_pod_without_its_account_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="automountServiceAccountToken"):
        find_access({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, str(tmp_path))


def test_without_any_access(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="set KUBECONFIG"):
        find_access({"HOME": str(tmp_path)})


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> dict[str, str]:
    file = folder / "config"
    whole = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    file.write_text(json.dumps(whole))
    return {"KUBECONFIG": str(file), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    access = find_access(kubeconfig(tmp_path, {"server": "http://127.0.0.1:8001/proxy/"}, {"tokenFile": "token"}))
    assert (access.host, access.port, access.path, access.tls) == ("127.0.0.1", 8001, "/proxy", None)
    assert (access.namespace, access.token()) == ("n", "secret")


def test_a_kubeconfig_with_a_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    client = authority.issue_cert("client@example.org")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    client.cert_chain_pems[0].write_to_path(tmp_path / "client.pem")
    client.private_key_pem.write_to_path(tmp_path / "key.pem")
    user = {"client-certificate": "client.pem", "client-key": "key.pem"}
    environment = kubeconfig(tmp_path, {"server": "https://h", "certificate-authority": "ca.pem"}, user)
    access = find_access(environment)
    assert access.port == 443 and access.tls is not None
    assert len(access.tls.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("cluster", "user", "told"),
    [
        ({"server": "10.0.0.1:443"}, {}, "'10.0.0.1:443' is no URL of a Kubernetes API server"),
        ({"server": "https://h:0"}, {}, "is no URL"),
        ({"server": "https://h"}, {"exec": {"command": "x"}}, "has 'exec' for its user, which is not supported"),
        ({"server": "https://h", "certificate-authority": "absent"}, {}, "certificates .* cannot be read"),
        ({"server": "https://h", "certificate-authority-data": "?"}, {}, "certificates .* cannot be read"),
    ],
)
def test_mistakes_in_a_kubeconfig(tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        find_access(kubeconfig(tmp_path, cluster, user))


def test_a_context_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config").write_text('{"current-context": "other"}')
    with pytest.raises(NeriteError, match="has no entry 'other' in contexts"):
        find_access({"KUBECONFIG": str(tmp_path / "config")})
