"""What the language model reads: text that every Python brings along.

The docstrings of the standard library become facts: a name, and what it does. The pages behind ``help()`` are prose. No
downloads; another release of Python has somewhat other words.
"""

from __future__ import annotations

import importlib
import inspect
import pydoc_data.topics
import re
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import NamedTuple

MODULES = (
    *("builtins", "base64", "bisect", "collections", "contextlib", "copy", "csv", "datetime", "functools", "glob"),
    *("gzip", "heapq", "html", "itertools", "json", "math", "operator", "os.path", "pathlib", "pprint", "queue"),
    *("random", "re", "secrets", "shlex", "shutil", "statistics", "string", "struct", "subprocess", "tempfile"),
    *("textwrap", "threading", "time", "urllib.parse", "uuid"),
)
LEFT_OUT = ("bytearray.", "bytes.", "frozenset.", "memoryview.", "random.Random.", "random.SystemRandom.")
"""What begins like this says the same as something else."""
LONGEST = 150
"""Letters of a sentence."""


class Fact(NamedTuple):
    """What something in Python does, in a sentence."""

    name: str
    sentence: str


def facts() -> list[Fact]:
    """Return a fact for all that is public in these modules and says in a sentence what it does."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, thing in _public(module, getattr(module, "__all__", ())):
            found[prefix + name] = _sentence(thing)
            if inspect.isclass(thing) and not issubclass(thing, BaseException):
                for method, what in _public(thing):
                    found[f"{prefix}{name}.{method}"] = _sentence(what)
    return [Fact(name, sentence) for name, sentence in found.items() if sentence and not name.startswith(LEFT_OUT)]


def pages() -> list[str]:
    """Return the reference of the language, in plain paragraphs."""
    texts = []
    for text in pydoc_data.topics.topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            plain = " ".join(paragraph.split())
            # Grammar, code and headings are no sentences.
            if (
                len(plain) > 80
                and "::=" not in plain
                and ">>>" not in plain
                and plain[0].isalpha()
                and plain[-1] == "."
            ):
                texts.append(plain)
    return texts


def _public(owner: ModuleType | type, names: Collection[str] = ()) -> Iterator[tuple[str, object]]:
    """Give what an owner has, under these names or all that are no secret. Modules also have what they import."""
    for name, thing in sorted(vars(owner).items()):
        is_own = name in names or getattr(thing, "__module__", None) in (None, owner.__name__, f"_{owner.__name__}")
        does = callable(thing) or hasattr(thing, "__get__")
        if does and not name.startswith("_") and (is_own or inspect.isclass(owner)):
            yield name, thing


def _sentence(thing: object) -> str:
    """Return the first sentence of a docstring, or nothing if it is none, or too long."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(doc if isinstance(doc := thing.__doc__, str) else ""))
    # Older ones begin with how it is called.
    if paragraphs and re.match(r"[\w.]+\(", paragraphs[0]):
        lines = paragraphs[0].splitlines()
        paragraphs = [" ".join(lines[1:]), *paragraphs[1:]]
        paragraphs = [each for each in paragraphs if each.strip()]
    text = " ".join(paragraphs[0].split()) if paragraphs else ""
    sentence = re.sub(r"[`*\\]", "", re.split(r"(?<=[.!]) (?=[A-Z])", text)[0]).rstrip(".")
    fits = 15 <= len(sentence) < LONGEST and sentence.isascii() and sentence[0].isupper() and " " in sentence
    return f"{sentence}." if fits and "::" not in sentence and ">>>" not in sentence else ""
