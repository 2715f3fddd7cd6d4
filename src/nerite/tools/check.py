"""``nerite check``: reports everything that is wrong in model repositories, without serving them."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nerite.admission.policy_file import open_policy
from nerite.artifacts.recognition import damage_explained, pointer_in, pointer_text
from nerite.backends import registry
from nerite.backends.configuration import missing, model_path
from nerite.backends.interface import ModelContext
from nerite.cli.command import new_parser, show_json, status_of
from nerite.config.defaults import Gpus, without_gpus
from nerite.config.json_form import to_json
from nerite.config.loading import CompletionUnavailable, LoadedModel, Remark, load_model_directory, refused
from nerite.config.mistake import Mistake, mistake_text
from nerite.config.model_config import ModelConfig
from nerite.config.options import DeviceOptions, ServerOptions
from nerite.config.signature import signature_of
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotInstalled
from nerite.core.failures import system_error
from nerite.models import warm_up
from nerite.observability.gpus import of_this_machine, open_library
from nerite.repository import refusals, version_maker
from nerite.repository.ensembles import DescribedModel, EnsembleSurvey
from nerite.repository.version_maker import GpuPlacement
from nerite.routes.route_file import RouteFile, is_route_alone, read_route_file, versions_of
from nerite.tools.add.destination import DEFAULT, add_repositories, repositories_of, repository_at
from nerite.transports.http import infer_request


class LocalModel:
    """A model in a directory, completed and opened by the backends of this machine as a server would do it."""

    def __init__(self, directory: Path, backends: str, environments: str = "") -> None:
        """``backends`` is the backend directory, ``environments`` that of environments; empty: the usual one."""
        self._directory = directory
        self._backends = backends
        self._environments = environments
        self._memos: dict[int, dict[Any, Any]] = {}
        """Results that ``complete`` keeps for ``open``, by version."""

    def complete(self, config: ModelConfig, version: int) -> Mapping[str, Any]:
        """Have the backend complete a configuration. Raises what ``Complete`` documents."""
        context = self._context(config, version)
        if context.environment:
            raise CompletionUnavailable("not completed from the model: it has its own Python environment")
        with self._calling_backend("not completed from the model", config, context):
            return registry.backend_of(context).complete(context)

    def open(self, config: ModelConfig, version: int, *, completed: bool = True) -> None:
        """Open a model with a complete configuration as a load does, and close it again.

        The code of Python models is read but not run; checkpoints of language models, and models that could not be
        ``completed`` here, are not opened. Raises ``NeriteError`` as a load does, and ``CompletionUnavailable`` if
        this machine lacks what is needed.
        """
        from nerite.backends.python import PythonBackend
        from nerite.backends.python.environments import locate_environment
        from nerite.models.launcher import is_isolated

        context = self._context(config, version)
        with self._calling_backend("not opened", config, context):
            is_isolated(context)
            if context.environment:
                locate_environment(context)
            found = registry.backend_of(context)
            if isinstance(found, PythonBackend):
                found.check(context)
            elif config.backend in registry.GENERATING:
                found.complete(context)
                if (pointer := pointer_in(context.version_directory)) is not None:
                    raise Internal(pointer_text(pointer))
            elif completed and not context.environment:
                found.open(context).close()

    def prepare(self, config: ModelConfig, version: int) -> Path | None:
        """Make what a load keeps in the directory of environments; return the Python that a worker would run.

        None is this Python. May take minutes. Raises ``NeriteError`` as a load does.
        """
        from nerite.backends.python.environments import find_interpreter

        context = self._context(config, version)
        if context.environment:
            return find_interpreter(context)
        return registry.prepared(context) if config.backend in registry.GENERATING else None

    def _context(self, config: ModelConfig, version: int) -> ModelContext:
        config = registry.filled_in(config, self._backends)
        options = ServerOptions(backend_directory=self._backends, environment_directory=self._environments)
        settings = options.settings_of(config.backend)
        memo = self._memos.setdefault(version, {})
        return ModelContext(config.name, version, self._directory, to_json(config), settings, memo)

    @contextlib.contextmanager
    def _calling_backend(self, skipped: str, config: ModelConfig, context: ModelContext) -> Iterator[None]:
        """Translate the errors of a backend called in the ``with`` block.

        ``skipped`` says what was not done if the backend lacks something on this machine.
        """
        try:
            # Output of a model must not be mixed with the mistakes on stdout.
            with (
                contextlib.redirect_stdout(sys.stderr),
                damage_explained(context.version_directory, config.default_model_filename),
            ):
                yield
        except NotInstalled as error:
            if not (file := model_path(context, "")).exists():  # which needs no package
                raise missing(context, file) from None
            raise CompletionUnavailable(f"{skipped}: {error.message}") from error
        except Internal as error:
            if error.message.startswith("ModuleNotFoundError"):
                raise CompletionUnavailable(f"{skipped}: {error.message.splitlines()[0]}") from error
            raise
        except CompletionUnavailable:
            raise
        except Exception as error:  # a load would fail with this error
            raise refusals.refusal(error) from error


def gpus_here() -> Callable[[ModelConfig], Gpus]:
    """Return a function that returns the GPUs of this machine that a model may use."""
    library, minimum = open_library(), DeviceOptions().min_compute_capability
    return GpuPlacement(library, of_this_machine(library, os.environ, minimum), minimum).gpus


_EPILOG = """\
Prints each mistake as FILE:LINE:COLUMN followed by a description, and below it how to fix it.
With --json, the mistakes are printed as a JSON list to standard output and everything else to standard error.

