"""Loading TensorFlow models: what is completed, without TensorFlow where that is possible, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import as_backends_get_it
from nerite.backends.interface import InstanceContext
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.frameworks.tensorflow import TensorFlowBackend, plan
from opened import Opened, context, placed

FROZEN = {"platform": "tensorflow_graphdef"}
SAVED = {"platform": "tensorflow_savedmodel"}


class Models:
    """Completes the configurations of models that TensorFlow has made."""

    def __init__(self, artifacts: Path, folder: Path) -> None:
        self.artifacts = artifacts
        self.folder = folder

    def context(self, name: str, config: dict[str, Any] | None = None, **parameters: str) -> Any:
        artifact = self.artifacts / name
        platform = FROZEN if artifact.suffix else SAVED
        path = placed(self.folder, artifact, "model.graphdef" if artifact.suffix else "model.savedmodel")
        assert path.exists()
        return context(self.folder, {**platform, **(config or {})}, **parameters)

    def completed(self, name: str, config: dict[str, Any] | None = None, **parameters: str) -> Any:
        return TensorFlowBackend().complete(self.context(name, config, **parameters))

    def refusal(self, name: str, config: dict[str, Any] | None = None, **parameters: str) -> NeriteError:
        with pytest.raises(NeriteError) as refused:
            self.completed(name, config, **parameters)
        return refused.value


@pytest.fixture
def models(tensorflow_artifacts: Path, tmp_path: Path) -> Models:
    return Models(tensorflow_artifacts, tmp_path)


# ---- Completion ----


def test_a_saved_model_is_completed(models: Models) -> None:
    config = models.completed("scaled")
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"] == {}
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    assert config["output"] == [
        {"name": "doubled", "data_type": "TYPE_FP32", "dims": [4]},
        {"name": "total", "data_type": "TYPE_FP32", "dims": [1]},
    ]


def test_every_type_of_the_protocol(models: Models) -> None:
    types = {entry["name"]: entry["data_type"] for entry in models.completed("typed")["input"]}
    assert (types["float32"], types["bfloat16"], types["string"]) == ("TYPE_FP32", "TYPE_BF16", "TYPE_STRING")
    assert len(set(types.values())) == len(types) == 14


def test_tensorflow_is_not_needed_for_that(models: Models) -> None:
    program = f"""
