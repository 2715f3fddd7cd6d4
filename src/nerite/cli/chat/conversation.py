"""What was said so far, and what of it goes to the model. Pure."""

from __future__ import annotations

Message = dict[str, str]


class Conversation:
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
