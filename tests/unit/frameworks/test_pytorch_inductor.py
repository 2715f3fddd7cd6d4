"""Packages that AOTInductor compiles. One is compiled for all tests and kept, which takes most of their time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import ArrayLike
from torch_models import Opened, context, declared, entry, export_scaled, python

from kept import kept
from nerite.core.errors import Internal, InvalidArgument, Unavailable
from nerite.frameworks.pytorch import PyTorchBackend
from nerite.testing import Answer, BackendContract
from opened import request
from tools import require

_COMPILE = """
import sys, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x, more, *, bias):
        return {"y": x * self.factor + bias, "pair": (x + more["m"], more["m"])}

batch = torch.export.Dim("batch", min=1, max=8)
# One tensor in three places would be one input.
x, m, bias = (torch.zeros(2, 4) for _ in range(3))
sizes = {"x": {0: batch}, "more": {"m": {0: batch}}, "bias": {0: batch}}
program = torch.export.export(Net(), (x, {"m": m}), {"bias": bias}, dynamic_shapes=sizes)
quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp_cache_precompile_headers": False, "cpp.simdlen": 1}
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1], inductor_configs=quick)
"""
CONFIG = declared(
    ["INPUT__0", "ARGS[1][m]", "bias"], ["RESULT[y]", "OUTPUT__1", entry("RESULT[pair][1]")], 8, INFERENCE_MODE="true"
)
pytestmark = pytest.mark.timeout(240)  # The first of them has it compiled.
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def compile_package(folder: Path) -> None:
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", _COMPILE, str(folder / "model.pt2")]
    subprocess.run(command, capture_output=True, check=True)


@pytest.fixture(scope="module", autouse=True)
def package(pytestconfig: pytest.Config) -> Path:
    require("g++")
    # Code for this processor, and for this compiler's libraries.
    of = (_COMPILE, version("torch"), Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0])
    path = TestContract.package = kept(pytestconfig, "inductor", "\n".join(of), compile_package) / "model.pt2"
    return path


def placed(folder: Path, package: Path) -> Path:
    (folder / "1").mkdir(exist_ok=True)
    shutil.copy(package, folder / "1" / "model.pt2")
    return folder


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("wrapper.so")


def test_a_package_is_served_by_position_and_by_path(tmp_path: Path, package: Path) -> None:
    opened = Opened(placed(tmp_path, package), CONFIG)
    inputs = {"INPUT__0": ROWS, "ARGS[1][m]": ROWS + 1, "bias": ROWS + 2}
    first, second = opened.answers(request(**inputs), request(**{name: rows[:1] for name, rows in inputs.items()}))
    np.testing.assert_array_equal(first["RESULT[y]"], ROWS * 3 + 2)
    np.testing.assert_array_equal(first["OUTPUT__1"], ROWS * 2 + 1)
    np.testing.assert_array_equal(first["RESULT[pair][1]"], ROWS + 1)
    np.testing.assert_array_equal(second["RESULT[y]"], (ROWS * 3 + 2)[:1])


def test_shapes_that_it_was_not_compiled_for_are_refused(tmp_path: Path, package: Path) -> None:
    config = declared([entry("x__0", [-1]), entry("m__1", [-1]), entry("b__2", [-1])], ["y__0"], 64)
    opened = Opened(placed(tmp_path, package), config)
    for wrong in (np.zeros((2, 5), np.float32), np.zeros((9, 4), np.float32)):
        with pytest.raises(Internal, match=r"^PyTorch execute failure: .*input_handles\[0\]"):
            opened.execute(request(x__0=wrong, m__1=wrong, b__2=wrong))


def test_the_same_package_takes_its_memory_once(tmp_path: Path, package: Path) -> None:
    def load() -> int:
        opened = Opened(placed(tmp_path, package), CONFIG)
        opened.close()
        return mappings()

    before = load()
    assert before > 0
    assert {load() for _ in range(3)} == {before}


def libraries() -> set[str]:
    """Return the libraries of packages that this process has mapped: what was loaded once stays, whoever did."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in maps if "wrapper.so" in line}


def test_no_file_is_left_of_a_package(tmp_path: Path, package: Path) -> None:
    before = libraries()
    opened = Opened(placed(tmp_path, package), CONFIG)
    deleted = {each for each in libraries() if each.endswith("(deleted)")}
    assert deleted
    assert not any(Path(each).parents[4].exists() for each in deleted)
    assert libraries() - before <= deleted
    opened.close()


def test_packages_and_code_are_for_workers(tmp_path: Path, package: Path) -> None:
    backend = PyTorchBackend()
    assert backend.isolates(context(placed(tmp_path, package), CONFIG))
    (tmp_path / "1" / "model.pt2").unlink()
    with pytest.raises(Unavailable, match="unable to find"):
        backend.isolates(context(tmp_path, CONFIG))
    export_scaled(tmp_path)
    assert not backend.isolates(context(tmp_path, CONFIG))
    (tmp_path / "1" / "model.pt2").unlink()
    python(tmp_path, "class Net(nn.Module):\n    pass\n")
    assert backend.isolates(context(tmp_path, CONFIG))
    shared = {"parameters": {"ENABLE_WEIGHT_SHARING": {"string_value": "true"}}}
    assert not backend.isolates(context(tmp_path, CONFIG | shared))


def test_what_does_not_fit_a_package(tmp_path: Path, package: Path) -> None:
    placed(tmp_path, package)
    with pytest.raises(InvalidArgument, match=r"The configuration lacks: INPUT__2$"):
        Opened(tmp_path, declared(["INPUT__0", "INPUT__1"], ["y__0"]))
    with pytest.raises(InvalidArgument, match=r'a compiled package does not say .* input \{ name: "INPUT__0"'):
        Opened(tmp_path, {})


def test_a_package_without_its_library(tmp_path: Path, package: Path) -> None:
    path = placed(tmp_path, package) / "1" / "model.pt2"
    with zipfile.ZipFile(package) as whole, zipfile.ZipFile(path, "w") as part:
        for name in whole.namelist():
            if not name.endswith(".so"):
                part.writestr(name, whole.read(name))
    with pytest.raises(Internal, match=r"A package runs with the version of PyTorch that compiled it; this is 2\."):
        Opened(tmp_path, CONFIG)


class TestContract(BackendContract):
    backend = PyTorchBackend()
    package: ClassVar[Path]

    def write_model(self, directory: Path) -> None:
        (directory / "1").mkdir(parents=True, exist_ok=True)
        placed(directory, self.package)
        sides = {"input": ["x__0", "m__1", "bias__2"], "output": ["y__0", "sum__1"]}
        tensors = [
            f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] }}' for side in sides for name in sides[side]
        ]
        (directory / "config.pbtxt").write_text(f'backend: "pytorch" max_batch_size: 4 {" ".join(tensors)}')

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"x__0": ROWS[:1] + start, "m__1": ROWS[1:], "bias__2": ROWS[:1]} for start in (1, 2)]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"y__0": inputs["x__0"] * 2 + inputs["bias__2"], "sum__1": inputs["x__0"] + inputs["m__1"]}
