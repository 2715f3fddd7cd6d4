"""Loading models for PyTorch: what is completed, what is refused, and with which words."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch_models import AddSub, Opened, Scaled, context, declared, entry, export, export_scaled, python, script

from configs import as_backends_get_it
from nerite.backends.interface import InstanceContext
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.frameworks.pytorch import PyTorchBackend
from opened import request

X, Y = entry("x"), entry("OUTPUT__0")


@pytest.fixture
def others() -> set[str]:
    """The modules that were there before."""
    return set(sys.modules)


def complete(directory: Path, config: dict[str, Any] | None = None, **settings: str) -> Any:
    return PyTorchBackend().complete(context(directory, config, **settings))


def refusal(directory: Path, config: dict[str, Any]) -> NeriteError:
    with pytest.raises(NeriteError) as refused:
        Opened(directory, config)
    return refused.value


# ---- Completion ----


def test_an_exported_program_completes_its_configuration(tmp_path: Path) -> None:
    export_scaled(tmp_path)
    added = {"max_batch_size": 4, "dynamic_batching": {}, "input": [X], "output": [Y]}
    assert complete(tmp_path) == {**as_backends_get_it({}), **added}


@pytest.mark.parametrize(("most", "size"), [(3, 3), (64, 4)])
def test_batches_are_no_larger_than_the_program_allows(tmp_path: Path, most: int, size: int) -> None:
    export_scaled(tmp_path, max=most)
    assert complete(tmp_path)["max_batch_size"] == size
    declared_too_large = declared(["x"], ["OUTPUT__0"], most + 1)
    error = refusal(tmp_path, declared_too_large)
    assert error.message.endswith(f"Set max_batch_size: {most}, or export it with a larger maximum")


def test_a_program_of_one_shape_has_no_batches(tmp_path: Path) -> None:
    export(tmp_path, AddSub(), (torch.zeros(2, 4), torch.zeros(1, dtype=torch.int64)))
    added = {
        "input": [entry("a", [2, 4]), entry("b", [1], "TYPE_INT64")],
        "output": [entry("OUTPUT__0", [2, 4]), entry("OUTPUT__1", [2, 4])],
    }
    assert complete(tmp_path) == {**as_backends_get_it({}), **added}
    error = refusal(tmp_path, {"max_batch_size": 2})
    assert "model does not support batching while non-zero max_batch_size is specified" in error.message


def test_controls_and_states_are_no_inputs_of_a_caller_s(tmp_path: Path) -> None:
    size = torch.export.Dim("batch")
    rows = torch.zeros(2, 4)
    export(tmp_path, AddSub(), (rows, rows), dynamic_shapes=({0: size}, {0: size}))
    state = {"input_name": "b", "output_name": "OUTPUT__1", "data_type": "TYPE_FP32", "dims": [4]}
    completed = complete(tmp_path, {"sequence_batching": {"state": [state]}})
    assert completed["input"] == [entry("a")]
    assert completed["output"] == [entry("OUTPUT__0")]


@pytest.mark.parametrize("kind", ["torchscript", "python"])
def test_what_does_not_say_enough_says_what_to_write(tmp_path: Path, kind: str) -> None:
    if kind == "torchscript":
        script(tmp_path, AddSub())
    else:
        python(tmp_path, "class Net(nn.Module):\n    def forward(self, a, b):\n        return a + b\n")
    error = refusal(tmp_path, {"name": "m"})
    assert isinstance(error, InvalidArgument)
    assert f"needs its inputs and outputs in '{tmp_path}/config.pbtxt'" in error.message
    assert 'input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] } input { name: "b" ' in error.message


def test_a_program_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_scaled(tmp_path)
    loads: list[str] = []
    load = torch.export.load
    monkeypatch.setattr(torch.export, "load", lambda path: loads.append(path) or load(path))
    opened = Opened(tmp_path)
    opened.model.instance(InstanceContext("m_1"))
    assert len(loads) == 1


class Capitals(nn.Module):
    def forward(self, IDS: Tensor, *, Kw: Tensor) -> Tensor:
        return IDS + Kw


def test_inputs_are_called_as_the_arguments_are(tmp_path: Path) -> None:
    export(tmp_path, Capitals(), (torch.zeros(1, 4),), {"Kw": torch.ones(1, 4)})
    assert [each["name"] for each in complete(tmp_path)["input"]] == ["IDS", "Kw"]


# ---- Agreement ----


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (
            ["x", "more"],
            ["OUTPUT__0"],
            "unexpected inference input 'more', allowed inputs are: x, or INPUT__0 and so on",
        ),
        (
            ["x", "INPUT__0"],
            ["OUTPUT__0"],
            "model 'm': inputs 'x' and 'INPUT__0' are the same: 'x'",
        ),
        (
            ["x"],
            ["OUTPUT__3"],
            "The output OUTPUT__3 in the model configuration refers to an output index which doesn't exist. This model "
            "has 1 outputs: OUTPUT__0",
        ),
        (
            [entry("x", [4], "TYPE_INT64")],
            ["OUTPUT__0"],
            "unable to load model 'm', configuration expects datatype TYPE_INT64 for input 'x', model provides "
            "TYPE_FP32. Set data_type: TYPE_FP32",
        ),
        (
            [entry("x", [5])],
            ["OUTPUT__0"],
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration "
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,5]). Set dims: [4]",
        ),
        (
            [entry("x", [4], "TYPE_STRING")],
            ["OUTPUT__0"],
            "unable to load model 'm', configuration expects datatype TYPE_STRING for input 'x', model provides "
            "TYPE_FP32. Set data_type: TYPE_FP32",
        ),
    ],
)
def test_a_configuration_that_says_something_else(tmp_path: Path, inputs: Any, outputs: Any, text: str) -> None:
    export_scaled(tmp_path)
    assert refusal(tmp_path, declared(inputs, outputs, 4)).message == text


def test_an_output_may_be_declared_with_less_than_is_known(tmp_path: Path) -> None:
    export_scaled(tmp_path)
    Opened(tmp_path, declared(["x"], [entry("OUTPUT__0", [-1])], 4))
    error = refusal(tmp_path, declared(["x"], [entry("OUTPUT__0", [5])], 4))
    assert error.message.endswith("making complete shape [-1,5]). Set dims: [4]")


def test_an_input_that_the_configuration_lacks(tmp_path: Path) -> None:
    script(tmp_path, AddSub())
    assert refusal(tmp_path, declared(["a"], ["x__0"])).message == (
        "unable to load model 'm', configuration expects 1 inputs, model provides 2. The configuration lacks: b"
    )


def test_names_are_never_swapped(tmp_path: Path) -> None:
    script(tmp_path, AddSub())
    # Triton would take the order here, and subtract the wrong way round.
    error = refusal(tmp_path, declared(["b", "first"], ["x__0"]))
    assert error.message.startswith("unexpected inference input 'first', allowed inputs are: a, b")


class Number(nn.Module):
    def forward(self, x: Tensor, times: int) -> Tensor:
        return x * times


def test_torchscript_with_inputs_that_are_no_tensors(tmp_path: Path) -> None:
    script(tmp_path, Number())
    error = refusal(tmp_path, declared(["x", "times"], ["y__0"]))
    assert error.message == (
        "An input of type 'int' was detected in the model. Only a single input of type Dict(str, Tensor) or input(s) "
        "of type Tensor are supported. Give 'times' a default, or make it a Tensor"
    )


class Words(nn.Module):
    def forward(self, words: list[str]) -> list[str]:
        return words


def test_strings_have_one_dimension(tmp_path: Path) -> None:
    script(tmp_path, Words())
    two = entry("words", [2, 2], "TYPE_STRING")
    error = refusal(tmp_path, declared([two], [entry("OUTPUT__0", [-1], "TYPE_STRING")]))
    assert error.message == (
        "Triton only supports 1 dimensional List of String as input for 'words' for model 'm'. Set dims: [ -1 ]"
    )
    error = refusal(tmp_path, declared(["words"], [entry("OUTPUT__0", [-1], "TYPE_STRING")]))
    assert error.message.endswith("model provides a list of strings. Set data_type: TYPE_STRING")


# ---- Files ----


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    error = refusal(tmp_path, declared(["x"], ["y__0"]))
    assert isinstance(error, Unavailable)
    assert error.message.startswith(f"unable to find '{tmp_path}/1/model.pt' for model instance 'm'. There may be ")


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    path = script(tmp_path, Scaled())
    path.write_bytes(path.read_bytes()[:-200])
    error = refusal(tmp_path, declared(["x"], ["y__0"]))
    assert error.message.startswith(f"failed to load model 'm': '{path}' is damaged or was cut off (")


def test_an_archive_that_is_damaged_within(tmp_path: Path) -> None:
    path = export_scaled(tmp_path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(next(name for name in archive.namelist() if name.endswith("model.json"))).header_offset
    path.write_bytes(content[: start + 200] + bytes(400) + content[start + 600 :])
    error = refusal(tmp_path, {})
    assert error.message.startswith("failed to load model 'm': ")
    assert "this is 2." in error.message


@pytest.mark.parametrize("legacy", [False, True])
def test_weights_alone(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "1" / "model.pt"
    path.parent.mkdir()
    torch.save(Scaled().state_dict(), path, _use_new_zipfile_serialization=not legacy)
    error = refusal(tmp_path, declared(["x"], ["y__0"]))
    assert error.message == (
        f"failed to load model 'm': '{path}' holds weights or a pickled module, and no program that could be run "
        "without its Python code. Write a program with torch.export.save(torch.export.export(model.eval(), "
        f"(example,)), 'model.pt2'), or put the module's class into '{path.parent}/model.py'"
    )


def test_something_else(tmp_path: Path) -> None:
    path = tmp_path / "1" / "model.pt"
    path.parent.mkdir()
    path.write_bytes(b"not a model")
    assert "is no file of PyTorch's" in refusal(tmp_path, declared(["x"], ["y__0"])).message
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    assert "is a zip archive, but not one of PyTorch's" in refusal(tmp_path, declared(["x"], ["y__0"])).message


def test_the_content_decides_and_not_the_name(tmp_path: Path) -> None:
    path = export_scaled(tmp_path)
    path.rename(path.with_name("net.pt"))
    opened = Opened(tmp_path, {"default_model_filename": "net.pt"})
    assert opened.config["input"] == [X]


# ---- TorchScript ----


def test_training_mode_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    script(tmp_path, nn.Sequential(nn.Dropout(0.9)).train())
    opened = Opened(tmp_path, declared(["x__0"], ["y__0"]))
    ones = np.ones(4, np.float32)
    np.testing.assert_array_equal(opened.answers(request(x__0=ones))[0]["y__0"], ones)
    assert "was saved in training mode" in caplog.text
    assert "torch.export writes programs that last" in caplog.text


# ---- Modules in Python ----

NET = """
from torch.nn import Linear

