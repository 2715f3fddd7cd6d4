"""What customers write: texts put together at random, with the topic that each is about."""

from __future__ import annotations

from random import Random

TOPICS = {
    "billing": (
        ("my invoice", "the last bill", "the payment", "the refund", "my subscription"),
        ("is wrong", "was charged twice", "has not arrived", "shows another price", "cannot be paid by card"),
    ),
    "delivery": (
        ("the parcel", "my order", "the package", "the courier", "the shipment"),
        ("is late", "went to another address", "arrived damaged", "cannot be tracked", "was left in the rain"),
    ),
    "technical": (
        ("the app", "the website", "the login page", "my password", "the update"),
        ("crashes", "does not load", "shows an error", "is not accepted", "hangs at the start"),
    ),
}
OPENINGS = ("Hello,", "Hi there,", "Good morning,", "Please help:", "")
CLOSINGS = ("Thanks!", "Please answer soon.", "This is the second time.", "Best regards", "")
WHEN = ("since yesterday", "again", "since the weekend", "for days", "")


def tickets(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return texts and their topics."""
    chance = Random(seed)
    texts, topics = [], []
    for _ in range(count):
        topic = chance.choice(list(TOPICS))
        things, problems = TOPICS[topic]
        words = [chance.choice(OPENINGS), chance.choice(things), chance.choice(problems), chance.choice(WHEN)]
        text = " ".join(filter(None, words)) + ". " + chance.choice(CLOSINGS)
        texts.append(misspelt(text.strip(), chance))
        topics.append(topic)
    return texts, topics


def misspelt(text: str, chance: Random) -> str:
    """Return a text with, now and then, two letters in the wrong order."""
    letters = list(text)
    for place in range(len(letters) - 1):
        if chance.random() < 0.02:
            letters[place : place + 2] = reversed(letters[place : place + 2])
    return "".join(letters)
