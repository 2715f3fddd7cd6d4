"""The Helm chart: what it renders fits the schemas of Kubernetes, is restricted, and says what the values say."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_tools import CHART, ROOT, mistakes, rendered, run
from nerite.cluster.cluster_file import parse_cluster
from nerite.cluster.kubernetes_names import ServiceReference
from tools import require

GATEWAY: dict[str, Any] = {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["models.example.org"]}
EVERYTHING: dict[str, Any] = {
    "router": {
        "enabled": True,
        "replicaCount": 1,
        "toml": 'timeout = "30s"',
        "policy": '[tenants.acme]\nkeys = ["k"]\n',
        "otherPools": '[[pool]]\nname = "elsewhere"\ndns = "vllm.example.org:8000"\nkind = "vllm"',
    },
    "picker": {"enabled": True},
    "gateway": GATEWAY,
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboards": True},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "egress": [{"ports": [{"port": 4318}]}],
    },
    "pools": [
        {
            "name": "interactive",
            "replicaCount": 3,
            "numGpus": 2,
            "autoscaling": {"enabled": True, "by": "keda", "maxReplicas": 8},
            "toml": "borrows = true\n\n[pool.ejection]\nconsecutive-failures = 3\n",
        },
        {
            "name": "batch",
            "repository": "s3://bucket/models",
            "toml": 'classes = ["batch"]',
            "autoscaling": {"enabled": True},
        },
        {"name": "state", "workload": "StatefulSet", "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}}},
        {
            "name": "large",
            "workload": "LeaderWorkerSet",
            "numGpus": 8,
            "leaderWorkerSet": {
                "size": 4,
                "workerCommand": ["ray"],
                "exclusiveTopology": "example.org/rack",
                "check": {"nvlink": True, "rdmaPorts": 8},
            },
        },
    ],
}
TRITON: dict[str, Any] = {
    # All values that Triton's chart for clusters of one's own has, with another image.
    "tags": {"autoscaling": True, "loadBalancing": True, "openshift": True},
    "image": {
        "imageName": "registry.example.org/nerite:1",
        "pullPolicy": "IfNotPresent",
        "modelRepositoryServer": "10.0.0.9",
        "modelRepositoryPath": "/srv/models",
        "numGpus": 1,
    },
    "replicaCount": 2,
    "service": {"type": "NodePort"},
    "serverArgs": ["--model-repository=/models", "--model-control-mode=poll"],
    "autoscaling": {
        "minReplicas": 2,
        "maxReplicas": 4,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": "avg_time_queue_us"},
                    "target": {"type": "AverageValue", "averageValue": 50},
                },
            }
        ],
    },
    "traefik": {"ports": {"triton-http": {"port": 18000, "exposedPort": 8000, "expose": True, "protocol": "TCP"}}},
    "prometheus-adapter": {"prometheus": {"url": "http://prometheus", "port": 9090}, "rules": {"custom": []}},
}
VALUES = {
    "default": {},
    "everything": EVERYTHING,
    "triton": TRITON,
    "picker": {"picker": {"enabled": True}, "gateway": GATEWAY},
}


def named(manifests: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    found = [each for each in manifests if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    assert len(found) == 1, [(each["kind"], each["metadata"]["name"]) for each in manifests]
    return found[0]


def pods(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the templates of all pods."""
    found = []
    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] == "LeaderWorkerSet":
            found += [spec["leaderWorkerTemplate"][key] for key in ("leaderTemplate", "workerTemplate")]
        elif "template" in spec:
            found.append(spec["template"])
    return found


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *(("everything", f"1.{minor}") for minor in range(25, 38)),
        *((name, version) for name in VALUES if name != "everything" for version in ("1.25", "1.31", "1.37")),
    ],
)
def test_what_is_rendered_fits_kubernetes_and_its_extensions(name: str, version: str, tmp_path: Path) -> None:
    manifests = rendered("--kube-version", version, values=VALUES[name], folder=tmp_path)
    assert len(manifests) >= 2
    assert [told for each in manifests for told in mistakes(each, version)] == []