The exit status is 0 if there are no mistakes, 1 if there are, 2 for an invalid command line.
Warnings and notes do not affect it.

Examples:
  nerite check ./models
  nerite check ./models ./more-models --json
  nerite check ./models --model-config-name gpu      use configs/gpu.pbtxt where it exists

Configurations are completed from the models as a server would do it, which runs auto_complete_config of Python
models. With --disable-auto-complete-config nothing is completed, and every config.pbtxt must be complete.
Models are opened one at a time, as a server would open them, if their framework is installed. Python models are
parsed but not initialized, and language models are not loaded.
Ensembles are checked against the models in their own and in the other repositories.
"""


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Mistakes and remarks about one model."""

    model: str
    directory: Path
    mistakes: Sequence[Mistake]
    remarks: Sequence[Remark]
    loaded: LoadedModel | None = None
    """The model itself; None if the finding is not about a particular model, or about a name that only a route has."""
    route: RouteFile | None = None


def run(arguments: Sequence[str]) -> int:
    """Check the repositories named in ``arguments`` and print the findings; return the exit status."""
    return status_of("nerite check", lambda: _check(_parser().parse_args(arguments)))


def examine(repositories: Sequence[str], backends: str = ServerOptions().backend_directory) -> list[CheckFinding]:
    """Return the findings about the models in repositories; ``backends`` is the backend directory."""
    return _examined(_parser().parse_args([f"--backend-directory={backends}", "--", *repositories]))


def _examined(options: argparse.Namespace) -> list[CheckFinding]:
    repositories = repositories_of(options) or [str(repository_at("", os.environ))]
    findings = [finding for repository in repositories for finding in _repository(Path(repository), options)]
    return [*_connected(findings), *_duplicates(findings), *_policy(options.policy_file)]


def _policy(path: str) -> Iterator[CheckFinding]:
    """Yield the mistakes in a policy file, if there are any."""
    try:
        if path:
            open_policy(path)
    except InvalidArgument as error:
        mistakes = [
            Mistake(message=line, remedy="docs/admission.md#policy-file has an example with every setting.")
            for line in error.message.splitlines()
        ]
        yield CheckFinding("", Path(path), mistakes, ())


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
        "nerite check", "Validate model repositories without serving them, and report all mistakes at once.", _EPILOG
    )
    where = f"directories with one directory per model (default: $NERITE_MODEL_REPOSITORY, or else {DEFAULT})"
    add_repositories(parser, where)
    parser.add_argument("--json", action="store_true", help="print the mistakes as a JSON list")
    parser.add_argument(
        "--model-config-name",
        metavar="NAME",
        default="",
        help="use configs/NAME.pbtxt instead of config.pbtxt for models that have it",
    )
    parser.add_argument(
        "--policy-file", metavar="FILE", default="", help="check the policy file of admission control, too"
    )
    parser.add_argument(
        "--backend-directory",
        metavar="PATH",
        default=ServerOptions().backend_directory,
        help="directory of backends written in Python (default: %(default)s)",
    )
    parser.add_argument(
        "--disable-auto-complete-config",
        action="store_true",
        help="do not complete configurations from the models; require a complete config.pbtxt",
    )
    return parser


