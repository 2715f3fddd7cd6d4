"""The command line of ``nerite chat``: which model, how it is to write; at a terminal or from a pipe."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator, Sequence

from nerite.cli.chat.answer import Answer
from nerite.cli.chat.conversation import Conversation, Message
from nerite.cli.chat.terminal import Terminal
from nerite.cli.client.connection import add_connection, connected
from nerite.cli.client.values import parameter
from nerite.cli.command import complain, fall_silent, new_parser, somebody_is_there, status_of, write
from nerite.cli.usage_error import UsageError
from nerite.client import Client, ClientError
from nerite.client.completion import Part

_PROGRAM = "nerite chat"
_EPILOG = """\
At a terminal it goes on until Ctrl-D; Ctrl-C stops an answer, and /help lists what else there is. From a pipe
everything that comes is one message, and its answer is written as plain text.

Works with every server that has OpenAI's chat completions under /v1: Nerite, vLLM, and others.
The exit status is 0 for success, 1 for a refusal or a server that cannot be reached, 2 for a wrong command line, 130
after Ctrl-C in a pipe.

Examples:
  nerite chat
  nerite chat docent --system 'Be brief.' --temperature 0
  git diff | nerite chat docent --system 'What does this change?'
  nerite chat --url gpu-3:8000 llama --header 'Authorization: Bearer TOKEN'
"""
_SETTINGS = ("temperature", "top_p", "max_tokens", "seed")
"""The options that the model is told, by their names under ``/v1``."""


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(_PROGRAM, lambda: _talk(_parse(arguments)), ClientError)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(_PROGRAM, "Talk with a text model of a running server.", _EPILOG)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="may be left out where there is one only")
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is told before all else")
    parser.add_argument("--temperature", metavar="T", type=float, help="0: always the likeliest token")
    parser.add_argument("--top-p", metavar="P", type=float, help="choose among the tokens that make up so much")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="the longest that an answer may be")
    parser.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same answer")
    parser.add_argument(
        "--parameter",
        metavar="NAME=VALUE",
        action="append",
        type=parameter,
        default=[],
        help="anything else that /v1/chat/completions takes, such as min_p=0.05; may be given several times",
    )
    parser.add_argument("--stats", action="store_true", help="show tokens and rate after each answer")
    add_connection(parser, url="localhost:8000")
    return parser.parse_args(arguments)


def _talk(options: argparse.Namespace) -> int:
    conversation = Conversation(options.system)
    settings = {name: value for name in _SETTINGS if (value := getattr(options, name)) is not None}
    settings |= dict(options.parameter)
    with connected(options) as client:
        model = options.model or _only_model(client)

        def ask(messages: list[Message]) -> Generator[Part]:
            return client.chat(model, messages, settings, usage=options.stats)

        if somebody_is_there():
            write(f"{model} at {options.url}. /help lists the commands, Ctrl-D ends.\n")
            Terminal(ask, conversation, figures=options.stats).run()
            return 0
        return _answer_pipe(ask(conversation.with_question(_message())), figures=options.stats)


def _only_model(client: Client) -> str:
    models = client.text_models()
    if not models:
        raise ClientError("the server has no text model that is ready.\n    What it has: nerite client ls")
    if len(models) > 1:
        raise UsageError(f"which model? One of: {', '.join(models)}", remedy=f"Such as: {_PROGRAM} {models[0]}")
    return models[0]


def _message() -> str:
    text = sys.stdin.read().strip()
    if not text:
        raise UsageError("there is no message on standard input.", remedy=f"echo 'How are you?' | {_PROGRAM}")
    return text


def _answer_pipe(parts: Generator[Part], *, figures: bool) -> int:
    """Write one answer as plain text, and what there is to say of it to stderr; return the exit status."""
    answer = Answer(time.monotonic)
    try:
        answer.listen(parts, write)
        write("\n")
    except BrokenPipeError:
        fall_silent()  # The reader has seen enough, and the server was told.
    if answer.cut_off:
        complain(_PROGRAM, "the answer is cut off: no more tokens were allowed.")
    if figures:
        complain(_PROGRAM, answer.figures())
    return 130 if answer.interrupted else 0
