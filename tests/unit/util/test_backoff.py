from hypothesis import given
from hypothesis import strategies as st

from pykubelet.util.backoff import ExponentialDelay, KeyedBackoff, exponential_delay


def test_keyed_backoff_repeated_attempts_delay_doubles_up_to_limit() -> None:
    back_off, now, pauses = KeyedBackoff(), 1000.0, []
    for _ in range(8):
        failed = now
        back_off.attempt("pod/main", failed, now)
        pauses.append(back_off.delay("pod/main"))
        assert back_off.remaining("pod/main", failed, now) == pauses[-1]
        now += pauses[-1]
        assert back_off.remaining("pod/main", failed, now) == 0
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]


def test_keyed_backoff_healthy_for_twice_limit_resets_delay() -> None:
    back_off = KeyedBackoff()
    back_off.attempt("k", 0, 0)
    back_off.attempt("k", 10, 10)
    assert back_off.delay("k") == 20
    assert back_off.remaining("k", since=10 + 601, now=10 + 601) == 0
    back_off.attempt("k", since=10 + 601, now=10 + 601)
    assert back_off.delay("k") == 10


def test_keyed_backoff_keys_independent_and_removed_by_forget_and_prune() -> None:
    back_off = KeyedBackoff()
    back_off.attempt("a", 0, 0)
    assert back_off.remaining("b", 0, 0) == 0
    back_off.forget("a")
    assert back_off.remaining("a", 0, 0) == 0
    back_off.attempt("a", 0, 0)
    back_off.prune(601)
    assert back_off.delay("a") == 0


def test_keyed_backoff_limit_below_initial_delay_caps_first_delay() -> None:
    back_off = KeyedBackoff(limit=1)
    back_off.attempt("a", 0, 0)
    assert back_off.delay("a") == 1


@given(st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 2000)), max_size=30))
def test_keyed_backoff_delay_between_initial_and_limit(moments: list[tuple[float, float]]) -> None:
    back_off, now = KeyedBackoff(), 0.0
    for failed_ago, passed in moments:
        now += passed
        back_off.attempt("k", now - failed_ago, now)
        assert 10 <= back_off.delay("k") <= 300
        assert 0 <= back_off.remaining("k", now, now) <= 300


def test_exponential_delay_doubles_up_to_limit_until_reset() -> None:
    delay = ExponentialDelay(0.1, 0.5)
    assert [delay.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    delay.reset()
    assert delay.next() == 0.1


def test_exponential_delay_by_failures_doubles_up_to_limit() -> None:
    assert [exponential_delay(0.5, 6.0, failures) for failures in range(1, 7)] == [0.5, 1, 2, 4, 6, 6]
    assert exponential_delay(1.0, 10.0, 5000) == 10
    assert exponential_delay(20.0, 10.0, 1) == 10
