"""The image's list of components (SBOM) in CycloneDX's JSON format, from what is installed.

``python -m nerite.tools.image.sbom FILE`` writes it. Equal installations make equal files.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import nerite

DPKG_STATUS: Final = Path("/var/lib/dpkg/status")
_OS_RELEASE: Final = Path("/etc/os-release")
_SPECIFICATION: Final = "1.5"
_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "https://cyclonedx.org/")


def main(arguments: Sequence[str]) -> int:
    """Write the components of this machine to the file that is named; return the exit status."""
    (file,) = arguments
    status = DPKG_STATUS.read_text(errors="replace") if DPKG_STATUS.exists() else ""
    release = platform.freedesktop_os_release() if _OS_RELEASE.exists() else {}
    components = [*python_components(distributions()), *debian_components(status, release.get("ID", "debian"))]
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
    Path(file).write_text(json.dumps(bill_of_materials(components, seconds), indent=1) + "\n")
    return 0


def bill_of_materials(components: Sequence[Mapping[str, Any]], seconds: int) -> dict[str, Any]:
    """Return the document with these components, written at a time in seconds since the epoch."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": _SPECIFICATION,
        "serialNumber": uuid.uuid5(_NAMESPACE, json.dumps([components, seconds])).urn,
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "container",
                "bom-ref": "image",
                "name": "nerite",
                "version": nerite.__version__,
            },
        },
        "components": list(components),
        "dependencies": [{"ref": "image", "dependsOn": [each["bom-ref"] for each in components]}],
    }


def python_components(installed: Iterable[Distribution]) -> list[dict[str, Any]]:
    """Return the components of Python packages, by name."""
    found = {}
    for each in installed:
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower()
        found[name] = _component(f"pkg:pypi/{name}@{quote(each.version)}", name, each.version)
        if licenses := _licenses(each):
            found[name]["licenses"] = licenses
    return [found[name] for name in sorted(found)]


def _licenses(installed: Distribution) -> list[dict[str, Any]]:
    """Return what a package says of its license: an SPDX expression, or a short name."""
    metadata = installed.metadata
    if "License-Expression" in metadata:
        return [{"expression": metadata["License-Expression"]}]
    stated = metadata["License"].strip() if "License" in metadata else ""
    if not stated or len(stated.splitlines()) > 1:  # some have the text of the license there
        classifiers = metadata.get_all("Classifier") or ()
        stated = next((each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")), "")
    return [{"license": {"name": stated}}] if stated else []


def debian_components(status: str, distribution: str) -> Iterator[dict[str, Any]]:
    """Yield the components of packages in the text of dpkg's status file, by name."""
    for paragraph in sorted(status.split("\n\n")):
        fields = dict(re.findall(r"^(\w[\w-]*): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/{distribution}/{quote(name)}@{quote(version)}?arch={fields['Architecture']}"
            yield _component(purl, name, version)


def _component(purl: str, name: str, version: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
