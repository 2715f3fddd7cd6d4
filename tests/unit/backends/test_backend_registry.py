"""Finding backends by name: our own, those in the backend directory, those of packages."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from nerite.backends import registry
from nerite.backends.interface import ModelContext
from nerite.config.model_config import ModelConfig, ModelParameter
from nerite.core.errors import InvalidArgument, Unsupported

STAND_IN_FOR_TENSORRT = Path(__file__).resolve().parents[2] / "stand_ins" / "tensorrt"
ROOT = Path(__file__).resolve().parents[3]
PACKAGED = """
class LookupBackend:
    name = "lookup"
    interface = {interface}
    isolated = False
"""


def model_of(backend: str, directory: Path | str = "", runtime: str = "") -> ModelContext:
    config = {"backend": backend, "runtime": runtime}
    return ModelContext("m", 1, Path("/models/m"), config, {"backend-directory": str(directory)})


def there_are(*more: str) -> str:
    """Return the sentence that names our backends, and more."""
    return f"The available backends are: {', '.join(sorted([*registry.ENTRIES, *more]))}."


def written_in_python(directory: Path, name: str) -> Path:
    file = directory / name / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text("class TritonPythonModel:\n    pass\n")
    return file


def installed(folder: Path, source: str, point: str = "lookup_module:LookupBackend", package: str = "lookup") -> None:
    """Write what an installer would: a module, and the entry point that leads to it."""
    (folder / "lookup_module.py").write_text(source)
    metadata = folder / f"{package}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(f"[nerite.backends]\nlookup = {point}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are looked for in."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(registry, "packaged_backends", {})
    monkeypatch.delitem(sys.modules, "lookup_module", raising=False)
    return folder


def refusal(context: ModelContext) -> str:
    with pytest.raises(InvalidArgument) as refused:
        registry.backend_of(context)
    return refused.value.message


def test_a_backend_is_one_object() -> None:
    found = registry.backend_of(model_of("onnxruntime"))
    assert found.name == "onnxruntime"
    assert registry.backend_of(model_of("onnxruntime")) is found


def names_with(*others: str) -> str:
    return ", ".join(sorted((*registry.ENTRIES, *others)))


@pytest.mark.parametrize("name", registry.ENTRIES)
def test_every_entry_leads_to_a_backend_of_that_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The only framework that the tests do not install: it needs a GPU, and 2 GB.
    monkeypatch.syspath_prepend(str(STAND_IN_FOR_TENSORRT))
    found = registry.backend(name)
    assert found.name == name
    assert isinstance(found.isolated, bool)


def test_an_unknown_backend(tmp_path: Path) -> None:
    written_in_python(tmp_path, "mine")
    assert refusal(model_of("onnx", tmp_path)) == (
        "unable to find backend library for backend 'onnx', try specifying runtime on the model configuration. "
        f"{there_are('mine')} Install the package that offers it, or put its model.py into {tmp_path}/onnx (see "
        "--backend-directory)."
    )


FRAMEWORKS = {name: entry for name, entry in registry.ENTRIES.items() if entry.package}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_framework_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = importlib.machinery.ModuleSpec(FRAMEWORKS[name].package, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    registry.backend.cache_clear()
    with pytest.raises(Unsupported) as refused:
        registry.backend_of(model_of(name))
    package, extra = FRAMEWORKS[name].package, FRAMEWORKS[name].extra
    assert refused.value.message == (
        f"backend '{name}' needs the Python package '{package}', which is not installed. Install it with: "
        f"pip install 'nerite[{extra}]'"
    )
    # Installed in the meantime: the refusal was not kept.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: framework)
    assert registry.backend(name).name == name


def test_a_framework_that_the_models_environment_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is said in the Python of that environment."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = {"backend": "litert", "parameters": {"EXECUTION_ENV_PATH": {"string_value": "/env"}}}
    with pytest.raises(Unsupported) as refused:
        registry.backend_of(ModelContext("m", 1, Path("/models/m"), config))
    assert refused.value.message == (
        "the environment of model 'm' (EXECUTION_ENV_PATH) lacks the Python package 'ai-edge-litert'. Add it to the "
        f"environment's list of packages, or install it there: {sys.executable} -m pip install ai-edge-litert"
    )


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_extra_brings_the_framework(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in extras[FRAMEWORKS[name].extra]}
    # TensorRT is not installed where there is no GPU; its package is called as its module.
    module = FRAMEWORKS[name].package
    distributions = importlib.metadata.packages_distributions().get(module, [module])
    providers = {each.lower().replace("_", "-") for each in distributions}
    assert brought & providers


@pytest.mark.parametrize("runtime", ["", "model.py"])
def test_one_in_the_backend_directory(runtime: str, tmp_path: Path) -> None:
    written_in_python(tmp_path, "mine")
    model = model_of("mine", tmp_path, runtime)
    found = registry.backend_of(model)
    assert found.name == "mine"
    assert registry.is_isolated(found, model)
    assert registry.backend_of(model_of("mine", tmp_path, runtime)) is found


def test_ours_are_not_replaced(tmp_path: Path) -> None:
    written_in_python(tmp_path, "python")
    assert registry.backend_of(model_of("python", tmp_path)) is registry.backend("python")
    assert registry.filled_in(ModelConfig(backend="python"), str(tmp_path)) == ModelConfig(backend="python")


def test_a_name_does_not_lead_out_of_the_directory(tmp_path: Path) -> None:
    written_in_python(tmp_path, "mine")
    (tmp_path / "backends").mkdir()
    assert "unable to find backend library for backend '../mine'" in refusal(model_of("../mine", tmp_path / "backends"))


def test_a_runtime_that_is_not_there(tmp_path: Path) -> None:
    written_in_python(tmp_path, "mine")
    assert refusal(model_of("other", tmp_path, "model.py")).startswith(
        "unable to find Python backend based backend library 'model.py' for model 'm', searched: "
        f"'{tmp_path}/other/model.py'. {there_are('mine')}"
    )
    assert refusal(model_of("mine", tmp_path, "libtriton_else.so")).startswith(
        "unable to find backend library 'libtriton_else.so' for model 'm', searched: '/models/m/1' '/models/m' "
        f"'{tmp_path}/mine' . Nerite cannot run shared libraries: remove 'runtime' from the configuration. The "
    )


def test_a_shared_library(tmp_path: Path) -> None:
    (tmp_path / "dali").mkdir()
    (tmp_path / "dali" / "libtriton_dali.so").touch()
    library = f"{tmp_path}/dali/libtriton_dali.so"
    assert f"'{library}' cannot be used: Nerite cannot run shared libraries." in refusal(model_of("dali", tmp_path))


def test_what_follows_for_the_configuration(tmp_path: Path) -> None:
    file = written_in_python(tmp_path, "mine")
    bare = ModelConfig(backend="mine")
    filled = registry.filled_in(bare, str(tmp_path))
    assert (filled.runtime, filled.parameters) == ("model.py", {})
    assert registry.filled_in(filled, str(tmp_path)) == filled
    environment = file.with_name("pb_exec_env_model.py.tar.gz")
    environment.touch()
    path = ModelParameter(string_value=str(environment))
    assert registry.filled_in(bare, str(tmp_path)).parameters == {"EXECUTION_ENV_PATH": path}
    # A model's own environment counts more.
    own = {"EXECUTION_ENV_PATH": ModelParameter(string_value="/own")}
    assert registry.filled_in(ModelConfig(backend="mine", parameters=own), str(tmp_path)).parameters == own


def test_one_of_a_package(site: Path) -> None:
    assert there_are() in refusal(model_of("lookup"))
    installed(site, PACKAGED.format(interface=1))
    found = registry.backend_of(model_of("lookup"))
    assert (found.name, registry.is_isolated(found, model_of("lookup"))) == ("lookup", False)
    assert registry.backend_of(model_of("lookup")) is found
    assert there_are("lookup") in refusal(model_of("else"))


def test_one_that_does_not_say_is_isolated(site: Path) -> None:
    installed(site, PACKAGED.format(interface=1).replace("    isolated = False\n", ""))
    assert registry.is_isolated(registry.backend_of(model_of("lookup")), model_of("lookup"))


def test_one_whose_models_differ(site: Path) -> None:
    method = "    def isolates(self, context):\n        return context.name == 'm'\n"
    installed(site, PACKAGED.format(interface=1) + method)
    model = model_of("lookup")
    found = registry.backend_of(model)
    assert registry.is_isolated(found, model)
    assert not registry.is_isolated(found, replace(model, name="other"))


def test_the_directory_comes_before_packages(site: Path, tmp_path: Path) -> None:
    installed(site, PACKAGED.format(interface=1))
    written_in_python(tmp_path / "backends", "lookup")
    model = model_of("lookup", tmp_path / "backends")
    assert registry.is_isolated(registry.backend_of(model), model)


@pytest.mark.parametrize(
    ("source", "point", "expected"),
    [
        (
            PACKAGED.format(interface=2),
            "lookup_module:LookupBackend",
            "is written for version 2 of the backend interface; this Nerite has version 1. "
            "Install a version of the package that supports it",
        ),
        ("class LookupBackend:\n    pass\n", "lookup_module:LookupBackend", "is written for version None of the"),
        (
            "import nowhere_to_be_found",
            "lookup_module:LookupBackend",
            "cannot be imported: ModuleNotFoundError: ",
        ),
        ("", "lookup_module:LookupBackend", "cannot be imported: AttributeError: "),
    ],
)
def test_a_package_that_is_wrong(source: str, point: str, expected: str, site: Path) -> None:
    installed(site, source, point)
    with pytest.raises(Unsupported) as refused:
        registry.backend_of(model_of("lookup"))
    assert refused.value.message.startswith(f"backend 'lookup' of the package lookup 1.2 {expected}")


def test_two_packages_with_one_name(site: Path) -> None:
    installed(site, PACKAGED.format(interface=1))
    installed(site, PACKAGED.format(interface=1), package="other")
    with pytest.raises(Unsupported, match=r"offered by the packages (lookup 1.2 and other|other 1.2 and lookup) 1.2: "):
        registry.package_backend("lookup")
