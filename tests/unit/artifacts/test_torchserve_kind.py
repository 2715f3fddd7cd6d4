"""TorchServe's archives: what is recognised, and what is refused before anything of it is run or unpacked."""

from __future__ import annotations

import json
import random
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nerite.artifacts.artifact import Candidate, Unusable
from nerite.artifacts.recognition import recognise

HANDLER = "def handle(data, context):\n    return data\n"


def archive(tmp_path: Path, files: dict[str, str], runtime: str = "python", **model: Any) -> Path:
    described = {"modelName": "net", "handler": "own.py", "modelVersion": "1.0", **model}
    path = tmp_path / "net.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": runtime, "model": described}))
        for name, text in files.items():
            file.writestr(name, text)
    return path


def test_recognised(tmp_path: Path) -> None:
    path = archive(tmp_path, {"own.py": HANDLER, "lib/a.txt": "a"}, modelName="my net", requirementsFile="r.txt")
    artifact = recognise(Candidate(path, trusted=True))
    assert (artifact.kind, artifact.name, list(artifact.files)) == ("TorchServe archive", "my net", ["model.py"])
    assert "archive/r.txt" in artifact.remarks[1]
    assert artifact.make is not None
    artifact.make(tmp_path / "1")
    found = {str(each.relative_to(tmp_path / "1")) for each in (tmp_path / "1").rglob("*") if each.is_file()}
    assert found == {"archive/MAR-INF/MANIFEST.json", "archive/own.py", "archive/lib/a.txt"}


def test_its_code_needs_trust(tmp_path: Path) -> None:
    path = archive(tmp_path, {"own.py": HANDLER})
    with pytest.raises(Unusable, match=r"it contains code, the handler 'own.py'.*\n.*--trust"):
        recognise(Candidate(path))


@pytest.mark.parametrize(
    ("files", "model", "reason"),
    [
        ({}, {}, "its handler 'own.py' is not in it"),
        ({"own.py": "def ("}, {}, "is not valid Python"),
        ({"own.py": HANDLER}, {"handler": ""}, "names no handler"),
        ({"own.py": HANDLER}, {"runtime": "java"}, "needs the runtime 'java'"),
        ({"own.py": "from ts.torch_handler.base_handler import BaseHandler"}, {}, "needs TorchServe's Python package"),
        ({"a.pt": "x"}, {"handler": "image_classifier"}, "'image_classifier' needs TorchServe's Python package"),
        ({"own.py": HANDLER, "../evil.py": "x"}, {}, r"'../evil.py' leads out of it"),
        ({"own.py": HANDLER, "/etc/evil": "x"}, {}, r"'/etc/evil' leads out of it"),
        ({"own.py": HANDLER, "a\\b": "x"}, {}, "leads out of it"),
        ({"own.py": HANDLER, "bomb": "0" * 10_000_000}, {}, "packed more densely than weights can be"),
    ],
)
def test_refused(tmp_path: Path, files: dict[str, str], model: dict[str, Any], reason: str) -> None:
    path = archive(tmp_path, files, **model)
    with pytest.raises(Unusable, match=reason):
        recognise(Candidate(path, trusted=True))


def test_links_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, {"own.py": HANDLER})
    with zipfile.ZipFile(path, "a") as file:
        link = zipfile.ZipInfo("weights.pt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(link, "/etc/passwd")
    with pytest.raises(Unusable, match=r"'weights\.pt' is a link"):
        recognise(Candidate(path, trusted=True))


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        ("x = " + "(" * 300 + ")" * 300, "is not valid Python"),
        ("x = " + "-" * 200_000 + "1", "is not valid Python|cannot be read"),
        ("# " + random.Random(1).randbytes(3 << 20).hex(), "too long to be a program"),
    ],
)
def test_handlers_that_cannot_be_parsed(tmp_path: Path, handler: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        recognise(Candidate(archive(tmp_path, {"own.py": handler}), trusted=True))


def test_any_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = archive(tmp_path, {"own.py": HANDLER, "lib/a.txt": "a" * 500}).read_bytes()
    rng = random.Random(38)
    refused = 0
    for number in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        path = tmp_path / f"{number}.mar"
        path.write_bytes(damaged[: rng.choice((len(damaged), len(damaged), rng.randrange(4, len(damaged))))])
        try:
            artifact = recognise(Candidate(path, trusted=True))
            if artifact.make is not None:
                artifact.make(tmp_path / str(number))
        except Unusable:
            refused += 1
    assert 0 < refused < 600
    assert (
        not {each.name for each in tmp_path.iterdir()}
        - {"net.mar", *map(str, range(600))}
        - {f"{number}.mar" for number in range(600)}
    )


@pytest.mark.parametrize("manifest", ["[]", "{", '{"model": 1}', "{}"])
def test_a_manifest_that_describes_nothing(tmp_path: Path, manifest: str) -> None:
    path = tmp_path / "net.mar"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", manifest)
        file.writestr("own.py", HANDLER)
    with pytest.raises(Unusable, match=r"its MAR-INF/MANIFEST.json cannot be read"):
        recognise(Candidate(path, trusted=True))
