"""``nerite check``: everything that is wrong in model repositories, without serving them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nerite.artifacts.damage import looked_at, pointer_in, refused_pointer
from nerite.backends import registry
from nerite.backends.interface import ModelContext
from nerite.cli.command import new_parser, show_json, status_of
from nerite.config.defaults import Gpus
from nerite.config.json_form import to_json
from nerite.config.loading import CompletionUnavailable, LoadedModel, Remark, load_model_directory, refused
from nerite.config.mistake import Mistake, mistake_text
from nerite.config.model_config import ModelConfig
from nerite.config.options import DeviceOptions, ServerOptions
from nerite.config.signature import signature_of
from nerite.core.errors import Internal, NeriteError, NotHere
from nerite.models import warm_up
from nerite.observability.gpus import of_this_machine, open_library
from nerite.repository import refusals, version_maker
from nerite.repository.ensembles import DescribedModel, EnsembleSurvey
from nerite.repository.version_maker import GpuPlacement
from nerite.transports.http import infer_request

# Has the backends of this machine look at a model, as a server would have it done.


class ModelHere:
    """A model in a directory, and what the backends of this machine say of it."""

    def __init__(self, directory: Path, backends: str) -> None:
        """``backends`` is the backend directory."""
        self._directory = directory
        self._backends = backends
        self._memos: dict[int, dict[Any, Any]] = {}
        """What was left by ``complete`` for ``open``, by version."""

    def complete(self, config: ModelConfig, version: int) -> Mapping[str, Any]:
        """Have the backend complete a configuration. Raises as ``Complete`` says."""
        context = self._context(config, version)
        if context.environment:
            raise CompletionUnavailable("not completed from the model: it has a Python environment of its own")
        with self._asked("not completed from the model", config, context):
            return registry.backend_of(context).complete(context)

    def open(self, config: ModelConfig, version: int, *, completed: bool = True) -> None:
        """Open a model with a complete configuration as a load does, and close it again.

        Code of a Python model is read, and not run; checkpoints of language models, and what could not be
        ``completed`` here, are left as they are. Raises ``NeriteError`` as a load, ``CompletionUnavailable`` where it
        cannot be told here.
        """
        from nerite.backends.python import PythonBackend
        from nerite.backends.python.environments import locate_environment
        from nerite.models.launcher import is_isolated

        context = self._context(config, version)
        with self._asked("not opened", config, context):
            is_isolated(context)
            if context.environment:
                locate_environment(context)
            found = registry.backend_of(context)
            if isinstance(found, PythonBackend):
                found.look(context)
            elif config.backend in registry.GENERATING:
                found.complete(context)
                if (pointer := pointer_in(context.version_directory)) is not None:
                    raise refused_pointer(pointer)
            elif completed and not context.environment:
                found.open(context).close()

    def _context(self, config: ModelConfig, version: int) -> ModelContext:
        config = registry.filled_in(config, self._backends)
        settings = ServerOptions(backend_directory=self._backends).settings_of(config.backend)
        memo = self._memos.setdefault(version, {})
        return ModelContext(config.name, version, self._directory, to_json(config), settings, memo)

    @contextlib.contextmanager
    def _asked(self, unknown: str, config: ModelConfig, context: ModelContext) -> Iterator[None]:
        """Have a backend asked in a ``with`` block. ``unknown`` is what is not known if something is missing here."""
        try:
            # What a model prints must not get between the mistakes.
            with (
                contextlib.redirect_stdout(sys.stderr),
                looked_at(context.version_directory, config.default_model_filename),
            ):
                yield
        except NotHere as error:
            raise CompletionUnavailable(f"{unknown}: {error.message}") from error
        except Internal as error:
            if error.message.startswith("ModuleNotFoundError"):
                raise CompletionUnavailable(f"{unknown}: {error.message.splitlines()[0]}") from error
            raise
        except CompletionUnavailable:
            raise
        except Exception as error:  # a load would fail with it
            raise refusals.refusal(error) from error


def gpus_here() -> Callable[[str], Gpus]:
    """Return which GPUs of this machine the models of a backend may be on."""
    library, minimum = open_library(), DeviceOptions().min_compute_capability
    return GpuPlacement(library, of_this_machine(library, os.environ, minimum), minimum).gpus


_EPILOG = """\
Prints each mistake as FILE:LINE:COLUMN: what is wrong, and below it the edit that cures it.
With --json the mistakes are a JSON list on standard output, and all else goes to standard error.

