"""``nerite bench``: its steps, and the table and remarks that it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from nerite.cli.command import ProgressBar, did_you_mean, show, show_table, status_of
from nerite.client import Client, ClientError, ModelStatistics
from nerite.client.connection import Address, Unreachable
from nerite.tools.bench import comparison, report
from nerite.tools.bench.conversations import prepared_prompts
from nerite.tools.bench.forms import Cancelling
from nerite.tools.bench.measurement import AGREEING, BenchPlan, BenchTarget, LoadLevel
from nerite.tools.bench.options import (
    PROGRAM,
    cancel_plan,
    levels_of,
    parse,
    prompt_load,
    rule_of,
    tensor_load,
    trace_of,
)
from nerite.tools.bench.provenance import Provenance
from nerite.tools.bench.replay import TracedRequest
from nerite.tools.bench.report import write_file
from nerite.tools.bench.requests import prepared_tensors
from nerite.tools.bench.session import (
    BenchedServer,
    BenchRegions,
    Fleet,
    GrpcServer,
    LevelOutcome,
    Search,
    ServerReading,
    Session,
)
from nerite.tools.connection import connected, remedied
from nerite.tools.trial_inputs import chosen_shapes

# Output: a table with a row for each level of load, and remarks.


def headings(outcomes: Sequence[LevelOutcome]) -> list[str]:
    """Return the headings, without columns that would be empty."""
    found = ["Rate wanted" if outcomes[0].level.open else "Concurrency", "Requests/s", "Mean ms"]
    found += ["p50 ms", "p90 ms", "p99 ms"]
    if outcomes[0].figures.tokens is not None:
        found += ["First ms", "First p99", "Between ms", "Tokens/s"]
    if outcomes[0].figures.texts is not None:
        found.append("Texts/s")
    if outcomes[0].figures.goodput is not None:
        found.append("Good/s")
    if outcomes[0].server is not None:
        found += ["Queue ms", "Compute ms", "Batch"]
    return [*found, "Client", *(["Cancelled"] if _cancels(outcomes) else []), "Failed"]


def _cancels(outcomes: Sequence[LevelOutcome]) -> bool:
    return any(outcome.totals.cancelled for outcome in outcomes)


def _level(outcome: LevelOutcome) -> str:
    """Return the level as the table shows it."""
    return f"{outcome.level}{'' if outcome.stable else ' ~'}"


def row(outcome: LevelOutcome, *, cancels: bool = False) -> list[str]:
    """Return the row of a level. ``cancels``: with the number of cancelled requests."""
    figures = outcome.figures
    latency = figures.latency
    cells = [_level(outcome), f"{figures.rate:,.1f}"]
    cells += [f"{value:,.3f}" for value in (latency.mean, latency["p50"], latency["p90"], latency["p99"])]
    if figures.tokens is not None:
        tokens = figures.tokens
        cells += [f"{tokens.first['p50']:,.1f}", f"{tokens.first['p99']:,.1f}"]
        cells += [f"{tokens.between.mean:,.2f}" if tokens.between else "", f"{tokens.rate:,.1f}"]
    if figures.texts is not None:
        cells.append(f"{figures.texts:,.1f}")
    if figures.goodput is not None:
        cells.append(f"{figures.goodput:,.1f}")
    if outcome.server is not None:
        server = outcome.server
        cells += [f"{server.queue.mean_ms:,.3f}", f"{server.mean_compute_ms:,.3f}", f"{server.mean_batch:,.1f}"]
    cells.append(f"{outcome.busy:.0%}{' !' if outcome.client_is_the_limit else ''}")
    return [*cells, *([str(figures.cancelled)] if cancels else []), str(figures.failed or "")]


def remarks(outcomes: Sequence[LevelOutcome], percentage: float) -> Iterator[str]:
    """Yield the remarks below the table."""
    if any(not outcome.stable for outcome in outcomes):
        yield (
            f"~ not stable: the last {AGREEING} windows differ by more than {percentage:g} % from their mean. "
            "A longer --window may help."
        )
    if any(outcome.client_is_the_limit for outcome in outcomes):
        yield (
            "! the client was the bottleneck: one of its processes was saturated, or sent requests late. "
            "Use more --processes, or run it on another machine."
        )
    for outcome in outcomes:
        if not outcome.kept_up:
            yield f"The server did not keep up with {outcome.level}: latencies grow as long as the load lasts."
        for reason, count in outcome.figures.failures.items():
            yield f"{count} failed at {outcome.level}: {reason}"
        yield from _cancellations(outcome)
    yield from _prompts(outcomes)


def _cancellations(outcome: LevelOutcome) -> Iterator[str]:
    """Yield whether the server has noticed that requests were cancelled."""
    totals, counted = outcome.totals, outcome.server_cancelled
    if not totals.cancelled:
        return
    gone = totals.cancelled + totals.unfinished
    text = f"{totals.cancelled} cancelled at {outcome.level}, of all {sum(totals)} requests"
    if counted is None:
        yield f"{text}. The server does not tell how many it noticed; --metrics-url names its metrics."
    elif totals.cancelled <= counted <= gone:
        yield f"{text}. The server noticed all of them."
    else:
        more = f", and {totals.unfinished} unfinished at the end" if totals.unfinished else ""
        yield f"{text}{more}. The server counted {counted:.0f}: one that it has just answered is not cancelled there."


def _prompts(outcomes: Sequence[LevelOutcome]) -> Iterator[str]:
    """Yield the lengths of prompts and the figures of adapters, for which the table has no columns."""
    for outcome in outcomes:
        tokens = outcome.figures.tokens
        if tokens is not None and tokens.prompt:
            cached = f", of which {tokens.cached:.0%} were cached" if tokens.cached else ""
            yield f"At {outcome.level} prompts had {tokens.prompt:,.0f} tokens on average{cached}."
        if len(outcome.models) > 1:
            for place, part in outcome.figures.parts.items():
                rate = part.answered / outcome.figures.seconds
                yield (
                    f"At {outcome.level} {outcome.models[place]}: {rate:,.1f} requests/s, p50 "
                    f"{part.latency['p50']:,.1f} ms, p99 {part.latency['p99']:,.1f} ms"
                )


def found(search: Search) -> str:
    """Return the result of a search for the highest load within a limit."""
    best = search.best
    if best is None:
        return f"No load was within a {search.limit}: start lower, or raise the limit."
    level = f"{best.level.kind} {best.level}"
    return f"Within a {search.limit}: {best.figures.rate:,.1f} requests/s, at {level}."


def run(arguments: Sequence[str]) -> int:
    """Run the benchmark, or compare reports; return the exit status."""
    if arguments[:1] == ["compare"]:
        return comparison.run(arguments[1:])
    return status_of(PROGRAM, lambda: _bench(parse(arguments)), ClientError)


def _bench(options: argparse.Namespace) -> int:
    target = BenchTarget(options.protocol, Address.parse(options.url), dict(options.header), options.timeout)
    trace = trace_of(options)
    with ExitStack() as stack:
        server = _server(options, target, stack)
        plan = _prepared(options, target, server, trace, stack)
        provenance = Provenance.now(options.command, str(target.address), _version(server))
        fleet = stack.enter_context(Fleet(plan, options.processes))
        session = Session(
            fleet,
            rule_of(options),
            options.warm_up,
            options.slo,
            count=lambda: _counted(server, options),
            count_cancelled=_cancel_counter(options, target, server, stack),
        )
        with ProgressBar() as progress:
            levels = levels_of(options, trace)
            search = Search(options.within, levels[0], levels[-1]) if options.within is not None else None
            outcomes = _outcomes(session, levels, search, lambda look: _show_progress(progress, look))
    table = [headings(outcomes), *(row(outcome, cancels=_cancels(outcomes)) for outcome in outcomes)]
    told = list(remarks(outcomes, options.stability))
    if plan.shapes:
        told.append(chosen_shapes(plan.shapes))
    if search is not None:
        told.insert(0, found(search))
    show_table(table[0], table[1:])
    for remark in told:
        show(remark)
    if options.json is not None:
        write_file(options.json, report.render_json(options.model, provenance, outcomes, search))
    if options.csv is not None:
        write_file(options.csv, report.render_csv(outcomes))
    if options.html is not None:
        heading = report.BenchHeading(options.model, str(target.address), _settings(options), provenance)
        write_file(options.html, report.render_html(heading, outcomes, table, told))
    return 0


def _outcomes(
    session: Session, levels: Sequence[LoadLevel], search: Search | None, tell: Callable[[ServerReading], None]
) -> list[LevelOutcome]:
    """Measure all levels, or those that a search selects; return the outcomes, lowest level first."""
    if search is None:
        return [session.measure(level, tell) for level in levels]
    outcomes = []
    while search.next is not None:
        outcomes.append(session.measure(search.next, tell))
        search.add(outcomes[-1])
    return sorted(outcomes, key=lambda outcome: outcome.level.value)


def _server(options: argparse.Namespace, target: BenchTarget, stack: ExitStack) -> BenchedServer:
    if target.protocol == "grpc":
        stack.enter_context(remedied("gRPC"))
        return GrpcServer(target)
    return stack.enter_context(connected(options))


def _version(server: BenchedServer) -> str:
    try:
        return server.server_version()
    except ClientError:
        return ""


def _prepared(
    options: argparse.Namespace,
    target: BenchTarget,
    server: BenchedServer,
    trace: Sequence[TracedRequest],
    stack: ExitStack,
) -> BenchPlan:
    """Return the plan of the load, with all that is the same for requests of every kind."""
    if options.protocol == "openai":
        plan = prepared_prompts(prompt_load(options, trace), target, _listed(server))
    else:
        plan = _prepared_tensors(options, target, server, stack)
        cancel = cancel_plan(options)
        if cancel is not None:
            plan = replace(plan, scripts=Cancelling(plan.scripts, cancel, options.seed))
    return replace(
        plan,
        schedule=tuple(traced.at for traced in trace),
        speed=options.speed,
        ramp=options.ramp,
        budget=options.requests,
        seed=options.seed,
    )


def _listed(server: BenchedServer) -> list[str] | None:
    """Return the models and adapters that the server lists under ``/v1``, or None if it does not list any."""
    assert isinstance(server, Client)
    try:
        return server.text_models()
    except Unreachable:
        raise
    except (ClientError, LookupError, TypeError):
        return None


def _prepared_tensors(
    options: argparse.Namespace, target: BenchTarget, server: BenchedServer, stack: ExitStack
) -> BenchPlan:
    try:
        regions = stack.enter_context(BenchRegions(server)) if options.shared_memory else None
        wanted = replace(
            tensor_load(options, options.model),
            version=options.version,
            outputs=options.output,
            first_id=options.first_sequence_id,
            output_room=options.output_shared_memory,
        )
        return prepared_tensors(wanted, target, server, regions)
    except Unreachable:
        raise
    except ClientError as error:
        raise ClientError("\n    ".join(filter(None, (str(error), _remedy(options, server))))) from error


def _remedy(options: argparse.Namespace, server: BenchedServer) -> str:
    """Return a remedy for a model that cannot be queried: another name or version, or loading it."""
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
        remedy = f"It exists but is not loaded. Fix the cause, then: nerite client load {model}"
        return "\n    ".join([remedy, *reasons])
    return "" if options.version in ("", *ready) else f"Its versions: {', '.join(ready)}."


def _counted(server: BenchedServer, options: argparse.Namespace) -> ModelStatistics | None:
    """Return the server's statistics of the model, or None if it does not report them."""
    try:
        versions = server.statistics(options.model, options.version)
    except ClientError:
        return None
    # The version that answers is the one with the latest request.
    return max(versions, key=lambda version: version.last_inference, default=None)


