"""When the loop executes, and when the thread does."""

from nerite.instances.instance import BRIEF_NS, DEBT_NS, BriefExecutionPolicy

LONG = 3 * BRIEF_NS


def in_thread(of: BriefExecutionPolicy, count: int, computed_ns: int = BRIEF_NS, took_ns: int = BRIEF_NS) -> list[bool]:
    """Run ``count`` times; return where the execution after each belongs."""
    seen = []
    for _ in range(count):
        of.ran_in_thread(computed_ns, took_ns)
        seen.append(of.on_loop)
    return seen


def executions_until_on_loop(of: BriefExecutionPolicy) -> int:
    count = 0
    while not of.on_loop:
        in_thread(of, 1)
        count += 1
    return count


def test_a_model_begins_in_its_thread() -> None:
    assert not BriefExecutionPolicy().on_loop


def test_the_loop_takes_over_after_eight_brief_executions() -> None:
    assert in_thread(BriefExecutionPolicy(), 8) == [False] * 7 + [True]


def test_one_that_is_not_brief_begins_the_count_again() -> None:
    of = BriefExecutionPolicy()
    in_thread(of, 7)
    in_thread(of, 1, computed_ns=LONG)
    assert executions_until_on_loop(of) == 8


def test_waiting_for_the_gil_does_not_count_but_waiting_for_something_does() -> None:
    of = BriefExecutionPolicy()
    in_thread(of, 7, took_ns=1_000_000)
    assert in_thread(of, 1) == [True]
    assert not in_thread(BriefExecutionPolicy(), 8, took_ns=10_000_000)[-1]


def test_a_model_that_computes_in_threads_of_its_framework_stays_in_its_own() -> None:
    assert not any(in_thread(BriefExecutionPolicy(), 1_000, computed_ns=BRIEF_NS // 2, took_ns=LONG))


def test_what_was_brief_long_ago_does_not_count() -> None:
    of = BriefExecutionPolicy()
    in_thread(of, 8)
    executions_until_in_thread(of, LONG)
    assert not any(in_thread(of, 100, took_ns=LONG))


def test_now_and_then_an_execution_may_take_long() -> None:
    of = BriefExecutionPolicy()
    in_thread(of, 8)
    for _ in range(100):
        of.ran_on_loop(1_000 * BRIEF_NS)
        for _ in range(4):
            of.ran_on_loop(BRIEF_NS // 10)
    assert of.on_loop


def executions_until_in_thread(of: BriefExecutionPolicy, took_ns: int) -> int:
    count = 0
    while of.on_loop:
        of.ran_on_loop(took_ns)
        count += 1
    return count


def test_four_that_take_long_send_the_model_back() -> None:
    of = BriefExecutionPolicy()
    in_thread(of, 8)
    assert executions_until_in_thread(of, 1_000 * BRIEF_NS) == 4


def test_many_that_take_a_little_longer_send_the_model_back() -> None:
    of = BriefExecutionPolicy()
    in_thread(of, 8)
    assert executions_until_in_thread(of, BRIEF_NS + DEBT_NS // 100) == 100


def test_each_return_to_the_thread_lasts_twice_as_long() -> None:
    of = BriefExecutionPolicy()
    waits = []
    for _ in range(5):
        waits.append(executions_until_on_loop(of))
        executions_until_in_thread(of, LONG)
    assert waits == [8, 16, 32, 64, 128]