The exit status is 0 if nothing is wrong, 1 if something is, 2 for a wrong command line.
Warnings and notes do not count.

Examples:
  nerite check ./models
  nerite check ./models ./more-models --json
  nerite check ./models --model-config-name gpu      read configs/gpu.pbtxt where there is one

Configurations are completed from the models as a server would do it, which runs the auto_complete_config of
Python models; --disable-auto-complete-config leaves that out, and the files have to say everything themselves.
Models are opened as a server would open them where their framework is installed, one at a time. Of Python models
the code is read, and not initialized; language models are not loaded.
Ensembles are checked against the models beside them, and those of the other repositories.
"""


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """What was found about one model."""

    model: str
    directory: Path
    mistakes: Sequence[Mistake]
    remarks: Sequence[Remark]
    loaded: LoadedModel | None = None
    """The model itself; None where this is about something else."""


def run(arguments: Sequence[str]) -> int:
    """Check the repositories that ``arguments`` name and print what was found; return the exit status."""
    return status_of("nerite check", lambda: _check(_parser().parse_args(arguments)))


def examine(repositories: Sequence[str]) -> list[CheckFinding]:
    """Return what is found about the models of repositories, as they are served without flags."""
    return _examined(_parser().parse_args(["--", *repositories]))


def _examined(options: argparse.Namespace) -> list[CheckFinding]:
    findings = [finding for repository in options.repositories for finding in _repository(Path(repository), options)]
    return [*_connected(findings), *_duplicates(findings)]


def _check(options: argparse.Namespace) -> int:
    findings = _examined(options)
    if options.json:
        _print_json(findings)
    else:
        _print_mistakes(findings)
    remarks_to = sys.stderr if options.json else sys.stdout
    for finding in findings:
        for remark in finding.remarks:
            level = "note" if remark.level == "note" else "warning"
            print(f"{level}: {finding.directory}: {remark.text}", file=remarks_to)
    print(_summary(findings), file=remarks_to)
    return 1 if any(finding.mistakes for finding in findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "nerite check", "Find everything that is wrong in model repositories, without serving them.", _EPILOG
    )
    parser.add_argument("repositories", metavar="REPOSITORY", nargs="+", help="a directory with one model a directory")
    parser.add_argument("--json", action="store_true", help="print the mistakes as a JSON list")
    parser.add_argument(
        "--model-config-name",
        metavar="NAME",
        default="",
        help="use configs/NAME.pbtxt of a model that has one, instead of its config.pbtxt",
    )
    parser.add_argument(
        "--backend-directory",
        metavar="PATH",
        default=ServerOptions().backend_directory,
        help="the directory of backends written in Python; %(default)s unless given",
    )
    parser.add_argument(
        "--disable-auto-complete-config",
        action="store_true",
        help="do not complete configurations from the models; config.pbtxt has to be there and complete",
    )
    return parser


def _repository(root: Path, options: argparse.Namespace) -> Iterator[CheckFinding]:
    """Find what is wrong with each model in a repository."""
    try:
        directories = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        remedy = f"{error.strerror}: name a directory that has a directory for each model."
        message = f"failed to open directory {root}"
        yield CheckFinding("", root, [Mistake(message=message, file=str(root), remedy=remedy, error=Internal)], ())
        return
    if not directories:
        yield CheckFinding("", root, (), [Remark("warning", "the repository is empty: there is no model in it")])
    gpus = gpus_here()
    for directory in directories:
        model = ModelHere(directory, options.backend_directory)
        loaded = load_model_directory(
            directory,
            config_name=options.model_config_name,
            auto_complete=not options.disable_auto_complete_config,
            complete=model.complete,
            gpus=gpus,
        )
        found = [*loaded.mistakes, *version_maker.agent_mistakes(loaded.polled), *_samples(loaded)]
        remarks = [*loaded.remarks]
        if not found:
            found, more = _opened(model, loaded)
            remarks += more
        mistakes = sorted(found, key=_place)
        # A repository is often checked on another machine than the one that serves it.
        local = [Remark("warning", f"on this machine: {mistake.message}") for mistake in mistakes if mistake.elsewhere]
        lasting = [mistake for mistake in mistakes if not mistake.elsewhere]
        yield CheckFinding(directory.name, directory, lasting, [*local, *remarks], loaded)


def _place(mistake: Mistake) -> tuple[str, int, int]:
    return (mistake.file, mistake.line, mistake.column)


def _connected(findings: Sequence[CheckFinding]) -> Iterator[CheckFinding]:
    """Add what is wrong between ensembles and their models."""
    models = {
        (finding.directory.parent, finding.model): DescribedModel(finding.loaded, sound=not finding.mistakes)
        for finding in findings
        if finding.loaded is not None
    }
    survey = EnsembleSurvey(models)
    for finding in findings:
        key = (finding.directory.parent, finding.model)
        if key in models:
            verdict = survey.verdict(key)
            mistakes = sorted((*finding.mistakes, *verdict.mistakes), key=_place)
            finding = replace(finding, mistakes=mistakes, remarks=[*finding.remarks, *verdict.remarks])
        yield finding


def _samples(loaded: LoadedModel) -> list[Mistake]:
    """Find what is wrong with what is to warm a model up, of one that is right so far."""
    polled = loaded.polled
    found: list[Mistake] = []
    for config in () if loaded.mistakes else loaded.configs.values():
        signature = signature_of(config, polled.directory)
        found += warm_up.warm_up_mistakes(config, signature, polled.directory)
        found += warm_up.recorded_mistakes(config, signature, polled.directory, infer_request.read_recorded_request)
    return polled.text.source.place(list(dict.fromkeys(found)))


def _opened(model: ModelHere, loaded: LoadedModel) -> tuple[list[Mistake], list[Remark]]:
    """Find what a load finds in the files of each version, of a model that is right so far."""
    mistakes: list[Mistake] = []
    remarks: list[Remark] = []
    for version, config in loaded.configs.items():
        try:
            if config.backend:
                model.open(config, version, completed=loaded.certain)
        except CompletionUnavailable as reason:
            remarks.append(Remark("note", str(reason)))
        except NeriteError as error:
            mistakes += refused(error, loaded.polled, version)
    return mistakes, remarks


def _duplicates(findings: Sequence[CheckFinding]) -> Iterator[CheckFinding]:
    """Find the models that are in more than one repository."""
    seen: dict[str, Path] = {}
    for finding in findings:
        if not finding.model:
            continue
        if (first := seen.setdefault(finding.model, finding.directory)) != finding.directory:
            message = f"failed to poll model '{finding.model}': not unique across all model repositories"
            mistake = Mistake(message=message, file=str(finding.directory), remedy=f"Rename it, or remove {first}.")
            yield CheckFinding(finding.model, finding.directory, [mistake], ())


def _print_mistakes(findings: Sequence[CheckFinding]) -> None:
    for finding in findings:
        for text in mistake_text(finding.mistakes):
            print(text)


def _print_json(findings: Sequence[CheckFinding]) -> None:
    rows = [
        {
            "model": finding.model,
            "file": mistake.file,
            "line": mistake.line,
            "column": mistake.column,
            "message": mistake.message,
            "remedy": mistake.remedy,
        }
        for finding in findings
        for mistake in finding.mistakes
    ]
    show_json(rows)


def _summary(findings: Sequence[CheckFinding]) -> str:
    models = {finding.directory for finding in findings if finding.model}
    wrong = {finding.directory for finding in findings if finding.model and finding.mistakes}
    mistakes = sum(len(finding.mistakes) for finding in findings)
    warnings = sum(remark.level != "note" for finding in findings for remark in finding.remarks)
    parts = [f"{_count(len(models), 'model')} checked"]
    where = f" in {_count(len(wrong), 'model')}" if wrong else ""
    parts.append(f"{_count(mistakes, 'mistake')}{where}" if mistakes else "no mistakes")
    if warnings:
        parts.append(_count(warnings, "warning"))
    return ", ".join(parts) + "."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
