"""``nerite add``, ``rm``, ``ls`` and ``show`` where nothing has to be loaded: command lines, refusals, tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import tree_models
from nerite.cli.main import main
from nerite.config.options import ServerOptions

Run = Callable[..., tuple[int, str, str]]
TENSORS = """\
backend: "python" max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }, { name: "text" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }]
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two models: one that is whole, one that lacks everything."""
    for version in (1, 2):
        (tmp_path / "whole" / str(version)).mkdir(parents=True)
        (tmp_path / "whole" / str(version) / "model.py").write_text("class TritonPythonModel:\n    execute = print\n")
    (tmp_path / "whole" / "config.pbtxt").write_text(TENSORS)
    (tmp_path / "bare" / "1").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["add"], "ARTIFACT"),
        (["add", "x", "--version", "0"], "'0' is not a positive integer"),
        (["add", "x", "--shape", "y"], "'y' is not a shape: write INPUT:3,224,224"),
        (["add", "x", "--shape", "y=3"], "'y=3' is not a shape"),
        (["add", "x", "--yes", "--no"], "not allowed with"),
        (["add", "x", "--shape", "y:3", "--no-measure"], "--shape has no effect with --no-measure"),
        (["add", "x", "--input", "y:FP33:1"], "'y:FP33:1' is not a tensor: write NAME:TYPE:N,N"),
        (["add", "x", "--output", "y:FP32:-2"], "is not a tensor"),
        (["rm"], "NAME"),
        (["show"], "NAME"),
        (["ls", "a", "b"], "unrecognized arguments"),
    ],
)
def test_wrong_command_lines(run: Run, arguments: list[str], says: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("command", ["add", "rm", "ls", "show"])
def test_help(run: Run, command: str) -> None:
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert f"nerite {command}" in out
    assert "Examples:" in out


def test_what_is_there(run: Run, repository: Path) -> None:
    status, out, _ = run("ls", repository)
    assert status == 0
    assert "| whole | 1, 2     | python                           |" in out
    assert "| bare  | 1        | unknown, 1 mistake: nerite check |" in out
    assert "hidden" not in out
    status, out, _ = run("ls", repository, "--json")
    bare, whole = json.loads(out)
    assert (bare["mistakes"], whole["versions"], whole["backend"]) == (1, [1, 2], "python")
    assert run("ls", repository / "bare" / "1")[1].startswith("No models in ")
    assert "no such directory" in run("ls", repository / "absent")[2]


def test_one_option_names_the_repository_in_all_commands(run: Run, repository: Path) -> None:
    for command in (["ls"], ["show", "whole"], ["check"]):
        out = run(*command, "--model-repository", repository)[1]
        assert "whole" in out or "bare" in out, command
    status, out, err = run("ls", repository, "--model-repository", repository)
    assert (status, out) == (1, "")
    assert "two repositories are given" in err
    status, out, err = run("environments", repository)
    assert (status, out) == (2, "")
    assert "Add --create." in err


def test_a_server_that_is_not_there(run: Run, repository: Path) -> None:
    status, out, err = run("ls", repository, "--url", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert "127.0.0.1:1" in err


def test_what_a_model_is(run: Run, repository: Path) -> None:
    status, out, _ = run("show", "whole", "--model-repository", repository, "--url", "gpu-3:8000", "--version", "2")
    assert status == 0
    assert out.startswith("whole, version 2 of 1, 2: python, batches of up to 8\n  input   x (FP32 [-1, 3, -1])\n")
    assert "2/model.py" in out
    assert "1/model.py" not in out
    assert "sha256:" in out
    assert "http://gpu-3:8000/v2/models/whole/versions/2/infer" in out
    assert """nerite client --url gpu-3:8000 infer whole --random --version 2""" in out
    snippet = json.loads(run("show", "whole", "--model-repository", repository, "--json")[1])["snippets"]["Python"]
    assert '"x": np.zeros((1, 3, 128), np.float32)' in snippet
    assert '"text": np.full((1, 1), "text", object)' in snippet
    compile(snippet, "snippet", "exec")


def test_the_largest_batch_is_the_one_that_a_server_gives(run: Run, tmp_path: Path) -> None:
    (tmp_path / "forest" / "1").mkdir(parents=True)
    (tmp_path / "forest" / "1" / "xgboost.model").write_bytes(tree_models.legacy_binary())
    (tmp_path / "forest" / "config.pbtxt").write_text(
        'backend: "fil" parameters { key: "model_type" value { string_value: "xgboost" } }'
    )
    shown = json.loads(run("show", "forest", "--model-repository", tmp_path, "--json")[1])
    assert str(shown["max_batch_size"]) == ServerOptions().settings_of("fil")["default-max-batch-size"] == "32768"


def test_what_a_model_is_not(run: Run, repository: Path) -> None:
    assert "Could not determine backend" in run("show", "bare", "--model-repository", repository)[2]
    assert "Did you mean 'whole'?" in run("show", "whale", "--model-repository", repository)[2]
    assert "Served versions: 2." in run("show", "whole", "--model-repository", repository, "--version", "3")[2]


def test_nobody_is_asked(run: Run, repository: Path) -> None:
    status, out, err = run("rm", "bare", "--model-repository", repository)
    assert (status, out) == (1, "")
    assert "cannot ask for confirmation" in err
    assert (repository / "bare").exists()
    assert run("rm", "bare", "--model-repository", repository, "--yes")[:2] == (0, f"Removed {repository}/bare.\n")
    assert not (repository / "bare").exists()


def test_a_refusal_as_json(run: Run, repository: Path) -> None:
    status, out, err = run("add", repository / "absent", "--model-repository", repository, "--json")
    assert (status, err) == (1, "")
    assert "no such file or directory" in json.loads(out)["error"]
