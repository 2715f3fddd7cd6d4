"""What ``nerite analyze`` does: has configurations measured, shows the best, and what it changes."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from nerite.analyze import report
from nerite.analyze.analysis import AGAIN, findings, settled
from nerite.analyze.checkpoint import Checkpoint
from nerite.analyze.conditions import Conditions, conditions
from nerite.analyze.finding import Finding
from nerite.analyze.load import Load
from nerite.analyze.ranking import Goal
from nerite.analyze.search import budget, search
from nerite.analyze.space import Space, space_of
from nerite.analyze.subject import Subject, Subjects
from nerite.analyze.trial import completed
from nerite.backends.cores import usable_cores
from nerite.bench.measurement import Rule
from nerite.bench.preparation import Wanted
from nerite.cli.analyze.measuring import Bench
from nerite.cli.analyze.options import PROGRAM, parse
from nerite.cli.analyze.telling import HEADINGS, comparison, difference, line, row
from nerite.cli.command import repository_of, show, show_table, status_of
from nerite.cli.progress import Progress
from nerite.client import ClientError
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal, InvalidArgument
from nerite.intake.destination import existing_model

_SHOWN = 5


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(PROGRAM, lambda: _analyze(parse(arguments)), ClientError)


def _analyze(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    for model in (*options.models, *options.bls_composing_models):
        existing_model(repository, model)
    goal = Goal(options.objective, options.max_p99, options.max_memory and options.max_memory * 1e6, options.min_rate)
    with Progress() as progress:
        progress.doing("loading the models as they are")
        load = _load(options)
        configs = completed(repository, load.models)
        load = load.fitted(configs)
        subjects = _subjects(repository, load, configs)
        space = space_of(subjects, usable_cores(), options.set)
        directories = {repository / name: config for name, config in configs.items()}
        now = conditions(load.to_json(), directories, [subject.name for subject in subjects.all])
        checkpoint = Checkpoint(options.checkpoint or Path(f"{'+'.join(options.models)}.analysis.jsonl"), now)
        if len(checkpoint):
            show(f"{checkpoint.path} has {len(checkpoint)} measurements: remove it to measure anew.")
        bench = Bench(repository, subjects, load, checkpoint, progress)
        # The server that is measured ends with us, whoever ends us.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            found = _found(options, space, goal, bench)
        except KeyboardInterrupt:
            progress.clear()
            show(f"Stopped: {checkpoint.path} has {len(checkpoint)} measurements. The same command goes on from there.")
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if options.json is not None:
        counts = {"configurations": space.size, "measurements": bench.measurements}
        told = [each.to_json() | {"kept": goal.kept(each)} for each in goal.winners(found)]
        _write(options.json, json.dumps({"models": options.models, **counts, "findings": told}, indent=2) + "\n")
    about = (f"{len(found)} of {space.size} configurations", *_about(load, now))
    return _conclude(options, subjects, goal, about, found)


def _found(options: argparse.Namespace, space: Space, goal: Goal, bench: Bench) -> list[Finding]:
    """Return what was found, the present configuration first."""
    # Those that are measured again are measured at one level.
    bench.most = budget(options.search, space, -(-AGAIN // len(options.concurrency)), options.most)
    found: list[Finding] = []
    for finding in findings(space, search(options.search, space, bench.most), bench, goal):
        if not found and finding.refused:
            raise InvalidArgument(f"the present configuration cannot be measured: {finding.refused}{_remedy(finding)}")
        found.append(finding)
        bench.done = len(found)
        bench.progress.clear()
        show(f"{len(found):3}  {line(finding, goal)}")
    found = settled(found, bench, goal)
    if found[0].refused:
        raise InvalidArgument(f"the present configuration cannot be measured again: {found[0].refused}")
    return found


def _remedy(finding: Finding) -> str:
    unknown = "unknown model" in finding.refused
    return "\n    If the model calls that one, name it with --bls-composing-models." if unknown else ""


def _about(load: Load, now: Conditions) -> Iterator[str]:
    yield f"{load.protocol}, concurrency {', '.join(map(str, load.concurrencies))}"
    yield f"{now['machine']['cores']} cores ({now['machine']['processor']})"
    yield datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _conclude(
    options: argparse.Namespace, subjects: Subjects, goal: Goal, about: Sequence[str], found: Sequence[Finding]
) -> int:
    ranked = goal.winners(found)
    best = ranked[0]
    show(f"\nThe best of {about[0]}:")
    show_table(HEADINGS, [row(each, goal) for each in ranked[:_SHOWN]])
    diff = difference(subjects, best.changes)
    if options.html is not None:
        table = [HEADINGS, *(row(each, goal) for each in ranked)]
        heading = report.Heading(" + ".join(options.models), about)
        _write(options.html, report.render(heading, found, goal, table, diff))
    if not goal.kept(best):
        show("No configuration keeps to the limits.")
        return 1
    if not best.changes:
        show("The present configuration is the best, or as good.")
        return 0
    show(comparison(found[0], best, goal))
    show(f"\n{diff}")
    if not options.apply:
        show("\n--apply writes that.")
        return 0
    for subject, values in subjects.values(best.changes):
        if values:
            _write(subject.path, subject.rewritten(values))
            show(f"\nWrote {subject.path}.")
    return 0


def _load(options: argparse.Namespace) -> Load:
    data = options.data if options.data in ("random", "zero") else Path(options.data)
    rule = Rule(options.window, percentage=options.stability, most=options.windows)
    asked = tuple(
        Wanted(
            model,
            batch=options.batch,
            shapes=dict(options.shape),
            data=data,
            parameters=dict(options.parameter),
            streaming=options.streaming,
            sequence_length=options.sequence_length,
        )
        for model in options.models
    )
    return Load(asked, options.concurrency, rule, options.warm_up, options.protocol, options.bls_composing_models)


def _subjects(repository: Path, load: Load, configs: Mapping[str, ModelConfig]) -> Subjects:
    """Return all models but ensembles, which have nothing to vary but their models."""
    varied = [config for config in configs.values() if config.ensemble_scheduling is None]
    subjects = tuple(Subject.read(existing_model(repository, config.name), config) for config in varied)
    return Subjects(subjects, prefixed=[subject.name for subject in subjects] != [load.asked[0].model])


def _write(path: Path, text: str) -> None:
    """Write it at once, so that no server sees a part of it."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise Internal(f"{path} cannot be written: {error.strerror}.") from None
