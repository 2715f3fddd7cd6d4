"""``nerite check`` as people and pipelines run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.repositories import repository, write
from serving import IDENTITY, PATIENCE, ensemble, pbtxt, python_model, serving, step

MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
TENSORS = (
    'input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
    'output [ { name: "B" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
)


def check(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nerite.tools.check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=cwd)


def add(repository: Path, name: str, config: str | None, code: str = MODEL) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config)
    return repository / name


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def test_nothing_is_wrong(models: Path) -> None:
    add(models, "a", TENSORS)
    add(models, "b", 'name: "b"\n' + TENSORS)
    done = check(models)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 models checked, no mistakes.\n", "")


def test_a_policy_file(models: Path) -> None:
    add(models, "a", TENSORS)
    policy = models.parent / "policy.toml"
    policy.write_text("[redis]\nurl = 'redis://localhost'\n")
    done = check("models", "--policy-file=policy.toml", cwd=models.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 model checked, no mistakes.\n", "")
    policy.write_text("[default]\ntokens_per_month = 1\nconcurency = 2\n")
    done = check("models", "--policy-file=policy.toml", cwd=models.parent)
    assert done.returncode == 1
    assert "policy.toml:3: default.concurency: is not known. Did you mean concurrency?" in done.stdout
    assert "policy.toml:2: default.tokens_per_month: needs a Redis" in done.stdout
    assert done.stdout.endswith("1 model checked, 2 mistakes.\n")


def test_all_mistakes_of_all_models(models: Path) -> None:
    add(models, "fine", TENSORS)
    add(models, "one", TENSORS + "instance_group [{ count: 2-4 }]\nmaxBatchSize: 8\n")
    add(models, "two", "max_batch_size: -1\n" + TENSORS + "dynamic_batching { preferred_batch_size: 0 }\n")
    done = check("models", cwd=models.parent)
    assert done.returncode == 1
    assert done.stderr == ""
    assert done.stdout == (
        "models/one/config.pbtxt:3:27: Expected identifier, got: -\n"
        "    'count' is one number, not a range: write count: 2 or count: 4.\n"
        'models/one/config.pbtxt:4:1: Message type "inference.ModelConfig" has no field named "maxBatchSize".\n'
        "    Write max_batch_size.\n"
        "models/two/config.pbtxt:1:17: 'max_batch_size' must be non-negative value for two\n"
        "    Write the largest batch, or 0 for a model whose tensors have no batch dimension.\n"
        "models/two/config.pbtxt:4:42: dynamic batching preferred size must be positive for two\n"
        "    Remove 'preferred_batch_size', or write sizes from 1 to max_batch_size.\n"
        "3 models checked, 4 mistakes in 2 models.\n"
    )


def test_json(models: Path) -> None:
    model = add(models, "m", 'backend: "python"\nmax_batch_size: "8"\n')
    (model / "003").mkdir()
    done = check(models, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == [
        {
            "model": "m",
            "file": f"{model}/config.pbtxt",
            "line": 2,
            "column": 17,
            "message": 'Expected integer, got: "8"',
            "remedy": "Write 8 without quotes.",
        }
    ]
    assert done.stderr == (
        f"warning: {model}: ignore version directory '003' which contains leading zeros in its directory name\n"
        "1 model checked, 1 mistake in 1 model, 1 warning.\n"
    )


def test_nothing_is_wrong_in_json(models: Path) -> None:
    add(models, "m", TENSORS)
    done = check("--json", models)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])


def test_warnings_do_not_fail(models: Path) -> None:
    model = add(models, "m", "instance_group { kind: KIND_GPU gpus: 0 }\n" + TENSORS)
    (model / "abc").mkdir()
    empty = models.parent / "empty"
    empty.mkdir()
    done = check(models, empty)
    assert done.returncode == 0
    assert done.stdout == (
        f"warning: {model}: on this machine: instance group m_0 of model m specifies invalid or unsupported gpu id 0. "
        "GPUs with at least the minimum required CUDA compute compatibility of 6.000000 are: none. "
        "Write kind: KIND_CPU and remove 'gpus': this machine has no GPU that could be used.\n"
        f"warning: {model}: ignore version directory 'abc' which fails to convert to integral number\n"
        f"warning: {empty}: the repository is empty\n"
        "1 model checked, no mistakes, 3 warnings.\n"
    )


def test_a_configuration_of_another_name(models: Path) -> None:
    model = add(models, "m", "max_batch_size: -1\n" + TENSORS)
    (model / "configs").mkdir()
    (model / "configs" / "gpu.pbtxt").write_text("max_batch_size: 4\n" + TENSORS)
    assert check(models).returncode == 1
    assert check(models, "--model-config-name", "gpu").returncode == 0


COMPLETING = """
print("hello from the model")

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(4)
        config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [0]})
        return config
