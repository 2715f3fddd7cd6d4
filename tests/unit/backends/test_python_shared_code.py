"""A ``model.py`` that is a backend: its models have artifacts only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python import PythonBackend
from nerite.core.errors import Internal
from python_model_files import execute, model_on_disk
from triton_python_backend_utils import TritonModelException, get_model_dir

SOURCE = """
import numpy as np
import triton_python_backend_utils as pb_utils
import beside

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        with open(pb_utils.get_model_dir() + "/size.txt") as file:
            config.set_max_batch_size(int(file.read()))
        return config

    def initialize(self, args):
        self.word = args["model_name"] + beside.MARK

    def execute(self, requests):
        said = np.array([self.word, __name__], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", said)]) for _ in requests]
"""


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    assert sys.path == path
    assert {"model", "model_2", "beside"} & (set(sys.modules) - modules) == set()


@pytest.fixture
def backend(tmp_path: Path) -> PythonBackend:
    folder = tmp_path / "backends" / "mine"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(SOURCE)
    (folder / "beside.py").write_text("MARK = '!'\n")
    return PythonBackend("mine", folder / "model.py")


def model(tmp_path: Path, name: str = "m", **files: str) -> ModelContext:
    """Write a model whose own code is none of the backend's."""
    artifacts = {"1/size.txt": "4", "1/beside.py": "MARK = '?'\n", **files}
    return model_on_disk(tmp_path / "models", "raise ValueError('not this one')\n", artifacts, name=name)


def said(instance: object) -> list[bytes]:
    (response,) = execute(instance)  # type: ignore[arg-type]
    data = bytes(response.data[0])
    length = int.from_bytes(data[:4], "little")
    return [data[4 : 4 + length], data[8 + length :]]


def test_serves_a_model_that_has_only_artifacts(backend: PythonBackend, tmp_path: Path) -> None:
    context = model(tmp_path)
    assert backend.complete(context)["max_batch_size"] == 4
    opened = backend.open(context)
    assert sys.path[-1] == str(tmp_path / "backends/mine")
    assert get_model_dir() == str(context.version_directory)
    assert said(opened.instance(InstanceContext("m_0"))) == [b"m!", b"model"]
    opened.close()


def test_several_in_one_process(backend: PythonBackend, tmp_path: Path) -> None:
    opened = [backend.open(model(tmp_path, name)) for name in ("a", "b")]
    instances = [each.instance(InstanceContext("i")) for each in opened]
    assert [said(each) for each in instances] == [[b"a!", b"model"], [b"b!", b"model_2"]]
    with pytest.raises(TritonModelException, match="Several run in this process"):
        get_model_dir()
    opened[0].close()
    assert said(instances[1]) == [b"b!", b"model_2"]
    opened[1].close()


def test_a_change_of_the_code_counts_at_the_next_load(backend: PythonBackend, tmp_path: Path) -> None:
    file = tmp_path / "backends/mine/beside.py"
    context = model(tmp_path)
    backend.open(context).close()
    file.write_text("MARK = ':'\n")
    opened = backend.open(context)
    assert said(opened.instance(InstanceContext("m_0")))[0] == b"m:"
    opened.close()


def test_failures_tell_the_place(backend: PythonBackend, tmp_path: Path) -> None:
    file = tmp_path / "backends/mine/model.py"
    file.write_text("raise OSError('no')\n")
    with pytest.raises(Internal) as refused:
        backend.open(model(tmp_path))
    assert refused.value.message == f"OSError: no\n\nAt:\n  {file}(1): <module>\n"
    file.write_text("class TritonPythonModel:\n    pass\n")
    opened = backend.open(model(tmp_path))
    with pytest.raises(Internal, match=f"Python model {file} does not implement `execute` method"):
        execute(opened.instance(InstanceContext("m_0")))
    opened.close()
    file.unlink()
    with pytest.raises(Internal, match=f"Python model file not found in '{file}'"):
        backend.complete(model(tmp_path))
