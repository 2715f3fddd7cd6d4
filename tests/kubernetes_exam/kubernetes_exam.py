"""The chart on a real Kubernetes (1.20), with real servers behind Services: ``make exam-kubernetes``. Needs root.

API server, controllers and scheduler are those of Kubernetes; kubelet, kube-proxy and the Prometheus adapter are the
small ones in this folder. It runs in a network and a mount namespace of its own, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane import BUILT, GATEWAY, SERVICE_NETWORK, Api, ApiError, control_plane
from kubelet import BRIDGE, Kubelet, PodRun
from queue_metrics import custom_metrics
from service_load import HEADER, ServiceLoad
from service_proxy import ServiceProxy

from kubernetes_tools import CHART, ROOT, program
from pages import Page
from prometheus_server import Prometheus
from serving import PATIENCE, adds, eventually, pbtxt, python_model
from tools import require, unavailable

pytestmark = pytest.mark.timeout(1500)
NODES = ("node-1", "node-2")
TOKEN_SECONDS = 0.05
SLOW_SECONDS = 0.04
PODS = "/api/v1/namespaces/default/pods"
COMMON: dict[str, Any] = {
    "image": {"imageName": "localhost/nerite:exam", "modelRepositoryPath": "/models"},
    "preStopSeconds": 3,
    "exitSeconds": 30,
    "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
}
SLOW = f"""
def execute(self, requests):
    time.sleep({SLOW_SECONDS} * len(requests))
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""


class Exam:
    """The cluster, with what the exam asks of it."""

    def __init__(
        self, folder: Path, api: Api, nodes: list[Kubelet], proxy: ServiceProxy, prometheus: Prometheus
    ) -> None:
        self.folder = folder
        self.api = api
        self.nodes = nodes
        self.proxy = proxy
        self.prometheus = prometheus

    def helm(self, *arguments: str) -> float:
        """Run helm, which must succeed; return the seconds that it took."""
        began = time.monotonic()
        self._run("helm", *arguments)
        return time.monotonic() - began

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl, which must succeed; return what it prints."""
        return self._run("kubectl", *arguments)

    def _run(self, name: str, *arguments: str) -> str:
        # The server is older than the lists that are sent as a watch, and does not say so.
        more = {
            "KUBECONFIG": f"{self.folder}/kubeconfig",
            "HOME": str(self.folder),
            "KUBE_FEATURE_WatchListClient": "false",
        }
        done = subprocess.run(
            [program(name), *arguments],
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{name} {arguments}: {done.stdout}{done.stderr}\n{self.told()}"
        return done.stdout

    def values(self, **more: Any) -> list[str]:
        """Return the arguments of helm for values, those that all releases have included."""
        volume = {"hostPath": {"path": str(self.folder / "models"), "type": "Directory"}}
        file = self.folder / "values.json"
        file.write_text(json.dumps({**COMMON, "modelVolume": volume, **more}))
        return [str(CHART), "-f", str(file), "--wait", "--timeout", "300s"]

    def address(self, service: str) -> str:
        """Return the address of a Service."""
        found: str = self.api.get(f"/api/v1/namespaces/default/services/{service}")["spec"]["clusterIP"]
        return found

    def runs(self) -> list[PodRun]:
        """Return the pods that are there."""
        return [run for node in self.nodes for run in list(node.runs.values()) if run not in node.past]

    def past(self) -> list[PodRun]:
        """Return the pods that are over."""
        return [run for node in self.nodes for run in node.past]

    def replicas(self, deployment: str) -> int:
        """Return how many pods a Deployment wants."""
        found: int = self.api.get(f"/apis/apps/v1/namespaces/default/deployments/{deployment}")["spec"]["replicas"]
        return found

    def told(self) -> str:
        """Return the last lines of all pods, for a failure."""
        with contextlib.suppress(OSError, ApiError):
            events = self.api.get("/api/v1/namespaces/default/events")["items"][-12:]
            print("\n".join(f"{each['involvedObject']['name']}: {each['message']:.300}" for each in events))
        return "\n".join(f"== {run.name}\n{run.text[-1500:]}" for run in self.runs()) + self.proxy.problem

    def ended_well(self) -> None:
        """Check how pods have ended: by themselves, with status 0, without an error that no code foresaw."""
        wrong = [(run.name, run.ended, run.text[-1500:]) for run in self.past() if run.ended != [0]]
        assert wrong == []
        assert [name for node in self.nodes for name in node.killed] == []
        assert [run.name for run in self.past() if "internal error, incident" in run.text] == []


def write_models(folder: Path) -> None:
    """Write a model for requests, one that answers with streams of tokens, and one that is slow."""
    python_model(folder, "add", adds(1))
    python_model(folder, "slow", SLOW, pbtxt(batch=1))
    shutil.copytree(ROOT / "examples" / "sources" / "babble", folder / "babble")
    file = folder / "babble" / "1" / "model.py"
    source = file.read_text()
    slow = source.replace(
        "        before = np.conc", f"        time.sleep({TOKEN_SECONDS})\n        before = np.conc", 1
    )
    assert slow != source
    file.write_text(slow.replace("import numpy", "import time\n\nimport numpy", 1))
    config = folder / "babble" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 16", "max_batch_size: 64"))


def _network() -> None:
    """Make the network of the pods, in the namespace in which this process was started."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    if len(links.splitlines()) > 1 and f"{BRIDGE}:" not in links:
        pytest.fail("this needs a network namespace of its own: make exam-kubernetes")
    for command in (
        "ip link set lo up",
        f"ip link add {BRIDGE} type bridge",
        f"ip addr add {GATEWAY}/16 dev {BRIDGE}",
        f"ip link set {BRIDGE} up",
        f"ip route add {SERVICE_NETWORK} dev {BRIDGE}",
        "mount -t tmpfs tmpfs /run/netns",
    ):
        subprocess.run(command.split(), check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exam]:
    if os.geteuid() or not (BUILT / "bin").exists():
        unavailable("this needs root, and Kubernetes: make exam-kubernetes")
    require("ip", "unshare", "nsenter", "setpriv", "prometheus")
    Path("/run/netns").mkdir(exist_ok=True)
    _network()
    folder = tmp_path_factory.mktemp("cluster")
    write_models(folder / "models")
    with control_plane(folder) as api:
        nodes = [Kubelet(api, name, GATEWAY, folder) for name in NODES]
        proxy = ServiceProxy(api)
        try:
            with custom_metrics(api, folder) as prometheus:
                print(f"\nKubernetes {api.get('/version')['gitVersion']}")
                yield Exam(folder, api, nodes, proxy, prometheus)
        finally:
            for node in nodes:
                node.stop()
            proxy.stop()


