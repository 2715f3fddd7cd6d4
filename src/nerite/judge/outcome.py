"""How a request of a judged route ended, and the class of requests that it is compared with."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

ENDS: Final = ("", "error", "timeout", "refused", "cancelled")
"""Values of ``Outcome.error``."""


class Stratum(NamedTuple):
    """A class of requests within which the arms are compared.

    ``cached`` is known only after the assignment, and may depend on the arm: a new version begins with a cold cache. So
    it selects the latency threshold that a request is held to, and nothing else.
    """

    prompt: str = ""
    """Class of the prompt's length, in tokens; empty for tensors."""
    cached: str = ""
    """How much of the prompt was in the prefix cache: '', 'none', 'part' or 'most'."""
    tenant: str = ""
    """Class of the tenant."""
    stream: bool = False

    @property
    def label(self) -> str:
        """The stratum in words, for people."""
        parts = [f"prompt {self.prompt}" if self.prompt else "", f"cached {self.cached}" if self.cached else ""]
        parts += [f"tenant {self.tenant}" if self.tenant else "", "stream" if self.stream else ""]
        return ", ".join(part for part in parts if part) or "all requests"

    @property
    def before_assignment(self) -> Stratum:
        """The stratum without what the arm itself may have changed."""
        return self._replace(cached="") if self.cached else self


@lru_cache(maxsize=1024)
def token_stratum(prompt_class: str, cached_class: str, tenant: str, stream: bool) -> Stratum:
    """Return the one object for these classes."""
    return Stratum(prompt_class, cached_class, tenant, stream)


class Outcome(NamedTuple):
    """How one request of a judged route ended. Of a request that was tried again, only the first attempt counts."""

    candidate: bool
    """Assigned to the candidate by the first assignment, even if the baseline answered in the end."""
    probability: float
    """With which the router assigned it to the candidate. 0 or 1: nothing was compared; teaches thresholds only."""
    at_ns: int
    """Monotonic, the end of the request."""
    latency_us: float
    """From its arrival to its end, however it ended."""
    first_us: float
    """To the first response. Equal to ``latency_us`` if there is one response, or if it ended without any."""
    token_us: float = 0.0
    """Mean time between responses or tokens; 0 if there were fewer than two."""
    error: str = ""
    """'' | 'error' | 'timeout' | 'refused' (admission, no room in the KV cache) | 'cancelled' (by the client)."""
    stratum: Stratum = Stratum()
    cluster: int = 0
    """Hash of the sticky key; 0 without one."""
