"""``nerite chat``: talks to a text model on a running server, interactively or with one message from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Generator, Sequence

from nerite.cli.command import (
    UsageError,
    add_repeated,
    complain,
    did_you_mean,
    fall_silent,
    is_interactive,
    new_parser,
    status_of,
    write,
)
from nerite.client import Client, ClientError
from nerite.client.models import CompletionPart
from nerite.config.mistake import nearest
from nerite.tools.client_infer import parameter
from nerite.tools.connection import add_connection, connected

_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Replaces control characters, because a model may generate anything and must not control the terminal."""


class ChatAnswer:
    """One streamed answer of a model: its text, timing and token counts."""

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
        """Pass the text to ``say`` as it arrives. Ctrl-C cancels the answer, here and on the server.

        Raises what ``parts`` and ``say`` raise; the request is cancelled on the server then, too.
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
        """True if the answer was truncated at the token limit."""
        return self.finish_reason == "length"

    def figures(self) -> str:
        """Return a summary of token counts, latency and token rate, as far as they are known."""
        seconds = self._last - self._began
        summary = [f"{self._tokens} tokens in {seconds:.2f} s" if self._tokens is not None else f"{seconds:.2f} s"]
        if self.text:
            summary.append(f"the first after {self._first - self._began:.2f} s")
        if self._tokens is not None and self._tokens > 1 and self._last > self._first:
            summary.append(f"then {(self._tokens - 1) / (self._last - self._first):.1f} per second")
        if self._prompt_tokens is not None:
            summary.append(f"{self._prompt_tokens} prompt tokens")
        return ", ".join(summary)

    def _take(self, part: CompletionPart) -> None:
        if part.text and not self.text:
            self._first = self._clock()
        self.text += part.text
        self.finish_reason = part.finish_reason or self.finish_reason
        if part.completion_tokens is not None:
            self._tokens, self._prompt_tokens = part.completion_tokens, part.prompt_tokens


def for_terminal(text: str) -> str:
    """Return text that is safe to print on a terminal, with control characters replaced."""
    return text.translate(_VISIBLE)


Message = dict[str, str]


class ChatHistory:
    """Conversation so far: pairs of question and answer. Questions without an answer are not kept."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        """System message, which precedes the conversation; "" for none."""
        self._messages: list[Message] = []

    def with_question(self, question: str) -> list[Message]:
        """Return the messages to send for the next question."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self._messages, {"role": "user", "content": question}]

    def remember(self, question: str, answer: str) -> None:
        """Append a question and its answer."""
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Clear the conversation, except for the system message."""
        self._messages.clear()


PROMPT = "> "
COMMANDS = {
    "/help": "list the commands",
    "/reset": "clear the conversation",
    "/system": "set the system message: /system TEXT; without TEXT, remove it",
    "/quit": "quit; so does Ctrl-D",
}
"""Name and purpose of each command."""


class Terminal:
    """Interactive chat: reads lines that are messages to the model or commands for this program."""

    def __init__(
        self, ask: Callable[[list[Message]], Generator[CompletionPart]], conversation: ChatHistory, *, figures: bool
    ) -> None:
        """``ask`` sends messages to the model. ``figures``: show token counts and rate after each answer."""
        self._ask = ask
        self._conversation = conversation
        self._figures = figures
        self._ended = False

    def run(self) -> None:
        """Run the chat until the user quits."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # enables line history and editing
        while not self._ended:
            try:
                line = input(PROMPT)
            except EOFError:
                write("\n")
                return
            except KeyboardInterrupt:
                write("\n[Press Ctrl-D or type /quit to leave the chat]\n")
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
        # A stopped answer is kept, because the user has read it.
        self._conversation.remember(question, answer.text)
        if answer.interrupted:
            write("[stopped]\n")
        if answer.cut_off:
            write("[truncated at the token limit]\n")
        if self._figures:
            write(f"[{answer.figures()}]\n")

    def _obey(self, command: str, rest: str) -> None:
        match command:
            case "/help":
                width = max(map(len, COMMANDS)) + 2
                write("".join(f"  {name:{width}}{purpose}\n" for name, purpose in COMMANDS.items()))
                write("Ctrl-C stops an answer. Precede a message that begins with / by a space.\n")
            case "/reset":
                self._conversation.reset()
                write("[conversation cleared]\n")
            case "/system":
                self._conversation.system = rest.strip()
                write("[system message set]\n" if rest.strip() else "[system message removed]\n")
            case "/quit":
                self._ended = True
            case _:
                near = did_you_mean(command, COMMANDS) or "/help lists the commands."
                write(f"[unknown command '{for_terminal(command)}'. {near}]\n")