def free(exam: Exam, release: str) -> None:
    """Uninstall a release, and wait until its pods are gone."""
    exam.helm("uninstall", release, "--wait")
    eventually(lambda: not exam.runs(), PATIENCE)


@pytest.mark.parametrize("routed", [True, False], ids=["router", "servers"])
def test_install_upgrade_rollback_uninstall(exam: Exam, routed: bool) -> None:
    """Under load all the while: no request fails, and no stream is cut."""
    values = exam.values(replicaCount=2, router={"enabled": routed, "replicaCount": 2})
    service, pods = ("r-nerite-router", 4) if routed else ("r-nerite", 2)
    seconds = exam.helm("install", "r", *values)
    first = {run.name for run in exam.runs()}
    assert len(first) == pods
    load = ServiceLoad(exam.address(service))
    try:
        print(f"\ninstalled and ready after {seconds:.0f} s; load on the Service {service}\n{HEADER}")
        time.sleep(10)
        phases = [load.figures("installed")]
        exam.helm("upgrade", "r", *values, "--set", "serverArgs={--log-verbose=1}", "--set", "router.toml=attempts = 2")
        phases.append(load.figures("upgrade"))
        eventually(lambda: not first & {run.name for run in exam.runs()}, PATIENCE)
        exam.helm("rollback", "r", "1", "--wait", "--timeout", "300s")
        phases.append(load.figures("rollback"))
        exam.helm("upgrade", "r", *values, "--set", "replicaCount=3")
        phases.append(load.figures("one server more"))
        exam.helm("upgrade", "r", *values, "--set", "replicaCount=1")
        eventually(lambda: len(exam.runs()) == pods - 1, PATIENCE)
        phases.append(load.figures("two servers fewer"))
    finally:
        load.stop()
    exam.helm("uninstall", "r")  # with the last streams under way
    load.join(PATIENCE)
    phases.append(load.figures("uninstall"))
    eventually(lambda: not exam.runs(), PATIENCE)
    assert not load.problems, load.problems
    assert sum(each.requests for each in phases) > 5000
    assert sum(each.streams for each in phases) > 100
    exam.ended_well()
    left = exam.api.get("/api/v1/namespaces/default/services")["items"]
    assert [each["metadata"]["name"] for each in left] == ["kubernetes"]


def test_the_value_file_of_triton_s_chart(exam: Exam) -> None:
    """All of it is applied as it stands, but for the image, the NFS server and the GPUs, which are not here."""
    values = yaml.safe_load(Page("docs/coming-from-triton.md").block("# values.yaml"))
    exam.helm("install", "t", *exam.values(**{**values, "image": COMMON["image"]}))
    path = "/apis/autoscaling/v2beta2/namespaces/default/horizontalpodautoscalers/t-nerite"
    (metric,) = exam.api.get(path)["spec"]["metrics"]
    assert metric["pods"] == {
        "metric": {"name": "avg_time_queue_us"}, "target": {"type": "AverageValue", "averageValue": "50"},
    }  # fmt: skip
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    with closing(http.client.HTTPConnection(exam.address("t-nerite-router"), 8000, timeout=PATIENCE)) as connection:
        connection.request("POST", "/v2/models/add/infer", json.dumps({"inputs": [tensor]}))
        assert json.loads(connection.getresponse().read())["outputs"][0]["data"] == [2]
    free(exam, "t")


