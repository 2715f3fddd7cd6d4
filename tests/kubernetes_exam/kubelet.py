"""A kubelet: a node of the cluster that runs the pods which the scheduler binds to it, each in a sandbox.

What it does as the real one: probes and their thresholds, restarts with back-off, the order in which a pod ends
(``preStop``, SIGTERM, SIGKILL after the grace period), and what it tells of all that. It has no images and no cgroups.
"""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from containers import Container, Sandbox, make_volume, remove_volumes
from control_plane import GATEWAY, PORT, Api, ApiError

BRIDGE = "pods"
_TURN = 0.05
_HEARTBEAT = 5.0
_FIRST_BACK_OFF = 10.0
_ADDRESSES = itertools.count(2)
_SIZE = {"cpu": "32", "memory": "64Gi", "pods": "50"}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Probe(threading.Thread):
    """Asks a container again and again, and tells when it is thought to be well or not."""

    def __init__(self, run: PodRun, spec: dict[str, Any], first: bool, told: Callable[[bool], None]) -> None:
        """``first``: what is thought of it before it was asked."""
        super().__init__(daemon=True)
        self._run = run
        self._spec = spec
        self._well = first
        self._told = told
        self.over = threading.Event()

    def run(self) -> None:
        spec, count, last = self._spec, 0, None
        self.over.wait(spec.get("initialDelaySeconds", 0))
        while not self.over.is_set():
            answer = self._ask()
            count = count + 1 if answer is last else 1
            last = answer
            needed = spec.get("successThreshold", 1) if answer else spec.get("failureThreshold", 3)
            if count >= needed and not self.over.is_set():
                if answer is not self._well or (not answer and count == needed):
                    self._told(answer)
                self._well = answer
            self.over.wait(spec.get("periodSeconds", 10))

    def _ask(self) -> bool:
        what = self._spec.get("httpGet") or self._spec["tcpSocket"]
        port, seconds = self._run.port(what["port"]), self._spec.get("timeoutSeconds", 1)
        try:
            if "tcpSocket" in self._spec:
                socket.create_connection((self._run.address, port), seconds).close()
                return True
            connection = http.client.HTTPConnection(self._run.address, port, timeout=seconds)
            try:
                connection.request("GET", what["path"], headers={"User-Agent": "kube-probe/1.20"})
                return 200 <= connection.getresponse().status < 400
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return False


class PodRun(threading.Thread):
    """The life of a pod on a node."""

    def __init__(self, node: Kubelet, pod: dict[str, Any], folder: Path) -> None:
        super().__init__(daemon=True)
        self.name: str = pod["metadata"]["name"]
        self.namespace: str = pod["metadata"]["namespace"]
        self.labels: dict[str, str] = pod["metadata"].get("labels", {})
        number = next(_ADDRESSES)
        self.address = f"10.213.{number // 250}.{number % 250 + 1}"
        self.container: Container | None = None
        self.ended: list[int] = []
        """Exit statuses of its containers that have ended."""
        self.grace: float | None = None
        """Seconds that it has to end, once it was deleted."""
        self._node = node
        self._pod = pod
        self._folder = folder
        (self._spec,) = pod["spec"]["containers"]
        self._sandbox = Sandbox(f"p{number}", self.address, BRIDGE, GATEWAY)
        self._probes: list[_Probe] = []
        self._up = self._ready = self._sick = False
        self._began = _now()
        self._state: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}
        self._told: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """What its containers have printed."""
        return self.container.text if self.container else ""

    def port(self, named: int | str) -> int:
        """Return the number of a port of the container."""
        if isinstance(named, int):
            return named
        return next(each["containerPort"] for each in self._spec["ports"] if each["name"] == named)

    def run(self) -> None:
        volumes = {
            volume["name"]: make_volume(volume, self._folder / "volumes", self._find)
            for volume in self._pod["spec"].get("volumes", ())
        }
        back_off = _FIRST_BACK_OFF
        while self.grace is None:
            self._live(volumes)
            if self.grace is None:
                self._state = {"waiting": {"reason": "CrashLoopBackOff"}}
                self._tell()
                deadline = time.monotonic() + back_off
                back_off *= 2
                while self.grace is None and time.monotonic() < deadline:
                    time.sleep(_TURN)
        self._state = {"terminated": {"exitCode": self.ended[-1] if self.ended else 0, "finishedAt": _now()}}
        self._tell()
        self._sandbox.remove()
        remove_volumes(self._folder / "volumes")
        self._node.gone(self)

    def _find(self, plural: str, name: str) -> Any:
        while True:  # a pod may be bound before its service account has a token
            try:
                return self._node.api.get(f"/api/v1/namespaces/{self.namespace}/{plural}/{name}")
            except ApiError:
                time.sleep(0.2)

    def _live(self, volumes: dict[str, Path]) -> None:
        """Run the container once, up to its end."""
        environment = {"KUBERNETES_SERVICE_HOST": GATEWAY, "KUBERNETES_SERVICE_PORT": str(PORT)}
        self._up = self._ready = self._sick = False
        self.container = Container(self._pod, self._sandbox, self._folder, volumes, environment)
        self._state = {"running": {"startedAt": _now()}}
        if "startupProbe" in self._spec:
            self._probe("startupProbe", False, self._take_startup)
        else:
            self._take_startup(True)
        while self.container.status is None and self.grace is None and not self._sick:
            self._tell()
            time.sleep(_TURN)
        if self.container.status is None:
            self._end(self.grace if self.grace is not None else self._pod["spec"]["terminationGracePeriodSeconds"])
        for probe in self._probes:
            probe.over.set()
        self._probes = []
        self.ended.append(self.container.status if self.container.status is not None else -1)
        self._ready = self._up = False

    def _probe(self, kind: str, first: bool, told: Callable[[bool], None]) -> None:
        if kind in self._spec:
            probe = _Probe(self, self._spec[kind], first, told)
            self._probes.append(probe)
            probe.start()

    def _take_startup(self, well: bool) -> None:
        if not well:
            self._sick = True
            return
        self._up = True
        for probe in self._probes:
            probe.over.set()
        if "readinessProbe" in self._spec:
            self._probe("readinessProbe", False, self._take_readiness)
        else:
            self._ready = True
        self._probe("livenessProbe", True, self._take_liveness)

    def _take_readiness(self, well: bool) -> None:
        self._ready = well

    def _take_liveness(self, well: bool) -> None:
        self._sick = not well

    def _end(self, grace: float) -> None:
        """End the container: the hook, SIGTERM, and SIGKILL when the time is over. Readiness is told all the while."""
        assert self.container is not None
        began = time.monotonic()
        if hook := self._spec.get("lifecycle", {}).get("preStop", {}).get("exec"):
            self._while_told(lambda: self.container.execute(hook["command"], grace))
        self.container.signal(15)
        while time.monotonic() - began < grace and self.container.status is None:
            self._tell()
            time.sleep(_TURN)
        if self.container.status is None:
            self._node.killed.append(self.name)
            self.container.kill()

    def _while_told(self, work: Callable[[], None]) -> None:
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        while worker.is_alive():
            self._tell()
            worker.join(_TURN)

    def _tell(self) -> None:
        """Tell the API server of what has changed."""
        yes = {True: "True", False: "False"}
        conditions = [
            {"type": name, "status": yes[holds]}
            for name, holds in (
                ("Initialized", True),
                ("Ready", self._ready),
                ("ContainersReady", self._ready),
                ("PodScheduled", True),
            )
        ]
        container = {
            "name": self._spec["name"],
            "image": self._spec["image"],
            "imageID": "",
            "ready": self._ready,
            "started": self._up,
            "restartCount": len(self.ended) if self.grace is None else max(len(self.ended) - 1, 0),
            "state": self._state,
        }
        status = {
            "phase": "Running" if self.container is not None else "Pending",
            "conditions": conditions,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": self._node.address,
            "startTime": self._began,
            "containerStatuses": [container],
        }
        if status == self._told:
            return
        self._told = status
        dated = [{**each, "lastTransitionTime": _now()} for each in conditions]
        with suppress(OSError, ApiError, http.client.HTTPException):
            self._node.api.patch(
                f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/status",
                {"status": {**status, "conditions": dated}},
            )

    def kill(self) -> None:
        """End it at once."""
        self.grace = 0.0
        if self.container is not None:
            self.container.kill()


