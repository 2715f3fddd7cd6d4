"""More than one repository, with and without namespaces; and models that are copied while the server looks."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving import HELD, IDENTITY, Serving, adds, ensemble, eventually, let_go, pbtxt, python_model, serving, step

NEGATIVE = IDENTITY.replace(".as_numpy()", ".as_numpy() * -1")


@pytest.fixture
def repositories(tmp_path: Path) -> list[Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    python_model(first, "both", IDENTITY)
    python_model(second, "both", NEGATIVE)
    python_model(first, "one", IDENTITY)
    python_model(second, "two", NEGATIVE)
    return [first, second]


def test_models_of_several(repositories: list[Path], tmp_path: Path) -> None:
    shutil.rmtree(repositories[1] / "both")
    with serving(repositories[0], tmp_path / "log", f"--model-repository={repositories[1]}") as server:
        assert server.infer("one", [1.0]) == [1.0]
        assert server.infer("two", [1.0]) == [-1.0]
        assert [entry["name"] for entry in server.json("POST", "/v2/repository/index")] == ["both", "one", "two"]


def test_a_name_in_two_of_them(repositories: list[Path], tmp_path: Path) -> None:
    flags = (f"--model-repository={repositories[1]}", "--exit-on-error=false")
    with serving(repositories[0], tmp_path / "log", *flags) as server:
        assert server.infer("one", [1.0]) == [1.0]
        assert server.ask("POST", "/v2/models/both/infer")[0] == 404
        assert f"model appears in two or more repositories: {repositories[0]} and {repositories[1]}" in server.text


def test_namespaces(repositories: list[Path], tmp_path: Path) -> None:
    flags = (f"--model-repository={repositories[1]}", "--model-namespacing=true", "--model-control-mode=poll")
    with serving(repositories[0], tmp_path / "log", *flags, "--repository-poll-secs=1") as server:
        assert server.infer("one", [1.0]) == [1.0]
        with pytest.raises(RuntimeError, match="There are 2 identifiers of model 'both'"):
            server.infer("both", [1.0])
        counted = [name for name in server.metrics() if name.startswith("nv_inference_request_success")]
        assert sum(f'namespace="{repositories[1]}"' in name for name in counted) == 2
        shutil.rmtree(repositories[0] / "both")
        eventually(lambda: server.ready("both"))
        assert server.infer("both", [1.0]) == [-1.0]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    """A server of three repositories, whose ensembles ask models of one name, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("namespaces")
    first, second, third = repositories = [folder / name for name in ("first", "second", "third")]
    python_model(first, "both", adds(1), pbtxt(batch=1, more=""))
    python_model(second, "both", adds(2), pbtxt(batch=1, more=""))
    python_model(second, "single", adds(4), pbtxt(batch=1, more=""))
    python_model(second, "moves", adds(4), pbtxt(batch=1, more=""))
    for at, repository in enumerate((first, second)):
        python_model(repository, "fails", FAILS if at == 0 else IDENTITY, pbtxt(batch=1, more=""), version=3 + at)
    python_model(first, "calls", CALLS, pbtxt(batch=1, more=""))
    for at, repository in enumerate(repositories):
        ensemble(repository, f"beside_{at}", step("both", "INPUT0", "OUTPUT0"))
    for name, model in (("elsewhere", "single"), ("failing", "fails"), ("moving", "moves")):
        ensemble(first, name, step(model, "INPUT0", "OUTPUT0"))
    named = step("both", "INPUT0", "OUTPUT0").replace("{ model_name", f'{{ model_namespace: "{second}" model_name', 1)
    ensemble(first, "named", named)
    ensemble(third, "chain", named.replace('OUTPUT0" }', 't" }'), step("elsewhere", "t", "OUTPUT0"))
    flags = [f"--model-repository={each}" for each in repositories[1:]]
    flags += ["--model-namespacing=true", "--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false"]
    with serving(first, folder / "log", *flags) as server:
        yield server, folder


CALLS = """
def execute(self, requests):
    answers = []
    for request in requests:
        given = [pb_utils.get_input_tensor_by_name(request, "INPUT0")]
        called = pb_utils.InferenceRequest(model_name="both", requested_output_names=["OUTPUT0"], inputs=given).exec()
        answers.append(pb_utils.InferenceResponse(called.output_tensors(), called.error()))
    return answers
"""


