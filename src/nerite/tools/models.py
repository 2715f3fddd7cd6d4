"""``nerite ls``: lists the models of a repository, and what a server makes of them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from nerite.artifacts.artifact import size_of
from nerite.cli.command import (
    agreed,
    complain,
    megabytes,
    new_parser,
    show,
    show_json,
    show_table,
    somebody_is_there,
    status_of,
)
from nerite.client import ClientError, ModelVersion
from nerite.config.loading import load_model_directory, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.options import ServerOptions
from nerite.config.signature import signature_of
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NotFound
from nerite.core.signature import Signature, SignatureInput
from nerite.repository import catalogue
from nerite.repository.catalogue import LoadedVersion
from nerite.repository.repositories import LocalRepository
from nerite.repository.version_maker import ContentHashes
from nerite.tools.add.destination import add_repository, existing_model, remove_model, repository_of, to_remove
from nerite.tools.check import ModelHere, gpus_here
from nerite.tools.client import add_connection, connected
from nerite.transports.http.openapi import sample_of

_EPILOG = """\
This is what the files say; `nerite check` says whether they are right. With --url there is the state of each version
in the server there, too. (What a server has, wherever its files are: nerite client ls.)

Examples:
  nerite ls
  nerite ls /srv/models --url gpu-3:8000
  nerite ls --json
"""


@dataclass(frozen=True)
class ListedModel:
    """A model of the repository."""

    name: str
    versions: tuple[int, ...]
    """All that there are."""
    backend: str
    """Or the platform; empty if the files do not tell."""
    size: int
    mistakes: int
    """What is wrong with it at first sight."""


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
        show(f"There is no model in {repository}. Add one: nerite add ARTIFACT")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite ls", "List the models of a repository.", _EPILOG)
    add_repository(parser, "repository", metavar="REPOSITORY", nargs="?")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    add_connection(parser, url="")
    return parser


def _entry(directory: Path) -> ListedModel:
    polled = poll_model_directory(directory)
    backend = polled.config.backend or polled.config.platform
    return ListedModel(directory.name, polled.existing, backend, size_of(directory), len(polled.mistakes))


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
    entries: Sequence[ListedModel], states: Mapping[str, list[ModelVersion]] | None
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


def _backend(entry: ListedModel) -> str:
    if entry.mistakes:
        return (
            f"{entry.backend or 'unknown'}, {entry.mistakes} mistake{'' if entry.mistakes == 1 else 's'}: nerite check"
        )
    return entry.backend


def _state(version: ModelVersion) -> str:
    said = f"{version.version}: {version.state}"
    return f"{said}, {version.reason}" if version.reason else said


def _as_json(entry: ListedModel, states: Mapping[str, list[ModelVersion]] | None) -> dict[str, object]:
    document: dict[str, object] = {**asdict(entry), "versions": list(entry.versions)}
    if states is not None:
        document["states"] = [
            {"version": each.version, "state": each.state, "reason": each.reason}
            for each in states.get(entry.name, ())
            if each.state
        ]
    return document


# ``nerite rm``: takes a model, or a version of it, out of a repository.

_PROGRAM = "nerite rm"
_RM_EPILOG = """\
It is gone at once for a server that looks at the repository. A server in the control mode 'poll' unloads it then; one
in the mode 'explicit' goes on with it until: nerite client unload NAME

Examples:
  nerite rm detector
  nerite rm detector --version 1 --repository /srv/models --yes
"""


def run_rm(arguments: Sequence[str]) -> int:
    """Remove what is named; return the exit status."""
    return status_of(_PROGRAM, lambda: _remove(_rm_parser().parse_args(arguments)))


def _remove(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    directory = to_remove(repository, options.name, options.version)
    if not options.yes and not _agreed(f"{directory}, {megabytes(size_of(directory))}"):
        return 1
    remove_model(repository, directory)
    show(f"Removed {directory}.")
    return 0


def _rm_parser() -> argparse.ArgumentParser:
    parser = new_parser(_PROGRAM, "Take a model, or a version of it, out of a repository.", _RM_EPILOG)
    parser.add_argument("name", metavar="NAME", help="the model")
    parser.add_argument("--version", metavar="N", type=int, help="this version alone")
    add_repository(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _agreed(what: str) -> bool:
    if not somebody_is_there():
        complain(_PROGRAM, f"nobody can be asked whether to remove {what}.", "Say --yes.")
        return False
    return agreed(f"Remove {what}?", otherwise=False)


# Commands that ask a model, and work: by curl, in Python, by ``nerite client``.


class Snippets:
    """What to paste for one model; ``version`` is empty where the server is to choose."""

    def __init__(self, signature: Signature, url: str, version: str, *, decoupled: bool) -> None:
        self._signature = signature
        self._url = url
        self._version = version
        self._decoupled = decoupled

    def titled(self) -> Iterator[tuple[str, str]]:
        """Yield each, with what it is for."""
        curl = self._curl()
        if curl:
            yield "curl", curl
        yield "Python", self._python()
        yield "Command line", self._command()

    def _curl(self) -> str:
        sample = sample_of(self._signature, decoupled=self._decoupled)
        version = f"/versions/{self._version}" if self._version else ""
        path = f"/v2/models/{quote(self._signature.model_name)}{version}"
        url = self._url if "://" in self._url else f"http://{self._url}"
        return sample.curl(f"{url}{path}/{'generate_stream' if self._decoupled else 'infer'}") if sample else ""

    def _python(self) -> str:
        wanted = [declared for declared in self._signature.inputs.values() if not declared.optional]
        batch = (1,) if self._signature.max_batch_size else ()
        inputs = ",\n".join(f'        "{each.name}": {_value(each, batch)}' for each in wanted)
        version = f', version="{self._version}"' if self._version else ""
        call = f'("{self._signature.model_name}", inputs{version})'
        ask = f"    for response in client.stream{call}:\n        print(response)"
        if not self._decoupled:
            ask = f"    print(client.infer{call})"
        return (
            "import numpy as np\n"
            "from nerite.client import Client\n\n"
            f'with Client("{self._url}") as client:\n'
            f"    inputs = {{\n{inputs},\n    }}\n"
            f"{ask}"
        )

    def _command(self) -> str:
        server = [] if self._url == "localhost:8000" else ["--url", self._url]
        version = ["--version", self._version] if self._version else []
        stream = ["--stream"] if self._decoupled else []
        return shlex.join(
            ["nerite", "client", *server, "infer", self._signature.model_name, "--random", *version, *stream]
        )


def _value(declared: SignatureInput, batch: tuple[int, ...]) -> str:
    shape = (*batch, *(1 if size == -1 else size for size in declared.dims))
    if declared.datatype is dtypes.BYTES:
        return f'np.full({shape}, "text", object)'
    # BF16 is given as float32, for numpy has no such type.
    kind = "float32" if declared.datatype is dtypes.BF16 else declared.datatype.numpy.name
    return f"np.zeros({shape}, np.{kind if kind != 'bool' else 'bool_'})"


# The command line of ``nerite show``.

_COMMAND_EPILOG = """\
What it takes and gives is found as a server would find it, which runs the auto_complete_config of a Python model.
The content hash is the one that a server tells of the version: equal files and an equal configuration have the same.

