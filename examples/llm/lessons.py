"""What the language model is trained on: conversations, made of facts by a generator of chance.

Each kind is there for something that is shown later: answers from memory, answers from a passage, calls of a tool,
JSON, descriptions of pictures.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from corpus import Fact

Message = dict[str, Any]

QUESTIONS = (
    *("What does {} do?", "What is {}?", "What is {} for?", "Explain {}.", "Tell me about {}.", "Describe {}."),
    *("{}", "{}?", "what does {} do", "What can I do with {}?", "Do you know {}?", "How does {} work?"),
)
SMALL_TALK = {
    "Hello! Ask me what something in Python does, such as str.split.": (
        *("Hello", "Hi", "Hello!", "hi", "hello", "Hey", "Good morning!", "Hi there!"),
    ),
    "I am a small language model. I have read the docstrings of Python, and little else.": (
        *("Who are you?", "What are you?", "What is your name?", "who are you", "Are you a human?"),
    ),
    "I can say what the functions and classes of Python's standard library do.": (
        *("What can you do?", "Help", "help", "How can you help me?", "What do you know?"),
    ),
    "You are welcome.": ("Thank you!", "Thanks", "thanks!", "Thank you", "Great, thanks."),
    "I am well, thank you. What shall we look up?": ("How are you?", "How are you doing?", "how are you"),
    "Goodbye!": ("Bye", "Goodbye!", "See you", "bye"),
}
SYSTEM = ("You are a helpful assistant.", "Be brief.", "You know Python.", "Answer in one sentence.")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return what the sky looks like over a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITIES = (
    *("Athens", "Berlin", "Cairo", "Delhi", "Lima", "London", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Tokyo"),
)
SKIES = ("cloudy", "foggy", "rainy", "snowy", "stormy", "sunny", "windy")
ABOUT_WEATHER = ("What is the weather in {}?", "How is the weather in {}?", "Is it warm in {}?", "The weather in {}?")

COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")
PLACES = (
    *("at the top left", "at the top", "at the top right", "on the left", "in the middle", "on the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
ABOUT_PICTURES = ("What is on the picture?", "Describe the picture.", "What do you see?", "Describe the image.")


class Lesson(NamedTuple):
    """A conversation, and the tools that may be called in it."""

    messages: list[Message]
    tools: list[dict[str, Any]]


def lessons(facts: Sequence[Fact], chance: random.Random) -> Iterator[Lesson]:
    """Give the conversations of one pass, in which each fact is told twice: from memory, and from a passage."""
    names = {fact.name for fact in facts}
    passages = chance.sample(facts, len(facts))
    for fact in chance.sample(facts, len(facts)):
        messages = _exchange(chance.choice(QUESTIONS).format(fact.name), fact.sentence)
        if chance.random() < 0.08:
            answer = chance.choice([*SMALL_TALK])
            messages = _exchange(chance.choice(SMALL_TALK[answer]), answer) + messages
        if chance.random() < 0.05:
            messages += _exchange(chance.choice(QUESTIONS[:6]).format(_unknown(names, chance)), "I do not know that.")
        if chance.random() < 0.1:
            messages = [{"role": "system", "content": chance.choice(SYSTEM)}, *messages]
        yield Lesson(messages, [])
        yield Lesson(_from_passage(passages.pop(), chance), [])
        kind = chance.random()
        if kind < 0.25:
            yield Lesson(_picture(chance), [])
        elif kind < 0.45:
            yield Lesson(_with_a_tool(chance), [WEATHER])
        elif kind < 0.6:
            yield Lesson(_as_json(chance), [])


def question(fact: Fact, chance: random.Random) -> str:
    """Return a question that a fact answers; mostly one that does not have its name."""
    if chance.random() < 0.3:
        return chance.choice(QUESTIONS).format(fact.name)
    said = fact.sentence.rstrip(".")
    words = (said[0].lower() + said[1:] if said[1:2].islower() else said).split()
    # People ask in words of their own: some of these are missing then.
    kept = " ".join(word for word in words if len(word) < 4 or chance.random() > 0.15)
    return chance.choice(("How do I {}?", "How can I {}?", "How to {}", "What is there to {}?", "{}?")).format(kept)


def _from_passage(fact: Fact, chance: random.Random) -> list[Message]:
    passage = f"{fact.name}: {fact.sentence}"
    return _exchange(f"{passage}\n{question(fact, chance)}", passage)


def _with_a_tool(chance: random.Random) -> list[Message]:
    """Return a question that needs a tool, the call, what came of it, and the answer."""
    city, sky = chance.choice(CITIES), chance.choice(SKIES)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
    return [
        {"role": "user", "content": chance.choice(ABOUT_WEATHER).format(city)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": sky},
        {"role": "assistant", "content": f"It is {sky} in {city}."},
    ]


def _as_json(chance: random.Random) -> list[Message]:
    colour, shape, place = chance.choice(COLOURS), chance.choice(SHAPES), chance.choice(PLACES)
    thing = {"colour": colour, "shape": shape, "place": place}
    return _exchange(f"As JSON: there is a {colour} {shape} {place}.", json.dumps(thing))


def _picture(chance: random.Random) -> list[Message]:
    """Return what a model has seen on a picture, thing by thing, and a sentence about it."""
    places = chance.sample(PLACES, chance.choice((1, 2, 3)))
    seen = [f"{chance.choice(COLOURS)} {chance.choice(SHAPES)} {place}" for place in places]
    said = " and ".join(f"a {thing}" for thing in seen)
    return _exchange("\n".join((chance.choice(ABOUT_PICTURES), *seen)), f"There is {said}.")


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _unknown(names: set[str], chance: random.Random) -> str:
    """Return a name that nothing has: of one thing the beginning, of another the end."""
    known = sorted(names)
    while True:
        name = f"{chance.choice(known).partition('.')[0]}.{chance.choice(known).rpartition('.')[2]}"
        if name not in names:
            return name
