"""``nerite dockerfile``: writes a Dockerfile for an image with models and all that they need."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nerite.cli.command import add_repeated, new_parser, show, status_of, write
from nerite.config.mistake import mistake_text
from nerite.config.options import ServerOptions
from nerite.core.errors import InvalidArgument
from nerite.tools.add.destination import DEFAULT, add_repositories, repositories_of
from nerite.tools.check import examine
from nerite.tools.image.dockerfile import ImagePlan, dockerfile_text
from nerite.tools.image.needs import needs_of, path_in

_EPILOG: Final = """\
The image contains the models at /models, the frameworks of their backends, and the Python environments that they name.
The repositories are checked first, as by `nerite check`. The base image is made from deploy/docker/Dockerfile of
Nerite's sources: docs/docker.md.

Examples:
  nerite dockerfile models > Dockerfile && docker build --tag models .
  nerite dockerfile models --image registry.example.com/nerite:0.1.0 --output Dockerfile
  nerite dockerfile models --package 'pillow>=10.3'
"""


def run(arguments: Sequence[str]) -> int:
    """Print or write the Dockerfile; return the exit status."""
    return status_of("nerite dockerfile", lambda: _write(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite dockerfile", "Write a Dockerfile for an image with models and what they need.", _EPILOG)
    add_repositories(parser, "model repositories below the build context (default: models)")
    parser.add_argument("--image", default="nerite", help="image of Nerite to build on (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write, instead of standard output")
    parser.add_argument(
        "--context", metavar="DIRECTORY", type=Path, default=Path(), help="build context (default: this directory)"
    )
    add_repeated(parser, "--package", "REQUIREMENT", "another Python package to install, as for pip")
    parser.add_argument(
        "--backend-directory",
        metavar="PATH",
        default=ServerOptions().backend_directory,
        help="directory of backends written in Python (default: %(default)s)",
    )
    return parser


def _write(options: argparse.Namespace) -> int:
    plan = _plan(options)
    text = dockerfile_text(plan)
    if options.output is None:
        write(text)
        return 0
    try:
        options.output.write_text(text)
    except OSError as error:
        raise InvalidArgument(f"cannot write '{options.output}': {error.strerror}") from None
    show(f"{options.output} is written. Build it: docker build --file {options.output} --tag models {options.context}")
    return 0


def _plan(options: argparse.Namespace) -> ImagePlan:
    repositories = repositories_of(options) or [DEFAULT]
    if any(character.isspace() or character == "\0" for character in options.image) or not options.image:
        raise InvalidArgument(f"--image '{options.image}' is not the name of an image")
    for repository in repositories:
        if "://" in repository:
            raise InvalidArgument(
                f"'{repository}' is not a directory. Serve it from where it is (docs/repositories.md), or copy it here."
            )
    sources = tuple(path_in(options.context, Path(each)) for each in repositories)
    for source in sources:
        if any(character.isspace() or character in ",\\\"'$" for character in source):
            raise InvalidArgument(f"'{source}' cannot be mounted by a Dockerfile: rename it without spaces and quotes")
    findings = examine(repositories, options.backend_directory)
    if lines := [line for finding in findings for line in mistake_text(finding.mistakes)]:
        raise InvalidArgument("the models have mistakes:\n" + "\n".join(lines))
    needs = needs_of([Path(each) for each in repositories], options.context, options.backend_directory)
    for remark in needs.remarks:
        print(f"note: {remark}", file=sys.stderr)
    return ImagePlan(
        options.image,
        sources,
        needs.copies,
        tuple(sorted(needs.extras)),
        (*sorted(needs.packages), *options.package),
        needs.environments,
        needs.uv,
    )
