"""Loading ONNX models: what is completed from the model, and every way in which loading is refused."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from configs import as_backends_get_it
from nerite.backends.interface import InstanceContext
from nerite.backends.onnxruntime import OnnxRuntimeBackend
from nerite.backends.onnxruntime.backend import OnnxModel
from nerite.backends.onnxruntime.session import CPU, load_cuda_libraries
from nerite.core.errors import Internal, InvalidArgument, NotInstalled, Unavailable, Unsupported
from onnx_models import Opened, constant, context, model, node, save, scaled, tensor

FLOAT4 = {"data_type": "TYPE_FP32", "dims": [4]}
IN, OUT = {"name": "IN", **FLOAT4}, {"name": "OUT", **FLOAT4}


def session_of(opened: Any) -> Any:
    """Return the session that an instance of a model would run."""
    return opened.copy_for(InstanceContext("m_0"))


def complete(directory: Path, proto: onnx.ModelProto, config: dict[str, Any] | None = None, **settings: str) -> Any:
    save(directory, proto)
    return OnnxRuntimeBackend().complete(context(directory, config, settings))


# ---- Completion ----


def test_a_model_that_can_batch_is_completed_with_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert as_backends_get_it(complete(tmp_path, scaled(), {"name": "m"})) == as_backends_get_it(
        {"max_batch_size": 4, "dynamic_batching": {}, "input": [IN], "output": [OUT]}
    )
    assert "autofilled max_batch_size to 4 for model 'm'" in caplog.text


def test_a_model_with_a_fixed_first_dimension_is_completed_without(tmp_path: Path) -> None:
    assert as_backends_get_it(complete(tmp_path, scaled(dims=[1, 4]), {"max_batch_size": 0})) == as_backends_get_it(
        {"input": [IN | {"dims": [1, 4]}], "output": [OUT | {"dims": [1, 4]}]}
    )


def test_one_output_with_a_fixed_first_dimension_is_enough_not_to_batch(tmp_path: Path) -> None:
    proto = model(
        [node("Identity", ["IN"], ["OUT"]), node("Identity", ["k"], ["K"])],
        [tensor("IN", ["N", 4])],
        [tensor("OUT", ["N", 4]), tensor("K", [1])],
        [constant("k", np.zeros(1, np.float32))],
    )
    assert complete(tmp_path, proto)["output"][1] == {"name": "K", "data_type": "TYPE_FP32", "dims": [1]}


def test_a_scalar_without_batches_has_dims_one_and_no_reshape(tmp_path: Path) -> None:
    assert complete(tmp_path, scaled(dims=[]))["input"] == [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}]


@pytest.mark.parametrize(("default", "size", "scheduler"), [("8", 8, True), ("1", 1, False), ("0", 0, False)])
def test_default_max_batch_size(tmp_path: Path, default: str, size: int, scheduler: bool) -> None:
    completed = complete(tmp_path, scaled(), **{"default-max-batch-size": default})
    assert completed["max_batch_size"] == size
    assert ("dynamic_batching" in completed) == scheduler
    assert completed["input"][0]["dims"] == ([4] if size else [-1, 4])


def test_what_the_configuration_says_stays(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_batch_size": 16, "sequence_batching": {"direct": {}}, "input": [IN]}
    completed = as_backends_get_it(complete(tmp_path, scaled(), given))
    assert completed == as_backends_get_it({**given, "output": [OUT]})
    given = {"max_batch_size": 16, "dynamic_batching": {"max_queue_delay_microseconds": 5}}
    completed = as_backends_get_it(complete(tmp_path, scaled(), given))
    assert completed == as_backends_get_it({**given, "input": [IN], "output": [OUT]})


def test_completion_is_skipped_when_both_sides_are_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    given = as_backends_get_it({"input": [IN], "output": [OUT]})
    # There is no model at all, and nobody looks.
    assert OnnxRuntimeBackend().complete(context(tmp_path, given)) == given
    assert caplog.messages == [
        "skipping model configuration auto-complete for 'm': inputs and outputs already specified"
    ]


def test_batches_that_the_model_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        complete(tmp_path, scaled(dims=[1, 4]), {"max_batch_size": 8})
    assert refused.value.message == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified. "
        "The shape of 'IN' is [1, 4]: export the model with a dynamic first dimension, or set max_batch_size: 0"
    )


def test_the_session_of_completion_is_the_one_that_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    load = OnnxModel.load
    monkeypatch.setattr(OnnxModel, "load", lambda model, plan: made.append(plan) or load(model, plan))
    opened = Opened(tmp_path, scaled())
    opened.model.instance(InstanceContext("m_1"))
    assert len(made) == 1


def test_a_model_file_that_changed_in_between_is_read_again(tmp_path: Path) -> None:
    backend = OnnxRuntimeBackend()
    first = context(tmp_path)
    save(tmp_path, scaled(2.0))
    completed = backend.complete(first)
    path = save(tmp_path, scaled(5.0))
    os.utime(path, ns=(1, 1))
    opened = backend.open(replace(first, config=completed))
    other = session_of(opened)
    assert first.memo
    assert other.run(None, {"IN": np.ones((1, 4), np.float32)})[0].tolist() == [[5.0] * 4]


def test_nothing_of_a_closed_model_stays(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled())
    inner = session_of(opened.model)
    gone = weakref.ref(inner)
    del inner
    opened.close()
    gc.collect()
    assert gone() is None


# ---- The model file ----


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        OnnxRuntimeBackend().complete(context(tmp_path))
    assert refused.value.message == f"unable to find '{tmp_path}/1/model.onnx' for model instance 'm'"


def test_a_missing_model_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "1" / "model.onnx").mkdir(parents=True)
    with pytest.raises(Unavailable, match=r"/1/model\.onnx/model\.onnx' for model instance 'm'"):
        OnnxRuntimeBackend().complete(context(tmp_path))


def test_a_model_with_another_name(tmp_path: Path) -> None:
    save(tmp_path, scaled(), name="net.onnx")
    config = {"default_model_filename": "net.onnx"}
    assert OnnxRuntimeBackend().complete(context(tmp_path, config))["max_batch_size"] == 4


def test_a_directory_with_external_data(tmp_path: Path) -> None:
    directory = tmp_path / "1" / "model.onnx"
    directory.mkdir(parents=True)
    weights = np.arange(4096, dtype=np.float32)
    proto = model(
        [node("Add", ["IN", "w"], ["OUT"])],
        [tensor("IN", ["N", 4096])],
        [tensor("OUT", ["N", 4096])],
        [constant("w", weights)],
    )
    onnx.save_model(
        proto, directory / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    assert (directory / "weights.bin").stat().st_size == weights.nbytes
    backend = OnnxRuntimeBackend()
    first = context(tmp_path)
    opened = backend.open(replace(first, config=backend.complete(first)))
    inner = session_of(opened)
    np.testing.assert_array_equal(inner.run(None, {"IN": np.zeros((1, 4096), np.float32)})[0], [weights])


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "1" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(b"not a model")
    with pytest.raises(Internal, match=r"^onnx runtime error \d: .*Protobuf parsing failed"):
        OnnxRuntimeBackend().complete(context(tmp_path))


def test_an_operator_that_does_not_exist(tmp_path: Path) -> None:
    proto = model([node("Nonsense", ["IN"], ["OUT"])], [tensor("IN", ["N"])], [tensor("OUT", ["N"])])
    with pytest.raises(Internal, match=r"^onnx runtime error \d+: .*Nonsense"):
        complete(tmp_path, proto)


def test_a_custom_operator_library_that_cannot_be_opened(tmp_path: Path) -> None:
    config = {"model_operations": {"op_library_filename": ["libops.so"]}}
    with pytest.raises(Internal, match=r"onnx runtime error 1: Failed to load library libops\.so"):
        complete(tmp_path, scaled(), config)
    # One that lies beside config.pbtxt is found there, though the server runs elsewhere.
    (tmp_path / "libops.so").write_bytes(b"")
    with pytest.raises(Internal, match=f"Failed to load library {tmp_path}/libops.so"):
        complete(tmp_path, scaled(), config)


def test_a_sequence_output_is_refused_by_name(tmp_path: Path) -> None:
    proto = model(
        [node("SequenceConstruct", ["IN"], ["OUT"])],
        [tensor("IN", ["N"])],
        [helper.make_tensor_sequence_value_info("OUT", TensorProto.FLOAT, None)],
    )
    with pytest.raises(Unsupported) as refused:
        complete(tmp_path, proto)
    assert refused.value.message.startswith(
        "Unsupported ONNX Type 'ONNX_TYPE_SEQUENCE' for I/O 'OUT', expected 'ONNX_TYPE_TENSOR'. "
    )
    assert "zipmap" in refused.value.message


def test_an_element_type_without_a_name_in_the_protocol_is_refused_by_name(tmp_path: Path) -> None:
    proto = model(
        [node("Cast", ["IN"], ["OUT"], to=TensorProto.FLOAT)],
        [tensor("IN", ["N"], TensorProto.FLOAT8E4M3FN)],
        [tensor("OUT", ["N"])],
        opset=19,
    )
    with pytest.raises(Unsupported, match=r"^tensor 'IN' is a tensor\(float8e4m3fn\)"):
        complete(tmp_path, proto)


# ---- Agreement of configuration and model ----


def opened_with(directory: Path, config: dict[str, Any], proto: onnx.ModelProto | None = None) -> Any:
    save(directory, proto or scaled())
    return OnnxRuntimeBackend().open(
        context(directory, {"max_batch_size": 4, "input": [IN], "output": [OUT], **config})
    )


TWO_IN = model(
    [node("Add", ["IN", "B"], ["OUT"])], [tensor("IN", ["N", 4]), tensor("B", ["N", 4])], [tensor("OUT", ["N", 4])]
)
DEFAULTED = model(
    [node("Mul", ["IN", "FACTOR"], ["OUT"])],
    [tensor("IN", [4]), tensor("FACTOR", [1])],
    [tensor("OUT", [4])],
    [constant("FACTOR", np.ones(1, np.float32))],
)
FACTOR = {"name": "FACTOR", "data_type": "TYPE_FP32", "dims": [1]}
BATCH_NOTE = (
    "(an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
    "making complete shape"
)

DISAGREEMENTS: dict[str, tuple[dict[str, Any], onnx.ModelProto, str]] = {
    "too few inputs": (
        {},
        TWO_IN,
        "unable to load model 'm', configuration expects 1 inputs, model provides 2. The configuration lacks: B",
    ),
    "too many inputs": (
        {"input": [IN, {"name": "MORE", **FLOAT4}]},
        scaled(),
        "unable to load model 'm', configuration expects 2 inputs, model provides 1. The model has no input: MORE",
    ),
    "a default that is not declared optional": (
        {"max_batch_size": 0, "input": [IN, FACTOR]},
        DEFAULTED,
        "unable to load model 'm', configuration expects 2 inputs, model provides 1. These have a default in the model "
        "and need 'optional: true': FACTOR",
    ),
    "another input": (
        {"input": [IN, {"name": "C", **FLOAT4}]},
        TWO_IN,
        "unexpected inference input 'C', allowed inputs are: B, IN",
    ),
    "another output": (
        {"output": [OUT, {"name": "C", **FLOAT4}]},
        scaled(),
        "unexpected inference output 'C', allowed outputs are: OUT",
    ),
    "an optional input with batches": (
        {"input": [{**FACTOR, "optional": True}, IN]},
        DEFAULTED,
        "unable to load model 'm', optional input 'FACTOR' is not supported for models that support batching",
    ),
    "an input of another type": (
        {"input": [{**IN, "data_type": "TYPE_INT64"}]},
        scaled(),
        "unable to load model 'm', configuration expects datatype TYPE_INT64 for input 'IN', model provides TYPE_FP32. "
        "Set data_type: TYPE_FP32",
    ),
    "an output of another type": (
        {"output": [OUT]},
        model(
            [node("Cast", ["IN"], ["OUT"], to=TensorProto.STRING)],
            [tensor("IN", ["N", 4])],
            [tensor("OUT", ["N", 4], TensorProto.STRING)],
        ),
        "unable to load model 'm', configuration expects datatype TYPE_FP32 for output 'OUT', model provides TYPE_BYTES"
        ". Set data_type: TYPE_STRING",
    ),
    "a model without batches": (
        {},
        scaled(dims=[1, 4]),
        "model 'm', tensor 'IN': for the model to support batching the shape should have at least 1 dimension and the "
        "first dimension must be -1; but shape expected by the model is [1,4]. Export the model with a dynamic first "
        "dimension, or set max_batch_size: 0 and dims: [1, 4]",
    ),
    "the batch written into dims": (
        {"input": [{**IN, "dims": [-1, 4]}]},
        scaled(),
        f"model 'm', tensor 'IN': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies "
        f"3 dimensions {BATCH_NOTE} [-1,-1,4]). Set dims: [4]",
    ),
    "a wrong reshape": (
        {"input": [{**IN, "dims": [2, 2], "reshape": {"shape": [2, 2]}}]},
        scaled(),
        f"model 'm', tensor 'IN': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies "
        f"3 dimensions {BATCH_NOTE} [-1,2,2]). Set reshape: {{ shape: [4] }}",
    ),
    "a size that the model gives freely": (
        {"input": [{**IN, "dims": [4]}], "output": [OUT]},
        scaled(dims=["N", "M"]),
        f"model 'm', tensor 'OUT': the model expects 2 dimensions (shape [-1,-1]) but the model configuration "
        f"specifies 2 dimensions {BATCH_NOTE} [-1,4]). Set dims: [-1]",
    ),
    "a scalar with batches": (
        {},
        scaled(dims=[]),
        "model 'm', tensor 'IN': for the model to support batching the shape should have at least 1 dimension and the "
        "first dimension must be -1; but shape expected by the model is []. Export the model with a dynamic first "
        "dimension, or set max_batch_size: 0 and dims: [1]",
    ),
    "other sizes without batches": (
        {"max_batch_size": 0, "input": [{**IN, "dims": [5]}]},
        scaled(dims=[1, 4]),
        "model 'm', tensor 'IN': the model expects 2 dimensions (shape [1,4]) but the model configuration specifies 1 "
        "dimensions (shape [5]). Set dims: [1, 4]",
    ),
    "a scalar with a size": (
        {"max_batch_size": 0},
        scaled(dims=[]),
        "unable to load model 'm', scalar tensor 'IN', should only provide 1 in the model configuration when the model "
        "doesn't support batching. Model configuration provided: [4].",
    ),
    "a ragged input of a model that takes rows": (
        {"input": [{**IN, "allow_ragged_batch": True}]},
        scaled(),
        "unable to load model 'm', configuration expects model provides input with shape [-1]  for ragged input 'IN', "
        "model provides [-1,4]",
    ),
    "a batch input of another type": (
        {
            "batch_input": [
                {
                    "kind": "BATCH_ELEMENT_COUNT",
                    "target_name": ["B"],
                    "data_type": "TYPE_INT32",
                    "source_input": ["IN"],
                }
            ]
        },
        TWO_IN,
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'B', model provides TYPE_FP32. "
        "Set data_type: TYPE_FP32",
    ),
}


@pytest.mark.parametrize(("config", "proto", "text"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_disagreements_are_refused(tmp_path: Path, config: dict[str, Any], proto: onnx.ModelProto, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        opened_with(tmp_path, config, proto)
    assert refused.value.message == text


def test_what_onnx_runtime_infers_counts_and_not_what_the_file_says(tmp_path: Path) -> None:
    # The file says that the sum has K rows; it has one.
    proto = model(
        [node("ReduceSum", ["IN", "axis"], ["OUT"], keepdims=1)],
        [tensor("IN", ["N", 4])],
        [tensor("OUT", ["K", 4])],
        [constant("axis", np.array([0]))],
    )
    with pytest.raises(InvalidArgument, match=r"tensor 'OUT'.*shape expected by the model is \[1,4\]"):
        opened_with(tmp_path, {}, proto)


def test_a_free_size_of_an_input_may_be_fixed_by_the_configuration(tmp_path: Path) -> None:
    opened_with(tmp_path, {"output": [{**OUT, "dims": [-1]}]}, scaled(dims=["N", "M"]))


def test_a_configuration_may_leave_outputs_out(tmp_path: Path) -> None:
    proto = model(
        [node("Identity", ["IN"], ["OUT"]), node("Neg", ["IN"], ["SPARE"])],
        [tensor("IN", ["N", 4])],
        [tensor("OUT", ["N", 4]), tensor("SPARE", ["N", 4])],
    )
    opened_with(tmp_path, {}, proto)


# ---- The framework ----


def test_an_accelerator_that_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    accelerators = {"cpu_execution_accelerator": [{"name": "openvino"}]}
    config = {"optimization": {"execution_accelerators": accelerators}}
    with pytest.raises(NotInstalled, match=r"OpenVINOExecutionProvider.*pip install onnxruntime-openvino"):
        complete(tmp_path, scaled(), config)
    with pytest.raises(NotInstalled, match=r"CUDAExecutionProvider.*pip uninstall -y onnxruntime && pip install 'onnx"):
        complete(tmp_path, scaled(), {"instance_group": [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}]})


def test_the_libraries_of_cuda_are_loaded_before_a_session_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def session(*given: Any, **options: Any) -> None:
        done.append("session")
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: done.append("libraries"))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU.name])
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    load_cuda_libraries.cache_clear()
    for kind in ("CPU", "GPU", "GPU"):
        with pytest.raises(Internal, match="there is no GPU"):
            complete(tmp_path, scaled(), {"instance_group": [{"kind": f"KIND_{kind}", "count": 1}]})
    load_cuda_libraries.cache_clear()
    assert done == ["session", "libraries", "session", "session"]


def test_every_option_is_accepted_by_onnx_runtime(tmp_path: Path) -> None:
    values = {
        "intra_op_thread_count": "2",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "false",
        "memory.enable_memory_arena_shrinkage": "cpu:0",
        "session.use_device_allocator_for_initializers": "1",
    }
    config = {
        "optimization": {"graph": {"level": -1}},
        "parameters": {key: {"string_value": value} for key, value in values.items()},
    }
    # Shrinking needs an arena.
    with pytest.raises(InvalidArgument, match="enable_memory_arena_shrinkage"):
        Opened(tmp_path, scaled(), config)
    config["parameters"]["enable_mem_arena"] = {"string_value": "1"}
    opened = Opened(tmp_path, scaled(), config)
    assert opened.answer(IN=np.ones((1, 4), np.float32))["OUT"].tolist() == [[2.0] * 4]
    inner = session_of(opened.model)
    options = inner.get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.graph_optimization_level.name == "ORT_ENABLE_BASIC"
    assert options.execution_mode.name == "ORT_PARALLEL"
    assert options.enable_mem_pattern is False


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("session.dynamic_block_base", "abc", "stoi"),
        ("session.graph_optimizations_loop_level", "abc", "stoi"),
        ("session.intra_op_thread_affinities", "abc", "Processor id"),
    ],
)
def test_a_wrong_value_of_onnx_runtimes_own_parameters(tmp_path: Path, key: str, value: str, says: str) -> None:
    config = {"parameters": {key: {"string_value": value}, "intra_op_thread_count": {"string_value": "2"}}}
    with pytest.raises(Internal, match=says) as refused:
        opened_with(tmp_path, config)
    assert refused.value.message.endswith(
        f" (ONNX Runtime's own parameters, for {tmp_path}/1/model.onnx: '{key}' is '{value}')"
    )


def test_its_own_parameters_are_no_reason_for_a_wrong_file(tmp_path: Path) -> None:
    config = {"parameters": {"session.disable_prepacking": {"string_value": "1"}}}
    with pytest.raises(Internal) as refused:
        opened_with(
            tmp_path, config, model([node("Nonsense", ["IN"], ["OUT"])], [tensor("IN", ["N"])], [tensor("OUT", ["N"])])
        )
    assert "disable_prepacking" not in refused.value.message


def test_sharing_sessions_is_a_yes_or_no(tmp_path: Path) -> None:
    config = {"parameters": {"share_session_between_instances": {"string_value": "some"}}}
    with pytest.raises(InvalidArgument) as refused:
        opened_with(tmp_path, config)
    assert refused.value.message == (
        "failed to convert 'some' to boolean, in parameter 'share_session_between_instances' of model 'm', which takes "
        "true or false"
    )


def test_a_default_batch_size_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        complete(tmp_path, scaled(), {"backend": "onnxruntime"}, **{"default-max-batch-size": "large"})
    assert refused.value.message == (
        "failed to convert 'large' to integral number, in --backend-config=onnxruntime,default-max-batch-size=…, which "
        "takes a number of rows"
    )


def test_importing_the_backend_does_not_import_the_framework() -> None:
    code = (
        "import sys; from nerite.backends import registry; registry.backend('onnxruntime'); "
        "sys.exit('onnxruntime' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_pool_of_threads_for_all_models(tmp_path: Path) -> None:
    # In a process of its own: the pool is made before the first session or never.
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from onnx_models import Opened, scaled
def threads(): return len(os.listdir("/proc/self/task"))
settings = {{"enable-global-threadpool": "1", "intra_op_thread_count": "3", "inter_op_thread_count": "1"}}
Opened(Path({str(tmp_path)!r}) / "first", scaled(), None, settings)
before = threads()
kept = [Opened(Path({str(tmp_path)!r}) / str(n), scaled(), None, settings) for n in range(5)]
assert threads() == before, (before, threads())
"""
    if not Path("/proc/self/task").exists():
        pytest.skip("counts threads through /proc")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_may_be_opened_by_several_threads_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                opened = Opened(tmp_path / f"{number}-{turn}", scaled(float(number)))
                assert opened.answer(IN=np.ones((1, 4), np.float32))["OUT"].tolist() == [[float(number)] * 4]
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


def test_the_framework_keeps_no_records_of_its_own(tmp_path: Path) -> None:
    program = (
        "import os; from nerite.backends.onnxruntime.session import onnxruntime; onnxruntime()\n"
        "assert 'ORT_DISABLE_TELEMETRY' not in os.environ"
    )
    home = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", program], env=home, check=True)
    assert list(tmp_path.rglob("*")) == []