def test_a_drained_node_keeps_the_disruption_budget(exam: Exam) -> None:
    """Pods of a node that is drained go one at a time, and nobody who uses them notices."""
    exam.helm("install", "d", *exam.values(replicaCount=4, router={"enabled": True, "replicaCount": 2}))
    drained = exam.nodes[0]
    evicted = {run.name for run in drained.runs.values() if run not in drained.past}
    assert evicted, "the scheduler put nothing on this node"
    load = ServiceLoad(exam.address("d-nerite-router"))
    least: dict[str, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for service in ("d-nerite", "d-nerite-router"):
                least[service] = min(least.get(service, 99), len(exam.proxy.ready(service)))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        print(f"\n{HEADER}")
        exam.kubectl(
            "drain", drained.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=300s"
        )
        found = load.figures(f"drain of {len(evicted)} pods")
        over.set()
    finally:
        over.set()
        load.stop()
        load.join(PATIENCE)
        watching.join()
        exam.kubectl("uncordon", drained.name)
    print(f"fewest that were ready: {least}")
    assert not load.problems, load.problems
    assert found.requests > 1000
    assert least["d-nerite"] >= 3 and least["d-nerite-router"] >= 1
    assert not [run for run in drained.runs.values() if run not in drained.past]
    free(exam, "d")
    exam.ended_well()


def _milliseconds(quantity: str) -> float:
    """Return a quantity of microseconds, as Kubernetes writes numbers, in milliseconds."""
    unit = {"m": 1e-3, "k": 1e3}.get(quantity[-1], 1)
    return float(quantity.rstrip("mk")) * unit / 1000


class _Callers:
    """So many clients, each of which asks the slow model again as soon as it has its answer."""

    def __init__(self, address: str, count: int) -> None:
        self.problems: list[str] = []
        self.answers = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(address,)) for _ in range(count)]
        for each in self._threads:
            each.start()

    def _ask(self, address: str) -> None:
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
        while not self._over.is_set():
            with closing(http.client.HTTPConnection(address, 8000, timeout=PATIENCE)) as connection:
                try:
                    connection.request("POST", "/v2/models/slow/infer", json.dumps({"inputs": [tensor]}))
                    answer = connection.getresponse()
                    body = answer.read()
                except (OSError, http.client.HTTPException) as error:
                    self.problems.append(repr(error))
                    continue
                if answer.status == 200:
                    self.answers += 1
                else:
                    self.problems.append(f"{answer.status} {body[:200]!r}")

    def stop(self) -> None:
        self._over.set()
        for each in self._threads:
            each.join(PATIENCE)


@contextmanager
def callers(address: str, count: int) -> Iterator[_Callers]:
    made = _Callers(address, count)
    try:
        yield made
    finally:
        made.stop()


def test_the_autoscaler_follows_the_time_in_the_queue(exam: Exam) -> None:
    """With the chart's own metric and the adapter's rules: more servers while requests wait, fewer when none do."""
    scaled = {"enabled": True, "by": "hpa", "minReplicas": 1, "maxReplicas": 3, "stabilization": 10}
    exam.helm("install", "h", *exam.values(autoscaling=scaled, router={"enabled": True, "replicaCount": 1}))
    address, began = exam.address("h-nerite-router"), time.monotonic()
    autoscaler = "/apis/autoscaling/v2beta2/namespaces/default/horizontalpodautoscalers/h-nerite"

    def until(what: str, holds: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"never {what}: {exam.api.get(autoscaler).get('status')}"
            time.sleep(0.5)
        metric = exam.api.get(autoscaler)["status"].get("currentMetrics") or [{}]
        value = _milliseconds((metric[0].get("pods") or {}).get("current", {}).get("averageValue", "0"))
        ready = len(exam.proxy.ready("h-nerite"))
        print(
            f"| {what} | {time.monotonic() - began:.0f} s | {exam.replicas('h-nerite')} | {ready} | {value:.0f} ms |",
            flush=True,
        )

    print("\n| | time | replicas | ready | queue |\n|---|---|---|---|---|")
    until("one server", lambda: exam.replicas("h-nerite") == 1)
    with callers(address, 12) as many:
        until("12 clients: three servers", lambda: len(exam.proxy.ready("h-nerite")) == 3)
    with callers(address, 1) as one:
        until("1 client: one server", lambda: exam.replicas("h-nerite") == 1)
    with callers(address, 12) as again:
        until("12 clients: three servers", lambda: len(exam.proxy.ready("h-nerite")) == 3)
    until("no client: one server", lambda: exam.replicas("h-nerite") == 1)
    assert many.problems + one.problems + again.problems == []
    assert min(many.answers, one.answers, again.answers) > 0
    free(exam, "h")
    exam.ended_well()
