"""The command line of ``nerite show``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nerite.cli.command import add_repository, new_parser, repository_of, show, show_json, status_of
from nerite.cli.completing import ModelHere, gpus_here
from nerite.cli.progress import megabytes
from nerite.cli.show.snippets import Snippets
from nerite.config.loading import load_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.options import ServerOptions
from nerite.config.signature import signature_of
from nerite.core.errors import InvalidArgument, NotFound
from nerite.core.signature import Signature
from nerite.intake.destination import existing_model
from nerite.repository import fingerprint
from nerite.repository.content import ContentHashes
from nerite.repository.model_record import Loaded

_EPILOG = """\
What it takes and gives is found as a server would find it, which runs the auto_complete_config of a Python model.
The content hash is the one that a server tells of the version: equal files and an equal configuration have the same.

Examples:
  nerite show detector
  nerite show detector --version 1 --repository /srv/models --url gpu-3:8000
  nerite show detector --json
"""


def run(arguments: Sequence[str]) -> int:
    """Print what there is to know about a model; return the exit status."""
    return status_of("nerite show", lambda: _show(_parser().parse_args(arguments)))


def _show(options: argparse.Namespace) -> int:
    directory = existing_model(repository_of(options), options.name)
    shown = _Shown(directory, options.version, options.url)
    if options.json:
        show_json(shown.as_json())
    else:
        show(shown.as_text())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "nerite show", "Show a model: what it takes and gives, its files, and commands that ask it.", _EPILOG
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
        seen = fingerprint.of_model(directory)
        self.files = [
            *([seen.config[:2]] if seen.config is not None else []),
            *((name, size) for name, size, _ in seen.shared),
            *((f"{self.version}/{name}", size) for name, size, _ in seen.versions.get(self.version, ())),
        ]
        self.content_hash = ContentHashes().of_version(Loaded(loaded.polled, seen), self.version)
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