_CANCELLED: Final = "nerite_requests_given_up_total"


def _cancel_counter(
    options: argparse.Namespace, target: BenchTarget, server: BenchedServer, stack: ExitStack
) -> Callable[[], float | None]:
    """Return a function that reads how many requests clients have given up, or None if that is not to be known."""
    if not options.cancel_rate:
        return lambda: None
    client = server if isinstance(server, Client) else None
    if options.metrics_url:
        client = stack.enter_context(Client(options.metrics_url, headers=dict(options.header), timeout=options.timeout))
    if client is None:
        return lambda: None
    return partial(_given_up, client)


def _given_up(client: Client) -> float | None:
    try:
        page = client.metrics()
    except ClientError:
        return None
    counts = [page.total(_CANCELLED, reason=reason) for reason in ("cancelled", "disconnected")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _settings(options: argparse.Namespace) -> str:
    if options.protocol == "openai":
        kind = f"openai, {options.endpoint}"
    else:
        kind = f"{options.protocol}, batches of {options.batch}"
    if options.replay is not None or options.requests is not None:
        return f"{kind}, measured as a whole"
    return f"{kind}, windows of {options.window:g} s"


def _show_progress(progress: ProgressBar, look: ServerReading) -> None:
    what = f"{look.level.kind} {look.level}"
    if look.warming_up:
        progress.part(what, look.part, "warming up")
    else:
        rate = f", {look.rate:,.0f} requests/s" if look.rate else ""
        progress.part(what, look.part, f"window {look.windows + 1}{rate}")
