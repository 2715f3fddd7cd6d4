"""A stand-in for the Kubernetes API server: stores objects, and lets them be listed, watched, patched and scaled.

It is a real HTTPS server with discovery, so kubectl, helm and our client talk to it as to any other. There are no
controllers but one: a workload is available as soon as it is written, unless a test takes care of its status.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import trustme
import yaml

from kubernetes_patches import apply_patch, selects
from kubernetes_protobuf import MAGIC, decode

TOKEN = "a-token-of-a-test"
Object = dict[str, Any]
_ALL = ("pods", "services", "deployments", "statefulsets", "horizontalpodautoscalers")
"""What kubectl means by all."""


class Resource(NamedTuple):
    """A kind of objects."""

    api: str
    """Group and version, such as ``apps/v1``."""
    plural: str
    kind: str
    namespaced: bool = True
    scaled: bool = False


def _resources() -> Iterator[Resource]:
    for plural, kind in (
        ("pods", "Pod"), ("services", "Service"), ("secrets", "Secret"), ("configmaps", "ConfigMap"),
        ("serviceaccounts", "ServiceAccount"), ("events", "Event"), ("persistentvolumeclaims", "PersistentVolumeClaim"),
    ):  # fmt: skip
        yield Resource("v1", plural, kind)
    yield Resource("v1", "namespaces", "Namespace", namespaced=False)
    yield Resource("v1", "nodes", "Node", namespaced=False)
    yield Resource("apps/v1", "deployments", "Deployment", scaled=True)
    yield Resource("apps/v1", "statefulsets", "StatefulSet", scaled=True)
    yield Resource("apps/v1", "replicasets", "ReplicaSet")
    yield Resource("leaderworkerset.x-k8s.io/v1", "leaderworkersets", "LeaderWorkerSet", scaled=True)
    for api, plural, kind in (
        ("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
        ("batch/v1", "jobs", "Job"),
        ("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget"),
        ("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
        ("rbac.authorization.k8s.io/v1", "roles", "Role"),
        ("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding"),
        ("discovery.k8s.io/v1", "endpointslices", "EndpointSlice"),
        ("coordination.k8s.io/v1", "leases", "Lease"),
        ("monitoring.coreos.com/v1", "servicemonitors", "ServiceMonitor"),
        ("monitoring.coreos.com/v1", "prometheusrules", "PrometheusRule"),
        ("keda.sh/v1alpha1", "scaledobjects", "ScaledObject"),
        ("gateway.networking.k8s.io/v1", "httproutes", "HTTPRoute"),
        ("gateway.networking.k8s.io/v1", "grpcroutes", "GRPCRoute"),
        ("inference.networking.k8s.io/v1", "inferencepools", "InferencePool"),
    ):
        yield Resource(api, plural, kind)


RESOURCES = {(each.api, each.plural): each for each in _resources()}


class Problem(Exception):
    """A request is refused, with an object of the kind ``Status``."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code,
        }  # fmt: skip


class _Event(NamedTuple):
    version: int
    resource: Resource
    kind: str
    object: Object


