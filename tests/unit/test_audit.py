"""``make audit``: which versions are looked at, and what comes of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = """
import re, sys
for line in sys.stdin.read().split("\\n"):
    name, bound = re.match(r"([A-Za-z0-9._-]+)[^<>=]*[>=]*([0-9.]*)", line).groups()
    print(f"{name.lower()}=={bound or 1}")
"""
PIP_AUDIT = """
import json, sys
pins = [line.strip().split("==") for line in open(sys.argv[-1])]
assert len({{name for name, _ in pins}}) == len(pins), "each name once"
known = {known!r}
packages = [{{"name": name, "version": version, "vulns": known.get(name, [])}} for name, version in pins]
print(json.dumps({{"dependencies": packages}}))
sys.exit(any(name in known for name, _ in pins))
"""


def program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def audit(folder: Path, pip_audit: str, uv: str = UV) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "audit.py", program(folder / "a", pip_audit), program(folder / "u", uv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_nothing_is_known(tmp_path: Path) -> None:
    done = audit(tmp_path, PIP_AUDIT.format(known={}))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 200
    assert "versions without known vulnerabilities" in done.stdout


def test_what_is_known_is_told_with_the_place_and_the_remedy(tmp_path: Path) -> None:
    flaw = {"id": "PYSEC-1", "aliases": ["CVE-2099-1"], "fix_versions": ["99.1"]}
    accepted = {"id": "GHSA-1", "aliases": ["CVE-2025-3730"], "fix_versions": []}
    done = audit(tmp_path, PIP_AUDIT.format(known={"uvloop": [flaw], "hpack": [accepted]}))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert all(": uvloop " in line for line in lines)
    assert lines[0] == "pyproject.toml allows it: uvloop 0.19: PYSEC-1, CVE-2099-1, fixed in 99.1"
    assert any(line.startswith("requirements/") for line in lines)


@pytest.mark.parametrize(
    ("pip_audit", "uv", "told"),
    [
        ("raise SystemExit('no route to pypi.org')", UV, "no route to pypi.org"),
        ("print('{}')", UV, "exit status 0"),
        (
            f"print({json.dumps({'dependencies': [{'name': 'a', 'skip_reason': 'not found'}]})!r})",
            UV,
            "1 of",
        ),
        (PIP_AUDIT.format(known={}), "raise SystemExit('uv fails')", "uv fails"),
    ],
)
def test_without_a_database_nothing_is_said_to_be_sound(pip_audit: str, uv: str, told: str, tmp_path: Path) -> None:
    done = audit(tmp_path, pip_audit, uv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Nothing is known of vulnerabilities: ")
    assert told in done.stderr
    assert "https://pypi.org" in done.stderr
