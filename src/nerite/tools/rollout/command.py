"""``nerite rollout``: its command line, and its commands."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from nerite.cli.command import (
    ProgressBar,
    UsageError,
    add_repeated,
    did_you_mean,
    new_parser,
    positive_number,
    show,
    show_json,
    show_table,
    status_of,
)
from nerite.client import Client, ClientError
from nerite.config.rollout_spec import AtDeadline, RolloutSpec, spec_of
from nerite.core.durations import duration_text
from nerite.core.errors import InvalidArgument
from nerite.tools.connection import add_connection, connected
from nerite.tools.rollout import check, view
from nerite.tools.rollout.fleet import add_fleet_arguments, refuse_fleet_arguments, run_fleet
from nerite.tools.rollout.gateway import add_gateway_arguments, gateway_route
from nerite.tools.rollout.replay import EXAMPLES, add_arguments, run_replay
from nerite.tools.rollout.watch import STATUSES, follow, follow_lines

_EPILOG: Final = """\
commands:
{commands}

A rollout gives a new version of a model a share of its requests, step by step, and compares both versions. Harm rolls
it back at once; it is promoted when the new version is shown to be not worse (docs/rollouts.md).

Examples:
  nerite rollout start resnet --to 2
  nerite rollout start chat --to 2 --steps 1,5,25,50,100 --hold 5m --gate errors --gate ttft_p95=+10% \\
      --sticky header:x-user --deadline 2h --wait
  nerite rollout watch resnet
  nerite rollout abort resnet --url gpu-3:8000