"""


def test_what_a_model_completes_is_judged_and_what_it_prints_is_kept_apart(models: Path) -> None:
    add(models, "m", 'backend: "python"\n', COMPLETING)
    done = check(models, "--json")
    assert done.returncode == 1
    assert [row["message"] for row in json.loads(done.stdout)] == [
        "model input 'A' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"
    ]
    assert "hello from the model\n" in done.stderr
    assert check(models, "--disable-auto-complete-config").returncode == 0


def test_without_completion_the_configuration_has_to_be_there(models: Path) -> None:
    model = add(models, "m", None)
    assert check(models).returncode == 0
    done = check(models, "--disable-auto-complete-config")
    assert done.returncode == 1
    assert f"failed to open text file for read {model}/config.pbtxt: No such file or directory" in done.stdout


def test_what_is_not_installed_is_a_note(models: Path) -> None:
    model = add(models, "m", TENSORS, "import a_package_that_nobody_has\n" + MODEL)
    done = check(models)
    assert done.returncode == 0
    assert done.stdout == (
        f"note: {model}: not completed from the model: ModuleNotFoundError: No module named "
        "'a_package_that_nobody_has'\n"
        "1 model checked, no mistakes.\n"
    )


def test_a_backend_that_nobody_knows(models: Path) -> None:
    model = add(models, "m", 'backend: "pyton"\n' + TENSORS)
    done = check(models)
    assert done.returncode == 1
    assert done.stdout.startswith(
        f"{model}/config.pbtxt:1:10: unable to find backend library for backend 'pyton', try specifying runtime on the "
        "model configuration."
    )


def test_samples_for_warming_up(models: Path) -> None:
    sample = """model_warmup [ { name: "%s" batch_size: 1 inputs { key: "A" value {
  data_type: TYPE_FP32 dims: 1 %s } } } ]
