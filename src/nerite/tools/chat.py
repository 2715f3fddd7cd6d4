"""The command line of ``nerite chat``: which model, how it is to write; at a terminal or from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Generator, Sequence

from nerite.cli.command import complain, fall_silent, new_parser, somebody_is_there, status_of, write
from nerite.cli.errors import UsageError, did_you_mean
from nerite.client import Client, ClientError
from nerite.client.models import CompletionPart
from nerite.tools.client import add_connection, connected
from nerite.tools.client_infer import parameter

# An answer while it comes, and what there is to say of it at its end.

_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""A model may write anything, and what steers a terminal is not for it to write."""


class ChatAnswer:
    """Listens to a model until it is done, or until Ctrl-C."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._first = self._last = 0.0
        self.text = ""
        self.finish_reason = ""
        self.interrupted = False
        self._prompt_tokens: int | None = None
        self._tokens: int | None = None

    def listen(self, parts: Generator[CompletionPart], say: Callable[[str], None]) -> None:
        """Give ``say`` the text as it comes. Ctrl-C ends the answer, here and at the server.

        Raises what ``parts`` and ``say`` raise; the server is told then, too.
        """
        try:
            for part in parts:
                self._take(part)
                if part.text:
                    say(part.text)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            parts.close()
            self._last = self._clock()

    @property
    def cut_off(self) -> bool:
        """Whether the model would have gone on."""
        return self.finish_reason == "length"

    def figures(self) -> str:
        """Return how many tokens there were, and how fast they came, as far as that is known."""
        seconds = self._last - self._began
        told = [f"{self._tokens} tokens in {seconds:.2f} s" if self._tokens is not None else f"{seconds:.2f} s"]
        if self.text:
            told.append(f"the first after {self._first - self._began:.2f} s")
        if self._tokens is not None and self._tokens > 1 and self._last > self._first:
            told.append(f"then {(self._tokens - 1) / (self._last - self._first):.1f} a second")
        if self._prompt_tokens is not None:
            told.append(f"prompt of {self._prompt_tokens}")
        return ", ".join(told)

    def _take(self, part: CompletionPart) -> None:
        if part.text and not self.text:
            self._first = self._clock()
        self.text += part.text
        self.finish_reason = part.finish_reason or self.finish_reason
        if part.completion_tokens is not None:
            self._tokens, self._prompt_tokens = part.completion_tokens, part.prompt_tokens


def for_terminal(text: str) -> str:
    """Return text as it may be shown at a terminal."""
    return text.translate(_VISIBLE)


# What was said so far, and what of it goes to the model. Pure.

Message = dict[str, str]


class ChatHistory:
    """Questions with their answers, in turn. A question that got none leaves no trace."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        """What the model is told before all else; empty for nothing."""
        self._said: list[Message] = []

    def with_question(self, question: str) -> list[Message]:
        """Return the messages that have a question answered."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self._said, {"role": "user", "content": question}]

    def remember(self, question: str, answer: str) -> None:
        """Add a question that was answered."""
        self._said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget what was said. The system message stays."""
        self._said.clear()


# A chat at a terminal: lines that are for the model, and commands that are for us.

PROMPT = "> "
COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget what was said",
    "/system": "tell the model something before all else: /system TEXT; without TEXT no more",
    "/quit": "end; so does Ctrl-D",
}
"""Name and purpose of each command."""


class Terminal:
    """Asks for a line, has it answered, and so on."""

    def __init__(
        self, ask: Callable[[list[Message]], Generator[CompletionPart]], conversation: ChatHistory, *, figures: bool
    ) -> None:
        """``ask`` sends messages to the model. ``figures``: tokens and rate are shown after each answer."""
        self._ask = ask
        self._conversation = conversation
        self._figures = figures
        self._ended = False

    def run(self) -> None:
        """Talk until whoever sits there wants no more."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives lines a history, and arrow keys
        while not self._ended:
            try:
                line = input(PROMPT)
            except EOFError:
                write("\n")
                return
            except KeyboardInterrupt:
                write("\n[Ctrl-D or /quit ends the chat]\n")
                continue
            if line.startswith("/"):
                self._obey(*line.strip().partition(" ")[::2])
            elif line.strip():
                self._answer(line.strip())

    def _answer(self, question: str) -> None:
        answer = ChatAnswer(time.monotonic)
        try:
            answer.listen(self._ask(self._conversation.with_question(question)), lambda text: write(for_terminal(text)))
        except ClientError as error:
            write("\n" if answer.text else "")
            complain("nerite chat", str(error))
            return
        write("\n")
        # What was stopped has been read as well.
        self._conversation.remember(question, answer.text)
        if answer.interrupted:
            write("[stopped]\n")
        if answer.cut_off:
            write("[cut off: no more tokens were allowed]\n")
        if self._figures:
            write(f"[{answer.figures()}]\n")

    def _obey(self, command: str, rest: str) -> None:
        match command:
            case "/help":
                width = max(map(len, COMMANDS)) + 2
                write("".join(f"  {name:{width}}{purpose}\n" for name, purpose in COMMANDS.items()))
                write("Ctrl-C stops an answer. Put a space before a message that begins with /.\n")
            case "/reset":
                self._conversation.reset()
                write("[forgotten]\n")
            case "/system":
                self._conversation.system = rest.strip()
                write("[the model is told]\n" if rest.strip() else "[no system message]\n")
            case "/quit":
                self._ended = True
            case _:
                near = did_you_mean(command, COMMANDS) or "/help lists what there is."
                write(f"[unknown command '{for_terminal(command)}'. {near}]\n")


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
    conversation = ChatHistory(options.system)
    settings = {name: value for name in _SETTINGS if (value := getattr(options, name)) is not None}
    settings |= dict(options.parameter)
    with connected(options) as client:
        model = options.model or _only_model(client)

        def ask(messages: list[Message]) -> Generator[CompletionPart]:
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


def _answer_pipe(parts: Generator[CompletionPart], *, figures: bool) -> int:
    """Write one answer as plain text, and what there is to say of it to stderr; return the exit status."""
    answer = ChatAnswer(time.monotonic)
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