class Kubelet:
    """A node."""

    def __init__(self, api: Api, name: str, address: str, folder: Path) -> None:
        self.api = api
        self.name = name
        self.address = address
        self.runs: dict[str, PodRun] = {}
        """By the uid of the pod."""
        self.past: list[PodRun] = []
        """Pods that are over."""
        self.killed: list[str] = []
        """Pods that had not ended when their grace period was over."""
        self._folder = folder / name
        self._over = threading.Event()
        self._register()
        for work in (self._beat, self._follow):
            threading.Thread(target=work, daemon=True).start()

    def _register(self) -> None:
        metadata = {"name": self.name, "labels": {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux"}}
        self.api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        self._tell()

    def _tell(self) -> None:
        conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now()}]
        addresses = [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}]
        status = {"capacity": _SIZE, "allocatable": _SIZE, "conditions": conditions, "addresses": addresses}
        with suppress(OSError, ApiError, http.client.HTTPException):
            self.api.patch(f"/api/v1/nodes/{self.name}/status", {"status": status})

    def _beat(self) -> None:
        while not self._over.wait(_HEARTBEAT):
            self._tell()

    def _follow(self) -> None:
        while not self._over.is_set():
            with suppress(OSError, ApiError, http.client.HTTPException, ValueError):
                for kind, pod in self.api.follow("/api/v1/pods", fieldSelector=f"spec.nodeName={self.name}"):
                    if self._over.is_set():
                        return
                    self._take(kind, pod)

    def _take(self, kind: str, pod: dict[str, Any]) -> None:
        key, metadata = pod["metadata"]["uid"], pod["metadata"]
        run = self.runs.get(key)
        deleted = metadata.get("deletionTimestamp") is not None
        if run is None and kind != "DELETED":
            run = PodRun(self, pod, self._folder / key)
            self.runs[key] = run
            run.start()
        if run is not None and run.grace is None and (deleted or kind == "DELETED"):
            run.grace = float(metadata.get("deletionGracePeriodSeconds") or 0)

    def gone(self, run: PodRun) -> None:
        """A pod has ended: it is not there any more."""
        self.past.append(run)
        with suppress(OSError, ApiError, http.client.HTTPException):
            self.api.delete(f"/api/v1/namespaces/{run.namespace}/pods/{run.name}")

    def stop(self) -> None:
        """End all pods at once."""
        self._over.set()
        for run in list(self.runs.values()):
            if run not in self.past:
                run.kill()
        for run in self.runs.values():
            run.join(30)