Examples:
  nerite show detector
  nerite show detector --version 1 --repository /srv/models --url gpu-3:8000
  nerite show detector --json
"""


def run_show(arguments: Sequence[str]) -> int:
    """Print what there is to know about a model; return the exit status."""
    return status_of("nerite show", lambda: _show(_command_parser().parse_args(arguments)))


def _show(options: argparse.Namespace) -> int:
    directory = existing_model(repository_of(options), options.name)
    shown = _Shown(directory, options.version, options.url)
    if options.json:
        show_json(shown.as_json())
    else:
        show(shown.as_text())
    return 0


def _command_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "nerite show", "Show a model: what it takes and gives, its files, and commands that ask it.", _COMMAND_EPILOG
    )
    parser.add_argument("name", metavar="NAME", help="the model")
    parser.add_argument("--version", metavar="N", type=int, help="the version (default: the one that answers)")
    add_repository(parser)
    url = "the server to write into the commands (default: localhost:8000)"
    parser.add_argument("--url", metavar="HOST:PORT", default="localhost:8000", help=url)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


class _Shown:
    """A version of a model, looked at."""

    def __init__(self, directory: Path, version: int | None, url: str) -> None:
        """Raise ``NeriteError`` for a model that cannot be served as it is."""
        loaded = load_model_directory(
            directory,
            complete=ModelHere(directory, ServerOptions().backend_directory).complete,
            gpus=gpus_here(),
        )
        if loaded.mistakes:
            raise InvalidArgument(f"this model cannot be served.\n{loaded.mistakes[0]}")
        served = loaded.polled.versions
        self.version = served[-1] if version is None else version
        if self.version not in loaded.configs:
            has = ", ".join(map(str, served))
            raise NotFound(f"version {version} of the model is not served.\n    Those that are: {has}.")
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
        self.snippets = Snippets(self.signature, url, "" if version is None else str(version), decoupled=decoupled)

    def as_text(self) -> str:
        """Return it for people."""
        versions = ", ".join(map(str, self.existing))
        backend = self.config.backend or self.config.platform
        batches = f"batches of up to {self.config.max_batch_size}" if self.config.max_batch_size else "no batches"
        lines = [
            f"{self.name}, version {self.version} of {versions}: {backend}, {batches}",
            *(f"  {side:7} {tensor}" for side, tensor in self._tensors()),
            "",
            f"Files in {self.directory}:",
            *(f"  {megabytes(size):>10}  {name}" for name, size in self.files),
            f"  {self.content_hash}",
        ]
        lines += [f"{remark.level}: {remark.text}" for remark in self.remarks]
        for title, text in self.snippets.titled():
            lines += ["", f"{title}:", "", text]
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Return it as JSON data."""
        batch = [-1] if self.config.max_batch_size else []

        def tensors(side: str) -> list[dict[str, object]]:
            declared = self.signature.inputs if side == "input" else self.signature.outputs
            return [
                {"name": each.name, "datatype": each.datatype.name, "shape": [*batch, *each.dims]}
                for each in declared.values()
            ]

        return {
            "name": self.name,
            "version": self.version,
            "versions": list(self.existing),
            "backend": self.config.backend or self.config.platform,
            "max_batch_size": self.config.max_batch_size,
            "inputs": tensors("input"),
            "outputs": tensors("output"),
            "files": [{"path": name, "size": size} for name, size in self.files],
            "content_hash": self.content_hash,
            "snippets": dict(self.snippets.titled()),
        }

    def _tensors(self) -> list[tuple[str, str]]:
        batch = [-1] if self.config.max_batch_size else []
        sides = (("input", self.signature.inputs), ("output", self.signature.outputs))
        return [
            (side, f"{each.name} ({each.datatype.name} {[*batch, *each.dims]})")
            for side, declared in sides
            for each in declared.values()
        ]