Help on a command:  nerite rollout start --help
"""
_STATUSES: Final = """\
The exit status is 0 if the candidate was promoted, 1 if it was rolled back or the rollout was aborted or refused, 2 for
an invalid command line, 3 if the evidence was not sufficient by the deadline, 130 after Ctrl-C.
"""
CHECK: Final = "check"
"""A command with arguments and exit statuses of its own."""
_DEFAULTS: Final = RolloutSpec("2")


class _Command(NamedTuple):
    purpose: str
    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Client, argparse.Namespace], int]


def run(arguments: Sequence[str]) -> int:
    """Run the command that the command line names; return the exit status."""
    return status_of("nerite rollout", lambda: _run(list(arguments)), ClientError)


def _run(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.command == CHECK:
        return check.run([*arguments[: len(arguments) - len(options.rest) - 1], *options.rest])
    with connected(options) as client:
        status: int = options.run(client, options)
        return status


def _parse(arguments: list[str]) -> argparse.Namespace:
    width = max(map(len, COMMANDS)) + 2
    purposes = {
        CHECK: "compare two versions, and try the new one, before its first request",
        **{k: c.purpose for k, c in COMMANDS.items()},
    }
    commands = "\n".join(f"  {name:{width}}{purpose}" for name, purpose in purposes.items())
    usage = "nerite rollout [options] COMMAND ..."
    parser = new_parser("nerite rollout", "Roll out new versions of models.", _EPILOG.format(commands=commands), usage)
    add_connection(parser)
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments or ["--help"])
    if options.command is None:
        parser.error(f"a command is required: {', '.join(purposes)}")
    if options.command == CHECK:
        return options
    command = COMMANDS.get(options.command)
    if command is None:
        near = did_you_mean(options.command, purposes)
        parser.error(" ".join(filter(None, (f"unknown command '{options.command}'.", near))))
    own = new_parser(f"nerite rollout {options.command}", command.description, command.epilog)
    command.add_arguments(own)
    # Connection options may also follow the command; those that do not keep the values given before it.
    add_connection(own, url=None)
    options.run = command.run
    return own.parse_intermixed_args(options.rest, options)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")


def _add_start(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    steps = ",".join(f"{step:g}" for step in _DEFAULTS.steps)
    parser.add_argument("--to", metavar="VERSION", required=True, help="the candidate: the version to roll out")
    parser.add_argument("--from", metavar="VERSION", help="version to compare with (default: the one that serves)")
    parser.add_argument(
        "--steps",
        metavar="PERCENTS",
        help=f"share of the requests that the candidate gets in each step; the last, 100, is the promotion, which "
        f"needs proof (default: {steps})",
    )
    shadow = (
        "share of the requests that are also sent to the candidate before the first step, as in 10%%: its answers are "
    )
    parser.add_argument("--shadow", metavar="PERCENT", help=f"{shadow}compared, and nobody gets them (default: none)")
    hold = f"minimum duration of a step, as in 30s, 5m, 1h (default: {duration_text(_DEFAULTS.hold)})"
    parser.add_argument("--hold", metavar="TIME", help=hold)
    requests = f"minimum number of requests to the candidate in a step (default: {_DEFAULTS.requests})"
    parser.add_argument("--requests", metavar="N", help=requests)
    add_repeated(
        parser, "--gate", "GATE", "what is compared, as in errors, p99=+10%%, ttft_p95=+10%% (default: errors, p99)"
    )
    parser.add_argument(
        "--sticky",
        metavar="KEY",
        help="what keeps a caller on one version, as in header:x-user (default: only sequences stay on one)",
    )
    deadline = f"time after which --at-deadline applies; 0 is never (default: {duration_text(_DEFAULTS.deadline)})"
    parser.add_argument("--deadline", metavar="TIME", help=deadline)
    parser.add_argument(
        "--at-deadline",
        choices=tuple(map(str, AtDeadline)),
        help="if the evidence is not sufficient: stay at the step as inconclusive, promote, or roll back "
        f"(default: {_DEFAULTS.at_deadline})",
    )
    parser.add_argument("--webhook", metavar="URL", help="URL that every decision is posted to as JSON")
    parser.add_argument("--record", action="store_true", help="record what the judge is given, for the command replay")
    parser.add_argument("--force", action="store_true", help="start in spite of differences that block a rollout")
    parser.add_argument("--wait", action="store_true", help="wait for the end of the rollout, and report it")
    _add_interval(parser)
    add_fleet_arguments(parser)


def _add_interval(parser: argparse.ArgumentParser) -> None:
    interval = "time between two looks at the rollout (default: 1)"
    parser.add_argument("--interval", metavar="SECONDS", type=positive_number, default=1.0, help=interval)


def spec_document(options: argparse.Namespace) -> dict[str, Any]:
    """Return the specification that a command line gives. Raises ``UsageError``."""
    given = vars(options)
    document = {
        key: given[key.replace("-", "_")]
        for key in (
            "to",
            "from",
            "steps",
            "shadow",
            "hold",
            "requests",
            "gate",
            "sticky",
            "deadline",
            "at-deadline",
            "webhook",
        )
        if given[key.replace("-", "_")]
    }
    document |= {key: True for key in ("record", "force") if given[key]}
    try:
        return spec_of(document, place="--").as_json()
    except InvalidArgument as error:
        raise UsageError(error.message) from None


def run_start(client: Client, options: argparse.Namespace) -> int:
    """Start a rollout; return the exit status."""
    document = spec_document(options)
    if options.fleet:
        return run_fleet(options, spec_of(document))
    refuse_fleet_arguments(options)
    try:
        status = client.start_rollout(options.model, document)
    except ClientError as error:
        if error.status == 400:
            raise UsageError(str(error)) from None
        raise
    with ProgressBar() as progress:
        while status["state"] == "checking" and not options.wait:
            progress.doing(f"version {status['to']} is being loaded and checked")
            time.sleep(min(options.interval, 0.2))
            status = client.rollout(options.model)
    if options.wait:
        return follow_lines(client, options.model, options.interval)
    show("\n".join(view.frame(status)))
    return STATUSES.get(status["state"], 0)


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="show only this model, in detail")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_gateway_arguments(parser)


def run_status(client: Client, options: argparse.Namespace) -> int:
    """Print the status of one rollout, or of all; return the exit status."""
    if options.gateway_route:
        if not options.model:
            raise UsageError("--gateway-route needs a MODEL")
        show(gateway_route(client.rollout(options.model), options))
        return 0
    if options.model:
        status = client.rollout(options.model)
        show_json(status) if options.json else show("\n".join(view.frame(status)))
        return 0
    found = client.rollouts()
    if options.json:
        show_json(found)
    elif found:
        rows = [
            (each["model"], each["from"], each["to"], each["state"], view.where(each), each["text"]) for each in found
        ]
        show_table(("Model", "From", "To", "State", "Where", "Last decision"), rows)
    else:
        show("The server has no rollouts.")
    return 0


def _add_watch(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_interval(parser)


def run_watch(client: Client, options: argparse.Namespace) -> int:
    """Follow a rollout; return the exit status."""
    return follow(client, options.model, options.interval)


def _add_history(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--json", action="store_true", help="print the decisions with their evidence as a JSON list")


def run_history(client: Client, options: argparse.Namespace) -> int:
    """Print the decisions of a model's rollouts; return the exit status."""
    found = client.rollout_history(options.model)
    if options.json:
        show_json(found)
    else:
        show("\n".join(map(view.evidence_line, found)) or f"No rollout of {options.model} has made a decision.")
    return 0