def _repository(root: Path, options: argparse.Namespace) -> Iterator[CheckFinding]:
    """Yield the findings about each model in a repository."""
    try:
        directories = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        remedy = f"{error.strerror}: specify a directory that contains one directory per model."
        message = f"failed to open directory {root}"
        yield CheckFinding("", root, [Mistake(message=message, file=str(root), remedy=remedy, error=Internal)], ())
        return
    if not directories:
        yield CheckFinding("", root, (), [Remark("warning", "the repository is empty")])
    gpus = gpus_here()
    for directory in directories:
        route, wrong = _route(directory)
        if (route is not None or wrong) and is_route_alone(directory):
            yield CheckFinding(directory.name, directory, wrong, (), route=route)
            continue
        model = LocalModel(directory, options.backend_directory)
        loaded = load_model_directory(
            directory,
            config_name=options.model_config_name,
            auto_complete=not options.disable_auto_complete_config,
            complete=model.complete,
            gpus=gpus,
        )
        found = [
            *wrong,
            *_missing_arms(route, loaded),
            *loaded.mistakes,
            *version_maker.agent_mistakes(loaded.polled),
            *_samples(loaded),
        ]
        remarks = [*loaded.remarks]
        if all(mistake.elsewhere for mistake in found):
            wrong, more = _opened(model, loaded, here=not found)
            found += wrong
            remarks += more
        mistakes = sorted(found, key=_place)
        # Repositories are often checked on a different machine from the one that serves them.
        local = [Remark("warning", f"on this machine: {_said(each)}") for each in mistakes if each.elsewhere]
        lasting = [mistake for mistake in mistakes if not mistake.elsewhere]
        yield CheckFinding(directory.name, directory, lasting, [*local, *remarks], loaded)


def _said(mistake: Mistake) -> str:
    """Return a mistake and its remedy in a line. Triton's text may end with a list of GPUs that is empty."""
    none = "none" if mistake.message.endswith(": ") else ""
    return mistake.client_message or f"{mistake.message}{none}. {mistake.remedy}"


def _route(directory: Path) -> tuple[RouteFile | None, list[Mistake]]:
    """Return the route in a model's directory, if it has one, and the mistake in it."""
    try:
        return read_route_file(directory), []
    except InvalidArgument as error:
        message = error.message
    except OSError as error:
        message = system_error(error, directory)
    return None, [_route_mistake(message)]


def _route_mistake(text: str) -> Mistake:
    """Return a mistake in a route from its text, which begins with file and line."""
    found = re.fullmatch(r"(.*?\.toml):(?:(\d+):)? (.*)", text, re.DOTALL)
    file, line, message = found.groups() if found is not None else ("", None, text)
    remedy = "Correct the route: docs/routes.md has its keys."
    return Mistake(message=message, remedy=remedy, file=file, line=int(line or 0), column=1 if line else 0)


def _missing_arms(route: RouteFile | None, loaded: LoadedModel) -> list[Mistake]:
    """Return the mistakes in a route whose arms are versions that the model does not have."""
    try:
        if route is not None:
            versions_of(route, loaded.polled.name, loaded.polled.existing)
    except InvalidArgument as error:
        return [_route_mistake(error.message)]
    return []


def _place(mistake: Mistake) -> tuple[str, int, int]:
    return (mistake.file, mistake.line, mistake.column)


def _connected(findings: Sequence[CheckFinding]) -> Iterator[CheckFinding]:
    """Yield the findings, extended by the mismatches between ensembles and their models."""
    models = {
        (finding.directory.parent, finding.model): DescribedModel(finding.loaded, sound=not finding.mistakes)
        for finding in findings
        if finding.loaded is not None
    }
    routes = {finding.model: finding.route.route for finding in findings if finding.route is not None}
    survey = EnsembleSurvey(models, routes)
    for finding in findings:
        key = (finding.directory.parent, finding.model)
        if key in models:
            verdict = survey.verdict(key)
            mistakes = sorted((*finding.mistakes, *verdict.mistakes), key=_place)
            finding = replace(finding, mistakes=mistakes, remarks=[*finding.remarks, *verdict.remarks])
        yield finding


def _samples(loaded: LoadedModel) -> list[Mistake]:
    """Return the mistakes in the warm-up samples of a model that has no other mistakes so far."""
    polled = loaded.polled
    found: list[Mistake] = []
    for config in () if loaded.mistakes else loaded.configs.values():
        signature = signature_of(config, polled.directory)
        found += warm_up.warm_up_mistakes(config, signature, polled.directory)
        found += warm_up.recorded_mistakes(config, signature, polled.directory, infer_request.read_recorded_request)
    return polled.text.source.place(list(dict.fromkeys(found)))


def _opened(model: LocalModel, loaded: LoadedModel, *, here: bool) -> tuple[list[Mistake], list[Remark]]:
    """Return what a load would report about the files of each version of a model that has no mistakes so far.

    Not ``here``: it lacks GPUs on this machine.
    """
    mistakes: list[Mistake] = []
    remarks: list[Remark] = []
    for version, config in loaded.configs.items():
        try:
            if config.backend:
                model.open(config if here else without_gpus(config), version, completed=loaded.certain)
        except CompletionUnavailable as reason:
            remarks.append(Remark("note", str(reason)))
        except NeriteError as error:
            mistakes += refused(error, loaded.polled, version)
    return mistakes, remarks


def _duplicates(findings: Sequence[CheckFinding]) -> Iterator[CheckFinding]:
    """Yield a finding for each model that is in more than one repository."""
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
