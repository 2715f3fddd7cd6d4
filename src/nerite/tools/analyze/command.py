"""``nerite analyze``: its command line; runs the search, and reports and applies the best configuration."""

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
from nerite.cli.command import (
    ProgressBar,
    add_repeated,
    did_you_mean,
    new_parser,
    positive_integer,
    positive_number,
    show,
    show_table,
    status_of,
)
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
    difference,
    findings,
    line,
    named,
    render,
    row,
    settled,
    verdict,
)
from nerite.tools.analyze.search import SETTINGS, Space, Subject, Subjects, Value, budget, search, space_of
from nerite.tools.analyze.trial import Checkpoint, Conditions, Load, completed, conditions, measured
from nerite.tools.bench.options import add_measurement, add_requests, add_tensors, counts, rule_of, tensor_load
from nerite.tools.bench.provenance import Provenance, command_line
from nerite.tools.bench.report import write_file
from nerite.tools.bench.session import ServerReading
from nerite.tools.trial_inputs import chosen_shapes

PROGRAM = "nerite analyze"
_SETTINGS = "\n".join(f"  {name:12}{setting.purpose}" for name, setting in SETTINGS.items())
_EPILOG = f"""\
Settings:
{_SETTINGS}

Several models are put under load together on one server, and their settings are varied together. For an ensemble, the
settings of its models are varied. With several models, settings are named MODEL.SETTING.
Each configuration is measured in a separate server with its own port, and the best ones are measured again in turns.
The repository is changed only with --apply. Do not run other work on the machine meanwhile. Measurements are kept in
a checkpoint: after Ctrl-C the same command resumes, and with other limits or values it measures only what is missing.
The exit status is 0 for success, 1 if a model cannot be analyzed or no configuration meets the limits, 2 for an invalid
command line, 130 after Ctrl-C.

Examples:
  nerite analyze resnet
  nerite analyze resnet --max-p99 50 --max-memory 2000 --concurrency 1,8,32
  nerite analyze resnet --objective latency --min-rate 200
  nerite analyze resnet --search brute --set max_batch=8,16,32 --set instances=1,2 --apply
  nerite analyze resnet bert --set bert.instances=1,2 --html both.html
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit if it is invalid."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.command = command_line(PROGRAM, arguments)
    models: list[str] = options.models
    if len(set(models)) < len(models):
        parser.error("a model is specified twice")
    if len(models) > 1 and options.data not in ("random", "zero"):
        parser.error("--data FILE requires a single model: several models have different inputs")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(PROGRAM, "Find the fastest configuration of models by measuring.", _EPILOG)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="model to analyze; several are measured together")
    add_repository(parser)
    parser.add_argument(
        "--bls-composing-models",
        metavar="MODELS",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help="models called by MODEL (BLS), comma-separated: they are loaded as well, and their settings varied",
    )
    parser.add_argument("--apply", action="store_true", help="write the best configuration to the repository")
    where = "file that keeps the measurements (default: MODEL.analysis.jsonl)"
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, help=where)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all findings as JSON, best first")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a self-contained HTML page with plots")
    _add_search(parser.add_argument_group("search"))
    _add_goal(parser.add_argument_group("goal"))
    _add_load(parser.add_argument_group("load"))
    add_measurement(parser)
    return parser


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--search",
        choices=("quick", "guided", "brute"),
        default="guided",
        help="guided (default): always the configuration with the largest expected improvement, at most a quarter of "
        "all; quick: hill climbing from the current configuration; brute: all",
    )
    values = "values to try, such as max_batch=1,8,32 or resnet.instances=1,2"
    add_repeated(group, "--set", "SETTING=VALUES", values, _setting)
    group.add_argument("--most", metavar="N", type=positive_integer, help="maximum number of configurations to try")


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--objective",
        choices=("throughput", "latency", "memory"),
        default="throughput",
        help="what to optimise within the limits: highest throughput (default), lowest p99, or lowest memory",
    )
    p99 = "maximum 99th percentile of the latency"
    group.add_argument("--max-p99", "--latency-budget", metavar="MS", type=positive_number, help=p99)
    group.add_argument(
        "--max-memory", metavar="MB", type=positive_number, help="maximum memory of the models under load"
    )
    rate = "minimum responses per second, for each model"
    group.add_argument("--min-rate", "--min-throughput", metavar="RATE", type=positive_number, help=rate)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        metavar="LEVELS",
        type=counts,
        default=(1, 8, 32),
        help="concurrent requests to each model; the best level within the limits counts (default: 1,8,32)",
    )
    group.add_argument("--protocol", choices=("http", "grpc"), default="http", help="protocol to use (default: http)")
    add_tensors(group)
    add_requests(group)


def _setting(text: str) -> tuple[str, str, Sequence[Value]]:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise argparse.ArgumentTypeError(f"'{text}' has no values: write max_batch=1,8,32")
    model, _, name = key.rpartition(".")
    if name not in SETTINGS:
        near = did_you_mean(name, SETTINGS) or f"Settings: {', '.join(SETTINGS)}."
        raise argparse.ArgumentTypeError(f"unknown setting '{name}'. {near}")
    try:
        return model, name, [SETTINGS[name].parsed(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{values}': values of {name} must be integers, such as 1,8,32") from None


class Bench:
    """Measures configurations, or takes the results from the checkpoint, and shows progress (``done`` of ``most``)."""

    def __init__(
        self, repository: Path, subjects: Subjects, load: Load, checkpoint: Checkpoint, progress: ProgressBar
    ) -> None:
        self.done = 0
        self.most = 0
        self.measurements = 0
        """Number of levels of load that were measured, in this or an earlier run."""
        self.progress = progress
        self._repository = repository
        self._subjects = subjects
        self._load = load
        self._checkpoint = checkpoint

    def __call__(self, changes: Mapping[str, Value], turn: int = 0, levels: Sequence[int] = ()) -> Finding:
        """Return the result of a configuration, and store it in the checkpoint."""
        levels = levels or self._load.concurrencies
        identity = self._subjects.identity(changes)
        finding = self._checkpoint.get(identity, turn, levels)
        if finding is None:
            place = "repeated" if turn else f"{self.done + 1} of at most {self.most}"
            report = partial(self._show_progress, f"{place}: {named(changes)}")
            finding = measured(self._repository, self._subjects.texts(changes), changes, self._load, levels, report)
            if not finding.refused:  # it may succeed another time
                self._checkpoint.add(identity, turn, finding)
        self.measurements += len(levels)
        # The current configuration may have been a different one in an earlier run.
        return dataclasses.replace(finding, changes=changes)

    def _show_progress(self, what: str, look: ServerReading) -> None:
        self.progress.part(what, look.part, f"concurrency {look.level}{', warming up' if look.warming_up else ''}")


_SHOWN = 5


def run(arguments: Sequence[str]) -> int:
    """Run the analysis; return the exit status."""
    return status_of(PROGRAM, lambda: _analyze(parse(arguments)), ClientError)


def _analyze(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    for model in (*options.models, *options.bls_composing_models):
        existing_model(repository, model)
    goal = Goal(options.objective, options.max_p99, options.max_memory and options.max_memory * 1e6, options.min_rate)
    with ProgressBar() as progress:
        progress.doing("loading the models with their current configurations")
        load, configs = completed(repository, _load(options))
        progress.clear()
        for text in _chosen(load, options):
            show(text)
        subjects = _subjects(repository, load, configs)
        space = space_of(subjects, usable_cores(), options.set)
        directories = {repository / name: config for name, config in configs.items()}
        now = conditions(load.to_json(), directories, [subject.name for subject in subjects.all])
        checkpoint = Checkpoint(options.checkpoint or Path(f"{'+'.join(options.models)}.analysis.jsonl"), now)
        if len(checkpoint):
            show(f"{checkpoint.path} has {len(checkpoint)} measurements. Remove it to start over.")
        bench = Bench(repository, subjects, load, checkpoint, progress)
        # On SIGTERM, unwind as for Ctrl-C, so that the trial server is terminated.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            found = _found(options, space, goal, bench)
        except KeyboardInterrupt:
            progress.clear()
            show(f"Stopped: {checkpoint.path} has {len(checkpoint)} measurements. Run the same command to resume.")
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if options.json is not None:
        counts = {"configurations": space.size, "measurements": bench.measurements}
        ranked = [each.to_json() | {"kept": goal.kept(each)} for each in goal.winners(found)]
        write_file(options.json, json.dumps({"models": options.models, **counts, "findings": ranked}, indent=2) + "\n")
    about = (f"{len(found)} of {space.size} configurations", *_about(load, now))
    return _conclude(options, subjects, goal, about, found)


def _chosen(load: Load, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each model whose variable dimensions were given sizes."""
    given = {name for name, _ in options.shape}
    for wanted in load.asked:
        chosen = {name: sizes for name, sizes in wanted.shapes.items() if not given & {name, f"{wanted.model}.{name}"}}
        if chosen:
            shown = {f"{wanted.model}.{name}" if len(load.asked) > 1 else name: chosen[name] for name in chosen}
            yield chosen_shapes(shown)


