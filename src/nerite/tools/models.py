"""``nerite ls``, ``nerite show`` and ``nerite rm``: list, describe and remove models in a repository."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nerite.artifacts.artifact import size_of
from nerite.cli.command import (
    agreed,
    complain,
    is_interactive,
    megabytes,
    new_parser,
    show,
    show_json,
    show_table,
    status_of,
)
from nerite.client import ClientError, ModelVersion
from nerite.client.connection import model_path
from nerite.config.loading import load_model_directory, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.options import ServerOptions
from nerite.config.signature import signature_of
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NotFound
from nerite.core.sample_inputs import constant_value, sample_shapes
from nerite.core.signature import Signature, SignatureInput
from nerite.repository import catalogue
from nerite.repository.catalogue import LoadedVersion
from nerite.repository.repositories import LocalRepository
from nerite.repository.version_maker import ContentHashes
from nerite.tools.add.destination import add_repository, existing_model, remove_model, repository_of, to_remove
from nerite.tools.check import LocalModel, gpus_here
from nerite.tools.connection import add_connection, connected
from nerite.transports.http.openapi import sample_of

_EPILOG = """\
The list shows what the files contain; `nerite check` validates them. With --url, it also shows the state of each
version on that server. To list the models of a server, wherever its repository is, use: nerite client ls

Examples:
  nerite ls
  nerite ls /srv/models --url gpu-3:8000
  nerite ls --json
"""


@dataclass(frozen=True)
class ListedModel:
    """A model in a repository, as its files describe it."""

    name: str
    versions: tuple[int, ...]
    """All existing versions."""
    backend: str
    """Backend or else platform; empty if the files do not say."""
    size: int
    mistakes: int
    """Number of mistakes that are visible without completing the configuration."""


def run_ls(arguments: Sequence[str]) -> int:
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
        show(f"No models in {repository}. Add one: nerite add ARTIFACT")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite ls", "List the models in a repository.", _EPILOG)
    add_repository(parser, also_argument=True)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    add_connection(parser, url="")
    return parser


def _entry(directory: Path) -> ListedModel:
    polled = poll_model_directory(directory)
    backend = polled.config.backend or polled.config.platform
    return ListedModel(directory.name, polled.existing, backend, size_of(directory), len(polled.mistakes))


def _states(options: argparse.Namespace) -> Mapping[str, list[ModelVersion]] | None:
    """Return the versions of each model on the server, or None if no server was named. Raises ``ClientError``."""
    if not options.url:
        return None
    states: dict[str, list[ModelVersion]] = {}
    with connected(options) as client:
        for version in client.models():
            states.setdefault(version.name, []).append(version)
    return states


def _table(
    entries: Sequence[ListedModel], states: Mapping[str, list[ModelVersion]] | None
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table."""
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


def _backend(entry: ListedModel) -> str:
    if entry.mistakes:
        return (
            f"{entry.backend or 'unknown'}, {entry.mistakes} mistake{'' if entry.mistakes == 1 else 's'}: nerite check"
        )
    return entry.backend


def _state(version: ModelVersion) -> str:
    state = f"{version.version}: {version.state}"
    return f"{state}, {version.reason}" if version.reason else state


def _as_json(entry: ListedModel, states: Mapping[str, list[ModelVersion]] | None) -> dict[str, object]:
    document: dict[str, object] = {**asdict(entry), "versions": list(entry.versions)}
    if states is not None:
        document["states"] = [
            {"version": each.version, "state": each.state, "reason": each.reason}
            for each in states.get(entry.name, ())
            if each.state
        ]
    return document


# ``nerite rm``.

_PROGRAM = "nerite rm"
_RM_EPILOG = """\
The removal is atomic for servers that read the repository. A server with --model-control-mode=poll then unloads the
model; one with --model-control-mode=explicit keeps it loaded until: nerite client unload NAME

Examples:
  nerite rm detector
  nerite rm detector --version 1 --model-repository /srv/models --yes
"""


