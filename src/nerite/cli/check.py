"""``nerite check``: everything that is wrong in model repositories, without serving them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nerite.cli.command import new_parser, show_json, status_of
from nerite.cli.completing import ModelHere, gpus_here
from nerite.config.completion import CompletionUnavailable
from nerite.config.loading import LoadedModel, Remark, load_model_directory, refused
from nerite.config.mistake import Mistake, told
from nerite.config.options import ServerOptions
from nerite.config.signature import signature_of
from nerite.core.errors import Internal, NeriteError
from nerite.execution import recorded_requests, warm_up_data
from nerite.repository import agents
from nerite.repository.ensemble_survey import Described, EnsembleSurvey
from nerite.transports.http import recorded_request

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
class Finding:
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


def examine(repositories: Sequence[str]) -> list[Finding]:
    """Return what is found about the models of repositories, as they are served without flags."""
    return _examined(_parser().parse_args(["--", *repositories]))


def _examined(options: argparse.Namespace) -> list[Finding]:
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


def _repository(root: Path, options: argparse.Namespace) -> Iterator[Finding]:
    """Find what is wrong with each model in a repository."""
    try:
        directories = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        remedy = f"{error.strerror}: name a directory that has a directory for each model."
        message = f"failed to open directory {root}"
        yield Finding("", root, [Mistake(message=message, file=str(root), remedy=remedy, error=Internal)], ())
        return
    if not directories:
        yield Finding("", root, (), [Remark("warning", "the repository is empty: there is no model in it")])
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
        found = [*loaded.mistakes, *agents.mistakes_of(loaded.polled), *_samples(loaded)]
        remarks = [*loaded.remarks]
        if not found:
            found, more = _opened(model, loaded)
            remarks += more
        mistakes = sorted(found, key=_place)
        # A repository is often checked on another machine than the one that serves it.
        local = [Remark("warning", f"on this machine: {mistake.message}") for mistake in mistakes if mistake.elsewhere]
        lasting = [mistake for mistake in mistakes if not mistake.elsewhere]
        yield Finding(directory.name, directory, lasting, [*local, *remarks], loaded)


def _place(mistake: Mistake) -> tuple[str, int, int]:
    return (mistake.file, mistake.line, mistake.column)


def _connected(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Add what is wrong between ensembles and their models."""
    models = {
        (finding.directory.parent, finding.model): Described(finding.loaded, sound=not finding.mistakes)
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
        found += warm_up_data.mistakes(config, signature, polled.directory)
        found += recorded_requests.mistakes(config, signature, polled.directory, recorded_request.read)
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


def _duplicates(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Find the models that are in more than one repository."""
    seen: dict[str, Path] = {}
    for finding in findings:
        if not finding.model:
            continue
        if (first := seen.setdefault(finding.model, finding.directory)) != finding.directory:
            message = f"failed to poll model '{finding.model}': not unique across all model repositories"
            mistake = Mistake(message=message, file=str(finding.directory), remedy=f"Rename it, or remove {first}.")
            yield Finding(finding.model, finding.directory, [mistake], ())


def _print_mistakes(findings: Sequence[Finding]) -> None:
    for finding in findings:
        for text in told(finding.mistakes):
            print(text)


def _print_json(findings: Sequence[Finding]) -> None:
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


def _summary(findings: Sequence[Finding]) -> str:
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
