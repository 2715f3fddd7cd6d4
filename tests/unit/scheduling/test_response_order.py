from hypothesis import given
from hypothesis import strategies as st

from nerite.scheduling.request_queue import ResponseOrder


def test_an_answer_waits_for_those_before_it() -> None:
    order: ResponseOrder[str] = ResponseOrder()
    first, second, third = order.begin(), order.begin(), order.begin()
    assert order.finish(third, "c") == []
    assert order.finish(first, "a") == ["a"]
    fourth = order.begin()
    assert order.finish(second, "b") == ["b", "c"]
    assert order.finish(fourth, "d") == ["d"]


@given(st.data())
def test_answers_leave_in_order_and_as_early_as_they_can(data: st.DataObject) -> None:
    order: ResponseOrder[int] = ResponseOrder()
    begun: list[int] = []
    answered: set[int] = set()
    released: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        open_places = [number for number in range(len(begun)) if number not in answered]
        if not open_places or data.draw(st.booleans()):
            begun.append(order.begin())
            continue
        number = data.draw(st.sampled_from(open_places))
        answered.add(number)
        released += order.finish(begun[number], number)
        waited_for = min(set(range(len(begun))) - answered, default=len(begun))
        assert released == list(range(waited_for))