class Before(nn.Module):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x, bias=None):
        return {"y": x * self.factor if bias is None else x * self.factor + bias}
"""
SERVED = {"MODEL_CLASS": "Net"}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_lie_beside_the_code(tmp_path: Path, suffix: str) -> None:
    path = python(tmp_path, NET).with_suffix(suffix)
    weights = {"factor": torch.arange(4.0)}
    torch.save(weights, path) if suffix == ".pt" else save_file(weights, path)
    opened = Opened(tmp_path, declared(["x"], ["y"], **SERVED))
    [answer] = opened.answers(request(x=np.ones(4, np.float32)))
    assert answer["y"].tolist() == [0.0, 1.0, 2.0, 3.0]
    opened.close()


def test_the_runtime_says_python_where_there_is_torchscript_too(tmp_path: Path) -> None:
    python(tmp_path, NET)
    script(tmp_path, Scaled())
    ones = np.ones(4, np.float32)
    scripted = Opened(tmp_path, declared(["x"], ["y__0"]))
    assert scripted.answers(request(x=ones))[0]["y__0"].tolist() == [2.0] * 4
    error = refusal(tmp_path, {**declared(["x"], ["y"], **SERVED), "runtime": "model.py"})
    assert "model.pt' is TorchScript" in error.message


def test_another_file_name_and_the_first_class_by_name(tmp_path: Path) -> None:
    python(tmp_path, NET.replace("class Before(nn.Module):\n    pass\n", ""), "net.py")
    config = {**declared(["x"], ["y"]), "default_model_filename": "net.py"}
    opened = Opened(tmp_path, config)
    assert opened.answers(request(x=np.ones(4, np.float32)))[0]["y"].tolist() == [1.0] * 4
    opened.close()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("value = 1\n", "Cannot find a subclass of torch.nn.Module in '{path}', which model 'm' needs"),
        ("1 / 0\n", "failed to load model 'm': division by zero. It was raised by '{path}'"),
        (
            "class Net(nn.Module):\n    def __init__(self, width):\n        pass\n",
            "failed to load model 'm': Net.__init__() missing 1 required positional argument: 'width'. The class is "
            "'Net' of '{path}'",
        ),
    ],
)
def test_code_that_cannot_be_served(tmp_path: Path, code: str, text: str, others: set[str]) -> None:
    path = python(tmp_path, code)
    assert refusal(tmp_path, declared(["x"], ["y__0"])).message == text.format(path=path)
    assert not [name for name in sys.modules.keys() - others if name.startswith("1")]


class Program:
    """What is pickled as a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("legacy", [False, True])
