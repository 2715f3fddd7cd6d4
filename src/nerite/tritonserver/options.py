"""Options of a server, and the flags that they are."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nerite.tritonserver.errors import UnsupportedError


class ModelControlMode(enum.Enum):
    """When models are loaded."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


class RateLimitMode(enum.Enum):
    """Whether instances wait for resources."""

    OFF = "off"
    EXEC_COUNT = "execution_count"


class LogFormat(enum.Enum):
    """Format of the log."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"


class MetricFormat(enum.Enum):
    """Format of the metrics."""

    PROMETHEUS = "prometheus"


@dataclass
class RateLimiterResource:
    """Amount of a resource; ``device`` -1 is all devices."""

    name: str
    count: int
    device: int = -1


@dataclass
class Options:
    """Options of a server, as Triton's package names them."""

    model_repository: str | Path | Sequence[str | Path] = ()
    server_id: str = "triton"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: Sequence[str] = ()
    strict_model_config: bool = True
    rate_limiter_mode: RateLimitMode = RateLimitMode.OFF
    rate_limiter_resources: Sequence[RateLimiterResource] = ()
    pinned_memory_pool_size: int = 1 << 28
    cuda_memory_pool_sizes: Mapping[int, int] = field(default_factory=dict)
    cache_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cache_directory: str = ""
    min_supported_compute_capability: float = 6.0
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout: int = 30
    buffer_manager_thread_count: int = 0
    model_load_thread_count: int = 4
    model_namespacing: bool = False
    log_file: str | None = None
    log_info: bool = False
    log_warn: bool = False
    log_error: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: bool | int = False
    metrics: bool = True
    gpu_metrics: bool = True
    cpu_metrics: bool = True
    metrics_interval: int = 2000
    backend_directory: str = ""
    repo_agent_directory: str = ""
    model_load_device_limits: Mapping[int, float] = field(default_factory=dict)
    backend_configuration: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    host_policies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    metrics_configuration: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def flags(self) -> list[str]:
        """Return the flags of the server. Raises ``UnsupportedError`` for what has none."""
        given = self.model_repository
        paths = [given] if isinstance(given, str | Path) else list(given)
        flags = [f"--model-repository={path}" for path in paths]
        flags += [f"--load-model={name}" for name in self.startup_models]
        for each in self.rate_limiter_resources:
            device = f":{each.device}" if each.device >= 0 else ""
            flags.append(f"--rate-limit-resource={each.name}:{each.count}{device}")
        for name, settings in self.cache_config.items():
            flags += [f"--cache-config={name},{key}={value}" for key, value in settings.items()]
        for name, settings in self.backend_configuration.items():
            flags += [f"--backend-config={name},{key}={value}" for key, value in settings.items()]
        for name, settings in self.host_policies.items():
            flags += [f"--host-policy={name},{key}={value}" for key, value in settings.items()]
        for name, settings in self.metrics_configuration.items():
            prefix = f"{name}," if name else ""
            flags += [f"--metrics-config={prefix}{key}={value}" for key, value in settings.items()]
        flags += [f"--model-load-gpu-limit={device}:{limit}" for device, limit in self.model_load_device_limits.items()]
        if isinstance(self.model_control_mode, str):
            raise UnsupportedError("model_control_mode must be a ModelControlMode")
        values = {
            "id": self.server_id,
            "model-control-mode": self.model_control_mode.value,
            "rate-limit": self.rate_limiter_mode.value,
            "min-supported-compute-capability": self.min_supported_compute_capability,
            "exit-on-error": self.exit_on_error,
            "strict-readiness": self.strict_readiness,
            "exit-timeout-secs": self.exit_timeout,
            "model-load-thread-count": self.model_load_thread_count,
            "model-namespacing": self.model_namespacing,
            "log-info": self.log_info,
            "log-warning": self.log_warn,
            "log-error": self.log_error,
            "log-format": self.log_format.value,
            "log-verbose": int(self.log_verbose),
            "log-file": self.log_file,
            "metrics-interval-ms": self.metrics_interval,
            "backend-directory": self.backend_directory,
        }
        for name, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if value not in (None, ""):
                flags.append(f"--{name}={text}")
        return flags
