"""``nerite rollout replay``: judges a recording of a rollout anew, with the same gates or others."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from nerite.cli.command import UsageError, add_repeated, show, show_json, show_table
from nerite.client import Client
from nerite.core.durations import duration_of
from nerite.core.failures import system_error
from nerite.judge.gates import GateError, parse_gate
from nerite.judge.judge import DEFAULT_GATES
from nerite.judge.replay import RecordingError, replay
from nerite.judge.verdict import Decision, Verdict

EXAMPLES: Final = """\
A rollout that is started with --record is recorded in the directory of its state; `nerite rollout status` tells the
file. The exit status is 0 if the candidate is found not worse, 1 if it is worse, 2 for an invalid command line or
recording, 3 if the evidence is not sufficient.

Examples:
  nerite rollout replay resnet-1a2b3c.jsonl
  nerite rollout replay resnet-1a2b3c.jsonl --gate errors=+20% --gate p99=+5% --every 1m
"""
STATUSES: Final = {Decision.NOT_WORSE: 0, Decision.ROLL_BACK: 1, Decision.CONTINUE: 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="recording: JSON lines")
    add_repeated(parser, "--gate", "GATE", f"what is compared (default: {', '.join(DEFAULT_GATES)})", _gate)
    parser.add_argument(
        "--every", metavar="TIME", type=_duration, default=60.0, help="time between two verdicts (default: 1m)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdicts as a JSON list")


def _gate(text: str) -> Any:
    try:
        return parse_gate(text)
    except GateError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    try:
        seconds = duration_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError("must be more than 0")
    return seconds


def run_replay(client: Client, options: argparse.Namespace) -> int:
    """Judge the recording, and print the verdicts; return the exit status. No server is asked."""
    gates = options.gate or [parse_gate(text) for text in DEFAULT_GATES]
    try:
        verdicts = replay(_events(Path(options.file)), gates, every_ns=int(options.every * 1e9))
    except RecordingError as error:
        raise UsageError(f"{options.file}: {error}") from None
    last = verdicts[-1]
    if options.json:
        show_json([each.to_json() for each in verdicts])
    else:
        begin = verdicts[0].at_ns - int(options.every * 1e9) if len(verdicts) > 1 else verdicts[0].at_ns
        rows = [_row(each, begin) for each in verdicts]
        show_table(("After", "Baseline", "Candidate", "Decision", *(gate.text for gate in gates)), rows)
        show(f"{last.decision.replace('_', ' ')}: {last.reason}")
        for hold in last.holds:
            show(f"holds the promotion: {hold}")
    return STATUSES[last.decision]


def _events(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise RecordingError(number, f"it is not JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = system_error(error, path) if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"the recording cannot be read: {reason}") from None


def _row(verdict: Verdict, begin_ns: int) -> list[str]:
    cells = [
        f"{(verdict.at_ns - begin_ns) / 1e9:.0f} s",
        f"{verdict.baseline_requests:,}",
        f"{verdict.candidate_requests:,}",
        verdict.decision.replace("_", " "),
    ]
    return [*cells, *(f"harm {gate.worse:+.1f}, proof {gate.not_worse:+.1f}" for gate in verdict.gates)]