def test_weights_that_are_a_program_are_not_run(tmp_path: Path, legacy: bool) -> None:
    path = python(tmp_path, NET)
    mark = tmp_path / "mark"
    torch.save({"factor": Program(mark)}, path.with_suffix(".pt"), _use_new_zipfile_serialization=not legacy)
    assert "Weights only load failed" in refusal(tmp_path, declared(["x"], ["y"], **SERVED)).message
    assert not mark.exists()


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = python(tmp_path, NET)
    torch.save({"other": torch.zeros(1)}, path.with_suffix(".pt"))
    error = refusal(tmp_path, declared(["x"], ["y"], **SERVED))
    assert 'Missing key(s) in state_dict: "factor"' in error.message
    assert f"The class is 'Net' of '{path}'" in error.message


def test_a_class_that_there_is_not(tmp_path: Path) -> None:
    path = python(tmp_path, NET)
    error = refusal(tmp_path, declared(["x"], ["y"], MODEL_CLASS="Nett"))
    assert error.message.endswith(f"asks for, in '{path}'. There are: Before, Net")


# ---- Parameters ----


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "INFERENCE_MODE",
            "maybe",
            "failed to convert 'maybe' to boolean, in parameter 'INFERENCE_MODE' of model 'm', which takes true "
            "or false",
        ),
        (
            "INTRA_OP_THREAD_COUNT",
            "many",
            "failed to convert 'many' to integral number, in parameter 'INTRA_OP_THREAD_COUNT' of model 'm', which "
            "takes a number of threads, or 0",
        ),
        (
            "TORCH_COMPILE_OPTIONAL_PARAMETERS",
            '{"model": 1}',
            "'model' is not an optional parameter for 'torch.compile'",
        ),
    ],
)
def test_parameters_that_make_no_sense(tmp_path: Path, key: str, value: str, text: str) -> None:
    script(tmp_path, Scaled())
    assert refusal(tmp_path, declared(["x"], ["y__0"], **{key: value})).message == text


