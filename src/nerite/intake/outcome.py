"""What became of an order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nerite.artifacts.artifact import Artifact
from nerite.client import Model
from nerite.config.model_config import ModelConfig
from nerite.intake.contest import Contestant
from nerite.intake.destination import Destination
from nerite.intake.measurement import Latency, Throughput
from nerite.intake.proposal import Proposal
from nerite.intake.written_config import written

_WITH_FIGURES: Final = ("backend", "max_batch_size", "instance_group")


@dataclass
class Outcome:
    """What became of it."""

    artifact: Artifact
    destination: Destination
    config: ModelConfig
    signature: Model | None = None
    load_seconds: float = 0.0
    memory: int = 0
    """Bytes that loading took; 0 where that is not known."""
    memory_at_work: int = 0
    """Bytes more after the largest batch."""
    latencies: list[Latency] = field(default_factory=list)
    rivals: list[Contestant] = field(default_factory=list)
    """The other backends that were measured: ``latencies`` are those of the file's own."""
    throughputs: list[Throughput] = field(default_factory=list)
    proposal: Proposal | None = None
    accepted: bool = False
    remarks: list[str] = field(default_factory=list)

    def config_text(self) -> str:
        """Return the config.pbtxt, with where the model came from and what was measured."""
        origin = f"{self.artifact.kind}, added by nerite add from {self.artifact.source.name}."
        advice = self.proposal.advice if self.proposal is not None and self.accepted else ()
        measured = {each.setting: f"Measured: {each.reason}." for each in advice if each.setting in _WITH_FIGURES}
        return written(self.config, origin, measured)
