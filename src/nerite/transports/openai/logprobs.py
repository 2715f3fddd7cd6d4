"""How likely tokens were: from what engines say, as Triton's vLLM backend writes it, to OpenAI's two forms."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson


class Token(NamedTuple):
    """A token that was chosen, and those that were likely in its place, the likeliest first."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


def read(text: str) -> list[Token]:
    """Return the tokens that the output ``logprobs`` lists. Raises ``ValueError`` for anything else.

    It is a list with an object for each token: by the ids of tokens, first the one that was chosen.
    """
    tokens = []
    try:
        for each in orjson.loads(text) or ():
            entries = [(str(entry["decoded_token"] or ""), float(entry["logprob"])) for entry in each.values()]
            tokens.append(Token(*entries[0], sorted(entries, key=lambda entry: -entry[1])))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the output 'logprobs' is not what it should be: {error}") from error
    return tokens


def chat(tokens: list[Token], count: int) -> dict[str, Any]:
    """Return tokens as chat completions have them, with the ``count`` likeliest at each place."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}

    content = [
        {**entry(token.text, token.logprob), "top_logprobs": [entry(*each) for each in token.top[:count]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion(tokens: list[Token], count: int, start: int) -> dict[str, Any]:
    """Return tokens as completions have them; ``start`` is where the first begins in the text."""
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top[:count]) for token in tokens],
        "text_offset": offsets,
    }
