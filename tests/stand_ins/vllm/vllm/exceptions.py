"""Errors of callers."""


class VLLMClientError(Exception):
    pass
