"""``nerite rollout check``: compares baseline and candidate on a running server, before the candidate gets requests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from nerite.cli.command import complain, new_parser, positive_integer, positive_number, show, show_json, status_of
from nerite.client import ClientError
from nerite.client.connection import Unreachable
from nerite.rollouts.difference import Difference, Severity
from nerite.tools.connection import add_connection, connected

_PROGRAM: Final = "nerite rollout check"
_EPILOG: Final = """\
The server compares signatures, configurations, tokenizers, chat templates, engines and memory, and tries the candidate
with real requests: an answer, a stream, a cancellation, a deadline. If the candidate is not loaded, the server loads it
for that, out of the reach of clients. docs/rollout-check.md describes each difference.

The exit status is 0 if nothing blocks a rollout, 1 if something does, 2 if nothing could be checked.

Examples:
  nerite rollout check detector --from 1 --to 2
  nerite rollout check scorer --from scorer_v1 --to scorer_v2
  nerite rollout check detector --to 2 --memory-limit 8000 --json
"""
_GRACE: Final = 30.0
"""Seconds that the command waits for the server longer than the check may take."""
_MIB: Final = 1024 * 1024


def run(arguments: Sequence[str]) -> int:
    """Print the differences; return the exit status."""
    return status_of(_PROGRAM, lambda: _check(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    text = "Compare two versions of a model on a running server, and try the new one, before it gets requests."
    parser = new_parser(_PROGRAM, text, _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    help_from = "version that serves now, or a model (default: the version that requests go to which name none)"
    parser.add_argument("--from", metavar="ARM", dest="baseline", default="", help=help_from)
    parser.add_argument("--to", metavar="ARM", dest="candidate", required=True, help="new version, or a model")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--seconds", metavar="N", type=positive_number, default=300.0, help="for the whole check (default: 300)"
    )
    limits.add_argument("--answer-seconds", metavar="N", type=positive_number, help="for an answer (default: 30)")
    limits.add_argument(
        "--cancel-seconds", metavar="N", type=positive_number, help="for the end of a cancelled request (default: 10)"
    )
    limits.add_argument(
        "--memory-limit", metavar="MIB", type=positive_integer, help="memory for both (default: what is free)"
    )
    add_connection(parser)
    return parser


def _check(options: argparse.Namespace) -> int:
    options.timeout = max(options.timeout, options.seconds + _GRACE)
    given: dict[str, Any] = {
        "from": options.baseline or options.model,
        "to": options.candidate,
        "seconds": options.seconds,
        "answer_seconds": options.answer_seconds,
        "cancel_seconds": options.cancel_seconds,
        "memory_limit": options.memory_limit and options.memory_limit * _MIB,
    }
    try:
        with connected(options) as client:
            document = client.rollout_check(options.model, {key: value for key, value in given.items() if value})
    except ClientError as error:
        remedy = "Start a server: nerite serve REPOSITORY." if isinstance(error.__cause__, Unreachable) else ""
        complain(_PROGRAM, str(error), remedy)
        return 2
    found = [Difference.from_json(each) for each in document["differences"]]
    if options.json:
        show_json(document)
    else:
        show(_text(found, options.model))
    return int(any(each.severity is Severity.BLOCKS for each in found))


def _text(found: Sequence[Difference], model: str) -> str:
    if not found:
        return f"No difference: '{model}' can be rolled out."
    lines = []
    for each in found:
        lines.append(f"{each.severity.value:7}{each.subject}: {each.baseline} -> {each.candidate}")
        lines.append(f"       {each.consequence}")
    counts = [(sum(each.severity is severity for each in found), severity) for severity in Severity]
    total = ", ".join(f"{count} {severity.value}" for count, severity in counts if count)
    return "\n".join([*lines, "", total])
