from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nerite.config.defaults import Gpus
from nerite.config.json_form import to_json
from nerite.config.loading import (
    CompletionUnavailable,
    LoadedModel,
    Remark,
    finish_config,
    load_model_directory,
    poll_model_directory,
)
from nerite.config.model_config import ModelConfig
from nerite.config.signature import signature_of
from nerite.core.errors import Internal, InvalidArgument, NotFound, NotInstalled, Unsupported
from nerite.core.tensor import BF16, BYTES, FP32

TENSORS = (
    'input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
    'output [ { name: "B" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").touch()
    return directory


def write(model: Path, text: str) -> None:
    (model / "config.pbtxt").write_text(text)


def told(loaded: LoadedModel) -> list[str]:
    return [mistake.message for mistake in loaded.mistakes]


def unchanged(config: ModelConfig, version: int) -> Mapping[str, Any]:
    return to_json(config)


def test_a_model_is_named_by_its_directory_and_its_backend_by_its_file(model: Path) -> None:
    write(model, TENSORS)
    loaded = load_model_directory(model)
    assert told(loaded) == []
    assert (loaded.polled.name, loaded.polled.existing, loaded.polled.versions) == ("m", (1,), (1,))
    config = loaded.configs[1]
    assert (config.name, config.backend, config.default_model_filename) == ("m", "python", "model.py")
    assert config.instance_group[0].name == "m"


def test_both_configurations_that_are_copied_from_place_to_place_are_refused_at_once(model: Path) -> None:
    write(
        model,
        "max_batch_size: 8\n"
        "instance_group [{ count: 2-4 }]\n"
        "dynamic_batching {\n"
        "  priority_levels: 3\n"
        "  default_priority_level: 2\n"
        "  priority_queue_policy {\n"
        "    key: 0\n"
        "    value { max_queue_size: 3 }\n"
        "  }\n"
        "}\n",
    )
    file = model / "config.pbtxt"
    assert [str(mistake) for mistake in load_model_directory(model).mistakes] == [
        f"{file}:2:27: Expected identifier, got: -\n"
        "    'count' is one number, not a range: write count: 2 or count: 4.",
        f"{file}:7:10: priority queue policy must have priority level in range [1, 3] for m\n"
        "    Levels count from 1, the highest, to 3: write one of them as key, or use default_queue_policy for all "
        "levels.",
    ]


@pytest.mark.parametrize(
    ("groups", "refused"),
    [
        ("{ count: 1024 kind: KIND_CPU }", False),
        ("{ count: 1025 kind: KIND_CPU }", True),
        ("{ count: 2147483647 kind: KIND_CPU }", True),
        ("{ count: 600 kind: KIND_CPU }, { count: 600 kind: KIND_CPU }, { count: 600 kind: KIND_CPU }", True),
    ],
)
def test_instances_without_end(model: Path, groups: str, refused: bool) -> None:
    write(model, f'backend: "python"\ninstance_group [ {groups} ]\n')
    assert told(load_model_directory(model)).count("model m has more than 1024 instances") == refused


def test_every_mistake_is_told(model: Path) -> None:
    write(
        model,
        'name: "other" backend: "python" max_batch_size: 4\n'
        'input [ { name: "A" dims: [ 0, 1 ] }, { data_type: TYPE_FP32 } ]\n'
        'output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "../x" } ]\n'
        "dynamic_batching { preferred_batch_size: [ 8, -1 ] }\n"
        "instance_group [ { kind: KIND_CPU gpus: 0 } ]\n"
        "model_transaction_policy { decoupled: true } response_cache { enable: true }\n"
        "version_policy { specific { versions: 3 } }\n",
    )
    assert told(load_model_directory(model)) == [
        "dynamic batching preferred size must be <= max batch size for other",
        "dynamic batching preferred size must be positive for other",
        "Response Cache does not currently support model other with 'decoupled' transaction policy. "
        "Please disable the response cache.",
        "unexpected directory name 'm' for model 'other', directory name must equal model name",
        "at least one version must be available under the version policy of model 'm'",
        "instance group other_0 of model other has kind KIND_CPU but specifies one or more GPUs",
        "model input 'A' must specify 'data_type' for other",
        "model input 'A' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for other",
        "model input must specify 'name' for other",
        f"label file path '{model}/../x' for output 'B' in model 'other' is outside model directory",
    ]


def test_what_a_wrong_word_makes_doubtful_is_not_judged(model: Path) -> None:
    write(
        model,
        'backend: "python" max_batch_size: "8"\ninput [ { name: "A" data_type: TYPE_FP32 dims: [ 0 ] } ]\n'
        "dynamic_batching { preferred_batch_size: 4 }\ninstance_group [ { kind: KIND_CPU gpus: 0 } ]\n",
    )
    assert told(load_model_directory(model)) == [
        'Expected integer, got: "8"',
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ]


@pytest.mark.parametrize("state", ["", '""data_type: TYPE_FP32 dims: -2', "data_type: TYPE_FP33 dims: 1"])
def test_states_of_which_something_is_wrong_are_not_read(model: Path, state: str) -> None:
    (model / "config.pbtxt").write_text(f"backend: 'python' sequence_batching {{ state {{ {state}")
    assert load_model_directory(model).mistakes


def test_warnings_do_not_refuse(model: Path) -> None:
    (model / "003").mkdir()
    (model / "warmup").mkdir()
    write(
        model,
        TENSORS + "version_policy { specific { versions: [ 1, 2 ] } }\n"
        'input [ { name: "A" data_type: TYPE_FP32 dims: [ 5 ] } ]\n'
        'model_metrics { metric_control { metric_identifier { family: "x" } histogram_options { buckets: 1 } } }\n',
    )
    loaded = load_model_directory(model)
    assert told(loaded) == []
    assert loaded.remarks == (
        Remark("warning", "ignore version directory '003' which contains leading zeros in its directory name"),
        Remark("error", "version 2 is specified for model 'm', but the version directory is not present"),
        Remark("warning", "Metric family 'x' in 'metric_identifier' is not a customizable metric in Triton core."),
        Remark("warning", "model input 'A' is specified more than once for m; the first one is used"),
    )
    assert signature_of(loaded.configs[1], model).inputs["A"].dims == (4,)


# Where the configuration comes from.


def test_a_custom_configuration_is_preferred_where_there_is_one(model: Path) -> None:
    write(model, "max_batch_size: 1")
    (model / "configs").mkdir()
    (model / "configs" / "gpu.pbtxt").write_text("max_batch_size: 2")
    assert load_model_directory(model, config_name="gpu").configs[1].max_batch_size == 2
    assert load_model_directory(model, config_name="cpu").configs[1].max_batch_size == 1
    assert load_model_directory(model).configs[1].max_batch_size == 1


def test_an_override_stands_for_the_file(model: Path) -> None:
    write(model, "max_batch_size: 1 parameters { key: 'k' }")
    config = load_model_directory(model, override='{"max_batch_size": 3}').configs[1]
    assert (config.max_batch_size, config.parameters) == (3, {})


def test_a_wrong_override_is_told_as_one(model: Path) -> None:
    (mistake,) = load_model_directory(model, override='{"backend": "python", "foo": 1}').mistakes
    assert mistake.message == "Invalid config override: foo: Cannot find field."
    assert mistake.as_error().message == mistake.message
    (mistake,) = load_model_directory(model, override='{"max_batch_size": -1}').mistakes
    assert str(mistake).startswith("config override: max_batch_size: 'max_batch_size' must be non-negative value for m")


def test_without_completion_the_file_has_to_be_there_with_complete_tensors(model: Path) -> None:
    (missing,) = load_model_directory(model, auto_complete=False).mistakes
    assert isinstance(missing.as_error(), Internal)
    assert missing.message == f"failed to open text file for read {model}/config.pbtxt: No such file or directory"
    write(model, 'input { name: "A" dims: 1 }')
    assert [mistake.message for mistake in poll_model_directory(model, auto_complete=False).mistakes] == [
        "model input 'A' must specify 'data_type' for m"
    ]
    assert poll_model_directory(model).mistakes == ()


def test_a_file_that_cannot_be_read(model: Path) -> None:
    (model / "config.pbtxt").mkdir()
    (mistake,) = load_model_directory(model).mistakes
    assert mistake.message == f"failed to open text file for read {model}/config.pbtxt: Is a directory"


def test_a_file_that_is_not_utf8(model: Path) -> None:
    (model / "config.pbtxt").write_bytes(b'backend: "python"\nname: "caf\xe9"\n\xff')
    assert [str(mistake) for mistake in load_model_directory(model).mistakes] == [
        f"{model}/config.pbtxt:2:7: String field contains invalid UTF-8.\n    Write the text itself, in UTF-8.",
        f"{model}/config.pbtxt:3:1: Interpreting non ascii codepoint 255.\n"
        "    Remove '\udcff': outside of strings and comments only ASCII is allowed.",
    ]


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert told(load_model_directory(tmp_path / "m"))[0] == f"failed to open directory {tmp_path}/m"


def test_no_version(model: Path) -> None:
    (model / "1" / "model.py").unlink()
    (model / "1").rmdir()
    write(model, 'backend: "python"')
    (mistake,) = load_model_directory(model, complete=unchanged).mistakes
    assert mistake.message == "at least one version must be available under the version policy of model 'm'"
    assert mistake.remedy == f"Put the model's files into {model}/1: mkdir -p {model}/1"


@pytest.mark.parametrize("name", ["v1", "V01", "version_1", "001", "ver-1"])
def test_a_version_that_is_called_otherwise(model: Path, name: str) -> None:
    (model / "1").rename(model / name)
    write(model, 'backend: "python"')
    (mistake,) = load_model_directory(model, complete=unchanged).mistakes
    assert mistake.message == "at least one version must be available under the version policy of model 'm'"
    moved = f"mv {model}/{name} {model}/1"
    assert mistake.remedy == f"The name of a version's directory is a number and nothing else: {moved}"


def test_an_ensemble_without_a_version(model: Path) -> None:
    (model / "1" / "model.py").unlink()
    (model / "1").rmdir()
    (model / "images").mkdir()
    maps = 'input_map { key: "A" value: "A" } output_map { key: "B" value: "B" }'
    step = f'step {{ model_name: "a" model_version: -1 {maps} }}'
    write(model, f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {step} }}')
    (mistake,) = load_model_directory(model, complete=unchanged).mistakes
    assert mistake.remedy == (
        f"An ensemble needs the directory of a version, too, with nothing in it: mkdir -p {model}/1"
    )


