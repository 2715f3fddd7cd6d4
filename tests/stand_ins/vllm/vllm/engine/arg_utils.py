"""Arguments."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AsyncEngineArgs:
    model: str = ""
    max_model_len: int = 100
    max_num_seqs: int = 4
    num_gpu_blocks_override: int = 64
    scheduling_policy: str = "fcfs"
    disable_log_stats: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    enable_sleep_mode: bool = False
    gpu_bytes: int = 0
    """What it takes of GPU 0 while it is awake, as the stand-in for NVML tells."""
    host_bytes: int = 0
    """What it takes of the memory of the host, awake and asleep."""
    wakes: bool = True
    tasks: tuple[str, ...] = ("generate",)
    most_images: int = 0
    mortal: bool = True
    """It refuses one token, and dies of another."""
    most_tokens: int | None = None
    """After so many a sequence ends, whatever was asked for."""
    prompts: list[Any] = field(default_factory=list)
    """Gets the prompts of all requests."""
