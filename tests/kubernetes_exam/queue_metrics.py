"""The API of custom metrics, as the Prometheus adapter serves it from the rules that come with the chart.

A real Prometheus reads the metrics of the pods, of which it is told by a file: Debian's cannot ask the API server. The
rules are those of ``deploy/helm/nerite/files/prometheus-adapter.yaml``, as they are.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from control_plane import GATEWAY, Api

from kubernetes_tools import CHART
from prometheus_server import Prometheus
from serving import eventually
from tools import require

PORT = 6444
_PROMETHEUS = 9099
GROUP = "/apis/custom.metrics.k8s.io/v1beta1"


def rules() -> dict[str, str]:
    """Return the queries of the chart's rules by the name of the metric."""
    found = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    return {rule["name"]["as"]: rule["metricsQuery"] for rule in found}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts = url.path.removeprefix(GROUP).split("/")
        if parts == [""]:
            status, told = 200, _described()
        elif len(parts) == 6 and parts[5] in rules():  # /namespaces/NAMESPACE/pods/*/METRIC
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            status, told = 200, self.server.values(parts[2], parts[5], selector)
        else:
            status, told = 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _described() -> dict[str, Any]:
    common = {"singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
    resources = [{"name": f"pods/{name}", **common} for name in rules()]
    version = "custom.metrics.k8s.io/v1beta1"
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, api: Api, prometheus: Prometheus, keys: Path) -> None:
        super().__init__((GATEWAY, PORT), _Handler)
        self.api = api
        self.prometheus = prometheus
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(keys / "server.crt", keys / "server.key")
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is none of our business."""

    def values(self, namespace: str, metric: str, selector: str) -> dict[str, Any]:
        """Return the values of a metric for the pods that the labels select: of those that have one."""
        pods = self.api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)["items"]
        names = "|".join(pod["metadata"]["name"] for pod in pods)
        query = rules()[metric].replace("<<.GroupBy>>", "pod")
        query = query.replace("<<.LabelMatchers>>", f'namespace="{namespace}",pod=~"{names}"')
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = [
            {
                "describedObject": {
                    "kind": "Pod", "namespace": namespace, "name": each["metric"]["pod"], "apiVersion": "/v1",
                },
                "metricName": metric,
                "timestamp": when,
                "value": str(round(float(each["value"][1]))),
            }
            for each in self.prometheus.samples(query)
            if each["value"][1] != "NaN"
        ]  # fmt: skip
        return {
            "kind": "MetricValueList",
            "apiVersion": "custom.metrics.k8s.io/v1beta1",
            "metadata": {},
            "items": items,
        }


@contextmanager
def custom_metrics(api: Api, folder: Path) -> Iterator[Prometheus]:
    """Serve the metrics, and tell the API server of it."""
    require("prometheus")
    job = {"job_name": "pods", "file_sd_configs": [{"files": [str(folder / "pods.json")]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{_PROMETHEUS}"], stdout=log, stderr=log)
    prometheus = Prometheus(_PROMETHEUS)
    eventually(lambda: _answers(prometheus), what=f"Prometheus does not start: see {folder}/prometheus.log")
    server = _Server(api, prometheus, folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    over = threading.Event()
    telling = threading.Thread(target=_tell_of_pods, args=(api, folder / "pods.json", over))
    telling.start()
    try:
        _announce(api)
        eventually(lambda: _available(api), what="the API server does not find the metrics")
        yield prometheus
    finally:
        over.set()
        telling.join()
        server.shutdown()
        server.server_close()
        process.terminate()
        process.wait(30)


def _answers(prometheus: Prometheus) -> bool:
    try:
        return bool(prometheus.ask("status/buildinfo"))
    except OSError:
        time.sleep(0.1)
        return False


def _tell_of_pods(api: Api, file: Path, over: threading.Event) -> None:
    """Write the pods that have a port for metrics into a file, whenever they have changed."""
    told = ""
    while not over.wait(1):
        found = [
            {
                "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
                "labels": {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]},
            }
            for pod in api.get("/api/v1/pods")["items"]
            for port in pod["spec"]["containers"][0].get("ports", ())
            if port.get("name") == "metrics" and pod["status"].get("podIP")
        ]
        if (text := json.dumps(found)) != told:
            file.with_suffix(".new").write_text(text)
            file.with_suffix(".new").rename(file)
            told = text


def _available(api: Api) -> bool:
    found = api.get("/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.custom.metrics.k8s.io")
    conditions = found.get("status", {}).get("conditions", ())
    if not any((each["type"], each["status"]) == ("Available", "True") for each in conditions):
        time.sleep(0.5)
        return False
    return True


def _announce(api: Api) -> None:
    """Register the API, with a service whose only endpoint is this process."""
    name, namespace = "custom-metrics", "kube-system"
    metadata = {"name": name, "namespace": namespace}
    port = {"name": "https", "port": 443, "targetPort": PORT}
    api.post(f"/api/v1/namespaces/{namespace}/services", {"metadata": metadata, "spec": {"ports": [port]}})
    subset = {"addresses": [{"ip": GATEWAY}], "ports": [{"name": "https", "port": PORT}]}
    api.post(f"/api/v1/namespaces/{namespace}/endpoints", {"metadata": metadata, "subsets": [subset]})
    api.post(
        "/apis/apiregistration.k8s.io/v1/apiservices",
        {
            "metadata": {"name": "v1beta1.custom.metrics.k8s.io"},
            "spec": {
                "service": {"name": name, "namespace": namespace, "port": 443},
                "group": "custom.metrics.k8s.io",
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
            },
        },
    )
