"""Where requests stand in their traces: asked for once, and only by who wants to know."""

from __future__ import annotations

from nerite.core.execution_observer import TraceContext
from nerite.workers.child.hosted_model import WorkerContexts
from nerite.workers.ipc import messages

CONTEXT = TraceContext(1, 2, "x=y")


class Bench:
    """Contexts, and a server that tells of batch 7 when it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.contexts = WorkerContexts(self._ask)

    def tell(self, batch: int) -> None:
        data = messages.contexts_frame(batch, [None, CONTEXT])
        _, _, count = messages.FRAME.unpack_from(data)
        self.contexts.receive(memoryview(data)[messages.FRAME.size :], count)

    def _ask(self) -> None:
        self.asked += 1
        self.tell(7)


def test_the_batch_that_is_here_when_somebody_first_wants_to_know() -> None:
    bench = Bench()
    assert bench.contexts.may_have(7) and not bench.asked
    assert bench.contexts.of(7) == {1: CONTEXT}
    assert bench.contexts.of(7) == {1: CONTEXT}
    assert bench.asked == 1


def test_each_batch_from_then_on() -> None:
    bench = Bench()
    bench.contexts.of(7)
    bench.tell(8)
    assert bench.contexts.may_have(8) and not bench.contexts.may_have(9)
    assert (bench.contexts.of(8), bench.contexts.of(9)) == ({1: CONTEXT}, {})
    assert bench.asked == 1


def test_what_is_over_is_forgotten() -> None:
    bench = Bench()
    bench.contexts.of(7)
    bench.contexts.forget(7)
    bench.contexts.forget(7)
    assert not bench.contexts.may_have(7)