import sys
from pathlib import Path
sys.modules["tensorflow"] = None
from nerite.backends.interface import ModelContext
from nerite.frameworks.tensorflow import TensorFlowBackend
completed = TensorFlowBackend().complete(ModelContext("m", 1, Path({str(models.folder)!r}), {SAVED}))
print(completed["max_batch_size"])
"""
    models.context("scaled")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "4\n", done.stderr


def test_a_first_dimension_that_is_fixed(models: Models) -> None:
    config = models.completed("fixed", {"max_batch_size": 0})
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 3]}]
    assert "dynamic_batching" not in config


def test_dims_with_the_batch_in_them_mean_a_model_without_batches(models: Models) -> None:
    config = models.completed("scaled", {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4]}]})
    assert config.get("max_batch_size", 0) == 0
    assert [entry["dims"] for entry in config["output"]] == [[-1, 4], [-1, 1]]


def test_entries_with_a_name_alone_are_filled_in(models: Models) -> None:
    given = {
        "max_batch_size": 8,
        "input": [{"name": "x"}],
        "output": [{"name": "total", "data_type": "TYPE_INVALID", "dims": [], "label_filename": "labels.txt"}],
    }
    config = models.completed("scaled", given)
    expected = {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "total", "data_type": "TYPE_FP32", "dims": [1], "label_filename": "labels.txt"}],
    }
    assert {side: config[side] for side in expected} == {side: as_backends_get_it(expected)[side] for side in expected}


def test_a_scalar(models: Models) -> None:
    assert models.completed("scalar")["input"][0]["dims"] == [1]


def test_dimensions_that_nobody_knows(models: Models) -> None:
    assert models.refusal("shapeless").message == (
        "unable to autofill for 'm': the rank of model tensor 'x' is 0 and dimensions are not defined. The model does "
        "not say how many dimensions 'x' has: write dims for it"
    )


def test_a_frozen_graph_is_completed_from_its_ends(models: Models) -> None:
    config = models.completed("frozen.pb")
    assert [entry["name"] for entry in config["input"]] == ["a", "b"]
    assert {entry["name"]: entry["dims"] for entry in config["output"]} == {
        "sum": [4],
        "halves": [2],
        "halves:1": [2],
    }


# ---- Which graph, which signature ----


def test_a_signature_of_another_name_is_taken_if_it_is_the_only_one(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    assert models.completed("one")["output"][0]["name"] == "tripled"
    assert "using signature 'only'" in caplog.text


def test_one_of_several_signatures(models: Models) -> None:
    assert models.completed("two", TF_SIGNATURE_DEF="large")["output"][0]["name"] == "tripled"


def test_several_signatures_and_none_is_chosen(models: Models) -> None:
    assert models.refusal("two").message == (
        "unable to load model 'm', expected 'serving_default' signature. The signatures there are: large, small. Set "
        "parameter TF_SIGNATURE_DEF to one"
    )


def test_no_signature_at_all(models: Models) -> None:
    assert "save it with signatures={'serving_default': function}" in models.refusal("none").message


def test_tags(models: Models) -> None:
    assert models.completed("old", TF_GRAPH_TAG="special,tagged")["input"][0]["name"] == "x"


def test_other_tags(models: Models) -> None:
    assert models.refusal("old").message == (
        "unable to load model 'm', expected 'serve' tag. The graphs there are have the tags: special, tagged. Set "
        "parameter TF_GRAPH_TAG to those of one"
    )


def test_tensors_that_the_protocol_does_not_have(models: Models) -> None:
    refused = models.refusal("complex")
    assert isinstance(refused, Unsupported)
    assert refused.message.startswith("unable to process input 'x' for 'm', unsupported datatype 'complex64'.")


def test_sparse_tensors(models: Models) -> None:
    assert "it is a sparse or ragged tensor" in models.refusal("sparse").message


# ---- Files ----


@pytest.mark.parametrize(("platform", "name"), [(SAVED, "model.savedmodel"), (FROZEN, "model.graphdef")])
def test_a_missing_model(tmp_path: Path, platform: dict[str, str], name: str) -> None:
    with pytest.raises(Unavailable) as refused:
        TensorFlowBackend().complete(context(tmp_path, platform))
    assert refused.value.message == f"unable to find '{tmp_path}/1/{name}' for model instance 'm'"


def broken(folder: Path, config: dict[str, str] = SAVED) -> str:
    with pytest.raises(NeriteError) as refused:
        TensorFlowBackend().complete(context(folder, config))
    return refused.value.message


def test_directories_that_are_no_saved_models(tmp_path: Path) -> None:
    directory = tmp_path / "1" / "model.savedmodel"
    directory.mkdir(parents=True)
    assert f"A Keras model becomes one by model.export('{directory}')" in broken(tmp_path)
    (directory / "exported").mkdir()
    (directory / "exported" / "saved_model.pb").touch()
    assert "saved_model.pb is in 'exported' in it. Move what is there up to 'model.savedmodel'" in broken(tmp_path)
    (directory / "saved_model.pbtxt").touch()
    assert "it is in text form" in broken(tmp_path)
    shutil.rmtree(directory)
    directory.touch()
    assert "it is a file, and has to be the directory that TensorFlow saved" in broken(tmp_path)


def test_a_saved_model_that_was_cut_off(models: Models, tmp_path: Path) -> None:
    whole = (models.artifacts / "scaled" / "saved_model.pb").read_bytes()
    directory = tmp_path / "1" / "model.savedmodel"
    directory.mkdir(parents=True)
    (directory / "saved_model.pb").write_bytes(whole[:100])
    assert broken(tmp_path).endswith("cannot be read as a SavedModel. It has 100 bytes: was it copied whole?")


def test_weights_that_are_missing(models: Models) -> None:
    with pytest.raises(Internal, match="The weights are missing: copy the directory 'variables'"):
        Opened(TensorFlowBackend(), models.context("weightless"))


@pytest.mark.parametrize(
    ("content", "said"), [(b"nonsense", "cannot be read as a GraphDef"), (b"", "has an empty network")]
)
def test_files_that_are_no_graphs(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "1" / "model.graphdef"
    path.parent.mkdir()
    path.write_bytes(content)
    text = broken(tmp_path, FROZEN)
    assert said in text and "It has to be a frozen graph" in text


def test_an_op_library_that_cannot_be_loaded(models: Models) -> None:
    given = {"model_operations": {"op_library_filename": ["own_ops.so"]}}
    with pytest.raises(InvalidArgument, match=r"unable to load op library 'own_ops\.so': .*built for this version"):
        Opened(TensorFlowBackend(), models.context("scaled", given))


# ---- The configuration ----


def test_a_configuration_that_says_something_else(models: Models) -> None:
    declared = {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [5]}], "max_batch_size": 2}
    with pytest.raises(InvalidArgument, match=r"complete shape \[-1,5\]\)\. Set dims: \[4\]"):
        Opened(TensorFlowBackend(), models.context("scaled", declared))


def test_an_input_of_a_frozen_graph_that_is_not_configured(models: Models) -> None:
    declared = {
        "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "sum", "data_type": "TYPE_FP32", "dims": [4]}],
        "max_batch_size": 2,
    }
    with pytest.raises(InvalidArgument, match=r"expects 1 inputs, model provides 2\. The configuration lacks: b"):
        Opened(TensorFlowBackend(), models.context("frozen.pb", declared))


def test_an_output_that_a_frozen_graph_does_not_have(models: Models) -> None:
    declared = {
        "input": [{"name": each, "data_type": "TYPE_FP32", "dims": [4]} for each in "ab"],
        "output": [{"name": "product", "data_type": "TYPE_FP32", "dims": [4]}],
        "max_batch_size": 2,
    }
    with pytest.raises(InvalidArgument, match="unexpected inference output 'product'"):
        Opened(TensorFlowBackend(), models.context("frozen.pb", declared))


def planned(
    folder: Path, kind: str = "CPU", settings: dict[str, str] | None = None, **given: Any
) -> plan.TensorFlowPlan:
    (folder / "1" / "model.savedmodel").mkdir(parents=True, exist_ok=True)
    parameters = {key: given.pop(key) for key in list(given) if key.isupper()}
    return plan.make_plan(context(folder, given, settings, **parameters), InstanceContext("m_0", kind, 1))


def test_threads(tmp_path: Path) -> None:
    assert planned(tmp_path).intra_op_threads == planned(tmp_path).inter_op_threads >= 1
    given = planned(tmp_path, TF_NUM_INTRA_THREADS="3", TF_NUM_INTER_THREADS="5", TF_USE_PER_SESSION_THREADS="yes")
    assert (given.intra_op_threads, given.inter_op_threads, given.own_threads) == (3, 5, True)
    with pytest.raises(InvalidArgument) as refused:
        planned(tmp_path, TF_NUM_INTRA_THREADS="-1")
    assert refused.value.message == (
        "parameter 'TF_NUM_INTRA_THREADS' must be non-negative number for TensorFlow model 'm'"
    )


@pytest.mark.parametrize(("level", "jit"), [(-1, "OFF"), (0, "DEFAULT"), (1, "ON_1"), (2, "ON_2"), (5, "ON_2")])
def test_graph_levels_are_those_of_xla(tmp_path: Path, level: int, jit: str) -> None:
    assert planned(tmp_path, optimization={"graph": {"level": level}}).jit_level == jit


def test_accelerators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def given(name: str) -> dict[str, Any]:
        return {"execution_accelerators": {"gpu_execution_accelerator": [{"name": name}]}}

    assert planned(tmp_path, "GPU", optimization=given("auto_mixed_precision")).mixed_precision
    assert not planned(tmp_path, optimization=given("auto_mixed_precision")).mixed_precision
    assert caplog.messages == ["GPU Execution Accelerator will be ignored for model instance on CPU"]
    for name, said in (("tensorrt", "TensorFlow no longer has it"), ("turbo", "unknown Execution Accelerator 'turbo'")):
        with pytest.raises(InvalidArgument, match=said):
            planned(tmp_path, "GPU", optimization=given(name))
    with pytest.raises(InvalidArgument, match="CPU Execution Accelerator is not supported in TensorFlow backend"):
        planned(tmp_path, optimization={"execution_accelerators": {"cpu_execution_accelerator": [{"name": "x"}]}})


def test_memory_of_a_gpu(tmp_path: Path) -> None:
    given = planned(tmp_path, "GPU", {"gpu-memory-fraction": "0.5", "allow-soft-placement": "false"})
    assert (given.device, given.gpu_fraction, given.soft_placement) == (1, 0.5, False)
    with pytest.raises(InvalidArgument, match="it may be a number from 0 to 1"):
        planned(tmp_path, "GPU", {"gpu-memory-fraction": "half"})


def test_initial_operations(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"unable to find 'init\.json', the TF_INIT_OPS_FILE of 'm'"):
        planned(tmp_path, TF_INIT_OPS_FILE="init.json")
    (tmp_path / "init.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="has to be JSON of the form"):
        planned(tmp_path, TF_INIT_OPS_FILE="init.json")
    # The one of the version comes first.
    (tmp_path / "1" / "init.json").write_text(json.dumps({"init_ops": ["first", "second"]}))
    assert planned(tmp_path, TF_INIT_OPS_FILE="init.json").init_operations == ("first", "second")


def test_a_platform_of_somebody_else(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        planned(tmp_path, platform="tensorflow_lite")
    assert refused.value.message.startswith("platform tensorflow_lite not supported for TensorFlow model 'm'.")


def test_parameters_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan.log_ignored_parameters(context(tmp_path, MAX_SESSION_SHARE_COUNT="2", TF_NUM_INTRA_THREAD="2"))
    assert caplog.messages == [
        "'MAX_SESSION_SHARE_COUNT' of 'm' has no effect: each instance has a process, and a session, of its own",
        "parameter 'TF_NUM_INTRA_THREAD' of 'm' is not known here; is it TF_NUM_INTRA_THREADS?",
    ]
    with pytest.raises(InvalidArgument, match="must be positive number for TensorFlow model 'm'"):
        plan.log_ignored_parameters(context(tmp_path, MAX_SESSION_SHARE_COUNT="0"))
