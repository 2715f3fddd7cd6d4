"""Where functions are found: files, modules, what they import, and the model directories that are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nerite.core.errors import InvalidArgument
from nerite.functions.function_source import FunctionSource, files_beside
from nerite.functions.model_directory import write_in_subprocess
from nerite.functions.program_import import source_of

PROGRAM = """
import nerite
import helper

@nerite.model(batch=4)
def double(x: nerite.Float32["n"]) -> nerite.Float32["n"]:
    return x * helper.FACTOR

@nerite.model
def greet(name: str) -> str:
    return name

nerite.serve(double)
raise AssertionError("what follows nerite.serve is not run by those who import the program")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("import other\nFACTOR = 2\n")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    path = tmp_path / "app.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("app.py", ("app.py", "")),
        ("./a/app.py:double", ("./a/app.py", "double")),
        ("package.module:double", ("package.module", "double")),
        ("models", None),
        ("s3://bucket/models", None),
        ("app.py:a/b", None),
        ("resnet50.onnx", None),
    ],
)
def test_how_functions_are_named(text: str, found: tuple[str, str] | None) -> None:
    assert FunctionSource.parse(text) == (None if found is None else FunctionSource(*found))


def test_files_that_are_imported_from_the_same_directory(program: Path) -> None:
    assert {path.name for path in files_beside(program)} == {"app.py", "helper.py", "other.py"}


def test_directories_of_all_functions(program: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    assert write_in_subprocess(FunctionSource(str(program), ""), repository) == ["double", "greet"]
    config = (repository / "double" / "config.pbtxt").read_text()
    assert "max_batch_size: 4" in config
    assert str(program) in (repository / "double" / "1" / "model.py").read_text()


def test_a_directory_with_a_copy(program: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_in_subprocess(FunctionSource(str(program), "double"), repository, copy=True)
    assert {path.name for path in (repository / "double" / "1").iterdir()} == {
        "app.py",
        "helper.py",
        "other.py",
        "model.py",
    }
    assert str(tmp_path) not in (repository / "double" / "1" / "model.py").read_text()


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("def f(): pass", "f", "is not a model: decorate it with @nerite.model. Models in it: none"),
        ("", "f", "'f' in .*app.py does not exist"),
        ("", "", "has no function that is decorated"),
        ("import nothing_such", "", "ModuleNotFoundError: No module named 'nothing_such'"),
        ("import nerite\n@nerite.model\ndef f(x) -> float: ...", "f", r"app.py:2: parameter 'x' of f\(\) has no annot"),
    ],
)
def test_programs_that_cannot_be_served(tmp_path: Path, text: str, name: str, told: str) -> None:
    (tmp_path / "app.py").write_text(text)
    with pytest.raises(InvalidArgument, match=told):
        write_in_subprocess(FunctionSource(str(tmp_path / "app.py"), name), tmp_path / "models")


def test_functions_within_functions_can_only_run_here() -> None:
    import nerite

    @nerite.model
    def inner(x: float) -> float:
        return x

    assert source_of(inner) is None


def test_importing_the_package_loads_nothing_else() -> None:
    program = (
        "import sys, nerite; print(*sorted(name for name in sys.modules if name.startswith(('nerite.', 'numpy'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
