"""``/tokenize`` and ``/detokenize`` of vLLM: requests that generate nothing, and replies with tokens or their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from nerite.core.tensor import Buffer
from nerite.llm.openai.chat_requests import ChatRequest, chat_request
from nerite.llm.openai.completion_requests import CompletionFields, CompletionRequest, token_bytes
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, missing, wrong_type
from nerite.llm.openai.reply_formats import ChoiceOutput, CompletionFormat, Usage
from nerite.llm.openai.sampling import SamplingSetting
from nerite.llm.openai.text_model import SPECIAL

_OF_PROMPTS: Final = ("model", "prompt", SPECIAL)
_OF_TOKENS: Final = ("model", "tokens")
_NOTHING: Final = SamplingSetting(0, "max_tokens")


def without_text(asked: CompletionFields) -> CompletionFields:
    """Return the fields of a request that generates nothing."""
    return asked._replace(n=1, sampling={"max_tokens": _NOTHING}, stream=False, usage=False, logprobs=-1)


def read_tokenize(body: Buffer) -> CompletionRequest | ChatRequest:
    """Read a body with a prompt or with the messages of a chat. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    if "messages" in fields:
        chat = chat_request(fields)
        return chat._replace(wanted=without_text(chat.wanted)._replace(token_ids=True))
    fields.pass_over_unknown(_OF_PROMPTS)
    if "prompt" not in fields:
        raise missing("prompt")
    prompt = fields.text("prompt").encode()
    if not prompt:
        raise ApiError("prompt must be non-empty", "prompt", "invalid_value")
    special = fields.flag(SPECIAL) if SPECIAL in fields else None
    wanted = _fields(fields, special)._replace(token_ids=True)
    return CompletionRequest(wanted, [prompt], False, 1)


def read_detokenize(body: Buffer) -> CompletionRequest:
    """Read a body with token ids. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_OF_TOKENS)
    if "tokens" not in fields:
        raise missing("tokens")
    tokens = fields["tokens"]
    if not isinstance(tokens, list):
        raise wrong_type("tokens", "an array of token ids", tokens)
    if not tokens:
        raise ApiError("tokens must be non-empty", "tokens", "invalid_value")
    return CompletionRequest(_fields(fields, None), [token_bytes("tokens", tokens)], True, 1, tokens=True)


def _fields(fields: Fields, special: bool | None) -> CompletionFields:
    model = fields.name("model")
    plain = CompletionFields(model, 1, {}, False, False, -1, special, 0, unknown=fields.unknown)
    return without_text(plain)


class TokensFormat(CompletionFormat):
    """Format of the tokens of a prompt."""

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the tokens and their number."""
        tokens = choices[0].prompt_ids or []
        return orjson.dumps({"count": len(tokens), "tokens": tokens})


class TextFormat(CompletionFormat):
    """Format of the text of tokens."""

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage | None) -> bytes:
        """Return the text."""
        return orjson.dumps({"prompt": choices[0].text})
