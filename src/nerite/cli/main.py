"""Entry points of the two programs: ``nerite`` with its commands, and ``tritonserver``.

A command is a function ``(arguments) -> exit status``. Its module is imported only when the command runs.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Sequence

import nerite
from nerite.core.thread_binding import one_thread

COMMANDS = {
    "serve": ("functions.command:run", "serve model repositories over HTTP and gRPC"),
    "add": ("tools.add.command:run", "add a trained model to a repository: recognise, try, tune and install it"),
    "downloads": ("tools.downloads:run", "list and remove models that were downloaded from the Hugging Face hub"),
    "rm": ("tools.models:run_rm", "remove a model, or a version of it, from a repository"),
    "ls": ("tools.models:run_ls", "list the models in a repository"),
    "show": ("tools.models:run_show", "show a model: inputs, outputs, files, and example requests"),
    "check": ("tools.check:run", "validate model repositories without serving them"),
    "doctor": ("tools.doctor:run", "diagnose this machine: limits, ports, installed packages, GPUs"),
    "dockerfile": ("tools.image.command:run", "write a Dockerfile for an image with models and what they need"),
    "route": ("tools.route:run", "route requests to pools of servers, from a cluster file"),
    "up": ("tools.up.command:run", "run a whole cluster file on this machine: servers and router"),
    "ray": ("ray.command:run", "run a whole cluster file on the nodes of a Ray cluster"),
    "kubernetes": ("tools.kubernetes.command:run", "turn a cluster file into values of the Helm chart"),
    "pick": ("tools.pick:run", "pick the endpoints of requests for a gateway such as Envoy"),
    "client": ("tools.client:run", "query a running server: models, inference, load and unload, statistics"),
    "rollout": ("tools.rollout.command:run", "roll out a new version step by step, with automatic rollback"),
    "top": ("tools.top:run", "monitor a running server in a full-screen view"),
    "bench": ("tools.bench.command:run", "measure the throughput and latency of a model on a running server"),
    "analyze": ("tools.analyze.command:run", "find the fastest configuration of a model by measuring"),
    "batch": ("tools.batch:run", "run files of requests in idle room before a deadline; list and cancel batches"),
    "quota": ("tools.quota:run", "show the usage and remaining quota of each tenant by model"),
    "background": ("tools.background:run", "show the loops beside the requests; retry or discard what they set aside"),
    "bill": ("tools.bill:run", "show what tenants used in a month, and what it costs"),
    "engines": ("tools.environments:run_engines", "list and install engines for language models"),
    "connect": ("tools.connect:run", "print what an agent such as Claude Code or Codex needs to use a model"),
    "chat": ("tools.chat:run", "chat with a text model on a running server"),
    "environments": (
        "tools.environments:run_environments",
        "list the Python environments created for models, and remove old ones",
    ),
    "version": ("cli.main:run_version", "print the version"),
}
"""Function and purpose of each command."""


def overview() -> str:
    """Return the list of commands that ``nerite`` prints when run without arguments."""
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  nerite {name:{width}}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return (
        "Nerite serves machine learning models.\n"
        f"{commands}\n\n"
        "Quick start:        nerite serve ./models, or: nerite serve Qwen/Qwen3-0.6B\n"
        "Help on a command:  nerite serve --help"
    )


_GC_THRESHOLD = 100_000
"""More than a start takes: what is imported stays. With Python's 700, a tenth of a start is spent on it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``nerite``; return the exit status."""
    _spare_collections()
    match list(sys.argv[1:] if arguments is None else arguments):
        case [] | ["help" | "--help" | "-h"]:
            print(overview())
            return 0
        case ["--version" | "-V"]:
            return _run("version", [])
        case ["help", name, *_] if name in COMMANDS:
            return _run(name, ["--help"])
        case [name, *rest] if name in COMMANDS:
            return _run(name, rest)
        case ["help", name, *_] | [name, *_]:
            print(_unknown(name), file=sys.stderr)
    return 1


def tritonserver() -> int:
    """Run the ``serve`` command with Triton's conventions; return the exit status."""
    _spare_collections()
    with one_thread():
        from nerite.cli.command_line import TRITON, run

    return run(sys.argv[1:], TRITON)


def _spare_collections() -> None:
    """Search no cycles while modules are imported, nor when Python ends: that would take a tenth of a second each."""
    gc.set_threshold(_GC_THRESHOLD)
    atexit.register(gc.freeze)


def _run(name: str, arguments: Sequence[str]) -> int:
    module, _, function = COMMANDS[name][0].partition(":")
    with one_thread():
        command = importlib.import_module(f"nerite.{module}")
    status: int = getattr(command, function)(arguments)
    return status


def run_version(arguments: Sequence[str]) -> int:
    """Print the version; return the exit status."""
    print(f"nerite {nerite.__version__}")
    return 0


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"nerite: flags must follow a command.\nTry: nerite serve {name}"
    if os.path.isdir(name):
        return f"nerite: unknown command '{name}'.\nTo serve the models in that directory: nerite serve {name}"
    from nerite.cli.command import did_you_mean

    return "\n".join(filter(None, (f"nerite: unknown command '{name}'.", did_you_mean(name, COMMANDS), overview())))


if __name__ == "__main__":
    sys.exit(main())
