"""What ``nerite bench`` does: prepares the load, has it measured, and says what it showed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from nerite.bench import prompts
from nerite.bench.fleet import Fleet
from nerite.bench.measurement import Rule
from nerite.bench.plan import Level, Plan
from nerite.bench.preparation import Target, Wanted, prepared
from nerite.bench.report import csv_form, html_form, json_form
from nerite.bench.search import Search
from nerite.bench.server import GrpcServer, Server
from nerite.bench.session import Look, Outcome, Session
from nerite.bench.shared_memory import Regions
from nerite.cli.bench.options import PROGRAM, parse
from nerite.cli.bench.table import found, headings, remarks, row
from nerite.cli.client.connection import connected, remedied
from nerite.cli.command import show, show_table, status_of
from nerite.cli.progress import Progress
from nerite.cli.suggestion import did_you_mean
from nerite.client import ClientError, ModelStatistics
from nerite.client.address import Address
from nerite.client.error import Unreachable


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(PROGRAM, lambda: _bench(parse(arguments)), ClientError)


def _bench(options: argparse.Namespace) -> int:
    rule = Rule(options.window, percentage=options.stability, most=options.windows)
    target = Target(options.protocol, Address.parse(options.url), dict(options.header), options.timeout)
    with ExitStack() as stack:
        server = _server(options, target, stack)
        plan = _prepared(options, target, server, stack)
        fleet = stack.enter_context(Fleet(plan, options.processes))
        session = Session(fleet, rule, options.warm_up, options.slo, count=lambda: _counted(server, options))
        with Progress() as progress:
            search = _search(options)
            outcomes = _outcomes(session, options, search, lambda look: _show_progress(progress, look))
    table = [headings(outcomes), *(row(outcome) for outcome in outcomes)]
    told = list(remarks(outcomes, options.stability))
    if search is not None:
        told.insert(0, found(search))
    show_table(table[0], table[1:])
    for remark in told:
        show(remark)
    if options.json is not None:
        _write(options.json, json_form.render(options.model, outcomes, search))
    if options.csv is not None:
        _write(options.csv, csv_form.render(outcomes))
    if options.html is not None:
        _write(options.html, html_form.render(_heading(options, target), outcomes, table, told))
    return 0


def _search(options: argparse.Namespace) -> Search | None:
    if options.within is None:
        return None
    levels = _levels(options)
    return Search(options.within, levels[0], levels[-1])


def _outcomes(
    session: Session, options: argparse.Namespace, search: Search | None, tell: Callable[[Look], None]
) -> list[Outcome]:
    """Measure all levels, or those that a search wants; return what they showed, the lowest first."""
    if search is None:
        return list(session.run(_levels(options), tell))
    outcomes = []
    while search.next is not None:
        outcomes.append(session.measure(search.next, tell))
        search.add(outcomes[-1])
    return sorted(outcomes, key=lambda outcome: outcome.level.value)


def _levels(options: argparse.Namespace) -> list[Level]:
    if options.rate:
        return [Level(rate=rate, arrivals="poisson" if options.poisson else "constant") for rate in options.rate]
    return [Level(concurrency=count) for count in options.concurrency]


def _server(options: argparse.Namespace, target: Target, stack: ExitStack) -> Server:
    if target.protocol == "grpc":
        stack.enter_context(remedied("gRPC"))
        return GrpcServer(target.plan())
    return stack.enter_context(connected(options))


def _prepared(options: argparse.Namespace, target: Target, server: Server, stack: ExitStack) -> Plan:
    if options.protocol == "openai":
        settings = dict(options.parameter)
        data = None if options.data == "random" else Path(options.data)
        return prompts.prepared(prompts.Wanted(options.model, options.prompt_words, data, settings), target)
    try:
        regions = stack.enter_context(Regions(server)) if options.shared_memory else None
        return prepared(_wanted(options), target, server, regions)
    except Unreachable:
        raise
    except ClientError as error:
        raise ClientError("\n    ".join(filter(None, (str(error), _remedy(options, server))))) from error


def _remedy(options: argparse.Namespace, server: Server) -> str:
    """Return what to do where a model cannot be asked: name another, or another version, or have it loaded."""
    model = options.model
    try:
        entries = server.models()
    except ClientError:
        return ""
    versions = [entry for entry in entries if entry.name == model]
    if not versions:
        return did_you_mean(model, {entry.name for entry in entries})
    ready = [entry.version for entry in versions if entry.state == "READY"]
    if not ready:
        reasons = [line.strip() for entry in versions for line in entry.reason.splitlines() if line.strip(" .")]
        remedy = f"It is there, but it is not loaded. When that is mended: nerite client load {model}"
        return "\n    ".join([remedy, *reasons])
    return "" if options.version in ("", *ready) else f"Its versions: {', '.join(ready)}."


def _wanted(options: argparse.Namespace) -> Wanted:
    return Wanted(
        model=options.model,
        version=options.version,
        batch=options.batch,
        shapes=dict(options.shape),
        data=options.data if options.data in ("random", "zero") else Path(options.data),
        outputs=options.output,
        parameters=dict(options.parameter),
        streaming=options.streaming,
        sequence_length=options.sequence_length,
        first_id=options.first_sequence_id,
        output_room=options.output_shared_memory,
    )


def _counted(server: Server, options: argparse.Namespace) -> ModelStatistics | None:
    """Return what the server has counted; None if it does not tell."""
    try:
        versions = server.statistics(options.model, options.version)
    except ClientError:
        return None
    # The one that answers is the one that was asked last.
    return max(versions, key=lambda version: version.last_inference, default=None)


def _show_progress(progress: Progress, look: Look) -> None:
    what = f"{look.level.kind} {look.level}"
    if look.warming_up:
        progress.part(what, look.part, "warming up")
    else:
        rate = f", {look.rate:,.0f} requests/s" if look.rate else ""
        progress.part(what, look.part, f"window {look.windows + 1}{rate}")


def _heading(options: argparse.Namespace, target: Target) -> html_form.Heading:
    settings = f"{options.protocol}, batches of {options.batch}, windows of {options.window:g} s"
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return html_form.Heading(options.model, str(target.address), settings, when)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"the figures cannot be written to {path}: {error.strerror}") from None