"""
    good = sample % ("good", "zero_data: true")
    model = add(models, "m", TENSORS + good + sample % ("absent", 'input_data_file: "absent"'))
    done = check(models)
    assert done.returncode == 1
    assert (
        f"failed to open text file for read {model}/warmup/absent: No such file or directory\n"
        "    The sample 'absent' of 'model_warmup' is invalid.\n"
    ) in done.stdout
    assert done.stdout.startswith(f"{model}/config.pbtxt:")
    assert "'good'" not in done.stdout


def test_recorded_requests(models: Path) -> None:
    parameter = 'parameters { key: "WARMUP_REQUESTS" value { string_value: "requests.jsonl" } }\n'
    model = add(models, "m", TENSORS + parameter)
    (model / "warmup").mkdir()
    right = '{"inputs": [{"name": "A", "shape": [1], "datatype": "FP32", "data": [1]}]}\n'
    (model / "warmup" / "requests.jsonl").write_text(right + right.replace('"A"', '"B"'))
    done = check(models)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{model}/config.pbtxt:")
    assert "The recorded request at warmup/requests.jsonl:2 is invalid.\n" in done.stdout
    assert "jsonl:1" not in done.stdout


def test_bounds_of_a_queue(models: Path) -> None:
    model = add(models, "m", TENSORS + 'parameters { key: "MAX_QUEUE_SECONDS" value { string_value: "soon" } }\n')
    done = check(models)
    assert done.returncode == 1
    assert done.stdout == (
        f"{model}/config.pbtxt:3:19: parameter 'MAX_QUEUE_SECONDS' of model 'm' is 'soon'; it must be a number from 0 "
        'on\n    Write a number, as in: value { string_value: "0.5" }, or remove the parameter.\n'
        "1 model checked, 1 mistake in 1 model.\n"
    )


def test_ensembles_as_a_load_has_it(models: Path, tmp_path: Path) -> None:
    wrong = ("bad_batch", "bad_circle", "bad_circle_back", "bad_input", "bad_model", "bad_version")
    for name in (*wrong, "bad_inner", "numbered", "twice"):
        write(repository("ensembles")[name], models / name)
    rows = json.loads(check(models, "--json").stdout)
    assert {row["model"] for row in rows} == set(wrong)
    with serving(models, tmp_path / "log", "--model-control-mode=explicit") as server:
        for name in wrong:
            status, _, told = server.ask("POST", f"/v2/repository/models/{name}/load")
            texts = [
                f"load failed for model '{name}': {row['message']}\n{row['file']}:{row['line']}:{row['column']}\n"
                f"    {row['remedy']}"
                for row in rows
                if row["model"] == name
            ]
            assert status == 400
            assert json.loads(told)["error"] in texts
    done = check(models)
    assert f"note: {models}/bad_inner: not checked against 'bad_model', which has mistakes of its own\n" in done.stdout
    assert done.stdout.endswith("9 models checked, 7 mistakes in 6 models.\n")


def test_one_model_in_two_repositories(models: Path) -> None:
    add(models, "m", TENSORS)
    other = add(models.parent / "other", "m", TENSORS)
    done = check(models, models.parent / "other")
    assert done.returncode == 1
    assert f"{other}: failed to poll model 'm': not unique across all model repositories" in done.stdout


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    done = check(tmp_path / "nope")
    assert done.returncode == 1
    assert done.stdout == (
        f"{tmp_path}/nope: failed to open directory {tmp_path}/nope\n"
        "    No such file or directory: specify a directory that contains one directory per model.\n"
        "0 models checked, 1 mistake.\n"
    )


def test_help_and_a_wrong_command_line() -> None:
    done = check("--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    done = check()
    assert done.returncode == 1
    assert "failed to open directory models" in done.stdout
    assert check("--jsn", "x").returncode == 2


def test_sums_of_files(models: Path) -> None:
    agents = (
        'model_repository_agents { agents [ { name: "checksum" parameters { key: "MD5:1/model.py" value: "0" } } ] }'
    )
    model = add(models, "m", TENSORS + agents)
    done = check(models)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{model}/config.pbtxt:3:")
    assert "Mismatched MD5 hash for file 1/model.py, expect: 0, got: " in done.stdout


def test_a_backend_in_the_backend_directory(models: Path, tmp_path: Path) -> None:
    backend = tmp_path / "backends" / "mine" / "model.py"
    backend.parent.mkdir(parents=True)
    backend.write_text(
        "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n"
        "        config.add_input({'name': 'A', 'data_type': 'TYPE_FP32', 'dims': [1]})\n"
        "        config.add_output({'name': 'B', 'data_type': 'TYPE_FP32', 'dims': [1]})\n        return config\n"
    )
    add(models, "m", 'backend: "mine"\n')
    done = check(models, f"--backend-directory={backend.parents[1]}")
    assert (done.returncode, done.stdout) == (0, "1 model checked, no mistakes.\n")
    done = check(models, f"--backend-directory={tmp_path}")
    assert done.returncode == 1
    assert "config.pbtxt:1:10: unable to find backend library for backend 'mine'" in done.stdout
    assert f"put its model.py into {tmp_path}/mine (see --backend-directory)" in done.stdout


def test_routes(models: Path) -> None:
    """An ensemble with a step on a route is checked against an arm; a mistake has its line."""
    python_model(models, "arm", IDENTITY, pbtxt())
    ensemble(models, "outer", step("scorer", "INPUT0", "OUTPUT0"))
    (models / "scorer").mkdir()
    route = models / "scorer" / "route.toml"
    route.write_text('[[arm]]\nmodel = "arm"\nweight = 1\n')
    done = check(models)
    assert (done.returncode, done.stdout) == (0, "3 models checked, no mistakes.\n")
    route.write_text('[[arm]]\nmodel = "arm"\nwieght = 1\n')
    (models / "arm" / "route.toml").write_text("\n[[arm]]\nversion = 3\nweight = 1\n")
    done = check("models", cwd=models.parent)
    assert done.returncode == 1
    assert "models/arm/route.toml:2:1: there is no version 3; there are: 1\n" in done.stdout
    assert "models/scorer/route.toml:3:1: 'wieght' is not known. An arm has: model, version, weight\n" in done.stdout


@pytest.mark.parametrize("kind", ["KIND_GPU", "KIND_GPU gpus: [ 0, 1 ]"])
@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        ('backend: "nosuch"', {}, "unable to find backend library for backend 'nosuch'"),
        ('backend: "onnxruntime"', {"note.txt": ""}, "unable to find '{version}/model.onnx'"),
        ('backend: "onnxruntime"', {"model.onnx": "no model"}, "model.onnx"),
        ('platform: "tensorrt_plan"', {".gitkeep": ""}, "unable to find '{version}/model.plan'"),
        ('platform: "pytorch_libtorch"', {".gitkeep": ""}, "unable to find '{version}/model.pt'"),
        ('platform: "tensorflow_savedmodel"', {".gitkeep": ""}, "unable to find '{version}/model.savedmodel'"),
        ('backend: "openvino"', {".gitkeep": ""}, "unable to find '{version}/model.xml'"),
        ('backend: "python"', {".gitkeep": ""}, "Python model file not found in '{version}/model.py'"),
        ('backend: "python"', {"model.py": "def (\n"}, "SyntaxError"),
        ('backend: "python"', {"model.py": "class Other:\n    pass\n"}, "has no attribute 'TritonPythonModel'"),
    ],
)
def test_on_a_machine_without_a_gpu_the_other_mistakes_are_found(
    models: Path, config: str, files: dict[str, str], message: str, kind: str
) -> None:
    version = models / "m" / "1"
    version.mkdir(parents=True)
    for name, text in files.items():
        (version / name).write_text(text)
    (version.parent / "config.pbtxt").write_text(f"{config}\n{TENSORS}instance_group {{ kind: {kind} }}\n")
    done = check(models)
    assert message.format(version=version) in done.stdout
    assert done.returncode == 1
    assert "1 mistake" in done.stdout
    assert "on this machine: instance group" in done.stdout


def test_a_mistake_that_a_library_raises_is_placed_in_the_model(models: Path) -> None:
    code = "import dataclasses\n\n\n@dataclasses.dataclass\nclass A:\n    x: list = []\n\n\n" + MODEL
    model = add(models, "m", TENSORS, code)
    done = check(models)
    assert f"{model}/1/model.py:4:1: " in done.stdout or f"{model}/1/model.py:5:1: " in done.stdout
    assert "dataclasses.py:" not in done.stdout
