"""What ``nerite analyze`` does: has configurations measured, shows the best, and what it changes."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from nerite.analyze import report
from nerite.analyze.analysis import findings
from nerite.analyze.checkpoint import Checkpoint
from nerite.analyze.finding import Finding, named
from nerite.analyze.ranking import Limits, best_figure, kept, ranked, score
from nerite.analyze.search import budget, search
from nerite.analyze.settings import Value, changed
from nerite.analyze.space import space_of
from nerite.analyze.trial import Load, completed, measured
from nerite.backends.cores import usable_cores
from nerite.bench.measurement import Rule
from nerite.bench.preparation import Wanted
from nerite.bench.session import Look
from nerite.cli.analyze.options import PROGRAM, parser
from nerite.cli.command import repository_of, show, show_table, status_of
from nerite.cli.progress import Progress, megabytes
from nerite.client import ClientError
from nerite.config.loading import CONFIG_FILE, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.text_edit import edited
from nerite.config.text_form import to_text
from nerite.core.errors import Internal, InvalidArgument
from nerite.intake.destination import existing_model

_SHOWN = 5
_HEADINGS = ["Settings", "Requests/s", "p99 ms", "at", "Memory", "Limits"]


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(PROGRAM, lambda: _analyze(parser().parse_args(arguments)), ClientError)


def _analyze(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    directory = existing_model(repository, options.model)
    limits = Limits(options.max_p99, options.max_memory and options.max_memory * 1e6)
    load = _load(options)
    checkpoint = Checkpoint(options.checkpoint or Path(f"{options.model}.analysis.jsonl"), load.to_json())
    with Progress() as progress:
        progress.doing("loading the model as it is")
        complete = completed(repository, options.model)
        written = dataclasses.replace(poll_model_directory(directory).text.config, name=options.model)
        space = space_of(complete, usable_cores(), dict(options.set))
        most = budget(options.search, space)
        if checkpoint.found:
            show(f"{checkpoint.path} has {checkpoint.found} measurements: remove it to measure anew.")
        found: list[Finding] = []

        def measure(changes: Mapping[str, Value]) -> Finding:
            config = changed(written, complete.backend, changes)
            finding = checkpoint.get(to_text(config))
            if finding is None:
                what = f"{len(found) + 1} of {most} at most: {named(changes)}"
                finding = measured(repository, config, changes, load, lambda look: _tell(progress, what, look))
                if not finding.refused:  # another time it may be none
                    checkpoint.add(to_text(config), finding)
            # Another run may have had another present configuration.
            return dataclasses.replace(finding, changes=changes)

        for finding in findings(space, search(options.search, space), measure, lambda each: score(each, limits)):
            if not found and finding.refused:
                raise InvalidArgument(f"the present configuration cannot be measured: {finding.refused}")
            found.append(finding)
            progress.clear()
            show(f"{len(found):3}  {_line(finding, limits)}")
    return _conclude(options, directory, limits, space.size, found, (written, complete.backend))


def _conclude(
    options: argparse.Namespace,
    directory: Path,
    limits: Limits,
    size: int,
    found: Sequence[Finding],
    config: tuple[ModelConfig, str],
) -> int:
    best = ranked(found, limits)
    told = f"The best of {len(found)} configurations that were measured, of {size} there are"
    show(f"\n{told}:")
    show_table(_HEADINGS, [_row(each, limits) for each in best[:_SHOWN]])
    path = directory / CONFIG_FILE
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    written, backend = config
    after = edited(before, written, changed(written, backend, best[0].changes))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), str(path), lineterm="")
    diff = "\n".join(lines)
    if options.html is not None:
        table = [_HEADINGS, *(_row(each, limits) for each in best)]
        _write(options.html, report.render(options.model, told, found, limits, table, diff))
    if not kept(best[0], limits):
        show("No configuration keeps to the limits.")
        return 1
    if not best[0].changes:
        show("The present configuration is the best.")
        return 0
    now, then = best_figure(found[0], limits), best_figure(best[0], limits)
    if kept(found[0], limits):
        show(f"That is {then.rate / now.rate:.2f} times what the present configuration answers, {now.rate:,.0f}/s.")
    else:
        show("The present configuration does not keep to the limits.")
    show(f"\n{diff}")
    if options.apply:
        _write(path, after)
        show(f"\nWrote {path}.")
    return 0


def _load(options: argparse.Namespace) -> Load:
    data = options.data if options.data in ("random", "zero") else Path(options.data)
    wanted = Wanted(options.model, batch=options.batch, shapes=dict(options.shape), data=data)
    rule = Rule(options.window, percentage=options.stability, most=options.windows)
    return Load(wanted, options.concurrency, rule, options.warm_up)


def _tell(progress: Progress, what: str, look: Look) -> None:
    progress.part(what, look.part, f"concurrency {look.level}{', warming up' if look.warming_up else ''}")


def _line(finding: Finding, limits: Limits) -> str:
    if finding.refused:
        return f"{named(finding.changes)}: refused, {finding.refused.splitlines()[0]}"
    figure = best_figure(finding, limits)
    return (
        f"{named(finding.changes)}: {figure.rate:,.0f}/s, p99 {figure.p99:,.2f} ms at concurrency "
        f"{figure.concurrency}, {megabytes(finding.memory)}"
    )


def _row(finding: Finding, limits: Limits) -> list[str]:
    figure = best_figure(finding, limits)
    within = "kept" if kept(finding, limits) else "exceeded"
    rates = [f"{figure.rate:,.1f}", f"{figure.p99:,.3f}", str(figure.concurrency)]
    return [named(finding.changes), *rates, megabytes(finding.memory), within]


def _write(path: Path, text: str) -> None:
    """Write it at once, so that no server sees a part of it."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise Internal(f"{path} cannot be written: {error.strerror}.") from None