def _found(options: argparse.Namespace, space: Space, goal: Goal, bench: Bench) -> list[Finding]:
    """Run the search and the repeated measurements; return the findings, the current configuration first."""
    # Repeated measurements use only one level of load.
    bench.most = budget(options.search, space, -(-AGAIN // len(options.concurrency)), options.most)
    found: list[Finding] = []
    for finding in findings(space, search(options.search, space, bench.most), bench, goal):
        if not found and finding.refused:
            raise InvalidArgument(f"the current configuration cannot be measured: {finding.refused}{_remedy(finding)}")
        found.append(finding)
        bench.done = len(found)
        bench.progress.clear()
        show(f"{len(found):3}  {line(finding, goal)}")
    found = settled(found, bench, goal)
    if found[0].refused:
        raise InvalidArgument(f"the current configuration cannot be measured again: {found[0].refused}")
    return found


def _remedy(finding: Finding) -> str:
    unknown = "unknown model" in finding.refused
    return "\n    If the model calls that model, add it with --bls-composing-models." if unknown else ""


def _about(load: Load, now: Conditions) -> Iterator[str]:
    yield f"{load.protocol}, concurrency {', '.join(map(str, load.concurrencies))}"
    yield f"{now['machine']['cores']} cores ({now['machine']['processor']})"
    yield datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _conclude(
    options: argparse.Namespace, subjects: Subjects, goal: Goal, about: Sequence[str], found: Sequence[Finding]
) -> int:
    ranked = goal.winners(found)
    best = ranked[0]
    show(f"\nBest of {about[0]}:")
    show_table(HEADINGS, [row(each, goal) for each in ranked[:_SHOWN]])
    diff = difference(subjects, best.changes)
    if options.html is not None:
        table = [HEADINGS, *(row(each, goal) for each in ranked)]
        heading = AnalyzeHeading(" + ".join(options.models), about, Provenance.now(options.command))
        write_file(options.html, render(heading, found, goal, table, diff))
    show(verdict(found, goal))
    if not goal.kept(best):
        return 1
    if not best.changes:
        return 0
    show(f"\n{diff}")
    if not options.apply:
        show("\nPass --apply to write these changes.")
        return 0
    for subject, values in subjects.values(best.changes):
        if values:
            _replace(subject.path, subject.rewritten(values))
            show(f"\nWrote {subject.path}.")
    return 0


def _load(options: argparse.Namespace) -> Load:
    asked = tuple(tensor_load(options, model) for model in options.models)
    return Load(
        asked, options.concurrency, rule_of(options), options.warm_up, options.protocol, options.bls_composing_models
    )


def _subjects(repository: Path, load: Load, configs: Mapping[str, ModelConfig]) -> Subjects:
    """Return the models whose settings are varied: all except ensembles, which have no settings of their own."""
    varied = [config for config in configs.values() if config.ensemble_scheduling is None]
    subjects = tuple(Subject.read(existing_model(repository, config.name), config) for config in varied)
    return Subjects(subjects, prefixed=[subject.name for subject in subjects] != [load.asked[0].model])


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, so that no server sees an incomplete one."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise Internal(f"cannot write {path}: {error.strerror}.") from None