@pytest.mark.parametrize(
    ("platform", "file", "remedy"),
    [
        ("onnx", "model.onnx", 'Write platform: "onnxruntime_onnx": that is what its files are for.'),
        ("onnx", "data", 'Did you mean platform: "onnxruntime_onnx"?'),
        ("onnxruntime_onx", "data", 'Did you mean platform: "onnxruntime_onnx"?'),
        ("torch", "resnet.pt", 'Write platform: "pytorch_libtorch" default_model_filename: "resnet.pt": that is what '
         "its files are for."),
        ("plan", "data", 'Did you mean platform: "tensorrt_plan"?'),
        ("openvino", "data", 'It is a backend, and no platform: write backend: "openvino".'),
        ("abacus", "model.py", 'Write backend: "python": that is what its files are for.'),
        ("abacus", "data", 'Say which backend it is, as in: backend: "python"'),
    ],
)  # fmt: skip
def test_an_unknown_platform(model: Path, platform: str, file: str, remedy: str) -> None:
    (model / "1" / "model.py").rename(model / "1" / file)
    write(model, f'platform: "{platform}"')
    mistake = load_model_directory(model).mistakes[0]
    assert (mistake.message, mistake.remedy) == (f"unexpected platform type '{platform}' for m", remedy)


def test_files_that_tell_the_backend_under_another_name(model: Path) -> None:
    (model / "1" / "model.py").rename(model / "1" / "resnet.onnx")
    write(model, TENSORS)
    mistake = load_model_directory(model).mistakes[0]
    assert mistake.remedy == (
        'Say in config.pbtxt which backend it is, as in: platform: "onnxruntime_onnx" default_model_filename: '
        '"resnet.onnx"'
    )


