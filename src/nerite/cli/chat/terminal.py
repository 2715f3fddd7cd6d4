"""A chat at a terminal: lines that are for the model, and commands that are for us."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from nerite.cli.chat.answer import Answer, for_terminal
from nerite.cli.chat.conversation import Conversation, Message
from nerite.cli.command import complain, write
from nerite.cli.suggestion import did_you_mean
from nerite.client import ClientError
from nerite.client.completion import Part

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
        self, ask: Callable[[list[Message]], Generator[Part]], conversation: Conversation, *, figures: bool
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
        answer = Answer(time.monotonic)
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
