"""Importing the code of several models, versions and reloads into one process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python import PythonBackend
from nerite.backends.python.module import ModelModule
from nerite.core.errors import Internal
from python_model_files import close_models, execute, instance_of, model_on_disk
from serving import PATIENCE
from triton_python_backend_utils import TritonModelException, get_model_dir

EMPTY = "class TritonPythonModel:\n    pass\n"


def imported(context: ModelContext) -> ModelModule:
    return ModelModule(context.directory, context.version_directory / "model.py")


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was(tmp_path: Path) -> Iterator[None]:
    path = list(sys.path)
    yield
    assert sys.path == path
    places = {
        name: f"{vars(module).get('__file__')} {vars(module).get('__path__')}" for name, module in sys.modules.items()
    }
    assert [name for name, place in places.items() if str(tmp_path) in place] == []


def test_names_are_those_of_triton(tmp_path: Path) -> None:
    module = imported(model_on_disk(tmp_path, EMPTY, version=3))
    assert module.module.__name__ == "3.model"
    assert module.module.__package__ == "3"
    assert module.module.__file__ == str(tmp_path / "m/3/model.py")
    module.close()


def test_helpers_of_version_and_model_are_importable(tmp_path: Path) -> None:
    source = "from . import near\nfrom .near import LEVEL\nimport near as flat\nimport far\nimport kit.tool\n"
    files = {
        "1/near.py": "LEVEL = 'version'\n",
        "far.py": "LEVEL = 'model'\n",
        "1/kit/__init__.py": "",
        "1/kit/tool.py": "",
    }
    module = imported(model_on_disk(tmp_path, source, files))
    assert module.module.LEVEL == "version"
    assert module.module.far.LEVEL == "model"
    assert module.module.near.__name__ == "1.near"
    assert module.module.flat is not module.module.near
    assert sys.path[-2:] == [str(tmp_path / "m/1"), str(tmp_path / "m")]
    module.close()


def test_models_with_helpers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    source = "import helper\nNAME = helper.NAME\n"
    modules = [
        imported(model_on_disk(tmp_path, source, {"1/helper.py": f"NAME = {name!r}\n"}, name=name)) for name in "abc"
    ]
    assert [module.module.NAME for module in modules] == ["a", "b", "c"]
    assert [module.module.helper.NAME for module in modules] == ["a", "b", "c"]
    for module in modules:
        module.close()


def test_versions_side_by_side(tmp_path: Path) -> None:
    contexts = [model_on_disk(tmp_path, f"NUMBER = {number}\n", version=number) for number in (1, 2)]
    modules = [imported(context) for context in contexts]
    again = imported(contexts[0])
    assert [module.module.NUMBER for module in [*modules, again]] == [1, 2, 1]
    assert again.module is not modules[0].module
    assert again.module.__name__ == "1_2.model"
    for module in (*modules, again):
        module.close()


def test_reload_beside_sees_the_new_text_even_within_the_same_second(tmp_path: Path) -> None:
    files = {"1/helper.py": "WORD = 'old'\n"}
    context = model_on_disk(tmp_path, "import helper\nWORD = helper.WORD\nMINE = 1\n", files)
    old = imported(context)
    before = (context.version_directory / "helper.py").stat()
    for name, text in (("helper.py", "WORD = 'new'\n"), ("model.py", "import helper\nWORD = helper.WORD\nMINE = 2\n")):
        path = context.version_directory / name
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    new = imported(context)
    old.close()
    assert (old.module.WORD, old.module.MINE) == ("old", 1)
    assert (new.module.WORD, new.module.MINE) == ("new", 2)
    assert sys.modules["helper"].WORD == "new"
    new.close()


def test_nothing_is_written_into_the_repository(tmp_path: Path) -> None:
    context = model_on_disk(tmp_path, "import near, far\n", {"1/near.py": "", "far.py": ""})
    imported(context).close()
    assert [path for path in tmp_path.rglob("*") if path.name == "__pycache__"] == []


def test_modules_of_the_process_stay_what_they_are(tmp_path: Path) -> None:
    """A test that lies beside the model it tests, and a library below the model's directory, are not the model's."""
    beside = tmp_path / "m"
    context = model_on_disk(tmp_path, "import beside\n", {"beside.py": "", "lib/below_the_model.py": ""})
    sys.path.insert(0, str(beside))
    sys.path.insert(1, str(beside / "lib"))
    try:
        mine = importlib.import_module("beside")
        below = importlib.import_module("below_the_model")
        module = imported(context)
        assert module.module.beside is mine
        module.close()
        assert sys.modules["beside"] is mine
        assert sys.modules["below_the_model"] is below
        assert sys.path[:2] == [str(beside), str(beside / "lib")]
    finally:
        sys.path.remove(str(beside))
        sys.path.remove(str(beside / "lib"))
        del sys.modules["beside"], sys.modules["below_the_model"]


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    context = model_on_disk(tmp_path, "import helper\nraise OSError('no')\n", {"1/helper.py": ""})
    with pytest.raises(OSError, match="no"):
        imported(context)
    no_class = model_on_disk(tmp_path, "import helper\n", {"1/helper.py": ""})
    with pytest.raises(Internal, match="has no attribute 'TritonPythonModel'"):
        PythonBackend().open(no_class)


def test_functions_of_a_model_reach_the_processes_it_spawns(tmp_path: Path) -> None:
    """They are sent by name, ``1.model.double``, and the child finds that by the path it inherits."""
    context = model_on_disk(tmp_path, EMPTY + "def double(x):\n    return 2 * x\n")
    script = (
        "import multiprocessing, pathlib, sys\n"
        "from nerite.backends.python.module import ModelModule\n"
        "if __name__ == '__main__':\n"
        "    module = ModelModule(*map(pathlib.Path, sys.argv[1:])).module\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(module.double, [21]))\n"
    )
    (tmp_path / "main.py").write_text(script)
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py", context.directory, context.version_directory / "model.py"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.stdout, done.returncode) == ("[42]\n", 0), done.stderr


def test_model_directory_is_that_of_the_caller(tmp_path: Path) -> None:
    source = (
        "import numpy as np\nimport triton_python_backend_utils as pb_utils\nimport shared\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        both = np.array([pb_utils.get_model_dir(), shared.where()], dtype=object)\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', both)]) for _ in requests]\n"
    )
    shared = (
        "import triton_python_backend_utils\ndef where():\n    return triton_python_backend_utils.get_model_dir()\n"
    )
    contexts = [
        model_on_disk(tmp_path, source, {"shared.py": shared}, name=name, version=version)
        for name, version in (("a", 1), ("b", 1), ("b", 2))
    ]
    models = [PythonBackend().open(context) for context in contexts]
    for context, model in zip(contexts, models, strict=True):
        (response,) = execute(model.instance(InstanceContext("i")))
        own = str(context.version_directory)
        assert response.header is not None
        assert own.encode() in bytes(response.data[0])[4 : 4 + len(own)]
    with pytest.raises(TritonModelException, match="can only be called by a model"):
        get_model_dir()
    for model in models:
        model.close()


def test_model_directory_of_the_only_model(tmp_path: Path) -> None:
    module = imported(model_on_disk(tmp_path, EMPTY))
    assert get_model_dir() == str(tmp_path / "m/1")
    module.close()


def test_numpy_is_the_one_of_the_process(tmp_path: Path) -> None:
    instance = instance_of(model_on_disk(tmp_path, "import numpy\n" + EMPTY))
    assert sys.modules["numpy"] is np
    assert type(instance.model).__module__ == "1.model"
    close_models()


class Importing(str):
    """The name of a module; while it is looked at, another thread has imported something."""

    def partition(self, sep: str) -> tuple[str, str, str]:
        sys.modules[f"imported meanwhile {len(sys.modules)}"] = sys
        return super().partition(sep)


def test_others_import_while_a_model_is_opened_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    sys.modules[Importing("other")] = sys
    module = imported(model_on_disk(tmp_path, "import far\n" + EMPTY, {"far.py": ""}))
    module.close()
    assert "1.model" not in sys.modules
