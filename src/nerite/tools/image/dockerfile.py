"""The text of the Dockerfile for an image with models. Pure: what it must contain is given."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

ENVIRONMENTS: Final = "/opt/environments"
"""Directory of Python environments and converted checkpoints in the image."""
_USER: Final = "1000:1000"
_APT: Final = (
    "RUN apt-get update \\\n"
    "    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3-venv \\\n"
    "    && rm -rf /var/lib/apt/lists/*"
)
_PIP: Final = (
    "RUN --mount=type=bind,from=installer,source=/opt/installer,target=/opt/installer \\\n"
    "    /opt/installer/bin/pip --python /opt/nerite/bin/python --disable-pip-version-check install --no-cache-dir \\\n"
    "    --constraint /opt/nerite/constraints.txt "
)


class CopyStep(NamedTuple):
    """One layer of the image: files or the content of one directory, copied from the build context."""

    sources: tuple[str, ...]
    """Paths in the build context: one directory, or files."""
    target: str
    """Absolute path in the image; it ends with a slash if the sources are files."""


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What an image with models consists of."""

    image: str
    """The image that it is based on."""
    repositories: tuple[str, ...]
    """Paths in the build context."""
    copies: tuple[CopyStep, ...]
    """From the layer that changes least to the one that changes most."""
    extras: tuple[str, ...] = ()
    """Extras of Nerite that the models' backends need."""
    packages: tuple[str, ...] = ()
    """Further packages, as pip takes them."""
    environments: bool = False
    """Models have Python environments of their own, or checkpoints to convert."""
    uv: bool = False
    """One of them is a lock file of uv's."""


def dockerfile_text(plan: ImagePlan) -> str:
    """Return the Dockerfile for a plan."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: ImagePlan) -> Iterator[str]:
    packages = [*([f"nerite[{','.join(plan.extras)}]"] if plan.extras else []), *plan.packages]
    base = "${IMAGE}"
    yield f"# Written by: nerite dockerfile {shlex.join(plan.repositories)}"
    yield f"ARG IMAGE={plan.image}"
    if packages or plan.uv:
        yield from _installer()
    if packages:
        yield from _packages(packages)
        base = "packages"
    if plan.environments:
        yield from _environments(plan, base)
    yield from ("", f"FROM {base}", "USER 0")
    if plan.environments:
        yield f"COPY --from=environments {ENVIRONMENTS} {ENVIRONMENTS}"
        yield f"ENV NERITE_ENVIRONMENT_DIRECTORY={ENVIRONMENTS}"
    for step in plan.copies:
        yield f"COPY {json.dumps([*step.sources, step.target], ensure_ascii=False)}"
    if packages:
        yield 'RUN ["/opt/nerite/bin/python", "-m", "nerite.tools.image.sbom", "/opt/nerite/sbom.cdx.json"]'
    yield f"USER {_USER}"


def _installer() -> Sequence[str]:
    return "", "FROM ${IMAGE} AS installer", "USER 0", _APT, "RUN python3 -m venv /opt/installer"


def _packages(packages: Sequence[str]) -> Iterator[str]:
    yield from ("", "FROM ${IMAGE} AS packages", "USER 0")
    yield "# Another package index, such as https://download.pytorch.org/whl/cpu for torch without libraries for GPUs."
    yield 'ARG PIP_EXTRA_INDEX_URL=""'
    yield _PIP + shlex.join(packages)


def _environments(plan: ImagePlan, base: str) -> Iterator[str]:
    yield from ("", f"FROM {base} AS environments", "USER 0", _APT)
    if plan.uv:
        yield f"{_PIP}uv"
    yield f"ENV NERITE_ENVIRONMENT_DIRECTORY={ENVIRONMENTS}"
    places = [f"/build/{number}" for number in range(len(plan.repositories))]
    mounts = [
        f"--mount=type=bind,source={source},target={place} \\\n    "
        for source, place in zip(plan.repositories, places, strict=True)
    ]
    yield f"RUN {''.join(mounts)}nerite environments --create {' '.join(places)}"
