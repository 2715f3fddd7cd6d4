"""Our client of the Kubernetes API, a router whose members are endpoints, and the scaling of workloads."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kubernetes_api import KubernetesApi
from kubernetes_objects import endpoint, endpoint_slice
from nerite.cluster.kubernetes_names import ScaleTarget
from nerite.core.errors import Unavailable
from nerite.kubernetes.access import find_access
from nerite.kubernetes.api_client import ApiClient, KubernetesError
from nerite.kubernetes.object_watch import ObjectWatch
from nerite.kubernetes.replicas import ReplicaActuator, replicas_of
from routing import ROUTER, Received, StandInMember, pool, response, routing, stand_ins
from serving import PATIENCE, Serving, eventually

SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
SELECTOR = "kubernetes.io/service-name=models"
DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web"},
    "spec": {"replicas": 1},
}


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    made = KubernetesApi()
    yield made
    made.stop()


def slice_of(member: StandInMember, **more: Any) -> dict[str, Any]:
    """Return a slice of one endpoint: all endpoints of a slice have the same ports."""
    host, _, port = member.address.rpartition(":")
    return endpoint_slice(endpoint(host, **more), name=f"models-{port}", ports={"http": int(port)})


def members_of(router: Serving) -> int:
    return int(router.metrics().get('nerite_router_members_ready{pool="main"}', 0))


def kube_pool(**more: Any) -> str:
    return pool(kubernetes="default/models:http", **more)


def answering(name: str) -> StandInMember:
    return StandInMember(lambda asked, connection: response(b'{"from": "%b"}' % name.encode()))


def asked(router: Serving) -> str:
    status, _, body = router.ask("POST", "/v2/models/m/infer", {"inputs": []})
    assert status == 200, body
    return str(json.loads(body)["from"])


def test_members_come_drain_and_go_and_stay_while_the_api_server_is_away(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    one, two = answering("one"), answering("two")
    api.put(slice_of(one, pod="one"))
    try:
        with routing(tmp_path, kube_pool()) as router:
            assert asked(router) == "one"
            api.put(slice_of(two, pod="two"))
            eventually(lambda: members_of(router) == 2)
            assert {asked(router) for _ in range(8)} == {"one", "two"}

            api.put(slice_of(one, pod="one", ready=False, serving=True, terminating=True))
            eventually(lambda: "1 are terminating" in router.text)
            assert {asked(router) for _ in range(8)} == {"two"}

            api.compact()  # watches from before are told 410, so that a list is needed
            api.put(slice_of(one, pod="one"))
            eventually(lambda: {asked(router) for _ in range(8)} == {"one", "two"})

            api.stop()
            eventually(lambda: "What was known last stays" in router.text)
            assert {asked(router) for _ in range(8)} == {"one", "two"}
            api.remove("endpointslices", f"models-{two.address.rpartition(':')[2]}")
            api.start_again()
            eventually(lambda: members_of(router) == 1)
            assert asked(router) == "one"
    finally:
        one.stop()
        two.stop()


def test_a_router_begins_without_the_api_server_and_other_pools_serve(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    api.stop()
    with (
        stand_ins(1) as (there,),
        stand_ins(1, models=("k",)) as (found,),
        routing(tmp_path, pool(there.address, name="other"), kube_pool(), router=ROUTER) as router,
    ):
        assert "It has no members until that succeeds" in router.text
        assert router.ask("POST", "/v2/models/m/infer", {})[0] == 200
        api.put(slice_of(found))
        api.start_again()
        eventually(lambda: members_of(router) == 1)
        assert router.ask("POST", "/v2/models/k/infer", {})[0] == 200


SCALING = """
[pool.scaling]
min = 1
max = 3
concurrency = 1
actuator = "kubernetes"
"""


def test_a_router_scales_the_workload_of_its_pool(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    api.put(DEPLOYMENT | {"metadata": {"name": "models"}})
    over = threading.Event()

    def answer(asked: Received, connection: socket.socket) -> bytes:
        over.wait(PATIENCE)
        return response()

    with stand_ins(1, answer) as (member,):
        api.put(slice_of(member))
        with routing(tmp_path, kube_pool() + SCALING) as router, ThreadPoolExecutor(6) as clients:
            asked = [clients.submit(router.ask, "POST", "/v2/models/m/infer", {}) for _ in range(6)]
            eventually(lambda: api.find("deployments")["models"]["spec"]["replicas"] == 3)
            over.set()
            assert [each.result()[0] for each in asked] == [200] * 6
            eventually(lambda: "deployment/models is scaled from 1 to 3 replicas" in router.text)


def test_a_router_without_access_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"the kubeconfig '.*absent' cannot be read"), routing(tmp_path, kube_pool()):
        pass


def client_of(api: KubernetesApi, folder: Path, **user: Any) -> ApiClient:
    return ApiClient(find_access({**os.environ, "KUBECONFIG": str(api.kubeconfig(folder, **user))}))


def test_a_client_certificate_is_used(api: KubernetesApi, tmp_path: Path) -> None:
    client = api.authority.issue_cert("client@example.org")
    client.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    files = {"client-certificate": "client.pem", "client-key": "client.pem"}
    assert asyncio.run(client_of(api, tmp_path, **files).get("/version"))["major"] == "1"


def test_refusals_say_what_to_do(api: KubernetesApi, tmp_path: Path) -> None:
    with pytest.raises(KubernetesError, match=r"refused GET /version: Unauthorized. Check its token") as refused:
        asyncio.run(client_of(api, tmp_path, token="wrong").get("/version"))
    assert refused.value.status == 401


def test_another_server_s_certificate_is_refused(api: KubernetesApi, tmp_path: Path) -> None:
    other = KubernetesApi()
    try:
        config = api.kubeconfig(tmp_path)
        config.write_text(config.read_text().replace(str(api.port), str(other.port)))
        client = ApiClient(find_access({"KUBECONFIG": str(config)}))
        with pytest.raises(Unavailable, match=r"cannot be reached: .*certificate"):
            asyncio.run(client.get("/version"))
    finally:
        other.stop()


def test_a_long_list_comes_in_pages(api: KubernetesApi, tmp_path: Path) -> None:
    for number in range(501):
        api.put(endpoint_slice(name=f"models-{number}"))
    api.put(endpoint_slice(name="other", service="other"))
    seen: list[int] = []
    watch = ObjectWatch(client_of(api, tmp_path), SLICES, SELECTOR, lambda found: seen.append(len(found)))
    asyncio.run(watch.list())
    assert seen == [501]
    assert sum("endpointslices" in path for _, path in api.requests) == 2


def test_an_old_server_is_asked_for_the_older_version(api: KubernetesApi, tmp_path: Path) -> None:
    api.put(endpoint_slice())
    seen: list[int] = []
    newer = SLICES.replace("/v1/", "/v9/")
    watch = ObjectWatch(client_of(api, tmp_path), newer, SELECTOR, lambda found: seen.append(len(found)), SLICES)
    asyncio.run(watch.list())
    asyncio.run(watch.list())
    assert seen == [1, 1]
    assert [path.partition("?")[0] for _, path in api.requests] == [newer, SLICES, SLICES]
    nowhere = ObjectWatch(client_of(api, tmp_path), newer, SELECTOR, lambda found: None, newer)
    with pytest.raises(KubernetesError, match="refused GET"):
        asyncio.run(nowhere.list())


def test_a_workload_is_scaled_as_wanted_last(api: KubernetesApi, tmp_path: Path) -> None:
    api.put(DEPLOYMENT)
    client, target = client_of(api, tmp_path), ScaleTarget("", "deployment", "web")

    async def scaled_to(count: int) -> None:
        await asyncio.to_thread(eventually, lambda: api.find("deployments")["web"]["spec"]["replicas"] == count)

    async def scale() -> None:
        actuator = ReplicaActuator(client, target)
        running = asyncio.create_task(actuator.run())
        for count in (3, 4, 0):
            actuator.want(count)
        await scaled_to(0)
        assert await replicas_of(client, target) == 0
        api.failures = 2
        actuator.want(7)
        await scaled_to(7)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(scale())
    assert api.failures == 0
