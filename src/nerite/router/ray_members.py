"""Follows the servers of a pool in Ray for a router.

A process of its own is connected to Ray, which takes some hundred megabytes and many threads, and may be lost with its
node: ``nerite ray members``. It prints the members whenever they change; without it the last ones stay.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence
from typing import Final

from nerite.balancing.member import Member
from nerite.cluster.addresses import members_of_text
from nerite.cluster.settings import PoolSettings
from nerite.core.errors import InvalidArgument, NotInstalled
from nerite.core.work_loop import WorkLoop
from nerite.observability.log import log

_FIRST_DELAY: Final = 1.0
_LONGEST_DELAY: Final = 30.0
_STABLE: Final = 30.0
"""Seconds that the process has to run for its next start to be prompt."""
_MAX_LINE: Final = 4 << 20


class RayMembers:
    """The members of a pool out of Ray."""

    def __init__(self, pool: PoolSettings, take: Callable[[Sequence[Member]], None]) -> None:
        """``take`` is called with all members when they have changed. Raises ``NotInstalled`` without Ray."""
        if importlib.util.find_spec("ray") is None:
            raise NotInstalled(
                f"pool '{pool.name}': Ray is not installed, which ray = \"{pool.source.ray}\" needs: "
                "pip install 'nerite[ray]', with the version of the cluster"
            )
        self._pool = pool
        self._take = take
        self._members: tuple[Member, ...] | None = None
        self._problem = ""

    async def run(self, loop: WorkLoop) -> None:
        """Follow the members until it is cancelled."""
        delay = _FIRST_DELAY
        while True:
            began = time.monotonic()
            how = "has failed"
            with loop.step("nerite ray members"):
                how = f"has ended with status {await self._follow()}"
            delay = _FIRST_DELAY if time.monotonic() - began > _STABLE else min(2 * delay, _LONGEST_DELAY)
            log.warning(
                f"pool '{self._pool.name}': nerite ray members {how}. The last members stay; it is started again in "
                f"{delay:g} s"
            )
            await asyncio.sleep(delay)

    async def _follow(self) -> int:
        """Take what the process prints until it ends; return its status. The next one prints all members again."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nerite.cli.main", "ray", "members", self._pool.source.ray,
            stdout=PIPE, limit=_MAX_LINE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            while line := await process.stdout.readline():
                self.read(line)
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()

    def read(self, line: bytes) -> None:
        """Take a line that the process has printed."""
        pool = self._pool
        try:
            said = json.loads(line)
            problem = str(said.get("problem", ""))
            members = None if problem else members_of_text(
                "\n".join(said["members"]), pool.source.ray, pool.kind, pool.grpc_port, pool.metrics_port
            )  # fmt: skip
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            problem, members = f"nerite ray members printed what cannot be read: {error}", None
        except InvalidArgument as error:
            problem, members = error.message, None
        if problem and problem != self._problem:
            log.warning(f"pool '{pool.name}': {problem}. The last members stay")
        self._problem = problem
        if members is not None and members != self._members:
            log.info(f"pool '{pool.name}': {pool.source.ray} has {len(members)} servers that are ready")
            self._take(members)
            self._members = members  # only now, or members that could not be taken would not be tried again
