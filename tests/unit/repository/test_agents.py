from __future__ import annotations

from hashlib import md5
from pathlib import Path

import pytest

from nerite.config.loading import poll_model_directory
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.repository.version_maker import consult_agents
from pages import Page

CONTENT = b"some weights"
SUM = md5(CONTENT).hexdigest()


def found(directory: Path, *parameters: tuple[str, str], name: str = "checksum") -> list[tuple[str, type[NeriteError]]]:
    """What is wrong with a model that has these parameters for an agent."""
    version = directory / "M" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_bytes(CONTENT)
    written = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters)
    config = f'backend: "python"\nmodel_repository_agents {{ agents [ {{ name: "{name}" {written} }} ] }}\n'
    (directory / "M" / "config.pbtxt").write_text(config)
    polled = consult_agents(poll_model_directory(directory / "M"))
    assert all(mistake.line == 2 and mistake.remedy for mistake in polled.mistakes)
    return [(mistake.message, mistake.error) for mistake in polled.mistakes]


@pytest.mark.parametrize(("algorithm", "value"), [("MD5", SUM), ("md5", SUM), ("MD5", SUM.upper())])
def test_a_file_that_is_as_it_should_be(tmp_path: Path, algorithm: str, value: str) -> None:
    assert found(tmp_path, (f"{algorithm}:1/model.py", value)) == []


def test_another_file_than_was_meant(tmp_path: Path) -> None:
    wanted = "Mismatched MD5 hash for file 1/model.py, expect: 00, got: " + SUM
    assert found(tmp_path, ("MD5:1/model.py", "00")) == [(wanted, InvalidArgument)]


def test_every_mistake_is_found(tmp_path: Path) -> None:
    parameters = (("1/model.py", SUM), ("SHA256:1/model.py", SUM), ("MD5:1/other.py", SUM), ("MD5:1", SUM))
    assert found(tmp_path, *parameters) == [
        ("failed to parse key: 1/model.py", InvalidArgument),
        ("Unsupported checksum algorithm: SHA256", Unsupported),
        ("failed to open text file for read 1/other.py: No such file or directory", InvalidArgument),
        ("failed to open text file for read 1: Is a directory", InvalidArgument),
    ]


def test_an_agent_that_is_not_there(tmp_path: Path) -> None:
    wanted = "unable to find 'libtritonrepoagent_decrypt.so' for repo agent 'decrypt'"
    assert found(tmp_path, name="decrypt") == [(wanted, Internal)]


def test_a_model_without_agents_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "M" / "1").mkdir(parents=True)
    polled = poll_model_directory(tmp_path / "M")
    assert consult_agents(polled) is polled


def test_what_the_documents_show(tmp_path: Path) -> None:
    block = Page("docs/repositories.md").block("model_repository_agents")
    (tmp_path / "M" / "1").mkdir(parents=True)
    (tmp_path / "M" / "1" / "model.onnx").write_bytes(CONTENT)
    (tmp_path / "M" / "config.pbtxt").write_text(block)
    (mistake,) = consult_agents(poll_model_directory(tmp_path / "M")).mistakes
    assert mistake.message.endswith(f"expect: d726e132f91f16ebee703d96f6f73cb1, got: {SUM}")