def test_old_clusters_get_the_kinds_that_they_have(tmp_path: Path) -> None:
    values = {"replicaCount": 2, "autoscaling": {"enabled": True, "minReplicas": 2}, "router": {"enabled": True}}
    kinds = {}
    for version in ("1.20", "1.21", "1.23"):
        found = rendered("--kube-version", version, values=values, folder=tmp_path)
        apis = {each["kind"]: each["apiVersion"] for each in found}
        kinds[version] = apis["PodDisruptionBudget"], apis["HorizontalPodAutoscaler"]
    assert kinds == {
        "1.20": ("policy/v1beta1", "autoscaling/v2beta2"),
        "1.21": ("policy/v1", "autoscaling/v2beta2"),
        "1.23": ("policy/v1", "autoscaling/v2"),
    }
    arguments = ("template", str(CHART), "--set", "picker.enabled=true", "--kube-version", "1.23")
    assert "the picker is probed over gRPC" in run("helm", *arguments, fails=True, home=tmp_path)


def test_ports_have_what_identifies_them_in_a_server_side_apply(tmp_path: Path) -> None:
    """Kubernetes before 1.21 refuses to apply a port without a protocol."""
    manifests = rendered(values=EVERYTHING, folder=tmp_path)
    ports = [port for each in manifests if each["kind"] == "Service" for port in each["spec"]["ports"]]
    ports += [port for pod in pods(manifests) for each in pod["spec"]["containers"] for port in each.get("ports", ())]
    assert len(ports) > 20
    assert {port.get("protocol") for port in ports} == {"TCP"}


def test_the_schemas_refuse_what_is_wrong(tmp_path: Path) -> None:
    deployment = named(rendered(folder=tmp_path), "Deployment")
    deployment["spec"]["replicaz"] = 3
    assert any("replicaz" in told for told in mistakes(deployment, "1.37"))
    found = {each["kind"]: each for each in rendered(values=EVERYTHING, folder=tmp_path)}
    found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["hostz"] = 1
    found["ScaledObject"]["spec"]["triggers"][0]["metadata"]["pool"] = 1
    for kind in ("HTTPRoute", "GRPCRoute", "InferencePool", "ServiceMonitor", "PrometheusRule"):
        found[kind]["spec"]["unheardOf"] = 1
    kinds = {kind for kind, each in found.items() if list(mistakes(each, "1.37"))}
    assert kinds == {
        *("LeaderWorkerSet", "ScaledObject", "HTTPRoute", "GRPCRoute"),
        *("InferencePool", "ServiceMonitor", "PrometheusRule"),
    }


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_nothing_runs_with_privileges_or_without_limits(values: dict[str, Any], tmp_path: Path) -> None:
    found = pods(rendered(values=values, folder=tmp_path))
    assert found
    for template in found:
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert ("runAsUser" in spec["securityContext"]) == (values is not TRITON)
        assert len(spec["containers"]) == 1
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert all("sizeLimit" in each["emptyDir"] for each in spec["volumes"] if "emptyDir" in each)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_pods_have_time_for_requests_in_progress(values: dict[str, Any], tmp_path: Path) -> None:
    for template in pods(rendered(values=values, folder=tmp_path)):
        (container,) = template["spec"]["containers"]
        if container["name"] != "worker":
            wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert template["spec"]["terminationGracePeriodSeconds"] >= wait + 60 + 5
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