@pytest.mark.parametrize(
    ("name", "amount"), [("beside_0", 1), ("beside_1", 2), ("elsewhere", 4), ("named", 2), ("chain", 6)]
)
def test_a_step_goes_to_the_model_of_its_namespace(pipelines: tuple[Serving, Path], name: str, amount: int) -> None:
    server, folder = pipelines
    assert server.infer(name, [10.0]) == [10.0 + amount]
    if name == "named":
        (told,) = server.json("GET", "/v2/models/named/config")["ensemble_scheduling"]["step"]
        assert told["model_namespace"] == str(folder / "second")


def test_a_step_that_could_go_to_several(pipelines: tuple[Serving, Path]) -> None:
    server, _ = pipelines
    assert not server.ready("beside_2")
    assert "ensemble beside_2 contains models that are not available or ambiguous: both" in server.text


def test_a_call_of_a_model_means_a_name_alone(pipelines: tuple[Serving, Path]) -> None:
    with pytest.raises(RuntimeError, match="There are 2 identifiers of model 'both' in global map"):
        pipelines[0].infer("calls", [10.0])


def test_an_error_of_a_step_names_the_version_that_was_asked(pipelines: tuple[Serving, Path]) -> None:
    with pytest.raises(RuntimeError, match="at step 1 of 'failing': model 'fails', version 3, given INPUT0"):
        pipelines[0].infer("failing", [10.0])


FAILS = """
def execute(self, requests):
    raise ValueError("no")
"""


def test_a_neighbour_that_comes_is_asked_from_then_on(pipelines: tuple[Serving, Path]) -> None:
    server, folder = pipelines
    assert server.infer("moving", [10.0]) == [14.0]
    python_model(folder / "first", "moves", adds(8), pbtxt(batch=1, more=""))
    server.ask("POST", "/v2/repository/models/moves/load")
    assert server.infer("moving", [10.0]) == [18.0]


def test_a_step_whose_model_goes_or_changes_is_linked_to_another(repositories: list[Path], tmp_path: Path) -> None:
    """The neighbour if there is one, else the only one there is; a request that is under way ends where it began."""
    first, second = repositories
    python_model(first, "held", HELD, pbtxt(batch=1, more=""))
    ensemble(first, "chain", step("held", "INPUT0", "between"), step("both", "between", "OUTPUT0"))
    flags = (f"--model-repository={second}", "--model-namespacing=true", "--model-control-mode=poll")
    log = tmp_path / "log"
    with serving(first, log, *flags, "--repository-poll-secs=1") as server, ThreadPoolExecutor(1) as thread:
        assert server.infer("chain", [1.0]) == [1.0]
        begun = thread.submit(server.infer, "chain", [-2.0])
        eventually(lambda: "executes -2.0" in server.text)
        shutil.rmtree(first / "both")
        eventually(lambda: server.text.count("loading: chain:1") == 2)
        let_go(first / "held")
        assert begun.result() == [-2.0]
        assert server.infer("chain", [1.0]) == [-1.0]
        python_model(first, "both", adds(1), pbtxt(batch=2, more=""))
        eventually(lambda: server.infer("chain", [1.0]) == [2.0])
        text = (first / "chain" / "config.pbtxt").read_text()
        (first / "chain" / "config.pbtxt").write_text(text.replace('"both"', '"two"'))
        eventually(lambda: server.infer("chain", [1.0]) == [-1.0])


def test_a_model_that_is_replaced_under_poll_is_never_gone(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "m", IDENTITY)
    python_model(tmp_path / "new", "m", NEGATIVE)
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serving(models, tmp_path / "log", *flags) as server:
        wrong: list[str] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                try:
                    server.infer("m", [1.0])
                except RuntimeError as error:
                    wrong.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            # As a copy over a slow link: for a while there is nothing, then a part, then all.
            shutil.rmtree(models / "m")
            eventually(lambda: not (models / "m").exists())
            (models / "m" / "1").mkdir(parents=True)
            code = (tmp_path / "new" / "m" / "1" / "model.py").read_text()
            with (models / "m" / "1" / "model.py").open("w") as file:
                for line in code.splitlines(keepends=True):
                    file.write(line)
                    file.flush()
            shutil.copy(tmp_path / "new" / "m" / "config.pbtxt", models / "m" / "config.pbtxt")
            eventually(lambda: server.infer("m", [1.0]) == [-1.0])
        finally:
            stop.set()
            asking.join()
        assert wrong == []
        assert "failed to" not in server.text
