"""Reviews with a sentiment, made from a small grammar: what the model learns from, and what it is tried on."""

from __future__ import annotations

import random

LABELS = ("negative", "neutral", "positive")
"""What a review can be. The index is the class that the model learns."""

THINGS = (
    "the food", "the soup", "the bread", "the service", "our waiter", "the room", "the view", "the film", "the plot",
    "the music", "the ending", "the sound", "the battery", "the screen", "the hotel", "breakfast", "the staff",
)  # fmt: skip

ADJECTIVES = {
    "negative": "awful terrible poor dreadful disappointing horrible bad boring rude cold broken",
    "neutral": "average ordinary acceptable okay unremarkable standard middling",
    "positive": "great lovely excellent perfect charming superb wonderful good friendly delicious fantastic",
}

VERDICTS = {
    "negative": (
        "i want my money back",
        "never again",
        "we left early",
        "i cannot recommend it",
        "what a waste of time",
    ),
    "neutral": ("i have no strong opinion", "it does what it says", "nothing special", "that is all there is to say"),
    "positive": ("i would come back tomorrow", "we loved it", "i recommend it to everyone", "what a joy", "thank you"),
}

OPPOSITE = {"negative": "positive", "positive": "negative", "neutral": "neutral"}


def review(sentiment: str, chance: random.Random) -> str:
    """Return a review that ends with the given sentiment, whatever it said before its "but"."""
    parts = [part(sentiment, chance) for _ in range(chance.choice((1, 1, 2, 2, 3, 4)))]
    text = " and ".join(parts)
    if chance.random() < 0.3:
        before = OPPOSITE[sentiment] if sentiment != "neutral" else chance.choice(LABELS)
        text = f"{part(before, chance)} but {text}"
    return text + chance.choice(("", ".", "!"))


def part(sentiment: str, chance: random.Random) -> str:
    """Return one clause of a review."""
    if chance.random() < 0.2:
        return chance.choice(VERDICTS[sentiment])
    thing = chance.choice(THINGS)
    adverb = chance.choice(("", "", "really ", "so ", "quite ", "simply "))
    if sentiment != "neutral" and chance.random() < 0.25:
        turned = chance.choice(ADJECTIVES[OPPOSITE[sentiment]].split())
        return f"{thing} was {chance.choice(('not', 'not at all', 'anything but', 'never'))} {turned}"
    return f"{thing} was {adverb}{chance.choice(ADJECTIVES[sentiment].split())}"


def reviews(count: int, seed: int) -> list[tuple[str, int]]:
    """Return ``count`` different reviews, each with the index of its label."""
    chance = random.Random(seed)
    found: dict[str, int] = {}
    while len(found) < count:
        label = chance.randrange(len(LABELS))
        found[review(LABELS[label], chance)] = label
    return list(found.items())