def test_no_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    script(tmp_path, Scaled())
    opened = Opened(tmp_path, declared(["x"], ["y__0"]))
    with pytest.raises(Unsupported, match=r"on 'cuda:1', and PyTorch .* sees no GPU\. Set kind: KIND_CPU, or install"):
        opened.model.instance(InstanceContext("m_1", "GPU", 1))


def test_kind_model_leaves_the_program_where_it_is(tmp_path: Path) -> None:
    script(tmp_path, Scaled())
    opened = Opened(tmp_path, {**declared(["x"], ["y__0"]), "instance_group": [{"kind": "KIND_MODEL", "count": 1}]})
    instance = opened.model.instance(InstanceContext("m_0", "MODEL"))
    assert instance.compute.program.device == ""


def test_torch_compile(tmp_path: Path) -> None:
    export_scaled(tmp_path)
    config = declared(
        ["x"], ["OUTPUT__0"], 4, TORCH_COMPILE_OPTIONAL_PARAMETERS='{"backend": "eager", "dynamic": true}'
    )
    opened = Opened(tmp_path, config)
    for _ in range(2):
        [answer] = opened.answers(request(x=np.ones((1, 4), np.float32)))
        assert answer["OUTPUT__0"].tolist() == [[2.0] * 4]


# ---- Coming and going ----


def test_nothing_of_a_closed_model_stays(tmp_path: Path, others: set[str]) -> None:
    python(tmp_path, NET)
    opened = Opened(tmp_path, declared(["x"], ["y"], **SERVED))
    gone = weakref.ref(opened.instance.compute)
    opened.close()
    gc.collect()
    assert gone() is None
    assert not [name for name in sys.modules.keys() - others if name.startswith("1")]


def test_the_framework_is_imported_by_the_first_model(tmp_path: Path) -> None:
    script(tmp_path, Scaled())
    program = (
        "import sys, pathlib\n"
        "from nerite.backends import registry\n"
        "from nerite.backends.interface import ModelContext\n"
        "backend = registry.backend('pytorch')\n"
        "assert 'torch' not in sys.modules\n"
        f"backend.open(ModelContext('m', 1, pathlib.Path({str(tmp_path)!r}), {declared(['x'], ['y__0'])!r}))\n"
        "assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules\n"
    )
    # The default warnings: nothing of what PyTorch has to say of TorchScript and of memory gets on a server's log.
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, check=True)
    assert "deprecated" not in done.stderr


def test_a_new_file_is_read_again(tmp_path: Path) -> None:
    export_scaled(tmp_path)
    backend = PyTorchBackend()
    first = context(tmp_path)
    completed = backend.complete(first)
    export(tmp_path, AddSub(), (torch.zeros(1, 4), torch.zeros(1, 4)))
    with pytest.raises(InvalidArgument, match="model provides 2"):
        backend.open(replace(first, config=completed))
