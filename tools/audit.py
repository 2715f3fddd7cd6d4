"""Looks for known vulnerabilities in the versions that are pinned, and in the oldest ones that pyproject.toml allows.

Usage: python tools/audit.py PIP-AUDIT UV, the programs. Exit status: 0 nothing is known, 1 something is, 2 nothing can
be said, because the database of PyPI cannot be reached.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
PINNED: Final = ("requirements/*.txt", "src/nerite/llm/environments/*.txt")
ACCEPTED: Final = {
    "CVE-2025-2953": "torch 2.6: an operator that crashes with sizes that a model chooses, whose author is trusted",
    "CVE-2025-3730": "torch 2.6: as CVE-2025-2953",
}
"""Vulnerabilities that concern no server, with the reason."""
_PIN: Final = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\+]+)", re.MULTILINE)
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


class Pin(NamedTuple):
    """One version of a package."""

    name: str
    version: str


class CannotAudit(Exception):
    """The database cannot be asked."""


def main(pip_audit: str, uv: str) -> int:
    """Report what is known; return the exit status."""
    found = []
    try:
        where = {**dict.fromkeys(oldest(uv), "pyproject.toml allows it"), **pinned()}
        for layer in layers(where):
            found += [told for each in audited(pip_audit, layer) for told in vulnerabilities(each, where)]
    except CannotAudit as error:
        print(
            f"Nothing is known of vulnerabilities: {error}\nIt takes a connection to https://pypi.org.", file=sys.stderr
        )
        return 2
    print("\n".join(found) or f"{len(where)} versions without known vulnerabilities")
    return 1 if found else 0


def pinned() -> dict[Pin, str]:
    """Return the pinned versions, each with the file that has it."""
    found: dict[Pin, str] = {}
    for path in sorted(path for pattern in PINNED for path in ROOT.glob(pattern)):
        for name, version in _PIN.findall(path.read_text()):
            found.setdefault(Pin(name.lower(), version), str(path.relative_to(ROOT)))
    return found


def oldest(uv: str) -> Iterator[Pin]:
    """Yield the oldest versions of what Nerite and its extras require, other than for development."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name, extra in project["optional-dependencies"].items() if name != "dev" for each in extra]
    wanted = {each for each in (*project["dependencies"], *extras) if not each.startswith("nerite[")}
    compile_them = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-deps", "--universal"]
    for layer in layers(Pin(_NAME.findall(each)[0].lower(), each) for each in wanted):
        given = "\n".join(each.version for each in layer)
        command = [*compile_them, "--resolution", "lowest-direct", "--python-version", "3.11", "-"]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotAudit(f"uv finds no versions that pyproject.toml allows: {' '.join(done.stderr.split())[:500]}")
        yield from (Pin(name.lower(), version) for name, version in _PIN.findall(done.stdout))


def layers(pins: Iterable[Pin]) -> list[list[Pin]]:
    """Divide pins so that each part has one version of a package: pip-audit takes no more."""
    parts: list[dict[str, Pin]] = []
    for pin in sorted(set(pins)):
        part = next((part for part in parts if pin.name not in part), None)
        if part is None:
            parts.append(part := {})
        part[pin.name] = pin
    return [list(part.values()) for part in parts]


def audited(pip_audit: str, pins: list[Pin]) -> list[dict[str, Any]]:
    """Return what is known of each pin. Raises ``CannotAudit`` if that is not so for each."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(f"{name}=={version}" for name, version in pins))
        file.flush()
        command = [pip_audit, "--format=json", "--no-deps", "--disable-pip", "--progress-spinner=off", "-r", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise CannotAudit((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]) from None
    skipped = [f"{each['name']}: {each['skip_reason']}" for each in found if "skip_reason" in each]
    if skipped:
        raise CannotAudit(f"{len(skipped)} of {len(pins)} packages could not be audited, such as {skipped[0]}")
    return found


def vulnerabilities(package: dict[str, Any], where: dict[Pin, str]) -> Iterator[str]:
    """Yield a line for each vulnerability of a package that is not accepted."""
    pin = Pin(package["name"].lower(), package["version"])
    for each in package["vulns"]:
        names = [each["id"], *each.get("aliases", ())]
        if not ACCEPTED.keys() & set(names):
            fixed = ", ".join(each.get("fix_versions", ())) or "no version yet"
            yield f"{where.get(pin, '?')}: {pin.name} {pin.version}: {', '.join(names)}, fixed in {fixed}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