def test_what_a_backend_says_stands_where_the_thing_is_that_it_names(model: Path) -> None:
    write(model, f'backend: "python"\n{TENSORS}parameters {{ key: "k" value {{ string_value: "v" }} }}\n')

    def places(message: str) -> list[str]:
        def refusing(config: ModelConfig, version: int) -> Mapping[str, Any]:
            raise InvalidArgument(message)

        loaded = load_model_directory(model, complete=refusing)
        assert all(mistake.remedy for mistake in loaded.mistakes)
        return [mistake.place.removeprefix(f"{model}/config.pbtxt:") for mistake in loaded.mistakes]

    assert places("wrong") == ["1:10"]
    assert places("output 'B' is wrong") == ["3:10"]
    assert places("parameter 'k' is wrong") == ["4:19"]


def test_what_is_wrong_in_a_models_code_stands_there(model: Path) -> None:
    def refusing(config: ModelConfig, version: int) -> Mapping[str, Any]:
        error = Internal("SyntaxError")
        error.place = "/code/model.py", 3, 7
        raise error.prefixed("it is a ")

    (mistake,) = load_model_directory(model, complete=refusing).mistakes
    assert str(mistake).startswith("/code/model.py:3:7: it is a SyntaxError\n    Correct the code there.")


def test_a_name_of_its_own(model: Path) -> None:
    write(model, 'name: "alias"')
    assert told(load_model_directory(model, name="alias")) == []