class KubernetesApi:
    """The server, and what is stored in it."""

    def __init__(self, port: int = 0) -> None:
        self.objects: dict[tuple[Resource, str, str], Object] = {}
        """By resource, namespace and name."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.available: Callable[[Object], bool] = lambda workload: True
        """Whether a workload that is written is available at once."""
        self.failures = 0
        """Changes that are still to be answered with status 500 instead of made."""
        self._version = 100
        self._oldest = 100
        self._events: list[_Event] = []
        self._changed = threading.Condition(threading.RLock())
        self._stopping = False
        self._applied: dict[tuple[Any, str], Object] = {}
        self.authority = trustme.CA()
        for name in ("default", "kube-system"):
            self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self._start(port)

    def _start(self, port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
        self.authority.configure_trust(context)
        context.verify_mode = ssl.CERT_OPTIONAL
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.api, self._server.context = self, context
        self.port = self._server.server_address[1]
        self._stopping = False
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"https://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End, and end all watches."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._server.reset_connections()

    def start_again(self) -> None:
        """Be back at the same address with the same objects."""
        self._start(self.port)

    def kubeconfig(self, folder: Path, namespace: str = "default", **user: Any) -> Path:
        """Write a kubeconfig for this server, as JSON; ``user`` instead of the token."""
        pem = base64.b64encode(self.authority.cert_pem.bytes()).decode()
        whole = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority-data": pem}}],
            "users": [{"name": "test", "user": user or {"token": TOKEN}}],
        }  # fmt: skip
        file = folder / "kubeconfig.json"
        file.write_text(json.dumps(whole))
        return file

    def find(self, plural: str, namespace: str = "default") -> dict[str, Object]:
        """Return the objects of a resource in a namespace, by name."""
        with self._changed:
            return {
                key[2]: copy.deepcopy(found)
                for key, found in self.objects.items()
                if key[0].plural == plural and key[1] in (namespace, "")
            }

    def put(self, given: Object) -> Object:
        """Store an object, new or not."""
        resource = next(
            each for each in RESOURCES.values() if (each.api, each.kind) == (given["apiVersion"], given["kind"])
        )
        given = copy.deepcopy(given)
        namespace = given["metadata"].setdefault("namespace", "default") if resource.namespaced else ""
        return self.write(resource, namespace, given["metadata"]["name"], lambda before: given)

    def change(self, plural: str, name: str, namespace: str = "default", **parts: Any) -> None:
        """Replace parts of an object that is there still, such as its status."""
        with self._changed:
            for resource in RESOURCES.values():
                if resource.plural == plural and (resource, namespace, name) in self.objects:
                    self.write(resource, namespace, name, lambda before: {**(before or {}), **parts})

    def remove(self, plural: str, name: str, namespace: str = "default") -> None:
        """Delete an object."""
        key = next(key for key in self.objects if (key[0].plural, *key[1:]) == (plural, namespace, name))
        self.delete(*key)

    def compact(self) -> None:
        """Forget all events, so that watches from before are told 410 Gone."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._events.clear()
            self._changed.notify_all()

    def write(self, resource: Resource, namespace: str, name: str, change: Callable[[Object | None], Object]) -> Object:
        """Replace an object by what ``change`` makes of it."""
        with self._changed:
            key = (resource, namespace, name)
            before = self.objects.get(key)
            after = copy.deepcopy(change(copy.deepcopy(before)))
            self._check_version(before, after, name)
            self._version += 1
            old = before["metadata"] if before else {}
            metadata = after.setdefault("metadata", {})
            metadata |= {"name": name, "resourceVersion": str(self._version)}
            metadata["uid"] = old.get("uid") or str(uuid.uuid4())
            metadata["creationTimestamp"] = old.get("creationTimestamp") or time.strftime("%Y-%m-%dT%H:%M:%SZ")
            if resource.namespaced:
                metadata["namespace"] = namespace
            same = before is not None and before.get("spec") == after.get("spec")
            metadata["generation"] = old.get("generation", 0) + (not same)
            after |= {"apiVersion": resource.api, "kind": resource.kind}
            if resource.scaled and self.available(after):
                after["status"] = _available(after)
            if resource.kind == "Namespace":
                after.setdefault("status", {"phase": "Active"})
            self.objects[key] = after
            self._tell(resource, "MODIFIED" if before else "ADDED", after)
            return copy.deepcopy(after)

    def _check_version(self, before: Object | None, after: Object, name: str) -> None:
        given = after.get("metadata", {}).get("resourceVersion")
        if before is not None and given and given != before["metadata"]["resourceVersion"]:
            raise Problem(409, "Conflict", f'Operation cannot be fulfilled on "{name}": the object has been modified')

    def delete(self, resource: Resource, namespace: str, name: str) -> Object:
        """Delete an object, and return it."""
        with self._changed:
            found = self.objects.pop((resource, namespace, name))
            self._applied = {
                key: value for key, value in self._applied.items() if key[0] != (resource, namespace, name)
            }
            self._version += 1
            found["metadata"]["resourceVersion"] = str(self._version)
            self._tell(resource, "DELETED", found)
            return found

    def _tell(self, resource: Resource, kind: str, found: Object) -> None:
        self._events.append(_Event(self._version, resource, kind, copy.deepcopy(found)))
        self._changed.notify_all()

    def read(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return an object."""
        with self._changed:
            found = self.objects.get((resource, namespace, name))
            if found is None:
                raise Problem(404, "NotFound", f'{resource.plural} "{name}" not found')
            return copy.deepcopy(found)

    def select(self, resource: Resource, namespace: str, query: Mapping[str, str]) -> tuple[list[Object], str]:
        """Return the objects that a list shows, and the resource version."""
        with self._changed:
            found = [
                copy.deepcopy(each)
                for key, each in sorted(self.objects.items(), key=lambda item: item[0][1:])
                if key[0] == resource and namespace in ("", key[1]) and selects(query, each)
            ]
            return found, str(self._version)

    def apply(self, key: tuple[Resource, str, str], manager: str, given: Object) -> Object:
        """Apply an object as the server does: what this manager has set before and sets no more is removed."""
        with self._changed:
            last = self._applied.get((key, manager), {})
            self._applied[key, manager] = copy.deepcopy(given)
            return self.write(*key, lambda before: apply_patch(before or {}, given, last))

    def events(
        self, resource: Resource, namespace: str, query: Mapping[str, str], since: int
    ) -> Iterator[tuple[str, Object]]:
        """Yield the events of a watch; with nothing new, every 100 ms nothing."""
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 300)
        while time.monotonic() < deadline:
            with self._changed:
                if self._stopping:
                    return
                if since < self._oldest:
                    yield "ERROR", Problem(410, "Expired", f"too old resource version: {since}").status
                    return
                new = [event for event in self._events if event.version > since]
                if not new:
                    self._changed.wait(0.1)
            for event in new:
                since = event.version
                found = event.object
                shown = event.resource == resource and namespace in ("", found["metadata"].get("namespace", ""))
                if shown and selects(query, found):
                    yield event.kind, found
            yield "", {}
        yield "BOOKMARK", {"metadata": {"resourceVersion": str(since)}}


def _available(workload: Object) -> Object:
    """Return the status of a workload of which all is as it should be."""
    count = workload.get("spec", {}).get("replicas", 1)
    counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    return {
        **dict.fromkeys(counts, count),
        "observedGeneration": workload["metadata"]["generation"],
        "conditions": [
            {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"},
            {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
        ],
    }


class _Server(ThreadingHTTPServer):
    """Does the handshake in the thread of the connection."""

    daemon_threads = True
    api: KubernetesApi
    context: ssl.SSLContext

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[Any] = set()

    def finish_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        try:
            with self.context.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)
        except OSError:
            return
        finally:
            self._open.discard(request)

    def reset_connections(self) -> None:
        """Close what is still open."""
        for each in tuple(self._open):
            with contextlib.suppress(OSError):
                each.close()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: _Server
    connection: ssl.SSLSocket

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.server.api.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not self.connection.getpeercert():
                raise Problem(401, "Unauthorized", "Unauthorized")
            if self.command != "GET" and self.server.api.failures:
                self.server.api.failures -= 1
                raise Problem(500, "InternalError", "the test wants a failure")
            found = self._route([part for part in url.path.split("/") if part], body)
        except Problem as problem:
            self._send(problem.code, problem.status)
        else:
            if found is not None:
                self._send(201 if self.command == "POST" else 200, found)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def _send(self, code: int, found: Object) -> None:
        data = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _route(self, parts: list[str], body: bytes) -> Object | None:
        if described := discovery(parts):
            return described
        api, rest = ("v1", parts[2:]) if parts[:2] == ["api", "v1"] else ("/".join(parts[1:3]), parts[3:])
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        resource = RESOURCES.get((api, rest[0])) if rest else None
        if resource is None:
            raise Problem(404, "NotFound", "the server could not find the requested resource")
        if len(rest) == 1:
            return self._collection(resource, namespace, body)
        return self._object((resource, namespace, rest[1]), rest[2] if len(rest) > 2 else "", body)

    def _collection(self, resource: Resource, namespace: str, body: bytes) -> Object | None:
        api = self.server.api
        if self.command == "POST":
            given = _parsed(body)
            name = given["metadata"].get("name") or given["metadata"]["generateName"] + uuid.uuid4().hex[:5]
            self._check_namespace(resource, namespace)
            if (resource, namespace, name) in api.objects:
                raise Problem(409, "AlreadyExists", f'{resource.plural} "{name}" already exists')
            return given if self._dry else api.write(resource, namespace, name, lambda before: given)
        if self.query.get("watch") in ("true", "1"):
            self._watch(resource, namespace)
            return None
        items, version = api.select(resource, namespace, self.query)
        if self.command == "DELETE":
            for each in items:
                api.delete(resource, each["metadata"].get("namespace", ""), each["metadata"]["name"])
        begin, limit = int(self.query.get("continue") or 0), int(self.query.get("limit") or 0)
        metadata: Object = {"resourceVersion": version}
        if limit and begin + limit < len(items):
            metadata["continue"] = str(begin + limit)
        items = items[begin : begin + limit if limit else None]
        return {"apiVersion": resource.api, "kind": f"{resource.kind}List", "metadata": metadata, "items": items}

    @property
    def _dry(self) -> bool:
        return "dryRun" in self.query

    def _check_namespace(self, resource: Resource, namespace: str) -> None:
        if resource.namespaced:
            self.server.api.read(RESOURCES["v1", "namespaces"], "", namespace)

    def _object(self, key: tuple[Resource, str, str], inner: str, body: bytes) -> Object:
        api = self.server.api
        if inner == "scale" and key[0].scaled:
            return self._scale(key, body)
        if self.command == "GET":
            return api.read(*key)
        if self.command == "DELETE":
            api.read(*key)
            api.delete(*key)
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        given = _parsed(body)
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("application/apply-patch"):
            self._check_namespace(key[0], key[1])
            if self._dry:
                return dict(given)
            return api.apply(key, self.query.get("fieldManager", ""), given)
        before = api.read(*key)
        if self.command == "PATCH":
            given = apply_patch(before, given, by_key="strategic" in kind)
        return dict(given) if self._dry else api.write(*key, lambda before: given)

    def _scale(self, key: tuple[Resource, str, str], body: bytes) -> Object:
        api = self.server.api
        found = api.read(*key)
        if self.command != "GET":
            count = json.loads(body)["spec"]["replicas"]
            found["metadata"].pop("resourceVersion")
            found["spec"]["replicas"] = count
            found = api.write(*key, lambda before: found)
        count = found["spec"].get("replicas", 1)
        names = ("name", "namespace", "uid", "resourceVersion")
        return {
            "apiVersion": "autoscaling/v1", "kind": "Scale",
            "metadata": {name: found["metadata"][name] for name in names},
            "spec": {"replicas": count}, "status": {"replicas": found.get("status", {}).get("replicas", 0)},
        }  # fmt: skip

    def _watch(self, resource: Resource, namespace: str) -> None:
        api = self.server.api
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        known = self.query.get("resourceVersion") or "0"
        items, version = api.select(resource, namespace, self.query)
        try:
            if known == "0" or self.query.get("sendInitialEvents") == "true":
                for each in items:
                    self._event("ADDED", each)
                end = {"resourceVersion": version, "annotations": {"k8s.io/initial-events-end": "true"}}
                if self.query.get("sendInitialEvents") == "true":
                    self._event("BOOKMARK", {"kind": resource.kind, "apiVersion": resource.api, "metadata": end})
                known = version
            for kind, found in api.events(resource, namespace, self.query, int(known)):
                if kind == "BOOKMARK":
                    found |= {"kind": resource.kind, "apiVersion": resource.api}
                if kind:
                    self._event(kind, found)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _event(self, kind: str, found: Object) -> None:
        data = json.dumps({"type": kind, "object": found}).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


def _parsed(body: bytes) -> Object:
    """Return the object in a body of JSON, YAML or protobuf."""
    return decode(body) if body.startswith(MAGIC) else dict(yaml.safe_load(body))


def discovery(parts: list[str]) -> Object | None:
    """Return what the server says of itself at a path; None if that is no path of discovery."""
    groups: dict[str, set[str]] = {}
    for each in RESOURCES.values():
        group, _, version = each.api.rpartition("/")
        groups.setdefault(group, set()).add(version)
    if parts == ["version"]:
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        named = [
            {
                "name": group,
                "versions": (versions := [{"groupVersion": f"{group}/{each}", "version": each} for each in found]),
                "preferredVersion": versions[0],
            }
            for group, found in groups.items()
            if group
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
    if parts == ["openapi", "v3"]:
        apis = [("api/v1" if each == "v1" else f"apis/{each}") for each in {key[0] for key in RESOURCES}]
        return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in apis}}
    if parts[:2] == ["openapi", "v3"]:
        return _schema("/".join(parts[2:]).removeprefix("apis/").removeprefix("api/"))
    api = "v1" if parts == ["api", "v1"] else "/".join(parts[1:]) if parts[:1] == ["apis"] and len(parts) == 3 else ""
    if api and any(key[0] == api for key in RESOURCES):
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": list(_described(api))}
    return None


def _described(api: str) -> Iterator[Object]:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    for each in RESOURCES.values():
        if each.api == api:
            singular = each.kind.lower()
            yield {"name": each.plural, "singularName": singular, "namespaced": each.namespaced, "kind": each.kind,
                   "verbs": verbs, "categories": ["all"] if each.plural in _ALL else []}  # fmt: skip
            if each.scaled:
                yield {"name": f"{each.plural}/scale", "singularName": "", "namespaced": True, "group": "autoscaling",
                       "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]}  # fmt: skip


def _schema(api: str) -> Object:
    """Return a schema in which each kind may be patched with checks of its fields."""
    paths = {}
    for each in RESOURCES.values():
        if each.api == api:
            group, _, version = api.rpartition("/")
            root = f"/apis/{api}" if group else "/api/v1"
            within = "/namespaces/{namespace}" if each.namespaced else ""
            paths[f"{root}{within}/{each.plural}/{{name}}"] = {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                    "x-kubernetes-action": "patch",
                    "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": each.kind},
                }
            }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.34.0"}, "paths": paths}