def run_rm(arguments: Sequence[str]) -> int:
    """Remove a model or a version; return the exit status."""
    return status_of(_PROGRAM, lambda: _remove(_rm_parser().parse_args(arguments)))


def _remove(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    directory = to_remove(repository, options.name, options.version)
    if not options.yes and not _confirmed(f"{directory} ({megabytes(size_of(directory))})"):
        return 1
    remove_model(repository, directory)
    show(f"Removed {directory}.")
    return 0


def _rm_parser() -> argparse.ArgumentParser:
    parser = new_parser(_PROGRAM, "Remove a model, or a version of it, from a repository.", _RM_EPILOG)
    parser.add_argument("name", metavar="NAME", help="name of the model")
    parser.add_argument("--version", metavar="N", type=int, help="remove only this version")
    add_repository(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser


def _confirmed(what: str) -> bool:
    if not is_interactive():
        complain(_PROGRAM, f"cannot ask for confirmation to remove {what}: this is not a terminal.", "Pass --yes.")
        return False
    return agreed(f"Remove {what}?", otherwise=False)


# ``nerite show``.


def snippets(signature: Signature, url: str, version: str, *, decoupled: bool) -> Iterator[tuple[str, str]]:
    """Yield example requests to a model, each with its title. ``version`` is empty if the server should choose it."""
    sample = sample_of(signature, decoupled=decoupled)
    if sample is not None:
        base = url if "://" in url else f"http://{url}"
        action = "generate_stream" if decoupled else "infer"
        yield "curl", sample.curl(f"{base}{model_path(signature.model_name, version)}/{action}")
    yield "Python", _python(signature, url, version, decoupled=decoupled)
    server = [] if url == "localhost:8000" else ["--url", url]
    options = [*(["--version", version] if version else []), *(["--stream"] if decoupled else [])]
    command = ["nerite", "client", *server, "infer", signature.model_name, "--random", *options]
    yield "Command line", shlex.join(command)


def _python(signature: Signature, url: str, version: str, *, decoupled: bool) -> str:
    shapes = next(sample_shapes(signature, streams=decoupled))
    wanted = [declared for declared in signature.inputs.values() if not declared.optional]
    inputs = ",\n".join(f'        "{each.name}": {_value(each, shapes[each.name])}' for each in wanted)
    named = f', version="{version}"' if version else ""
    call = f'("{signature.model_name}", inputs{named})'
    request = f"    for response in client.stream{call}:\n        print(response)"
    if not decoupled:
        request = f"    print(client.infer{call})"
    return (
        "import numpy as np\n"
        "from nerite.client import Client\n\n"
        f'with Client("{url}") as client:\n'
        f"    inputs = {{\n{inputs},\n    }}\n"
        f"{request}"
    )


def _value(declared: SignatureInput, shape: tuple[int, ...]) -> str:
    if declared.datatype is dtypes.BYTES:
        return f'np.full({shape}, "text", object)'
    # BF16 is passed as float32, because numpy has no such type.
    kind = "float32" if declared.datatype is dtypes.BF16 else declared.datatype.numpy.name
    made = "ones" if constant_value(declared.name, declared.datatype) else "zeros"
    return f"np.{made}({shape}, np.{kind if kind != 'bool' else 'bool_'})"


_SHOW_EPILOG = """\
Inputs and outputs are determined as a server would do it, which runs the auto_complete_config of a Python model.
The content hash is the one that a server reports: versions with equal files and configurations have equal hashes.

Examples:
  nerite show detector
  nerite show detector --version 1 --model-repository /srv/models --url gpu-3:8000
  nerite show detector --json
"""


def run_show(arguments: Sequence[str]) -> int:
    """Describe a model; return the exit status."""
    return status_of("nerite show", lambda: _show(_show_parser().parse_args(arguments)))


def _show(options: argparse.Namespace) -> int:
    directory = existing_model(repository_of(options), options.name)
    shown = _Shown(directory, options.version, options.url)
    if options.json:
        show_json(shown.as_json())
    else:
        show(shown.as_text())
    return 0


def _show_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "nerite show", "Show a model: its inputs and outputs, its files, and example requests.", _SHOW_EPILOG
    )
    parser.add_argument("name", metavar="NAME", help="name of the model")
    parser.add_argument("--version", metavar="N", type=int, help="version to show (default: the latest served one)")
    add_repository(parser)
    url = "server address to use in the examples (default: localhost:8000)"
    parser.add_argument("--url", metavar="HOST:PORT", default="localhost:8000", help=url)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


class _Shown:
    """Description of a model version, as text and as JSON."""

    def __init__(self, directory: Path, version: int | None, url: str) -> None:
        """Read a model. Raises ``NeriteError`` if it cannot be served."""
        loaded = load_model_directory(
            directory,
            complete=LocalModel(directory, ServerOptions().backend_directory).complete,
            gpus=gpus_here(),
        )
        if loaded.mistakes:
            raise InvalidArgument(f"the model cannot be served.\n{loaded.mistakes[0]}")
        served = loaded.polled.versions
        self.version = served[-1] if version is None else version
        if self.version not in loaded.configs:
            has = ", ".join(map(str, served))
            raise NotFound(f"version {version} of the model is not served.\n    Served versions: {has}.")
        self.name = loaded.polled.name
        self.existing = loaded.polled.existing
        self.config: ModelConfig = loaded.configs[self.version]
        self.signature: Signature = signature_of(self.config, directory)
        self.remarks = loaded.remarks
        self.directory = directory
        seen = catalogue.model_fingerprint(directory)
        self.files = [
            *([seen.config[:2]] if seen.config is not None else []),
            *((name, size) for name, size, _ in seen.shared),
            *((f"{self.version}/{name}", size) for name, size, _ in seen.versions.get(self.version, ())),
        ]
        self.content_hash = ContentHashes().of_version(LoadedVersion(loaded.polled, seen), self.version)
        policy = self.config.model_transaction_policy
        decoupled = policy is not None and policy.decoupled
        named = "" if version is None else str(version)
        self.snippets = dict(snippets(self.signature, url, named, decoupled=decoupled))

    def as_text(self) -> str:
        """Return the description as text."""
        versions = ", ".join(map(str, self.existing))
        backend = self.config.backend or self.config.platform
        batches = f"batches of up to {self.config.max_batch_size}" if self.config.max_batch_size else "no batches"
        lines = [
            f"{self.name}, version {self.version} of {versions}: {backend}, {batches}",
            *(f"  {side:7} {name} ({datatype} {shape})" for side, name, datatype, shape in self._tensors()),
            "",
            f"Files in {self.directory}:",
            *(f"  {megabytes(size):>10}  {name}" for name, size in self.files),
            f"  {self.content_hash}",
        ]
        lines += [f"{remark.level}: {remark.text}" for remark in self.remarks]
        for title, text in self.snippets.items():
            lines += ["", f"{title}:", "", text]
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Return the description as a JSON-serialisable document."""
        tensors: dict[str, list[dict[str, object]]] = {"inputs": [], "outputs": []}
        for side, name, datatype, shape in self._tensors():
            tensors[f"{side}s"].append({"name": name, "datatype": datatype, "shape": shape})
        return {
            "name": self.name,
            "version": self.version,
            "versions": list(self.existing),
            "backend": self.config.backend or self.config.platform,
            "max_batch_size": self.config.max_batch_size,
            **tensors,
            "files": [{"path": name, "size": size} for name, size in self.files],
            "content_hash": self.content_hash,
            "snippets": self.snippets,
        }

    def _tensors(self) -> Iterator[tuple[str, str, str, list[int]]]:
        """Yield side, name, data type and shape of each input and output."""
        batch = [-1] if self.config.max_batch_size else []
        for side, declared in (("input", self.signature.inputs), ("output", self.signature.outputs)):
            for each in declared.values():
                yield side, each.name, each.datatype.name, [*batch, *each.dims]
