"""More than one repository, with and without namespaces; and models that are copied while the server looks."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from serving import IDENTITY, eventually, python_model, serving

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
