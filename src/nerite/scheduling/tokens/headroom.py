"""Whether the KV cache of an engine has room for one more request until that is done.

The engine tells now and then how many blocks are free. Of those, what the requests that run will still grow by is
promised already, and so is all of a request that has been let in and that the engine may not know yet. Only what is
left after that is given away, and a fraction of the whole beyond it if the policy says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine tells of itself."""

    total_blocks: int
    free_blocks: int
    """Those that it can reuse are free."""
    block_size: int
    """Tokens that one holds."""


class Holding:
    """The blocks of one request."""

    __slots__ = ("held", "promised", "shared")

    def __init__(self, promised: int) -> None:
        self.promised = promised
        self.held = 0
        """Of those, as many as it has by now."""
        self.shared = 0
        """Of those, as many as others have, too: they are not free when it ends."""


class Headroom:
    """Of one engine. It has no bounds until the engine has told its figures."""

    __slots__ = ("_held", "_left", "_overcommit", "_promised", "block_size", "free_blocks", "total_blocks")

    def __init__(self, overcommit: float = 0.0) -> None:
        self._overcommit = overcommit
        self._promised = 0
        self._held = 0
        self._left = 0
        self.block_size = 0
        """0: the engine has not told anything yet."""
        self.total_blocks = 0
        self.free_blocks = 0
        """As the engine told last."""

    def tell(self, statistics: EngineStatistics) -> None:
        """Take in what the engine says."""
        self.block_size = statistics.block_size
        self.total_blocks = statistics.total_blocks
        self.free_blocks = statistics.free_blocks
        self._left = statistics.free_blocks - (self._promised - self._held)

    def change(self, overcommit: float) -> None:
        """Go on by another policy."""
        self._overcommit = overcommit

    @property
    def promised(self) -> int:
        """Blocks that all that run have or may have."""
        return self._promised

    @property
    def left(self) -> int:
        """Blocks that are not promised to anybody; below 0: how much too much was."""
        return self._left

    @property
    def limit(self) -> int:
        """As many blocks may be promised, all together."""
        return self.total_blocks + int(self._overcommit * self.total_blocks)

    def blocks(self, tokens: int) -> int:
        """Return how many blocks hold ``tokens``."""
        return -(-tokens // self.block_size) if self.block_size else 0

    def fits(self, blocks: int) -> bool:
        """Return whether ``blocks`` more may be promised."""
        if not self.block_size:
            return True
        return blocks <= min(self._left + self.limit - self.total_blocks, self.limit - self._promised)

    def promise(self, blocks: int) -> Holding:
        """Promise blocks to a request."""
        self._promised += blocks
        self._left -= blocks
        return Holding(blocks)

    def grow(self, holding: Holding, promised: int) -> None:
        """Promise more to a request that needs more than was thought. It has been let in: it gets them."""
        more = promised - holding.promised
        holding.promised += more
        self._promised += more
        self._left -= more

    def hold(self, holding: Holding, held: int) -> None:
        """Note how many of the promised blocks a request has by now."""
        self._held += held - holding.held
        holding.held = held

    def release(self, holding: Holding) -> None:
        """Have back what was promised to a request."""
        self._promised -= holding.promised
        self._held -= holding.held
        self._left += holding.promised - holding.shared
