"""helm (4, and 3 as ``helm3``), kubectl and the schemas of Kubernetes, as ``make kubernetes-tools`` fetches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

from tools import unavailable

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "nerite"
_OWN = ("", "apps", "autoscaling", "batch", "networking.k8s.io", "policy", "rbac.authorization.k8s.io")
"""Groups of Kubernetes itself."""
_EXTENSIONS = ROOT / "tests" / "schemas"
_FOLDER = Path(os.environ.get("NERITE_KUBERNETES_TOOLS") or Path(sys.prefix) / "kubernetes")


def program(name: str) -> str:
    """Return the path of helm or kubectl. Skip the test, or fail it in CI, if it is not there."""
    if not (_FOLDER / name).exists():
        unavailable(f"{name} is not installed: make kubernetes-tools")
    return str(_FOLDER / name)


def run(name: str, *arguments: str, fails: bool = False, home: Path | None = None, **environment: str) -> str:
    """Run helm or kubectl; return what it prints, or what it complains of if it is to fail."""
    variables = {**os.environ, **({"HOME": str(home)} if home else {}), **environment}
    command = [program(name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables, check=False)
    assert bool(done.returncode) == fails, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stderr if fails else done.stdout


def rendered(
    *arguments: str, values: dict[str, Any] | None = None, folder: Path, helm: str = "helm"
) -> list[dict[str, Any]]:
    """Return the manifests of the chart with some values, as a release ``r`` in the namespace ``models``."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(values or {}))
    text = run(helm, "template", "r", str(CHART), "-n", "models", "-f", str(file), *arguments, home=folder)
    return [each for each in yaml.safe_load_all(text) if each]


def mistakes(manifest: dict[str, Any], version: str) -> Iterator[str]:
    """Yield what a version of Kubernetes, or an extension of it, would not accept in a manifest."""
    group, _, number = manifest["apiVersion"].rpartition("/")
    if group in _OWN:
        parts = filter(None, (manifest["kind"].lower(), group.partition(".")[0], number))
        file = _schemas(version) / f"{'-'.join(parts)}.json"
    else:
        file = _EXTENSIONS / f"{manifest['kind']}.json"
    validator = jsonschema.Draft202012Validator(json.loads(file.read_text()), registry=_definitions(version))
    for error in validator.iter_errors(manifest):
        yield f"{manifest['kind']} {manifest['metadata']['name']}: {error.json_path}: {error.message[:300]}"


def _schemas(version: str) -> Path:
    program("kubectl")
    return _FOLDER / "kubernetes_validate" / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@cache
def _definitions(version: str) -> Registry[Any]:
    found = json.loads((_schemas(version) / "_definitions.json").read_text())
    resource = Resource.from_contents(found, default_specification=_draft())
    return Registry().with_resource("_definitions.json", resource)


def _draft() -> Any:
    from referencing.jsonschema import DRAFT202012

    return DRAFT202012
