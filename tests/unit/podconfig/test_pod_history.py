"""Timeline of a pod: its order and its bound."""

from pykubelet.podconfig.pod_history import NOTES_PER_POD, PodHistory


def test_note_of_an_earlier_time_is_inserted_in_order_and_bounded() -> None:
    times = iter(range(10, 1000, 10))
    history = PodHistory(clock=lambda: float(next(times)))
    for text in ("a", "b", "c"):
        history.note("u", "start", text)
    history.note("u", "exit", "ended", at=15.0)
    history.note("u", "exit", "first", at=1.0)
    assert [entry.text for entry in history.timeline("u")] == ["first", "a", "ended", "b", "c"]
    for number in range(NOTES_PER_POD):
        history.note("u", "exit", str(number), at=100.0 + number)
    timeline = history.timeline("u")
    assert len(timeline) == NOTES_PER_POD
    assert [entry.time for entry in timeline] == sorted(entry.time for entry in timeline)
    assert timeline[-1].text == str(NOTES_PER_POD - 1)
