"""A loaded model version as those see it who send requests to it: transports, ensembles' steps, routes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from nerite.core.request import InferenceRequest, ServedVersion
from nerite.core.signature import Signature


class ServableVersion(ServedVersion, Protocol):
    """A model version as transports see it."""

    @property
    def name(self) -> str:
        """The name of the model."""

    @property
    def decoupled(self) -> bool:
        """Whether a request may get several responses."""

    @property
    def stream_input(self) -> str:
        """Name of the input that a request for several responses sets; empty if any request may get several."""

    @property
    def signature(self) -> Signature:
        """Inputs and outputs."""

    @property
    def generates(self) -> bool:
        """Whether the model runs on an LLM engine."""

    @property
    def usable(self) -> bool:
        """Whether an instance can run requests, now or after what it runs."""

    @property
    def runtime_adapters(self) -> Collection[str]:
        """Names of the LoRA adapters that were loaded since the version was."""

    def parameter(self, name: str) -> str:
        """Return a parameter of the model's configuration; empty if it has none of that name."""

    def enqueue(self, requests: Iterable[InferenceRequest]) -> None:
        """Answer requests whose data were checked before. What is unforeseen ends only the request concerned."""

    def receive_buffer(self, size: int) -> memoryview | None:
        """Return writable shared memory that instances can read without a copy; None if there is none."""
