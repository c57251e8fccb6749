import math

from hypothesis import given
from hypothesis import strategies as st

from pykubelet.probes.prober import Schedule

items = st.integers(0, 8)
dues = st.integers(0, 20)
doings = st.lists(
    st.one_of(
        st.tuples(st.just("put"), items, dues),
        st.tuples(st.just("drop"), items, st.just(0)),
        st.tuples(st.just("take"), st.integers(1, 4), dues),
    ),
    max_size=60,
)


@given(doings)
def test_schedule_any_sequence_equals_sorted_dict(steps: list[tuple[str, int, int]]) -> None:
    schedule: Schedule[int] = Schedule()
    model: dict[int, float] = {}
    for what, number, due in steps:
        if what == "put":
            schedule.put(number, due)
            model[number] = due
        elif what == "drop":
            schedule.remove(number)
            model.pop(number, None)
        else:
            taken = schedule.pop_due(due, number)
            allowed = sorted(model[item] for item in model if model[item] <= due)
            assert sorted(model.pop(item) for item in taken) == allowed[:number]
        assert len(schedule) == len(model)
        assert schedule.next_due() == min(model.values(), default=None)
        assert all((item in schedule) == (item in model) for item in range(9))


class Counted(float):
    """A moment that counts how often moments are compared."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)


def test_schedule_pop_and_put_cost_is_logarithmic() -> None:
    def cost_of_a_turn(size: int) -> float:
        schedule: Schedule[int] = Schedule()
        for item in range(size):
            schedule.put(item, Counted((item * 7919) % size))
        Counted.comparisons = 0
        turns = 2000
        for turn in range(turns):
            [item] = schedule.pop_due(math.inf, 1)
            schedule.put(item, Counted(size + turn))
        return Counted.comparisons / turns

    small, large = cost_of_a_turn(100), cost_of_a_turn(10_000)
    assert small > 0
    assert large < 3 * small  # a hundred times as many: the logarithm doubles


def test_schedule_repeated_put_does_not_grow_heap() -> None:
    schedule: Schedule[str] = Schedule()
    for turn in range(10_000):
        schedule.put("a", turn)
        schedule.put("b", turn)
        schedule.remove("b")
    assert len(schedule._heap) < 100
    assert schedule.pop_due(math.inf, 10) == ["a"]
