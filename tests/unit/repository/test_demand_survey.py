"""What is known of models before they are loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nerite.backends.interface import ModelContext
from nerite.config.model_parameters import DemandMode
from nerite.config.options import ControlMode, RepositoryOptions
from nerite.llm.checkpoint import task_of
from nerite.repository.demand_survey import DemandSurvey, demanded
from nerite.repository.repositories import LocalRepository
from serving import IDENTITY, ensemble, pbtxt, python_model, step


def survey(models: Path, mode: ControlMode = "demand", *startup: str, gpus: tuple[int, ...] = ()) -> DemandSurvey:
    options = RepositoryOptions((str(models),), control_mode=mode, startup_models=startup, keep_alive_seconds=7)
    return DemandSurvey([LocalRepository(str(models))], options, gpus, task_of)


def saying(key: str, value: str) -> str:
    return pbtxt(parameters=f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}')


def test_each_model_says_whether_requests_load_it(tmp_path: Path) -> None:
    for name, value in (("always", "pinned"), ("never", "false"), ("wanted", "true")):
        python_model(tmp_path, name, IDENTITY, saying("LOAD_ON_DEMAND", value))
    for name in ("plain", "named"):
        python_model(tmp_path, name, IDENTITY)
    found = survey(tmp_path, "demand", "named").read()
    assert {name: each.mode for name, each in found.items()} == {
        "always": DemandMode.PINNED,
        "never": DemandMode.NEVER,
        "wanted": DemandMode.ON_DEMAND,
        "plain": DemandMode.ON_DEMAND,
        "named": DemandMode.PINNED,
    }
    assert [each.name for each in demanded(survey(tmp_path, "explicit", "named").read())] == ["always", "wanted"]


def test_what_a_model_of_language_does_is_known_from_its_files(tmp_path: Path) -> None:
    for name, parameter in (("chat", ""), ("vectors", "embed"), ("wrong", "nonsense")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        task = f'parameters {{ key: "TASK" value: {{ string_value: "{parameter}" }} }}' if parameter else ""
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "llm"\n{task}')
    python_model(tmp_path, "other", IDENTITY)
    tasks = {name: each.text_task for name, each in survey(tmp_path).read().items()}
    assert tasks == {"chat": "generate", "vectors": "embed", "wrong": "", "other": ""}


def test_an_ensemble_has_its_models_with_it(tmp_path: Path) -> None:
    python_model(tmp_path, "part", IDENTITY, saying("LOAD_ON_DEMAND", "false"))
    ensemble(tmp_path, "whole", step("part", "INPUT0", "OUTPUT0"))
    found = survey(tmp_path).read()
    assert found["whole"].needs == ("part",)
    assert found["whole"].estimate == {}
    assert [each.name for each in demanded(found)] == ["whole", "part"]


def test_a_keep_alive_of_its_own_and_what_its_files_take(tmp_path: Path) -> None:
    config = saying("KEEP_ALIVE_SECONDS", "90").replace("KIND_CPU", "KIND_GPU")
    folder = python_model(tmp_path, "m", IDENTITY, config)
    python_model(tmp_path, "other", IDENTITY)
    (folder / "1" / "weights").write_bytes(bytes(1 << 20))
    found = survey(tmp_path, gpus=(0, 1)).read()
    assert (found["m"].keep_alive, found["other"].keep_alive) == (90, 7)
    assert found["m"].estimate["GPU 1"] > 1 << 20
    assert found["m"].estimate["host"] > found["m"].estimate["GPU 0"], "and a worker"
    assert set(found["other"].estimate) == {"host"}


def test_a_mistake_is_known_before_the_load(tmp_path: Path) -> None:
    python_model(tmp_path, "m", IDENTITY, saying("LOAD_ON_DEMAND", "often"))
    python_model(tmp_path, "n", IDENTITY, saying("KEEP_ALIVE_SECONDS", "long"))
    found = survey(tmp_path).read()
    assert "'LOAD_ON_DEMAND' of model 'm' is 'often'; it must be true, false or pinned" in found["m"].mistake
    assert "'KEEP_ALIVE_SECONDS' of model 'n' is 'long'; it must be a number" in found["n"].mistake


def test_a_change_is_seen_and_a_repository_that_is_gone_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = tmp_path / "models"
    python_model(models, "m", IDENTITY)
    made = survey(models)
    before = made.read()
    assert made.read()["m"] is before["m"], "it was not read again"
    python_model(models, "m", IDENTITY, version=2)
    after = made.read()
    assert (after["m"].versions, after["m"].digest != before["m"].digest) == ((2,), True)
    models.rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.ERROR):
        assert made.read() == after
    assert "failed to read the model repository" in caplog.text


def test_a_model_that_cannot_be_read_keeps_the_server_from_no_other(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        python_model(tmp_path, name, IDENTITY, 'backend: "llm"')

    def fails(model: ModelContext) -> str:
        if model.name == "bad":
            raise RecursionError("no such case was foreseen")
        return "generate"

    options = RepositoryOptions((str(tmp_path),), control_mode="demand")
    assert list(DemandSurvey([LocalRepository(str(tmp_path))], options, (), fails).read()) == ["good"]
