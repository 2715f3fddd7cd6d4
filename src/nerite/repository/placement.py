"""Which GPUs models may be on, and whether there is room for one more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nerite.backends.gpu_builds import can_use_gpus
from nerite.config.gpus import Gpus
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Unavailable
from nerite.observability.gpus import Gpu, GpuLibrary


class Placement:
    """For any thread."""

    def __init__(
        self, library: GpuLibrary, gpus: Sequence[Gpu], minimum: float, limits: Mapping[int, float] | None = None
    ) -> None:
        """``gpus`` have at least the compute capability ``minimum``.

        ``limits``: GPUs by their number, with the fraction of their memory beyond which no model is loaded.
        """
        self._library = library
        self._gpus = {gpu.number: gpu for gpu in gpus}
        self._minimum = minimum
        self._limits = limits or {}

    def gpus(self, backend: str) -> Gpus:
        """Return the GPUs that a backend's models may be on."""
        return Gpus(tuple(self._gpus), self._minimum, can_use_gpus(backend) if self._gpus else True)

    def check_room(self, config: ModelConfig) -> None:
        """Raise ``Unavailable`` if a GPU that a model is to be on has less memory left than it is to have."""
        for number in sorted(_wanted(config) & self._limits.keys() & self._gpus.keys()):
            memory = self._library.memory(self._gpus[number])
            if memory is not None and memory.used > memory.total * self._limits[number]:
                raise Unavailable(
                    f"can not create model '{config.name}': memory limit set for GPU {number} has exceeded, model "
                    f"loading is rejected. {memory.used:,} of its {memory.total:,} bytes are used, and "
                    f"--model-load-gpu-limit allows {self._limits[number]:.0%}: unload a model, or raise the limit"
                )


def _wanted(config: ModelConfig) -> set[int]:
    groups: Iterable[Iterable[int]] = (group.gpus for group in config.instance_group if group.kind == "KIND_GPU")
    return {number for group in groups for number in group}
