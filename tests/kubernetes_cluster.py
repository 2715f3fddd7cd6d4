"""What a cluster does with Deployments and Services, for tests: a process for each pod, on addresses of 127/8.

It stands in for the controllers and the kubelet: rolling updates with one pod more, probes, the wait before SIGTERM,
and EndpointSlices. Images and volumes are not looked at: nerite is that of the tests, and the model repository the
test's own.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kubernetes_api import KubernetesApi, Object
from serving import NERITE, PATIENCE

_TURN = 0.05
_PROBE_SECONDS = 5.0


class Pod:
    """A pod: a process, from its start to its end."""

    def __init__(self, name: str, address: str, template: Object, folder: Path, kubeconfig: Path) -> None:
        self.name = name
        self.address = address
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.identity = json.dumps(template, sort_keys=True)
        """What has to be the same for a pod to be up to date."""
        (self.container,) = template["spec"]["containers"]
        self.log = folder / f"{name}.log"
        self.ready = False
        self.terminating = False
        self.over = False
        self.status: int | None = None
        """Its exit status once it has ended."""
        self._wait: float = self.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        self._grace: float = template["spec"]["terminationGracePeriodSeconds"]
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command(folder),
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            )
        threading.Thread(target=self._live, daemon=True).start()

    def _command(self, folder: Path) -> list[str]:
        words = [str(each).replace("0.0.0.0", self.address) for each in self.container["command"]]
        places = {"nerite": str(NERITE), "/models": str(folder / "models"), "/etc/nerite/cluster.toml": self._config()}
        return [places["/models"] if word.startswith("s3://") else places.get(word, word) for word in words]

    def _config(self) -> str:
        return str(self.log.with_name(f"{self.name}.toml"))

    @property
    def text(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace")

    def _live(self) -> None:
        probe = self.container["readinessProbe"]["httpGet"]["path"]
        while self._process.poll() is None:
            self.ready = _answers(self.address, probe)
            time.sleep(_TURN)
        self.ready = False
        self.status = self._process.returncode
        self.over = True

    def terminate(self) -> None:
        """Begin to end the pod, as the kubelet does."""
        if not self.terminating:
            self.terminating = True
            threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        began = time.monotonic()
        time.sleep(self._wait)
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace - (time.monotonic() - began))
        self._process.kill()

    def kill(self) -> None:
        """End it at once."""
        self.terminating = True
        self._process.kill()
        self._process.wait(PATIENCE)


def _answers(address: str, path: str) -> bool:
    connection = http.client.HTTPConnection(address, 8000, timeout=_PROBE_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Cluster:
    """Keeps pods as the Deployments of a namespace say."""

    def __init__(self, api: KubernetesApi, folder: Path, namespace: str = "default") -> None:
        self.api = api
        self.pods: list[Pod] = []
        self.ended: list[Pod] = []
        """Pods that were deleted and are over."""
        self._folder = folder
        self._namespace = namespace
        self._kubeconfig = api.kubeconfig(folder, namespace)
        self._network = f"127.{random.randint(10, 250)}.{random.randint(0, 250)}"
        self._next = 1
        self._stop = threading.Event()
        api.available = lambda workload: False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End all pods at once."""
        self._stop.set()
        self._thread.join()
        for pod in self.pods:
            pod.kill()

    def _run(self) -> None:
        while not self._stop.wait(_TURN):
            deployments = self.api.find("deployments", self._namespace)
            for pod in [pod for pod in self.pods if pod.over]:
                self.pods.remove(pod)
                self.ended.append(pod)
            for pod in self.pods:
                if not any(_owns(each, pod) for each in deployments.values()):
                    pod.terminate()
            for deployment in deployments.values():
                self._roll(deployment)
            for service in self.api.find("services", self._namespace).values():
                self._tell_endpoints(service)

    def _roll(self, deployment: Object) -> None:
        """Go one step towards what a Deployment says: one pod more at most, and none less than it wants."""
        spec = deployment["spec"]
        wanted = spec.get("replicas", 1)
        identity = json.dumps(spec["template"], sort_keys=True)
        living = [pod for pod in self.pods if _owns(deployment, pod) and not pod.terminating]
        new = [pod for pod in living if pod.identity == identity]
        old = [pod for pod in living if pod.identity != identity]
        for _ in range(min(wanted - len(new), wanted + bool(old) - len(living))):
            self._start(deployment)
        if sum(pod.ready for pod in living) > wanted and old:
            old[0].terminate()
        for pod in new[wanted:]:
            pod.terminate()
        self._tell_status(deployment, wanted, new, living)

    def _start(self, deployment: Object) -> None:
        name = f"{deployment['metadata']['name']}-{self._next}"
        address = f"{self._network}.{self._next}"
        self._next += 1
        template = deployment["spec"]["template"]
        for volume in template["spec"].get("volumes", ()):
            if "configMap" in volume:
                data = self.api.find("configmaps", self._namespace)[volume["configMap"]["name"]]["data"]
                file = self._folder / f"{name}.toml"
                file.write_text(data["cluster.toml"].replace("0.0.0.0", address))
        self.pods.append(Pod(name, address, template, self._folder, self._kubeconfig))

    def _tell_status(self, deployment: Object, wanted: int, new: Sequence[Pod], living: Sequence[Pod]) -> None:
        ready = sum(pod.ready for pod in living)
        whole = len(living) == len(new) == wanted == ready
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(living),
            "updatedReplicas": len(new),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": [
                {"type": "Available", "status": "True" if ready >= wanted else "False"},
                {
                    "type": "Progressing",
                    "status": "True",
                    "reason": "NewReplicaSetAvailable" if whole else "ReplicaSetUpdated",
                },
            ],
        }
        if status != deployment.get("status"):
            self.api.change("deployments", deployment["metadata"]["name"], self._namespace, status=status)

    def _tell_endpoints(self, service: Object) -> None:
        name, selector = service["metadata"]["name"], service["spec"]["selector"]
        pods = [pod for pod in self.pods if selector.items() <= pod.labels.items()]
        ports = {
            port["name"]: container_port["containerPort"]
            for pod in pods[:1]
            for port in service["spec"]["ports"]
            for container_port in pod.container["ports"]
            if container_port["name"] == port["targetPort"]
        }
        told = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{name}-0", "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "ports": [{"name": key, "port": number} for key, number in ports.items()],
            "endpoints": [
                {
                    "addresses": [pod.address],
                    "conditions": {
                        "ready": pod.ready and not pod.terminating,
                        "serving": pod.ready,
                        "terminating": pod.terminating,
                    },
                    "targetRef": {"kind": "Pod", "namespace": self._namespace, "name": pod.name},
                }
                for pod in pods
            ],
        }
        known = self.api.find("endpointslices", self._namespace).get(f"{name}-0", {})
        if {key: known.get(key) for key in ("ports", "endpoints")} != {
            key: told[key] for key in ("ports", "endpoints")
        }:
            told["metadata"]["namespace"] = self._namespace
            self.api.put(told)

    def addresses(self, service: str) -> list[str]:
        """Return where a connection to a service may lead: its endpoints that are ready."""
        found: Object = self.api.find("endpointslices", self._namespace).get(f"{service}-0", {})
        return [each["addresses"][0] for each in found.get("endpoints", ()) if each["conditions"]["ready"]]


def _owns(deployment: Object, pod: Pod) -> bool:
    selector: dict[str, Any] = deployment["spec"]["selector"]["matchLabels"]
    return selector.items() <= pod.labels.items()


@contextmanager
def cluster(folder: Path, namespace: str = "default") -> Iterator[Cluster]:
    """Run a cluster with an API server; every model repository is the folder ``models`` in ``folder``."""
    api = KubernetesApi()
    made = Cluster(api, folder, namespace)
    try:
        yield made
    finally:
        made.stop()
        api.stop()