def test_clusters_without_the_action_sleep_wait_by_a_program(tmp_path: Path) -> None:
    (template,) = pods(rendered("--kube-version", "1.29", folder=tmp_path))
    assert template["spec"]["containers"][0]["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "5"]}}


def test_engines_over_several_nodes_check_what_they_were_given(tmp_path: Path) -> None:
    template = named(rendered(values=EVERYTHING, folder=tmp_path), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        (check,) = template[role]["spec"]["initContainers"]
        assert check["command"] == [
            *("nerite", "doctor", "--expect-nodes=4", "--wait=300", "--expect-gpus=8", "--expect-nvlink"),
            "--expect-rdma=8",
        ]
        assert check["resources"] == template[role]["spec"]["containers"][0]["resources"]
        assert check["resources"]["limits"]["nvidia.com/gpu"] == 8
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    (worker,) = template["workerTemplate"]["spec"]["containers"]
    assert (template["size"], leader["command"][0], worker["command"]) == (4, "nerite", ["ray"])
    off = {"workload": "LeaderWorkerSet", "leaderWorkerSet": {"workerCommand": ["a"], "check": {"enabled": False}}}
    manifests = rendered(values=off, folder=tmp_path)
    assert all("initContainers" not in each["spec"] for each in pods(manifests))
    assert "annotations" not in named(manifests, "LeaderWorkerSet")["metadata"]


def test_where_pods_run(tmp_path: Path) -> None:
    """Nodes are chosen by labels and taints, pods kept apart or together; a group of nodes has a rack of its own."""
    near = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone", "labelSelector": {}}]}
    placed = {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAffinity": near, "podAntiAffinity": near},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
        ],
        "runtimeClassName": "nvidia",
    }
    (pod,) = pods(rendered(values=placed, folder=tmp_path))
    assert placed.items() <= pod["spec"].items()
    group = named(rendered(values=EVERYTHING, folder=tmp_path), "LeaderWorkerSet")
    key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    assert group["metadata"]["annotations"] == {key: "example.org/rack"}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_services_and_budgets_choose_the_pods_of_a_workload(values: dict[str, Any], tmp_path: Path) -> None:
    manifests = rendered(values=values, folder=tmp_path)
    labels = [template["metadata"]["labels"] for template in pods(manifests)]
    for each in manifests:
        if each["kind"] in ("Service", "PodDisruptionBudget"):
            spec = each["spec"]
            selector = spec["selector"].get("matchLabels") or spec["selector"]
            assert sum(selector.items() <= found.items() for found in labels) == 1, each["metadata"]["name"]


def test_the_cluster_file_of_router_and_picker(tmp_path: Path) -> None:
    manifests = rendered(values=EVERYTHING, folder=tmp_path)
    data = named(manifests, "ConfigMap", "r-nerite-router")["data"]
    cluster = parse_cluster(data["cluster.toml"])
    assert [pool.name for pool in cluster.pools] == ["interactive", "batch", "state", "large", "elsewhere"]
    assert cluster.pools[0].source.kubernetes == ServiceReference("models", "r-nerite-interactive", "http")
    assert (cluster.pools[0].borrows, cluster.pools[1].classes) == (True, ("batch",))
    assert (cluster.router.timeout, cluster.router.exit_timeout, cluster.router.address) == (30.0, 60.0, "0.0.0.0")
    assert Path(cluster.router.policy_file).name in data
    assert tomllib.loads(data["policy.toml"])["tenants"]["acme"]["keys"] == ["k"]
    services = {each["metadata"]["name"] for each in manifests if each["kind"] == "Service"}
    assert {pool.source.kubernetes.service for pool in cluster.pools if pool.source.kubernetes} <= services


def test_a_changed_cluster_file_starts_routers_anew(tmp_path: Path) -> None:
    def checksum(**router: Any) -> str:
        values = {"router": {"enabled": True, **router}}
        template = named(rendered(values=values, folder=tmp_path), "Deployment", "r-nerite-router")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/cluster-file"])

    assert len({checksum(), checksum(toml="attempts = 2"), checksum(policy="# another")}) == 3


def test_rights_are_those_that_are_needed(tmp_path: Path) -> None:
    watching = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    assert named(rendered(values=EVERYTHING, folder=tmp_path), "Role")["rules"] == [watching]
    toml = '[pool.scaling]\nmax = 3\nactuator = "kubernetes"\ntarget = "deployment/r-nerite-a"\n'
    values = {"router": {"enabled": True}, "pools": [{"name": "a", "toml": toml}, {"name": "b"}]}
    assert named(rendered(values=values, folder=tmp_path), "Role")["rules"] == [
        watching,
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["r-nerite-a"],
            "verbs": ["get", "patch"],
        },
    ]
    assert all(each["kind"] not in ("Role", "ServiceAccount") for each in rendered(folder=tmp_path))