# Completion.


def test_each_version_is_completed_by_itself(model: Path) -> None:
    (model / "2").mkdir()
    write(model, 'backend: "python" version_policy { all { } }')

    def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
        assert config.instance_group[0].kind == "KIND_CPU"
        tensor = {"name": f"A{version}", "data_type": "TYPE_FP32", "dims": [version]}
        return to_json(config) | {"input": [tensor], "output": [tensor]}

    loaded = load_model_directory(model, complete=complete)
    assert told(loaded) == []
    assert [config.input[0].name for config in loaded.configs.values()] == ["A1", "A2"]


def test_a_backend_may_change_batch_size_tensors_scheduler_and_decoupling_and_nothing_else(model: Path) -> None:
    write(model, 'backend: "python" model_transaction_policy { decoupled: false }')
    completed = {
        "name": "x",
        "max_batch_size": 4,
        "backend": "other",
        "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1]}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
        "instance_group": [{"count": 9}],
        "parameters": {"a": {"string_value": "b"}},
    }
    config = load_model_directory(model, complete=lambda config, version: completed).configs[1]
    assert (config.name, config.backend, config.max_batch_size, config.parameters) == ("m", "python", 4, {})
    assert config.instance_group[0].count == 1
    assert config.input[0].dims == (-1,)
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_size == (4,)
    assert config.model_transaction_policy is not None
    assert config.model_transaction_policy.decoupled


def test_a_backend_may_not_change_the_scheduler(model: Path) -> None:
    write(model, 'backend: "python" dynamic_batching { }')
    loaded = load_model_directory(model, complete=lambda config, version: {"sequence_batching": {}})
    assert told(loaded) == [
        "Cannot update scheduling choice from dynamic_batching to sequence_batching when auto-completing."
    ]


