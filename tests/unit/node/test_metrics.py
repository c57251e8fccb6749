"""The node's beginning in numbers."""

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.node.registration import NodeStartup


class Clock:
    """A clock that is set by hand."""

    now = 130.0

    def __call__(self) -> float:
        return self.now


def times(registry: CollectorRegistry) -> list[float | None]:
    parts = ("pre_kubelet_", "pre_registration_", "registration_", "post_registration_", "")
    names = [f"kubelet_node_startup_{part}duration_seconds" for part in parts]
    return [registry.get_sample_value(name) for name in names]


def test_node_startup_new_node_sets_durations() -> None:
    registry, clock = CollectorRegistry(), Clock()
    startup = NodeStartup(registry, started=120, boot=lambda: 100.0, clock=clock)
    startup.attempted()
    clock.now = 132
    startup.attempted()
    clock.now = 135
    startup.registered()
    assert times(registry) == [20, 10, 5, 0, 0]
    clock.now = 142
    startup.ready()
    for later in (150, 160):
        clock.now = later
        startup.registered()
        startup.ready()
    assert times(registry) == [20, 10, 5, 7, 42]


@pytest.mark.parametrize("attempted", [True, False])
def test_node_startup_existing_node_durations_are_zero(attempted: bool) -> None:
    registry = CollectorRegistry()
    startup = NodeStartup(registry, started=120, boot=lambda: 100.0, clock=Clock())
    if attempted:
        startup.attempted()
    else:
        startup.registered()
    startup.ready()
    assert times(registry) == [0, 0, 0, 0, 0]
