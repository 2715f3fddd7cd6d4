"""The policy file: read at the start, and followed while the server runs."""

from __future__ import annotations

from typing import Final, NamedTuple

from nerite.admission.policy import AdmissionPolicy, parse_policy
from nerite.config.watched_file import WatchedFile, read_content
from nerite.core.errors import InvalidArgument
from nerite.redis.settings import RedisSettings, settings_of_address

_MAX_SIZE: Final = 4 * 1024 * 1024


class PolicyChange(NamedTuple):
    """Content of the policy file, or the reason why it could not be read."""

    text: str
    problem: str = ""
    """Why the file could not be read; empty if it could."""


class WatchedPolicy(WatchedFile[PolicyChange]):
    """Policy of a file that may change while the server runs; keeps the last valid version."""

    def __init__(self, path: str, found: PolicyChange, redis: RedisSettings | None = None) -> None:
        """``found`` is the initial content. ``redis`` takes precedence over the one that the policy names.

        Raises ``InvalidArgument`` that lists all mistakes.
        """
        super().__init__(path, found)
        self._redis = redis
        self.policy = _parsed(path, found, redis)

    def _take(self, found: PolicyChange) -> None:
        try:
            policy = _parsed(self.path, found, self._redis)
            if _redis_of(policy) != _redis_of(self.policy):
                raise InvalidArgument(f"{self.path}: redis.url: is that of the start: restart the server to change it")
            self.policy = policy
            self.problem = ""
        except InvalidArgument as error:
            self.problem = error.message

    def poll(self) -> PolicyChange:
        """Read the file. Blocks on I/O."""
        return check_policy(self.path)

    def news(self) -> str:
        """Return the log message for a change of the file."""
        if self.problem:
            return f"{self.problem}\nThe previous policy stays in force: correct '{self.path}'; changes are picked up"
        return f"the policy file '{self.path}' was read and is in force"


def check_policy(path: str) -> PolicyChange:
    """Read a policy file. Blocks on I/O."""
    content = read_content(path, _MAX_SIZE)
    if content.problem:
        return PolicyChange("", content.problem)
    # The file may have been truncated before being rewritten, which must not lift every limit.
    if not content.data.strip():
        return PolicyChange("", "is empty")
    try:
        return PolicyChange(content.data.decode())
    except UnicodeDecodeError as error:
        return PolicyChange("", f"is not UTF-8: {error}")


def open_policy(path: str, redis: str = "") -> WatchedPolicy:
    """Return the policy in a file. Raises ``InvalidArgument`` that lists all mistakes in it.

    ``redis``: address of the Redis over which servers share quotas, in place of the one in the file.
    """
    return WatchedPolicy(path, check_policy(path), settings_of_address(redis) if redis else None)


def _parsed(path: str, found: PolicyChange, redis: RedisSettings | None) -> AdmissionPolicy:
    if found.problem:
        raise InvalidArgument(f"the policy file '{path}' {found.problem}")
    return parse_policy(found.text, path, redis)


def _redis_of(policy: AdmissionPolicy) -> RedisSettings | None:
    return None if policy.shared is None else policy.shared.redis