def _steering(command: str) -> Callable[[Client, argparse.Namespace], int]:
    def steer(client: Client, options: argparse.Namespace) -> int:
        status = client.command_rollout(options.model, command, force=getattr(options, "force", False))
        wish = (status.get("fleet") or {}).get("wish")
        if wish:
            show(f"{options.model}: the fleet command that leads the rollout is asked to {wish['command']} it")
        else:
            show(f"{options.model}: {status['text']}" if command == "clear" else view.line(status))
        return 0

    return steer


def _add_promote(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--force", action="store_true", help="promote without sufficient evidence, or against it")


COMMANDS: Final = {
    "start": _Command(
        "start a rollout",
        "Roll out a version of a model: load it beside the one that serves, compare both, and move requests to it.",
        f"""\
With --wait:
{_STATUSES}
Examples:
  nerite rollout start resnet --to 2
  nerite rollout start resnet --to 2 --steps 5,25,50,100 --hold 10m --gate errors=+50% --gate p99=+10% --wait
  nerite rollout start chat --to 2 --gate ttft_p95=+10% --gate itl=+10% --sticky header:x-user
  nerite rollout start resnet --from 1 --to 2 --fleet --replicas dns:nerite:8000 --prometheus http://prometheus:9090
""",
        _add_start,
        run_start,
    ),
    "status": _Command(
        "show the rollouts, or one in detail",
        "Show the rollouts of a server, or one in detail.",
        "Examples:\n  nerite rollout status\n  nerite rollout status resnet --json\n",
        _add_status,
        run_status,
    ),
    "watch": _Command(
        "follow a rollout until it ends",
        "Follow a rollout until it ends: a live view on a terminal, otherwise a line for each decision.",
        f"{_STATUSES}\nExamples:\n  nerite rollout watch resnet\n  nerite rollout watch resnet | tee rollout.log\n",
        _add_watch,
        run_watch,
    ),
    "pause": _Command(
        "stay at the present step",
        "Stay at the present step. Harm still rolls the rollout back.",
        "Example:\n  nerite rollout pause resnet\n",
        _add_model,
        _steering("pause"),
    ),
    "resume": _Command(
        "continue a paused or inconclusive rollout",
        "Continue a paused rollout, or an inconclusive one, which then has its deadline again.",
        "Example:\n  nerite rollout resume resnet\n",
        _add_model,
        _steering("resume"),
    ),
    "promote": _Command(
        "give the candidate all requests",
        "Give the candidate all requests, if it is shown to be not worse.",
        "Examples:\n  nerite rollout promote resnet\n  nerite rollout promote resnet --force\n",
        _add_promote,
        _steering("promote"),
    ),
    "abort": _Command(
        "give the baseline all requests again",
        "End a rollout: the baseline gets all requests again.",
        "Example:\n  nerite rollout abort resnet\n",
        _add_model,
        _steering("abort"),
    ),
    "clear": _Command(
        "let the version policy choose again",
        "Forget a rollout that has ended: the model's version policy chooses the version that serves again.",
        "Example:\n  nerite rollout clear resnet\n",
        _add_model,
        _steering("clear"),
    ),
    "history": _Command(
        "show the decisions of past and present rollouts",
        "Show the decisions of a model's rollouts, the oldest first.",
        "Examples:\n  nerite rollout history resnet\n  nerite rollout history resnet --json\n",
        _add_history,
        run_history,
    ),
    "replay": _Command(
        "judge a recording again, also with other gates",
        "Judge a recording of a rollout again, with the same gates or others. No server is asked.",
        EXAMPLES,
        add_arguments,
        run_replay,
    ),
}  # fmt: skip
"""The commands by name."""