def test_what_a_backend_completed_is_judged(model: Path) -> None:
    write(model, 'backend: "python"')
    loaded = load_model_directory(
        model, complete=lambda config, version: {"max_batch_size": -1, "input": [{"name": "A", "dims": [0]}]}
    )
    assert told(loaded) == [
        "'max_batch_size' must be non-negative value for m",
        "model input 'A' must specify 'data_type' for m",
        "model input 'A' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ]
    assert load_model_directory(model, complete=lambda config, version: {"maxBatch": 1}).mistakes[0].message == (
        "maxBatch: Cannot find field."
    )


def test_a_contradiction_between_file_and_model_is_a_mistake(model: Path) -> None:
    write(model, '\nbackend: "python"')

    def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
        raise InvalidArgument("unable to load model 'm', configuration expects 2 inputs, model provides 1")

    (mistake,) = load_model_directory(model, complete=complete).mistakes
    assert mistake.place == f"{model}/config.pbtxt:2:10"
    assert mistake.message == "unable to load model 'm', configuration expects 2 inputs, model provides 1"


def test_the_model_is_not_asked_where_something_is_wrong_already(model: Path) -> None:
    asked: list[int] = []
    write(model, 'backend: "python" max_batch_size: -1')
    load_model_directory(model, complete=lambda config, version: asked.append(version))
    write(model, 'backend: "python" instance_group { kind: KIND_GPU }')
    finish_config(poll_model_directory(model), 1, complete=lambda config, version: asked.append(version))
    write(model, 'backend: "python"')
    load_model_directory(model, auto_complete=False, complete=lambda config, version: asked.append(version))
    assert asked == []


def test_a_model_that_lacks_a_gpu_here_is_asked_on_the_cpu(model: Path) -> None:
    asked: list[tuple[str, int]] = []

    def complete(config: ModelConfig, version: int) -> None:
        asked.extend((group.kind, version) for group in config.instance_group)

    write(model, 'backend: "python" instance_group { kind: KIND_GPU }')
    loaded = load_model_directory(model, complete=complete)
    assert asked == [("KIND_CPU", 1)]
    assert [group.kind for group in loaded.configs[1].instance_group] == ["KIND_GPU"]
    assert loaded.mistakes[0].elsewhere


def test_nobody_to_ask_is_a_note(model: Path) -> None:
    write(model, 'backend: "python"')

    def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
        raise CompletionUnavailable("the framework is not installed")

    loaded = load_model_directory(model, complete=complete)
    assert told(loaded) == []
    assert loaded.remarks == (Remark("note", "the framework is not installed"),)


def test_neither_the_user_nor_the_model_says_anything(model: Path) -> None:
    (mistake,) = load_model_directory(model, complete=lambda config, version: None).mistakes
    assert isinstance(mistake.as_error(), NotFound)
    assert mistake.message == "model configuration is not provided for model 'm'"
    write(model, "")
    assert told(load_model_directory(model, complete=lambda config, version: None)) == []


def test_the_machine_decides_what_instances_are(model: Path) -> None:
    write(model, 'backend: "onnxruntime" instance_group [ { kind: KIND_GPU gpus: [ 0, 5 ] } ]')
    polled = poll_model_directory(model)
    (mistake,) = finish_config(polled, 1, gpus=Gpus((0, 1), 6.0)).mistakes
    assert mistake.elsewhere
    assert mistake.path == ("instance_group", 0, "gpus", 1)
    assert mistake.message == (
        "instance group m_0 of model m specifies invalid or unsupported gpu id 5. GPUs with at least the minimum "
        "required CUDA compute compatibility of 6.000000 are: 0, 1"
    )
    assert finish_config(polled, 1, gpus=Gpus(tuple(range(8)))).mistakes == ()


CPU_BUILD = Gpus(
    (0, 1),
    preferred=False,
    misfit="onnxruntime 1.31.1 is a CPU build",
    remedy="install its build for GPUs: pip install x",
)


def test_a_build_that_cannot_use_the_gpus(model: Path) -> None:
    asked: list[int] = []
    write(model, 'backend: "onnxruntime"\ninstance_group { kind: KIND_GPU }')
    polled = poll_model_directory(model)
    finished = finish_config(polled, 1, complete=lambda config, version: asked.append(version), gpus=CPU_BUILD)
    (mistake,) = finished.mistakes
    assert (mistake.place, mistake.elsewhere, asked) == (f"{model}/config.pbtxt:2:24", True, [])
    assert mistake.message == ("instance group m_0 of model m has kind KIND_GPU, but onnxruntime 1.31.1 is a CPU build")
    assert mistake.remedy == "Write kind: KIND_CPU, or install its build for GPUs: pip install x"
    error = mistake.as_error()
    assert isinstance(error, NotInstalled)
    assert error.message == f"{mistake.message}. {mistake.remedy}"
    # Triton's own text comes first.
    write(model, 'backend: "onnxruntime" instance_group { kind: KIND_GPU gpus: [ 0, 5 ] }')
    (mistake,) = finish_config(poll_model_directory(model), 1, gpus=CPU_BUILD).mistakes
    assert "specifies invalid or unsupported gpu id 5" in mistake.message


def test_a_backend_without_instances_on_cpus(model: Path) -> None:
    write(model, 'backend: "tensorrt"')
    gpus = Gpus((0,), misfit="tensorrt is not installed", remedy="install it: pip install x")
    (mistake, *_) = finish_config(poll_model_directory(model), 1, gpus=gpus).mistakes
    assert mistake.as_error().message == (
        "instance group m of model m has kind KIND_GPU, but tensorrt is not installed. Install it: pip install x"
    )


def test_a_model_on_the_cpu_is_told_why_once(model: Path) -> None:
    write(model, 'backend: "onnxruntime" version_policy { all {} }')
    (model / "3").mkdir()
    polled = poll_model_directory(model)
    assert polled.versions == (1, 3)
    said = [finish_config(polled, version, gpus=CPU_BUILD).remarks for version in (1, 3)]
    text = (
        "model 'm' is on the CPU although there is a GPU: onnxruntime 1.31.1 is a CPU build. Write kind: KIND_CPU if "
        "that is intended, or install its build for GPUs: pip install x"
    )
    assert said == [(), (Remark("warning", text),)]
    assert finish_config(polled, 3, gpus=Gpus((0,))).remarks == ()


# Signatures.


def test_a_signature(model: Path) -> None:
    write(
        model,
        "max_batch_size: 8\n"
        'input [ { name: "A" data_type: TYPE_FP32 dims: [ 4, -1 ] optional: true allow_ragged_batch: true },'
        ' { name: "C" data_type: TYPE_BF16 dims: [ 1 ] reshape { shape: [ ] } } ]\n'
        'output [ { name: "B" data_type: TYPE_STRING dims: [ 3 ] label_filename: "labels.txt" } ]\n',
    )
    (model / "labels.txt").write_bytes("cat\r\nçat\n\ndog".encode())
    signature = signature_of(load_model_directory(model).configs[1], model)
    assert (signature.model_name, signature.max_batch_size) == ("m", 8)
    assert list(signature.inputs) == ["A", "C"]
    assert signature.inputs["A"] == ("A", FP32, (4, -1), True, True, None)
    assert signature.inputs["C"] == ("C", BF16, (1,), False, False, ())
    assert signature.outputs["B"] == ("B", BYTES, (3,), ("cat", "çat", "", "dog"), None)


def test_labels_are_inside_of_the_model_and_there(model: Path) -> None:
    for name, kind, text in (
        ("../labels.txt", Unsupported, "is outside model directory"),
        ("\\000", Unsupported, "is outside model directory"),
        ("nope.txt", Internal, f"failed to open text file for read {model}/nope.txt: No such file or directory"),
    ):
        write(
            model,
            f'output [ {{ name: "B" data_type: TYPE_FP32 dims: 1 label_filename: "{name}" }} ]',
        )
        loaded = load_model_directory(model)
        (mistake,) = loaded.mistakes
        assert text in mistake.message
        with pytest.raises(kind):
            signature_of(loaded.configs[1], model)


def test_a_model_may_be_given_another_name(tmp_path: Path) -> None:
    directory = tmp_path / "folder"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text('name: "trained"\nbackend: "python"\n')
    (wrong,) = poll_model_directory(directory, name="given").mistakes
    assert wrong.message.startswith("unexpected directory name 'given' for model 'trained'")
    polled = poll_model_directory(directory, name="given", renamed=True)
    assert (polled.mistakes, polled.name, polled.config.name) == ((), "given", "given")


@pytest.mark.parametrize("name", ["/tmp/evil.py", "../2/model.py", "a/../../x", ".."])
@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ('default_model_filename: "{}"', "default_model_filename '{}' must stay within the directory of the version"),
        (
            'cc_model_filenames {{ key: "8.0" value: "{}" }}',
            "cc_model_filenames '{}' must stay within the directory of the version",
        ),
        (
            'model_operations {{ op_library_filename: "ops.so" op_library_filename: "{}" }}',
            "op_library_filename '{}' must stay within the directory of the model",
        ),
    ],
)
def test_files_are_within_their_directory(model: Path, text: str, refusal: str, name: str) -> None:
    write(model, f'backend: "python"\n{TENSORS}{text.format(name)}\n')
    loaded = load_model_directory(model)
    # A library may lie where an image has such things: the writer of config.pbtxt may say so.
    expected = [] if "op_library" in text and name.startswith("/") else [refusal.format(name)]
    assert told(loaded) == expected
    for mistake in loaded.mistakes:
        assert mistake.place.startswith(f"{model}/config.pbtxt:4:")
    brought = json.dumps(to_json(loaded.polled.config))
    assert [mistake.message for mistake in poll_model_directory(model, override=brought).mistakes] == [
        refusal.format(name)
    ]


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("is_shape_tensor", "shape tensors are only supported for TensorRT platform"),
        ("is_non_linear_format_io", "Non-linear IO format is only supported for the TensorRT platform"),
    ],
)
def test_fields_for_tensorrt_alone(tmp_path: Path, side: str, field: str, said: str) -> None:
    config = f'backend: "python"\n{TENSORS}'.replace("] }", f"] {field}: true }}", 1 + (side == "output"))
    config = config.replace(f" {field}: true", "", int(side == "output"))
    (tmp_path / "config.pbtxt").write_text(config)
    (tmp_path / "1").mkdir()
    polled = poll_model_directory(tmp_path)
    found = finish_config(polled, 1).mistakes
    assert [(each.message, each.path) for each in (*polled.mistakes, *found)] == [
        (f"{said} for {tmp_path.name}", (side, 0, field))
    ]