def test_the_values_of_triton_s_chart(tmp_path: Path) -> None:
    manifests = rendered(values=TRITON, folder=tmp_path)
    deployment = named(manifests, "Deployment", "r-nerite")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["image"] == "registry.example.org/nerite:1"
    assert container["command"][:3] == ["tritonserver", "--model-repository=/models", "--model-control-mode=poll"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "models", "nfs": {"server": "10.0.0.9", "path": "/srv/models", "readOnly": True}} in spec["volumes"]
    assert "replicas" not in deployment["spec"]
    scaler = named(manifests, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 4)
    (metric,) = scaler["metrics"]
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "50"}  # as text, which applies
    assert named(manifests, "Service", "r-nerite")["spec"]["type"] == "NodePort"
    assert named(manifests, "Deployment", "r-nerite-router")
    file = tmp_path / "values.yaml"
    told = run("helm", "install", "r", str(CHART), "-f", str(file), "--dry-run=client", home=tmp_path)
    assert "The values traefik and prometheus-adapter have no effect" in told


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ({"image": {"modelRepositoryPath": "s3://b/m"}}, ["nerite", "serve", "s3://b/m"]),
        ({"serverArgs": ["--log-verbose=1"]}, ["nerite", "serve", "/models"]),
        ({"serverArgs": ["tritonserver", "--model-store=/m"]}, ["tritonserver", "--model-store=/m"]),
    ],
)
def test_the_command_of_a_server(values: dict[str, Any], command: list[str], tmp_path: Path) -> None:
    found = pods(rendered(values=values, folder=tmp_path))[0]["spec"]["containers"][0]["command"]
    assert found[: len(command)] == command
    flags = [flag for flag in values.get("serverArgs", []) if flag.startswith("--")]
    assert {*flags, "--address=0.0.0.0", "--exit-timeout-secs=60"} <= set(found)


@pytest.mark.parametrize(
    ("exit_seconds", "own", "kept"),
    [(60, False, 5), (3, False, 1), (60, True, 2)],
    ids=["default", "short exit", "given by the user"],
)
def test_idle_connections_outlive_sigterm(exit_seconds: int, own: bool, kept: int, tmp_path: Path) -> None:
    """They do for as long as the user says, of servers and of routers alike."""
    values: dict[str, Any] = {"exitSeconds": exit_seconds, "router": {"enabled": True, "exitSeconds": exit_seconds}}
    if own:
        values["serverArgs"] = ["--exit-keepalive-secs=2"]
        values["router"]["toml"] = 'exit-keepalive = "2s"'
    manifests = rendered(values=values, folder=tmp_path)
    command = named(manifests, "Deployment", "r-nerite")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert [flag for flag in command if "keepalive" in flag] == [f"--exit-keepalive-secs={kept}"]
    file = named(manifests, "ConfigMap", "r-nerite-router")["data"]["cluster.toml"]
    assert tomllib.loads(file)["router"]["exit-keepalive"] == f"{kept}s"


