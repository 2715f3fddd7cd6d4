"""Lists of models that all members together serve: the repository index, and the models of the OpenAI API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from nerite.balancing.member import Member, ServerKind
from nerite.core.errors import NeriteError
from nerite.router.health import entries_of
from nerite.router.http_members import HttpMembers, MemberAnswer
from nerite.router.member_call import BadGateway
from nerite.router.pools import PoolTable
from nerite.transports.http.reply import Reply, json_reply

_KSERVE: Final = (ServerKind.NERITE, ServerKind.TRITON, ServerKind.KSERVE)
_OPENAI: Final = (ServerKind.NERITE, ServerKind.VLLM, ServerKind.SGLANG, ServerKind.OPENAI)
_CONCURRENCY: Final = 16
_SECONDS: Final = 5.0
_READY: Final = "READY"


class MergedLists:
    """Asks all ready members for their lists, and merges them."""

    def __init__(self, table: PoolTable, members: HttpMembers) -> None:
        self._table = table
        self._members = members

    async def index(self, body: bytes) -> Reply:
        """Return the repository index of all members: a version is ready if it is ready at one of them."""
        answers = await self._ask_all(_KSERVE, "POST", "/v2/repository/index", body)
        merged: dict[tuple[str, str], dict[str, Any]] = {}
        for entries in _lists(answers, ""):
            for entry in entries:
                key = str(entry.get("name", "")), str(entry.get("version", ""))
                if key not in merged or (merged[key].get("state") != _READY and entry.get("state") == _READY):
                    merged[key] = entry
        return json_reply([merged[key] for key in sorted(merged)])

    async def openai_models(self) -> Reply:
        """Return the models of the OpenAI API of all members."""
        answers = await self._ask_all(_OPENAI, "GET", "/v1/models")
        merged: dict[str, dict[str, Any]] = {}
        for entries in _lists(answers, "data"):
            for entry in entries:
                merged.setdefault(str(entry.get("id", "")), entry)
        return json_reply({"object": "list", "data": [merged[name] for name in sorted(merged)]})

    async def _ask_all(
        self, kinds: tuple[ServerKind, ...], method: str, path: str, body: bytes = b""
    ) -> list[tuple[Member, MemberAnswer]]:
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def ask(member: Member) -> tuple[Member, MemberAnswer]:
            async with limit:
                return member, await self._members.ask(member, method, path, body, _SECONDS)

        ready = {member.name: member for pool in self._table.pools for member in pool.ready_members}
        return await asyncio.gather(*(ask(member) for member in ready.values() if member.kind in kinds))


def _lists(answers: Iterable[tuple[Member, MemberAnswer]], key: str) -> list[list[dict[str, Any]]]:
    """Return the lists in the answers. Raises ``BadGateway`` with the first problem if no member gave one."""
    found = []
    problems: list[NeriteError] = []
    for member, answer in answers:
        entries = entries_of(answer, key)
        if entries is not None:
            found.append(entries)
        elif not problems:
            why = (
                answer.problem or f"answered with status {answer.status}: {answer.body[:200].decode(errors='replace')}"
            )
            problems.append(BadGateway(f"member '{member.name}' {why}"))
    if problems and not found:
        raise problems.pop()  # not kept in this frame, which the error refers to
    return found
