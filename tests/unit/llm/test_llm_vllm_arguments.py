"""What an engine of vLLM is made of: model.json, or a checkpoint and parameters; adapters, devices, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.llm.selection import RESERVED_GPUS
from nerite.llm.vllm import framework


def model(folder: Path, files: dict[str, Any] | None = None, kind: str = "", **parameters: str) -> ModelContext:
    version = folder / "1"
    version.mkdir(parents=True)
    for name, content in (files or {}).items():
        (version / name).write_text(content if isinstance(content, str) else json.dumps(content))
    config: dict[str, Any] = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    if kind:
        config["instance_group"] = [{"kind": kind}]
    return ModelContext("m", 1, folder, config)


CHECKPOINT = {"config.json": {}, "model.safetensors": ""}


def test_a_repository_of_tritons_vllm_backend(tmp_path: Path) -> None:
    """As its pages have it."""
    file = {
        "model": "facebook/opt-125m",
        "disable_log_requests": True,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
    }
    read = framework.read_arguments(model(tmp_path, {"model.json": file}, ENABLE_VLLM_HEALTH_CHECK="true"))
    assert read.engine == {
        "model": "facebook/opt-125m",
        "enable_log_requests": False,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "scheduling_policy": "priority",
    }


def test_a_checkpoint_with_parameters(tmp_path: Path) -> None:
    parameters = {"MAX_NUM_SEQS": "8", "KV_CACHE_GB": "2", "ENABLE_PREFIX_CACHING": "false"}
    context = model(tmp_path, CHECKPOINT, **parameters, ENABLE_SLEEP_MODE="true", TENSOR_PARALLEL_SIZE="2")
    assert framework.read_arguments(context).engine == {
        "model": str(tmp_path / "1"),
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "enable_sleep_mode": True,
        "tensor_parallel_size": 2,
        "scheduling_policy": "priority",
    }


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"PROMPT_LOOKUP_MAX": "3"}, {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}),
        ({"SPECULATIVE_MODEL": "some/where"}, {"method": "draft_model", "model": "some/where"}),
    ],
)
def test_speculation(said: dict[str, str], expected: dict[str, Any], tmp_path: Path) -> None:
    read = framework.read_arguments(model(tmp_path, CHECKPOINT, **said, NUM_SPECULATIVE_TOKENS="4"))
    assert read.engine["speculative_config"] == {**expected, "num_speculative_tokens": 4}


def test_a_smaller_model_beside_it(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    read = framework.read_arguments(model(tmp_path, CHECKPOINT, SPECULATIVE_MODEL="../small"))
    assert Path(read.engine["speculative_config"]["model"]).samefile(tmp_path / "small")


def test_arguments_beside_a_checkpoint(tmp_path: Path) -> None:
    context = model(tmp_path, {**CHECKPOINT, "model.json": {"dtype": "float16", "scheduling_policy": "fcfs"}})
    assert framework.read_arguments(context).engine == {
        "model": str(tmp_path / "1"),
        "dtype": "float16",
        "scheduling_policy": "fcfs",
    }


def test_adapters_have_a_spare_slot(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "adapter_config.json").write_text('{"r": 24}')
    files = {
        "model.json": {"model": "m", "enable_lora": "true", "max_loras": 2},
        "multi_lora.json": {"here": "adapter", "elsewhere": str(tmp_path / "elsewhere")},
    }
    context = model(tmp_path, files)
    (tmp_path / "1" / "adapter").mkdir()
    read = framework.read_arguments(context)
    assert read.adapters == {"here": str(tmp_path / "1" / "adapter"), "elsewhere": str(tmp_path / "elsewhere")}
    assert read.engine["enable_lora"] is True
    assert (read.engine["max_loras"], read.engine["max_lora_rank"]) == (3, 32)


def test_adapters_that_are_not_enabled(tmp_path: Path) -> None:
    read = framework.read_arguments(model(tmp_path, {"model.json": {"model": "m"}, "multi_lora.json": {"a": "a"}}))
    assert read.adapters == {}
    assert "max_loras" not in read.engine


def test_what_an_instance_is_given(tmp_path: Path) -> None:
    context = model(tmp_path, CHECKPOINT)
    assert framework.read_arguments(context, InstanceContext("m_0", "GPU", 3)).variables == {
        "CUDA_VISIBLE_DEVICES": "3"
    }
    assert framework.read_arguments(context, InstanceContext("m_0", "MODEL")).variables == {}
    read = framework.read_arguments(context, InstanceContext("m_0", cores=(2, 3)))
    assert (read.name, read.variables) == ("m_0", {"VLLM_CPU_OMP_THREADS_BIND": "2,3"})


@pytest.mark.parametrize(
    ("files", "said", "kind", "text"),
    [
        ({"model.json": "{"}, {}, InvalidArgument, "model.json' cannot be read as JSON"),
        ({"model.json": "[]"}, {}, InvalidArgument, "model.json' must hold a JSON object"),
        ({}, {}, Unavailable, "has no model.json"),
        (CHECKPOINT, {"MAX_NUM_SEQ": "4"}, InvalidArgument, "Did you mean MAX_NUM_SEQS"),
        (CHECKPOINT, {"WEIGHT_FORMAT": "int8"}, Unsupported, "'WEIGHT_FORMAT', which the engine vllm does not support"),
        (CHECKPOINT, {"NUM_SPECULATIVE_TOKENS": "2"}, InvalidArgument, "nothing that proposes tokens"),
        (CHECKPOINT, {"MAX_NUM_SEQS": "0"}, InvalidArgument, "'MAX_NUM_SEQS' of model 'm' is 0; it must be above 0"),
        (
            {"model.json": {"enable_lora": True}, "multi_lora.json": {"a": 1}},
            {},
            InvalidArgument,
            r"the adapter 'a' in multi_lora.json of model 'm' must be a directory",
        ),
    ],
)
def test_what_is_refused(
    files: dict[str, Any], said: dict[str, str], kind: type[NeriteError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=text):
        framework.read_arguments(model(tmp_path, files, **said))


def test_one_gpu_is_not_several(tmp_path: Path) -> None:
    context = model(tmp_path, {"model.json": {"model": "m", "tensor_parallel_size": 2}}, "KIND_GPU")
    with pytest.raises(InvalidArgument, match="KIND_GPU is currently for single-GPU models, please specify KIND_MODEL"):
        framework.read_arguments(context)


def test_gpus_are_not_reserved_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would wait for a placement group of GPUs that its own server has."""
    context = model(tmp_path, {"model.json": {"model": "m", "distributed_executor_backend": "ray"}})
    assert framework.read_arguments(context).engine["distributed_executor_backend"] == "ray"
    monkeypatch.setenv(RESERVED_GPUS, "8")
    with pytest.raises(InvalidArgument, match=r"this server has reserved 8 already\. Write engine-places-gpus = true"):
        framework.read_arguments(context)


def test_an_executor_over_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gets what model.json says; in a group of pods, the first one is where the others connect."""
    sizes = {"distributed_executor_backend": "mp", "nnodes": 2, "tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    several = model(tmp_path / "several", {"model.json": {"model": "m", **sizes}})
    named = model(tmp_path / "named", {"model.json": {"model": "m", **sizes, "master_addr": "10.0.0.1"}})
    alone = model(tmp_path / "alone", {"model.json": {"model": "m"}})
    assert sizes.items() <= framework.read_arguments(several).engine.items()
    assert "master_addr" not in framework.read_arguments(several).engine
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "large-0.large.models")
    found = [framework.read_arguments(each).engine.get("master_addr") for each in (several, named, alone)]
    assert found == ["large-0.large.models", "10.0.0.1", None]