def test_who_scales_a_pool(tmp_path: Path) -> None:
    manifests = rendered(values=EVERYTHING, folder=tmp_path)
    scaled = named(manifests, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "r-nerite-interactive"}
    assert scaled["triggers"] == [
        {
            "type": "external-push",
            "metricType": "AverageValue",
            "metadata": {"scalerAddress": "r-nerite-router.models:8001", "pool": "interactive"},
        }
    ]
    assert stabilization(scaled) == scaled["cooldownPeriod"] == 0  # the router has waited
    assert named(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "r-nerite-batch"
    rules = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    metric = named(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
    assert metric["metric"]["name"] in {rule["name"]["as"] for rule in rules}
    assert metric["target"]["averageValue"] == "50000"  # a quantity is text: a server-side apply refuses a number


def stabilization(scaled: dict[str, Any]) -> int:
    """Return the seconds in which fewer replicas have to be enough, in the specification of a ScaledObject."""
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    return int(behavior["scaleDown"]["stabilizationWindowSeconds"])


SCALED: dict[str, Any] = {
    "enabled": True,
    "targets": {"queueMilliseconds": 20, "kvCachePercent": 80, "tokensPerSecond": 500},
}


def test_an_autoscaler_of_the_queue_of_tokens_and_of_the_cache(tmp_path: Path) -> None:
    manifests = rendered(values={"autoscaling": SCALED}, folder=tmp_path)
    metrics = [metric["pods"] for metric in named(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"]]
    assert {each["metric"]["name"]: each["target"]["averageValue"] for each in metrics} == {
        "avg_time_queue_us": "20000",
        "generated_tokens_per_second": "500",
        "kv_cache_usage": "800m",
    }
    rules = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert {each["metric"]["name"] for each in metrics} == {rule["name"]["as"] for rule in rules}


def test_what_keda_asks_prometheus(tmp_path: Path) -> None:
    """Its queries have one number each: for the pods of the pool and no others, and 0 without requests."""
    require("promtool")
    keda = {**SCALED, "by": "keda", "prometheus": "http://prometheus:9090", "stabilization": 120}
    manifests = rendered(values={"autoscaling": keda}, folder=tmp_path)
    scaled = named(manifests, "ScaledObject")["spec"]
    assert stabilization(scaled) == scaled["cooldownPeriod"] == 120
    found = [(each["metricType"], each["metadata"]["threshold"]) for each in scaled["triggers"]]
    assert found == [("Value", "20"), ("AverageValue", "500"), ("Value", "80")]
    own, others = (
        ("r-nerite-5d9f7c-abcde", "r-nerite-5d9f7c-fghij"),
        ("r-nerite-router-5d9f7c-abcde", "x-nerite-1-abcde"),
    )
    series = {
        "nv_inference_queue_duration_us": "0+6000000x20",
        "nv_inference_request_success": "0+60x20",
        "vllm:generation_tokens_total": "0+6000x20",
        "vllm:kv_cache_usage_perc": "0.5x20",
    }
    given = [
        {"series": f'{name}{{namespace="models",pod="{pod}"}}', "values": values}
        for pod in (*own, *others)
        for name, values in series.items()
    ]
    queries = [each["metadata"]["query"] for each in scaled["triggers"]]
    busy = [shown(query, value) for query, value in zip(queries, (100, 800, 50), strict=True)]
    check_queries({"input_series": given, "promql_expr_test": busy}, tmp_path)
    check_queries({"input_series": [], "promql_expr_test": [shown(query, 0) for query in queries]}, tmp_path)


def shown(query: str, value: float, labels: str = "{}") -> dict[str, Any]:
    """Return what promtool expects of a query whose answer is one number."""
    return {"expr": query, "eval_time": "4m", "exp_samples": [{"labels": labels, "value": value}]}


def check_queries(case: dict[str, Any], folder: Path) -> None:
    """Have promtool evaluate queries on series."""
    file = folder / "cases.yml"
    file.write_text(json.dumps({"tests": [{"interval": "15s", **case}]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_pod_without_requests_waits_no_time(tmp_path: Path) -> None:
    """Without a value of its metric an autoscaler does nothing: after the last request it would keep all servers."""
    require("promtool")
    rules = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    (query,) = [rule["metricsQuery"] for rule in rules if rule["name"]["as"] == "avg_time_queue_us"]
    series = [
        {"series": f'{name}{{namespace="models",pod="{pod}"}}', "values": values}
        for pod, times, counts in (("busy", "0+6000000x20", "0+60x20"), ("idle", "9000000x20", "90x20"))
        for name, values in (("nv_inference_queue_duration_us", times), ("nv_inference_request_success", counts))
    ]
    expected = [{"labels": '{pod="busy"}', "value": 100_000}, {"labels": '{pod="idle"}', "value": 0}]
    asked = query.replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="models"')
    expression = {"expr": asked, "eval_time": "4m", "exp_samples": expected}
    check_queries({"input_series": series, "promql_expr_test": [expression]}, tmp_path)


def test_routes_lead_to_the_router_or_to_the_picker(tmp_path: Path) -> None:
    manifests = rendered(values=EVERYTHING, folder=tmp_path)
    route = named(manifests, "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "r-nerite-router", "port": 8000}]
    (method,) = named(manifests, "GRPCRoute")["spec"]["rules"][0]["matches"]
    assert method == {"method": {"service": "inference.GRPCInferenceService"}}
    picked = rendered(values=VALUES["picker"], folder=tmp_path)
    assert named(picked, "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "r-nerite"}
    ]
    pool = named(picked, "InferencePool")["spec"]
    assert pool["endpointPickerRef"] == {
        "kind": "Service", "name": "r-nerite-picker", "port": {"number": 9002}, "failureMode": "FailClose",
    }  # fmt: skip
    assert pool["targetPorts"] == [{"number": 8000}]
    labels = pods([named(picked, "Deployment", "r-nerite")])[0]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()


def connections(manifests: list[dict[str, Any]], name: str, direction: str) -> list[tuple[Any, list[int]]]:
    """Return from or to whom pods take or make connections, None for everybody, and the ports, none for all."""
    key = "from" if direction == "ingress" else "to"
    rules = named(manifests, "NetworkPolicy", name)["spec"][direction]
    return [(each.get(key), [port["port"] for port in each.get("ports", ())]) for each in rules]


NAMESPACE: dict[str, Any] = {"podSelector": {}}
ANYWHERE: dict[str, Any] = {"namespaceSelector": {}}
RELEASE: dict[str, Any] = {
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "nerite", "app.kubernetes.io/instance": "r"}}
}
DNS = (None, [53, 53])


def test_who_may_connect_to_servers_and_routers(tmp_path: Path) -> None:
    """Servers behind a router are for the router alone; metrics are for Prometheus, wherever it is."""
    alone = rendered(folder=tmp_path)
    scraped = ([ANYWHERE], [8002])
    own = ([RELEASE], [])
    assert connections(alone, "r-nerite-servers", "ingress") == [own, ([NAMESPACE], [8000, 8001]), scraped]
    routed = rendered(values={"router": {"enabled": True}}, folder=tmp_path)
    assert connections(routed, "r-nerite-servers", "ingress") == [own, scraped]
    assert connections(routed, "r-nerite-fronts", "ingress") == [([NAMESPACE], [8000, 8001, 9002]), scraped]
    everything = rendered(values=EVERYTHING, folder=tmp_path)
    team = EVERYTHING["networkPolicy"]["from"][0]
    keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert connections(everything, "r-nerite-servers", "ingress") == [own, ([ANYWHERE, team], [8000, 8001]), scraped]
    assert connections(everything, "r-nerite-fronts", "ingress") == [
        ([NAMESPACE, ANYWHERE, team], [8000, 8001, 9002]), ([keda], [8001]), scraped,
    ]  # fmt: skip
    outside = {"router": {"enabled": True, "service": {"type": "LoadBalancer"}}}
    assert connections(rendered(values=outside, folder=tmp_path), "r-nerite-fronts", "ingress")[0] == (
        None,
        [8000, 8001],
    )
    assert connections(rendered(values=TRITON, folder=tmp_path), "r-nerite-servers", "ingress")[1] == (
        None,
        [8000, 8001],
    )
    off = rendered(values={"networkPolicy": {"enabled": False}}, folder=tmp_path)
    assert "NetworkPolicy" not in {each["kind"] for each in off}


def test_where_servers_and_routers_may_connect_to(tmp_path: Path) -> None:
    """To names, to the pods of the namespace, and to the ports of addresses in the values."""
    alone = rendered(folder=tmp_path)
    assert connections(alone, "r-nerite-servers", "egress") == [([NAMESPACE], []), DNS]
    values = {
        "image": {"modelRepositoryPath": "s3://https://minio.example.org:9000/models"},
        "serverArgs": ["--trace-config=opentelemetry,url=http://collector.tracing:4318/v1/traces"],
        "router": {
            "enabled": True,
            "toml": 'redis = "rediss://redis.example.org"\nledger = "postgresql://[fd00::1]:6432/nerite"',
            "otherPools": '[[pool]]\nname = "a"\ndns = "vllm.example.org:8080"\ngrpc-port = 9090',
        },
        "networkPolicy": {"egress": [{"ports": [{"port": 587}]}]},
    }
    found = rendered(values=values, folder=tmp_path)
    cloud = ([{"ipBlock": {"cidr": "169.254.0.0/16"}}], [80, 988])
    addresses = (None, [80, 443, 9000, 4318])
    more = (None, [587])
    assert connections(found, "r-nerite-servers", "egress") == [([NAMESPACE], []), DNS, addresses, more, cloud]
    addresses = (None, [443, 6443, 5432, 6379, 6432, 8080, 9090])
    assert connections(found, "r-nerite-fronts", "egress") == [([NAMESPACE], []), DNS, addresses, more]


def test_rules_and_dashboards_are_those_of_the_project(tmp_path: Path) -> None:
    manifests = rendered(values=EVERYTHING, folder=tmp_path)
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert named(manifests, "PrometheusRule")["spec"] == rules
    dashboards = named(manifests, "ConfigMap", "r-nerite-dashboards")["data"]
    names = {f"nerite-{path.name}" for path in (ROOT / "deploy" / "grafana").glob("*.json")}
    assert set(dashboards) == names and all(json.loads(text) for text in dashboards.values())


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("router.enable=true", "additional properties 'enable' not allowed"),
        ("replicas=3", "additional properties 'replicas' not allowed"),
        ("pools[0].name=Big_One", "does not match pattern"),
        ("workload=DaemonSet", "must be one of"),
        ("gateway.enabled=true", "set router.enabled or picker.enabled"),
        ("autoscaling.enabled=true,autoscaling.by=keda", "set router.enabled, or"),
        ("autoscaling.enabled=true,autoscaling.by=router,router.enabled=true", "set router.replicaCount=1"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=0", "set autoscaling.minReplicas=1"),
        ("autoscaling.enabled=true,autoscaling.targets.queueMilliseconds=0", "all autoscaling.targets are 0"),
        ("workload=LeaderWorkerSet", "set leaderWorkerSet.workerCommand"),
    ],
)
def test_values_that_mean_nothing_are_refused(setting: str, told: str, tmp_path: Path) -> None:
    assert told in run("helm", "template", "r", str(CHART), "--set", setting, fails=True, home=tmp_path)


@pytest.mark.parametrize("helm", ["helm", "helm3"])
def test_helm_has_nothing_to_complain_of(helm: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(EVERYTHING))
    assert "0 chart(s) failed" in run(helm, "lint", "--strict", str(CHART), "-f", str(file), home=tmp_path)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_3_renders_what_helm_4_renders(values: dict[str, Any], tmp_path: Path) -> None:
    assert run("helm3", "version", "--short").startswith("v3.")
    assert run("helm", "version", "--short").startswith("v4.")
    older = rendered("--kube-version", "1.31", values=values, folder=tmp_path, helm="helm3")
    assert older == rendered("--kube-version", "1.31", values=values, folder=tmp_path)
