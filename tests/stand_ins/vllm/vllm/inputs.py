"""Prompts."""


def tokens_input(tokens):
    return {"type": "token", "prompt_token_ids": tokens}
