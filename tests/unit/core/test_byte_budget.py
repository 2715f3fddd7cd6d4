"""What memos keep: never more bytes than their budget, and of all memos together what was put first goes first."""

from __future__ import annotations

import threading
from weakref import ref

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nerite.core.byte_budget import BUDGETS, ENTRY, TOTAL, ByteBudget, Memo

LIMIT = 20 * ENTRY
LARGEST = 6 * ENTRY
KEYS = st.integers(0, 5)
MEMOS = st.integers(0, 2)


class Kept(RuleBasedStateMachine):
    """Beside the budget, a list of all that was put, and everything added up."""

    @initialize()
    def empty(self) -> None:
        self.budget = ByteBudget("test", LIMIT, LARGEST)
        self.memos: list[Memo[int, object]] = [Memo(), Memo(), Memo()]
        self.put_in: list[tuple[int, int, int]] = []
        """Which memo, key and size; the oldest first."""
        self.expected: list[dict[int, object]] = [{}, {}, {}]

    @rule(memo=MEMOS, key=KEYS, size=st.integers(0, LARGEST + ENTRY))
    def put(self, memo: int, key: int, size: int) -> None:
        value = object()
        self.budget.put(self.memos[memo], key, value, size)
        if size + ENTRY > LARGEST:
            return
        self.put_in.append((memo, key, size + ENTRY))
        self.expected[memo][key] = value
        while sum(size for _, _, size in self.put_in) > LIMIT:
            evicted, key, _ = self.put_in.pop(0)
            self.expected[evicted].pop(key, None)

    @rule(memo=MEMOS)
    def clear(self, memo: int) -> None:
        self.memos[memo].clear()
        self.expected[memo].clear()

    @rule(memo=MEMOS)
    def replace_owner(self, memo: int) -> None:
        """The bytes of a memo that is gone count until it is their turn; then nothing happens to the new one."""
        self.memos[memo] = Memo()
        self.expected[memo] = {}
        self.put_in = [(3 if which == memo else which, key, size) for which, key, size in self.put_in]
        self.expected = [*self.expected[:3], {}]

    @invariant()
    def what_is_found_is_what_was_put_last(self) -> None:
        assert self.memos == self.expected[:3]

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.budget.used == sum(size for _, _, size in self.put_in) <= LIMIT


TestKept = Kept.TestCase


def test_what_is_too_large_is_not_kept_and_evicts_nothing() -> None:
    budget = ByteBudget("test", LIMIT, LARGEST)
    memo: Memo[str, str] = Memo()
    budget.put(memo, "small", "", 0)
    budget.put(memo, "large", "", LARGEST)
    assert list(memo) == ["small"]
    assert (budget.used, budget.evictions) == (ENTRY, 0)


def test_what_is_evicted_may_put_something_itself() -> None:
    budget = ByteBudget("test", 2 * ENTRY, ENTRY)
    memo: Memo[int, object] = Memo()

    class Last:
        def __del__(self) -> None:
            budget.put(memo, 10, None, 0)

    budget.put(memo, 0, Last(), 0)
    budget.put(memo, 1, None, 0)
    budget.put(memo, 2, None, 0)
    assert (list(memo), budget.used, budget.evictions) == ([2, 10], 2 * ENTRY, 2)


def test_any_thread_may_put() -> None:
    budget = ByteBudget("test", 100 * ENTRY, ENTRY)
    memos: list[Memo[int, int]] = [Memo() for _ in range(4)]

    def fill(memo: dict[int, int]) -> None:
        for number in range(5000):
            budget.put(memo, number, number, 0)

    threads = [threading.Thread(target=fill, args=(memo,)) for memo in memos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used == 100 * ENTRY
    assert sum(map(len, memos)) == 100
    assert budget.evictions == 4 * 5000 - 100


def test_all_budgets_of_a_process_have_a_bound() -> None:
    names = [budget.name for budget in BUDGETS]
    assert len(set(names)) == len(names)
    assert sum(budget.limit for budget in BUDGETS) <= TOTAL
    assert all(budget.largest <= budget.limit // 8 for budget in BUDGETS), "one entry must not evict all others"


def test_what_is_kept_ends_with_its_owner() -> None:
    class Model:
        pass

    budget = ByteBudget("test", LIMIT, LARGEST)
    memo: Memo[int, Model] = Memo()
    model = Model()
    budget.put(memo, 1, model, 0)
    weights = ref(model)
    del model, memo
    assert weights() is None
    assert budget.used == ENTRY, "until it is its turn"
    other: Memo[int, Model] = Memo()
    for key in range(LIMIT // ENTRY):
        budget.put(other, key, Model(), 0)
    assert (budget.used, len(other), budget.evictions) == (LIMIT, LIMIT // ENTRY, 1)
