"""What ``nerite analyze`` does: has configurations measured, shows the best, and what it changes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from nerite.backends.machine import usable_cores
from nerite.cli.command import ProgressBar, new_parser, show, show_table, status_of
from nerite.cli.errors import did_you_mean
from nerite.client import ClientError
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal, InvalidArgument
from nerite.tools.add.destination import add_repository, existing_model, repository_of
from nerite.tools.analyze.finding import (
    AGAIN,
    HEADINGS,
    AnalyzeHeading,
    Finding,
    Goal,
    comparison,
    difference,
    findings,
    line,
    named,
    render,
    row,
    settled,
)
from nerite.tools.analyze.search import budget, search
from nerite.tools.analyze.space import SETTINGS, Space, Subject, Subjects, Value, space_of
from nerite.tools.analyze.trial import Checkpoint, Conditions, Load, completed, conditions, measured
from nerite.tools.bench.command import add_measurement, add_requests, add_tensors, at_least_one, counts
from nerite.tools.bench.measurement import Rule
from nerite.tools.bench.requests import TensorLoad
from nerite.tools.bench.session import ServerReading

# The options of ``nerite analyze``.

PROGRAM = "nerite analyze"
_SETTINGS = "\n".join(f"  {name:12}{setting.purpose}" for name, setting in SETTINGS.items())
_EPILOG = f"""\
Settings:
{_SETTINGS}

Several models are asked at once, on one server, and their settings varied together. Of an ensemble those of its models
are varied. Settings of one of several models are MODEL.SETTING.
Each configuration is measured in a server of its own, on a port of its own, and the best few again, in turns. The
repository is not written to without --apply. Leave the machine to it meanwhile. What was measured is kept in the
checkpoint: the same command goes on after Ctrl-C, and asks for nothing twice where the limits or the values change.
The exit status is 0 for success, 1 for a model that cannot be analyzed or where nothing keeps to the limits, 2 for a
wrong command line, 130 after Ctrl-C.

Examples:
  nerite analyze resnet
  nerite analyze resnet --max-p99 50 --max-memory 2000 --concurrency 1,8,32
  nerite analyze resnet --objective latency --min-rate 200
  nerite analyze resnet --search brute --set max_batch=8,16,32 --set instances=1,2 --apply
  nerite analyze resnet bert --set bert.instances=1,2 --html both.html
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits where it is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    models: list[str] = options.models
    if len(set(models)) < len(models):
        parser.error("a model is named twice")
    if len(models) > 1 and options.data not in ("random", "zero"):
        parser.error("--data of a file is for one model: several have inputs of their own")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(PROGRAM, "Find the configuration with which models answer most, by measuring.", _EPILOG)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="what is asked; several are asked at once")
    add_repository(parser)
    parser.add_argument(
        "--bls-composing-models",
        metavar="MODELS",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help="models that those call (BLS): they are loaded, too, and their settings varied",
    )
    parser.add_argument("--apply", action="store_true", help="write the best configuration into the repository")
    where = "where to keep what was measured (default: MODEL.analysis.jsonl)"
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, help=where)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all that was found as JSON, the best first")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, in one file")
    _add_search(parser.add_argument_group("the search"))
    _add_goal(parser.add_argument_group("the goal"))
    _add_load(parser.add_argument_group("the load"))
    add_measurement(parser)
    return parser


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--search",
        choices=("quick", "guided", "brute"),
        default="guided",
        help="guided (default): always what promises most by what was measured before, with a quarter of all "
        "measurements at most; quick: a climb from the present configuration; brute: all",
    )
    group.add_argument(
        "--set",
        metavar="SETTING=VALUES",
        action="append",
        type=_setting,
        default=[],
        help="values to try, such as max_batch=1,8,32 or resnet.instances=1,2; may be given several times",
    )
    group.add_argument("--most", metavar="N", type=at_least_one, help="try at most so many configurations")


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--objective",
        choices=("throughput", "latency", "memory"),
        default="throughput",
        help="what is best within the limits: the most answers (default), the least p99, or the least memory",
    )
    p99 = "of 100 answers 99 take no longer"
    group.add_argument("--max-p99", "--latency-budget", metavar="MS", type=_positive, help=p99)
    group.add_argument("--max-memory", metavar="MB", type=_positive, help="the models take no more at work")
    rate = "so many answers a second at least; of several models, of each"
    group.add_argument("--min-rate", "--min-throughput", metavar="RATE", type=_positive, help=rate)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        metavar="LEVELS",
        type=counts,
        default=(1, 8, 32),
        help="so many requests under way, to each model; the level that is best within the limits counts "
        "(default: 1,8,32)",
    )
    group.add_argument("--protocol", choices=("http", "grpc"), default="http", help="what is spoken (default: http)")
    add_tensors(group)
    add_requests(group)


def _setting(text: str) -> tuple[str, str, Sequence[Value]]:
    key, equals, said = text.partition("=")
    if not equals or not said:
        raise argparse.ArgumentTypeError(f"'{text}' names no values: write max_batch=1,8,32")
    model, _, name = key.rpartition(".")
    if name not in SETTINGS:
        near = did_you_mean(name, SETTINGS) or f"There are: {', '.join(SETTINGS)}."
        raise argparse.ArgumentTypeError(f"there is no setting '{name}'. {near}")
    try:
        return model, name, [SETTINGS[name].parsed(value) for value in said.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{said}': values of {name} are whole numbers, such as 1,8,32") from None


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not more than 0")
    return number


# Measures configurations, or remembers what they showed.


class Bench:
    """Tells how far it has come: ``done`` configurations of ``most``."""

    def __init__(
        self, repository: Path, subjects: Subjects, load: Load, checkpoint: Checkpoint, progress: ProgressBar
    ) -> None:
        self.done = 0
        self.most = 0
        self.measurements = 0
        """Levels of load that were measured, now or in an earlier run."""
        self.progress = progress
        self._repository = repository
        self._subjects = subjects
        self._load = load
        self._checkpoint = checkpoint

    def __call__(self, changes: Mapping[str, Value], turn: int = 0, levels: Sequence[int] = ()) -> Finding:
        """Return what a configuration shows, which is in the checkpoint then."""
        levels = levels or self._load.concurrencies
        identity = self._subjects.identity(changes)
        finding = self._checkpoint.get(identity, turn, levels)
        if finding is None:
            place = "again, in turns" if turn else f"{self.done + 1} of {self.most} at most"
            tell = partial(self._tell, f"{place}: {named(changes)}")
            finding = measured(self._repository, self._subjects.texts(changes), changes, self._load, levels, tell)
            if not finding.refused:  # another time it may be none
                self._checkpoint.add(identity, turn, finding)
        self.measurements += len(levels)
        # Another run may have had another present configuration.
        return dataclasses.replace(finding, changes=changes)

    def _tell(self, what: str, look: ServerReading) -> None:
        self.progress.part(what, look.part, f"concurrency {look.level}{', warming up' if look.warming_up else ''}")


_SHOWN = 5


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(PROGRAM, lambda: _analyze(parse(arguments)), ClientError)


def _analyze(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    for model in (*options.models, *options.bls_composing_models):
        existing_model(repository, model)
    goal = Goal(options.objective, options.max_p99, options.max_memory and options.max_memory * 1e6, options.min_rate)
    with ProgressBar() as progress:
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
        heading = AnalyzeHeading(" + ".join(options.models), about)
        _write(options.html, render(heading, found, goal, table, diff))
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
        TensorLoad(
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
