"""A server on a machine with GPUs, as far as placing models and reporting go. The GPUs are a stand-in's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from distributions import install
from onnx_models import save, scaled
from pages import Page
from serving import Serving, eventually, pbtxt, python_model, serving

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
WHERE = """
    def initialize(self, args):
        self.where = f"{args['model_instance_name']} {args['model_instance_kind']} {args['model_instance_device_id']}"

    def execute(self, requests):
        where = np.array([[self.where]], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("WHERE", where)]) for _ in requests]
"""
CONFIG = """backend: "python" max_batch_size: 1
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "WHERE" data_type: TYPE_STRING dims: [ 1 ] }
"""


PROFILE = {"IN": [[1, 4], [2, 4], [8, 4]]}
TENSORS = [
    {"name": "IN", "mode": "INPUT", "type": "FLOAT", "dims": [-1, 4]},
    {"name": "OUT", "mode": "OUTPUT", "type": "FLOAT", "dims": [-1, 4]},
]
ENGINE = {"computes": "double", "tensors": TENSORS, "profiles": [PROFILE, PROFILE]}
PLAN = b"ftrt" + bytes(20) + bytes((10, 9, 0, 34)) + json.dumps(ENGINE).encode()


def gpu(number: int, capability: tuple[int, int] = (9, 0), used: int = 10) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{number}",
        "name": f"Model {number}",
        "capability": capability,
        "memory": [100, used],
        "percent": 25,
        "milliwatts": 90000,
        "milliwatts_allowed": 300000,
        "millijoules": 1000,
    }


class Machine:
    """What the GPUs do."""

    def __init__(self, file: Path) -> None:
        site = file.with_name("site")
        site.mkdir()
        # Which the driver of the stand-in is too old for.
        install(site, "torch 2.13.0")
        path = [
            *(str(STAND_INS / library) for library in ("nvml", "cuda", "tensorrt")),
            str(site),
            os.environ.get("PYTHONPATH", ""),
        ]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "STAND_IN_GPUS": str(file),
            "CUDA_VISIBLE_DEVICES": "0,1,2",
        }
        self._file = file

    def has(self, *gpus: dict[str, Any]) -> None:
        self._file.with_suffix(".new").write_text(json.dumps(gpus))
        self._file.with_suffix(".new").rename(self._file)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    machine = Machine(tmp_path_factory.mktemp("machine") / "gpus.json")
    machine.has(gpu(0), gpu(1, used=60), gpu(2, (6, 1)))
    return machine


@pytest.fixture(scope="module")
def server(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("models")
    python_model(models, "anywhere", WHERE, CONFIG)
    python_model(models, "first", WHERE, CONFIG + "instance_group { count: 2 kind: KIND_GPU gpus: 0 }")
    python_model(models, "page", WHERE, CONFIG + Page("docs/gpus.md").block("instance_group"))
    python_model(models, "processor", WHERE, CONFIG + "instance_group { kind: KIND_CPU }")
    python_model(models, "missing", WHERE, CONFIG + "instance_group { kind: KIND_GPU gpus: [ 0, 5 ] }")
    python_model(models, "old", WHERE, CONFIG + "instance_group { kind: KIND_GPU gpus: 2 }")
    python_model(models, "crowded", WHERE, CONFIG + "instance_group { kind: KIND_GPU gpus: 1 }")
    for name, groups in (("built_for_cpus", "instance_group { kind: KIND_GPU }"), ("elsewhere", "")):
        save(models / name, scaled())
        (models / name / "config.pbtxt").write_text(f'backend: "onnxruntime" {groups}')
    (models / "too_new" / "1").mkdir(parents=True)
    (models / "too_new" / "1" / "model.pt").touch()
    (models / "too_new" / "config.pbtxt").write_text('backend: "pytorch" instance_group { kind: KIND_GPU gpus: 0 }')
    page = Page("docs/tensorrt.md")
    configurations = {"engine": "", "profiles": page.block("profile:"), "tuned": page.block("PRIORITY_MAX")}
    configurations["apart"] = 'parameters { key: "EXECUTION_MODE" value { string_value: "worker" } }'
    for name, config in configurations.items():
        (models / name / "1").mkdir(parents=True)
        (models / name / "1" / "model.plan").write_bytes(PLAN)
        if config:
            (models / name / "config.pbtxt").write_text(config)
    flags = (
        "--model-control-mode=explicit",
        "--min-supported-compute-capability=7.0",
        "--model-load-gpu-limit=1:0.5",
        "--metrics-interval-ms=100",
    )
    with serving(models, models / "log", *flags, environment=machine.environment) as server:
        yield server


def load(server: Serving, model: str, **parameters: str) -> tuple[int, dict[str, str]]:
    body = {"parameters": parameters} if parameters else {}
    status, _, answer = server.ask("POST", f"/v2/repository/models/{model}/load", body)
    return status, json.loads(answer or "{}")


def groups(server: Serving, model: str) -> list[tuple[str, int, list[int]]]:
    config = server.json("GET", f"/v2/models/{model}/config")
    return [(group["kind"], group["count"], group["gpus"]) for group in config["instance_group"]]


def test_the_page(server: Serving, machine: Machine) -> None:
    machine.has(gpu(0), gpu(1), gpu(2, (6, 1)))
    assert load(server, "page")[0] == 200
    assert groups(server, "page") == [("KIND_GPU", 2, [0, 1])]
    machine.has(gpu(0), gpu(1, used=60), gpu(2, (6, 1)))


def test_models_are_placed(server: Serving, machine: Machine) -> None:
    assert load(server, "first")[0] == load(server, "processor")[0] == 200
    assert groups(server, "first") == [("KIND_GPU", 2, [0])]
    assert groups(server, "processor") == [("KIND_CPU", 1, [])]
    assert server.infer("first", [1])[0].rpartition(" ")[0] in ("first_0_0 GPU", "first_0_1 GPU")
    assert server.infer("processor", [1]) == ["processor_0_0 CPU 0"]
    # All GPUs that are not too old, one of which is too full at first.
    assert load(server, "anywhere")[0] == 400
    machine.has(gpu(0), gpu(1), gpu(2, (6, 1)))
    assert load(server, "anywhere")[0] == 200
    machine.has(gpu(0), gpu(1, used=60), gpu(2, (6, 1)))
    assert groups(server, "anywhere") == [("KIND_GPU", 1, [0, 1])]
    seen = {server.infer("anywhere", [1])[0] for _ in range(20)}
    assert seen <= {"anywhere_0 GPU 0", "anywhere_1 GPU 1"}


def test_an_engine_without_a_configuration(server: Serving, machine: Machine) -> None:
    machine.has(gpu(0), gpu(1), gpu(2, (6, 1)))
    assert load(server, "engine")[0] == 200
    machine.has(gpu(0), gpu(1, used=60), gpu(2, (6, 1)))
    config = server.json("GET", "/v2/models/engine/config")
    assert (config["backend"], config["platform"], config["max_batch_size"]) == ("tensorrt", "tensorrt_plan", 4)
    assert groups(server, "engine") == [("KIND_GPU", 1, [0, 1])]
    for value in range(4):
        assert server.infer("engine", [value] * 4, "IN") == [2 * value] * 4
    status, _, _ = server.ask("POST", "/v2/repository/models/engine/unload", {})
    assert status == 200


@pytest.mark.parametrize("model", ["profiles", "tuned", "apart"])
def test_engines_with_configurations(model: str, server: Serving, machine: Machine) -> None:
    machine.has(gpu(0), gpu(1), gpu(2, (6, 1)))
    assert load(server, model) == (200, {})
    machine.has(gpu(0), gpu(1, used=60), gpu(2, (6, 1)))
    for value in range(4):
        assert server.infer(model, [value] * 4, "IN") == [2 * value] * 4


@pytest.mark.parametrize(("model", "number"), [("missing", 5), ("old", 2)])
def test_a_gpu_that_is_not_there(server: Serving, model: str, number: int) -> None:
    status, answer = load(server, model)
    assert status == 400
    assert (
        f"instance group {model}_0 of model {model} specifies invalid or unsupported gpu id {number}. GPUs with at "
        "least the minimum required CUDA compute compatibility of 7.000000 are: 0, 1" in answer["error"]
    )


def test_a_framework_that_is_built_for_cpus(server: Serving) -> None:
    status, answer = load(server, "built_for_cpus")
    assert status == 400
    assert (
        "instance group built_for_cpus_0 of model built_for_cpus has kind KIND_GPU, but onnxruntime "
        f"{metadata.version('onnxruntime')} is a CPU build. Write kind: KIND_CPU, or install its build for GPUs: "
        "pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]<1.27';\n" in answer["error"]
    )


def test_a_framework_that_is_built_for_a_newer_driver(server: Serving) -> None:
    status, answer = load(server, "too_new")
    assert status == 400
    assert (
        "instance group too_new_0 of model too_new has kind KIND_GPU, but torch 2.13.0 was built for CUDA 13.0, and "
        "the driver supports CUDA up to 12.8. Write kind: KIND_CPU, or upgrade the driver to 580 or newer, or install "
        "the build for CUDA 12: pip uninstall -y torch && pip install torch --index-url "
        "https://download.pytorch.org/whl/cu126;\n" in answer["error"]
    )


def test_a_model_that_may_be_anywhere_is_told_why_it_is_on_the_cpu(server: Serving) -> None:
    assert load(server, "elsewhere")[0] == 200
    assert groups(server, "elsewhere") == [("KIND_CPU", 2, [])]
    assert server.text.count("model 'elsewhere' is on the CPU although there is a GPU: onnxruntime ") == 1
    assert server.infer("elsewhere", [1, 2, 3, 4], "IN") == [2, 4, 6, 8]


def test_a_gpu_that_is_full(server: Serving) -> None:
    status, answer = load(server, "crowded")
    assert status == 400
    assert "can not create model 'crowded': memory limit set for GPU 1 has exceeded" in answer["error"]
    elsewhere = CONFIG_JSON | {"instance_group": [{"kind": "KIND_GPU", "gpus": [0]}]}
    assert load(server, "crowded", config=json.dumps(elsewhere))[0] == 200


CONFIG_JSON = {
    "backend": "python",
    "max_batch_size": 1,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "WHERE", "data_type": "TYPE_STRING", "dims": [1]}],
}


def test_metrics(server: Serving, machine: Machine) -> None:
    def told() -> dict[str, float]:
        return {name: value for name, value in server.metrics().items() if "gpu_uuid" in name}

    first = told()
    assert first['nv_gpu_utilization{gpu_uuid="GPU-0"}'] == 0.25
    assert first['nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"}'] == 100
    assert first['nv_gpu_power_usage{gpu_uuid="GPU-0"}'] == 90
    assert first['nv_gpu_power_limit{gpu_uuid="GPU-0"}'] == 300
    assert not any("GPU-2" in name for name in first)
    machine.has(gpu(0, used=77) | {"millijoules": 4000}, gpu(1, used=60), gpu(2, (6, 1)))
    eventually(lambda: told()['nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"}'] == 77)
    assert told()['nv_energy_consumption{gpu_uuid="GPU-0"}'] == 3
    machine.has(gpu(0), gpu(1, used=60), gpu(2, (6, 1)))


def test_what_is_said(server: Serving) -> None:
    assert "Collecting metrics for GPU 0: Model 0" in server.text
    assert "GPU 2 (Model 2) is not used: its compute capability 6.1" in server.text


def test_no_metrics_of_gpus(machine: Machine, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "m", WHERE, pbtxt())
    with serving(
        tmp_path / "models",
        tmp_path / "log",
        "--allow-gpu-metrics=false",
        "--model-control-mode=explicit",
        environment=machine.environment,
    ) as server:
        assert not any("gpu" in name for name in server.metrics())


def test_the_budget_of_models_that_are_loaded_on_demand(machine: Machine, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "m", WHERE, pbtxt())
    flags = ("--model-control-mode=demand", "--demand-gpu-memory=40", "--demand-host-memory=1GiB")
    with serving(tmp_path / "models", tmp_path / "log", *flags, environment=machine.environment) as server:
        budget = 'nerite_memory_budget_bytes{place="%s"}'
        page = server.metrics()
        assert [page[budget % place] for place in ("host", "GPU 0", "GPU 1")] == [1 << 30, 40, 40]
