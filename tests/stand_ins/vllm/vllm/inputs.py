"""Prompts."""


def tokens_input(prompt_token_ids, *, prompt=None, cache_salt=None):
    made = {"type": "token", "prompt_token_ids": prompt_token_ids}
    if prompt is not None:
        made["prompt"] = prompt
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made
