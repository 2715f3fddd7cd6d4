"""What ``nerite bench`` does: prepares the load, has it measured, and says what it showed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from nerite.bench import prompts
from nerite.bench.fleet import Fleet
from nerite.bench.measurement import Rule
from nerite.bench.plan import Level, Plan
from nerite.bench.preparation import Target, Wanted, prepared
from nerite.bench.report import csv_form, html_form, json_form
from nerite.bench.server import GrpcServer, Server
from nerite.bench.session import Look, Session
from nerite.bench.shared_memory import Regions
from nerite.cli.bench.options import PROGRAM, parse
from nerite.cli.bench.table import headings, remarks, row
from nerite.cli.client.connection import connected
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
            outcomes = list(session.run(_levels(options), lambda look: _show_progress(progress, look)))
    table = [headings(outcomes), *(row(outcome) for outcome in outcomes)]
    told = list(remarks(outcomes, options.stability))
    show_table(table[0], table[1:])
    for remark in told:
        show(remark)
    if options.json is not None:
        _write(options.json, json_form.render(options.model, outcomes))
    if options.csv is not None:
        _write(options.csv, csv_form.render(outcomes))
    if options.html is not None:
        _write(options.html, html_form.render(_heading(options, target), outcomes, table, told))
    return 0


def _levels(options: argparse.Namespace) -> list[Level]:
    if options.rate:
        return [Level(rate=rate, arrivals="poisson" if options.poisson else "constant") for rate in options.rate]
    return [Level(concurrency=count) for count in options.concurrency]


def _server(options: argparse.Namespace, target: Target, stack: ExitStack) -> Server:
    if target.protocol == "grpc":
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
        raise ClientError("\n    ".join(filter(None, (str(error), _near(options.model, server))))) from error


def _near(model: str, server: Server) -> str:
    """Return the model that may have been meant, where there is none of that name."""
    try:
        names = {entry.name for entry in server.models()}
    except ClientError:
        return ""
    return "" if model in names else did_you_mean(model, names)


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
