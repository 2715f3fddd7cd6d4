"""Sampling parameters."""

from enum import Enum


class RequestOutputKind(Enum):
    DELTA = 1


class StructuredOutputsParams:
    def __init__(self, **form):
        (self.form,) = form.items()


class SamplingParams:
    def __init__(self, **said):
        if said["output_kind"] is not RequestOutputKind.DELTA:
            raise ValueError("only what is new is told")
        if said["top_k"] > 1000:
            raise ValueError("top_k is too large")
        self.__dict__.update(said)
