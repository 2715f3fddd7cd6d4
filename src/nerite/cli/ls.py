"""``nerite ls``: lists the models of a repository, and what a server makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nerite.artifacts.artifact import size_of
from nerite.cli.client.connection import add_connection, connected
from nerite.cli.command import add_repository, new_parser, repository_of, show, show_json, show_table, status_of
from nerite.cli.progress import megabytes
from nerite.client import ClientError, ModelVersion
from nerite.config.loading import poll_model_directory
from nerite.repository.source import LocalRepository

_EPILOG = """\
This is what the files say; `nerite check` says whether they are right. With --url there is the state of each version
in the server there, too. (What a server has, wherever its files are: nerite client ls.)

Examples:
  nerite ls
  nerite ls /srv/models --url gpu-3:8000
  nerite ls --json
"""


@dataclass(frozen=True)
class Entry:
    """A model of the repository."""

    name: str
    versions: tuple[int, ...]
    """All that there are."""
    backend: str
    """Or the platform; empty if the files do not tell."""
    size: int
    mistakes: int
    """What is wrong with it at first sight."""


def run(arguments: Sequence[str]) -> int:
    """Print the models; return the exit status."""
    return status_of("nerite ls", lambda: _list(_parser().parse_args(arguments)), ClientError)


def _list(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    entries = [_entry(repository / name) for name in LocalRepository(str(repository)).models()]
    states = _states(options)
    if options.json:
        show_json([_as_json(entry, states) for entry in entries])
    elif entries:
        show_table(*_table(entries, states))
    else:
        show(f"There is no model in {repository}. Add one: nerite add ARTIFACT")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite ls", "List the models of a repository.", _EPILOG)
    add_repository(parser, "repository", metavar="REPOSITORY", nargs="?")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    add_connection(parser, url="")
    return parser


def _entry(directory: Path) -> Entry:
    polled = poll_model_directory(directory)
    backend = polled.config.backend or polled.config.platform
    return Entry(directory.name, polled.existing, backend, size_of(directory), len(polled.mistakes))


def _states(options: argparse.Namespace) -> Mapping[str, list[ModelVersion]] | None:
    """Return what the server says of each model; None if none was named. Raises ``ClientError``."""
    if not options.url:
        return None
    states: dict[str, list[ModelVersion]] = {}
    with connected(options) as client:
        for version in client.models():
            states.setdefault(version.name, []).append(version)
    return states


def _table(
    entries: Sequence[Entry], states: Mapping[str, list[ModelVersion]] | None
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows."""
    headings = ["Model", "Versions", "Backend", "Size"]
    rows = [
        [entry.name, ", ".join(map(str, entry.versions)) or "none", _backend(entry), megabytes(entry.size)]
        for entry in entries
    ]
    if states is not None:
        headings.append("State")
        for entry, row in zip(entries, rows, strict=True):
            known = [each for each in states.get(entry.name, ()) if each.state]
            row.append("\n".join(_state(each) for each in known) or "not loaded")
    return headings, rows


def _backend(entry: Entry) -> str:
    if entry.mistakes:
        return (
            f"{entry.backend or 'unknown'}, {entry.mistakes} mistake{'' if entry.mistakes == 1 else 's'}: nerite check"
        )
    return entry.backend


def _state(version: ModelVersion) -> str:
    said = f"{version.version}: {version.state}"
    return f"{said}, {version.reason}" if version.reason else said


def _as_json(entry: Entry, states: Mapping[str, list[ModelVersion]] | None) -> dict[str, object]:
    document: dict[str, object] = {**asdict(entry), "versions": list(entry.versions)}
    if states is not None:
        document["states"] = [
            {"version": each.version, "state": each.state, "reason": each.reason}
            for each in states.get(entry.name, ())
            if each.state
        ]
    return document