_PROGRAM = "nerite chat"
_EPILOG = """\
On a terminal the chat continues until Ctrl-D; Ctrl-C stops an answer, and /help lists the commands. From a pipe,
all of standard input is sent as one message, and the answer is printed as plain text.

Works with any server that offers OpenAI's chat completions under /v1, such as Nerite and vLLM.
The exit status is 0 for success, 1 if the server rejects the request or cannot be reached, 2 for an invalid command
line, 130 after Ctrl-C in a pipe.

Examples:
  nerite chat
  nerite chat docent --system 'Be brief.' --temperature 0
  git diff | nerite chat docent --system 'What does this change?'
  nerite chat --url gpu-3:8000 llama --header 'Authorization: Bearer TOKEN'
"""
_SETTINGS = ("temperature", "top_p", "max_tokens", "seed")
"""Options that are sent to the server, by their names in the OpenAI API."""
_OTHERS = (
    "chat_template_kwargs", "frequency_penalty", "logit_bias", "max_completion_tokens", "min_p", "min_tokens",
    "presence_penalty", "reasoning_effort", "repetition_penalty", "response_format", "stop", "tools", "top_k",
)  # fmt: skip
"""Other parameters in use; servers pass over names that they do not know, so misspelt ones are refused here."""
_MISSPELT = 0.88
"""Similarity from which on an unknown name counts as a misspelt one."""


def run(arguments: Sequence[str]) -> int:
    """Run the chat; return the exit status."""
    return status_of(_PROGRAM, lambda: _talk(_parse(arguments)), ClientError)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(_PROGRAM, "Chat with a text model on a running server.", _EPILOG)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", help="language model; optional if the server has only one"
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="system message, sent before the conversation")
    parser.add_argument("--temperature", metavar="T", type=float, help="sampling temperature; 0 is greedy decoding")
    parser.add_argument("--top-p", metavar="P", type=float, help="nucleus sampling: cumulative probability to keep")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="maximum length of an answer in tokens")
    parser.add_argument("--seed", metavar="N", type=int, help="random seed, to get the same answer again")
    other = "any other parameter of /v1/chat/completions, such as min_p=0.05"
    add_repeated(parser, "--parameter", "NAME=VALUE", other, parameter)
    parser.add_argument("--stats", action="store_true", help="show token counts and rate after each answer")
    add_connection(parser)
    return parser.parse_args(arguments)


def _talk(options: argparse.Namespace) -> int:
    conversation = ChatHistory(options.system)
    settings = {name: value for name in _SETTINGS if (value := getattr(options, name)) is not None}
    settings |= dict(options.parameter)
    for name, _ in options.parameter:
        meant = nearest(name, (*_SETTINGS, *_OTHERS), _MISSPELT)
        if meant not in ("", name):
            raise UsageError(f"the parameter '{name}' would have no effect.", remedy=f"Did you mean '{meant}'?")
    with connected(options) as client:
        model = options.model or _only_model(client)

        def ask(messages: list[Message]) -> Generator[CompletionPart]:
            return client.chat(model, messages, settings, usage=options.stats)

        if is_interactive():
            write(f"{model} at {options.url}. Type /help for commands, Ctrl-D to quit.\n")
            Terminal(ask, conversation, figures=options.stats).run()
            return 0
        return _answer_pipe(ask(conversation.with_question(_message())), figures=options.stats)


def _only_model(client: Client) -> str:
    models = client.chat_models()
    if not models:
        others = client.text_models()
        instead = f" It has models for other purposes: {', '.join(others)}." if others else ""
        raise ClientError(f"the server has no language model that is ready.{instead}\n    List all: nerite client ls")
    if len(models) > 1:
        raise UsageError(
            f"the server has several language models: {', '.join(models)}",
            remedy=f"Specify one of them: {_PROGRAM} {models[0]}",
        )
    return models[0]


def _message() -> str:
    text = sys.stdin.read().strip()
    if not text:
        raise UsageError("no message on standard input.", remedy=f"For example: echo 'How are you?' | {_PROGRAM}")
    return text


def _answer_pipe(parts: Generator[CompletionPart], *, figures: bool) -> int:
    """Write one answer as plain text to stdout, and remarks about it to stderr; return the exit status."""
    answer = ChatAnswer(time.monotonic)
    try:
        answer.listen(parts, write)
        write("\n")
    except BrokenPipeError:
        fall_silent()  # The reader closed the pipe; listen has cancelled the request.
    if answer.cut_off:
        complain(_PROGRAM, "the answer was truncated at the token limit.")
    if figures:
        complain(_PROGRAM, answer.figures())
    return 130 if answer.interrupted else 0
