import itertools

from hypothesis import given
from hypothesis import strategies as st

from pykubelet.probes.prober import ProbeTick, first_tick, next_tick, probe_phase
from pykubelet.probes.types import ProbeParameters

periods = st.integers(1, 3600)
phases = st.floats(0, 1, exclude_max=True)
moments = st.floats(0, 1e6)


def terms(period: int) -> ProbeParameters:
    return ProbeParameters(delay=0, period=period, timeout=1, successes=1, failures=3)


def beats(period: int, outcomes: list[bool], phase: float = 0.0) -> list[ProbeTick]:
    found = [first_tick(terms(period), 100.0, phase, eager=True, older=False)]
    for passed in outcomes:
        found.append(next_tick(found[-1], terms(period), passed, found[-1].due, phase))
    return found


def test_next_tick_eager_retries_with_backoff_in_first_period() -> None:
    found = beats(10, [False] * 7)
    assert [beat.due - 100 for beat in found] == [0, 0.5, 1.5, 3.5, 7.5, 10, 20, 30]
    assert [beat.eager for beat in found] == [True] * 5 + [False] * 3


def test_next_tick_first_success_ends_eager_retries() -> None:
    found = beats(10, [False, True, False, True], phase=0.5)
    assert [beat.due - 100 for beat in found] == [0, 0.5, 8.0, 18.0, 28.0]
    assert [beat.eager for beat in found] == [True, True, False, False, False]


def test_next_tick_slow_probe_delays_without_accumulating() -> None:
    beat = next_tick(ProbeTick(100.0, 0.0), terms(10), True, 137.0, 0.0)
    assert beat.due == 137.0
    assert next_tick(beat, terms(10), True, 138.0, 0.0).due == 147.0


@given(periods, phases, st.lists(st.booleans(), max_size=20))
def test_next_tick_is_monotonic_and_eager_only_in_first_period(
    period: int, phase: float, outcomes: list[bool]
) -> None:
    found = beats(period, outcomes, phase)
    assert all(later.due > earlier.due for earlier, later in itertools.pairwise(found))
    assert all(beat.due < 100 + period for beat in found if beat.eager)
    assert all(later.due - earlier.due <= period + 1e-6 for earlier, later in itertools.pairwise(found))


@given(periods, phases, st.integers(1, 10))
def test_next_tick_failure_threshold_takes_at_least_threshold_periods(
    period: int, phase: float, failures: int
) -> None:
    counted = [beat for beat in beats(period, [False] * 40, phase) if not beat.eager]
    assert counted[failures - 1].due - 100 >= failures * period - 1e-6


@given(periods, phases, moments)
def test_first_tick_not_eager_is_within_first_period(period: int, phase: float, opened: float) -> None:
    new = first_tick(terms(period), opened, phase, eager=False, older=False)
    assert opened + period / 2 <= new.due <= opened + period
    old = first_tick(terms(period), opened, phase, eager=False, older=True)
    assert opened <= old.due <= opened + period


def test_probe_phase_is_spread_and_stable() -> None:
    phases = sorted(probe_phase(f"uid-{n}", "app", "liveness") for n in range(1000))
    tenths = [sum(low <= phase * 10 < low + 1 for phase in phases) for low in range(10)]
    assert min(tenths) > 50
    assert max(tenths) < 200
    assert probe_phase("a", "b", "startup") == probe_phase("a", "b", "startup")
    assert probe_phase("a", "b", "startup") != probe_phase("a", "b", "liveness")
