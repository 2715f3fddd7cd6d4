"""docs/environments.md is followed on a real server, with packages from a folder in the place of an index."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import wheels
from pages import Page, run
from serving import Serving, pbtxt, python_model, serving

PAGE = Page("docs/environments.md")
TITLES = """
def execute(self, requests):
    import slugify
    texts = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
    slug = np.vectorize(lambda text: slugify.slugify(text.decode()), otypes=[object])
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", slug(text))]) for text in texts]
"""


@dataclass(frozen=True)
class Place:
    server: Serving
    environments: Path

    def command(self, text: str) -> str:
        """Run one of the page's commands for the environments of this server."""
        return run(f"{text} --environment-directory {shlex.quote(str(self.environments))}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Two models with the list of the page, and one whose package there is not."""
    folder = tmp_path_factory.mktemp("environments")
    wheels.wheel_of_installed(folder / "wheels", "numpy")
    source = "def slugify(text):\n    return '-'.join(text.lower().split())\n"
    wheels.wheel(folder / "wheels", "python_slugify", "8.0.4", source, "slugify")
    config = pbtxt(datatype="TYPE_STRING", parameters=PAGE.block("models/titles/config.pbtxt"))
    for name in ("titles", "headings", "wrong"):
        model = python_model(folder / "models", name, TITLES, config)
        (model / "requirements.txt").write_text(PAGE.block("models/titles/requirements.txt"))
    (folder / "models" / "wrong" / "requirements.txt").write_text("nobody-has-this==1\n")
    (folder / "few").mkdir()
    environment = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(folder / "wheels")}
    flags = [f"--environment-directory={folder / 'kept'}", "--exit-on-error=false"]
    with serving(folder / "models", folder / "log", *flags, environment=environment) as server:
        yield Place(server, folder / "kept")


def test_every_block_is_known_here() -> None:
    known = (
        "requirements.txt\n",
        'requirements.txt" }',
        "python3 -m venv",
        '/env" }',
        "--unused-for",
        "engines install",
    )
    assert len(PAGE.blocks) == len(known)
    for part in known:
        PAGE.block(part)


def test_models_with_one_list_have_one_environment(place: Place) -> None:
    for model in ("titles", "headings"):
        assert place.server.infer(model, ["Hello My World"], datatype="BYTES") == ["hello-my-world"]
    assert place.server.text.count("made an environment from") == 1
    assert "python-slugify==8.0.4" in place.server.text


def test_a_package_that_cannot_be_had(place: Place) -> None:
    reasons = {entry["name"]: entry.get("reason", "") for entry in place.server.json("POST", "/v2/repository/index")}
    assert "wrong/requirements.txt' cannot be made" in reasons["wrong"]
    assert "nobody-has-this" in reasons["wrong"]


def test_the_commands(place: Place) -> None:
    """The last test of this server: it is stopped."""
    create, look, remove = PAGE.block("--unused-for").strip().splitlines()
    models = place.environments.with_name("models")
    (models / "titles").rename(place.environments.with_name("few") / "titles")
    created = place.command(create.replace("models", str(place.environments.with_name("few"))))
    assert created.startswith(f"titles: {place.environments}/")
    listed = place.command(look)
    assert listed.count("requirements.txt") == 1
    assert place.command(remove) == ""
    now = remove.replace(" --unused-for 30", "")
    assert place.command(now).startswith("in use  ")
    place.server.stop()
    assert place.command(now).startswith("removed ")
    assert place.command(look) == f"No environments in {place.environments}.\n"


def test_a_virtual_environment_as_on_the_page(tmp_path: Path) -> None:
    """The commands are right; that such an environment serves is tested with Python models."""
    make, install = PAGE.block("python3 -m venv").strip().splitlines()
    python_model(tmp_path / "models", "doubler", TITLES)
    run(f"{make} --without-pip", cwd=tmp_path)
    assert install == "models/doubler/env/bin/pip install numpy"
    version = [str(tmp_path / "models/doubler/env/bin/python"), "--version"]
    assert subprocess.run(version, capture_output=True, check=True).stdout.startswith(b"Python 3.")
