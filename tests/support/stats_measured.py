"""Statistics of the upstream kubelet, of ours and of the upstream kubelet again, and how they are compared.

The node is the tests' own: one of a cluster, or the guest of a virtual machine. Shared are the rules that
depend on neither, what of the host existed all the time, and the checks.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.stats_comparison import Difference, Rule, compare, compare_expositions
from tests.support.stats_pages import StatsPages

UPSTREAM_AGE_SECONDS = 15.0
"""The longest interval at which the upstream kubelet measures a container."""
SINCE_START = "counted since the start of the kubelet"
FLUCTUATES = "changes from sample to sample"
HOST = "other processes of the host change it"
BATCHES = "the kernel charges memory in batches per CPU"
PROCESSES = "container_(processes|threads|file_descriptors|sockets)"
SUMMARY_MEMORY = r".*\.memory\.(usageBytes|workingSetBytes|rssBytes|availableBytes)"
SLIS_RULES = [Rule("process_start_time_seconds|kubernetes_healthchecks_total", SINCE_START, any_value=True)]
PROBES_RULES = [Rule("prober_probe_.*", SINCE_START, any_value=True)]
OOM_RULE = Rule("container_oom_events_total", SINCE_START, any_value=True)


class HostParts(NamedTuple):
    """Names of the host's file systems and network interfaces at one time."""

    devices: frozenset[str]
    links: frozenset[str]

    def common(self, other: "HostParts") -> "HostParts":
        """Return what exists in both."""
        return HostParts(self.devices & other.devices, self.links & other.links)


def host_parts(*, containers: bool) -> HostParts:
    """Return the names by which cAdvisor may call the mounted file systems, and the interfaces.

    Without `containers`, mounts of containers are not among them: the upstream kubelet reports those that
    exist when it starts, ours none.
    """
    found: set[str] = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, second = line.partition(" - ")
        number, point, source = first.split()[2], first.split()[4], second.split()[1]
        if containers or not re.search("/[0-9a-f]{64}/", point):
            found |= {source, point, f"{source}_{number.replace(':', '-')}"}
    return HostParts(frozenset(found), frozenset(path.name for path in Path("/sys/class/net").iterdir()))


def host_rules(parts: HostParts, host_network: str) -> list[Rule]:
    """Ignore other file systems and interfaces of the host; `host_network` is the name of a pod with them."""
    other_link = {"interface": _none_of(parts.links)}
    return [
        Rule(".*", HOST, labels={"id": "/", "device": _none_of(parts.devices)}, ignored=True),
        Rule(".*", HOST, labels={"id": "/", **other_link}, ignored=True),
        Rule(".*", HOST, labels={"pod": f"(.*/)?{host_network}", **other_link}, ignored=True),
        Rule("node.network.interfaces.*", HOST, labels=other_link, ignored=True),
    ]


def _none_of(names: Iterable[str]) -> str:
    return rf"(?!(?:{'|'.join(map(re.escape, sorted(names)))})$).+"


class Measured(NamedTuple):
    """The answers, and rules for what did not exist all the time."""

    before: StatsPages
    ours: StatsPages
    after: StatsPages
    host_rules: list[Rule]

    def check_exposition(self, endpoint: str, rules: Mapping[str, Sequence[Rule]]) -> None:
        """Fail unless the page is that of the upstream kubelet."""
        before, ours, after = (pages.expositions[endpoint] for pages in self[:3])
        _check(compare_expositions(before, ours, after, [*self.host_rules, *rules[endpoint]]))

    def check_summary(self, endpoint: str, rules: Mapping[str, Sequence[Rule]]) -> None:
        """Fail unless the response of the Summary API is that of the upstream kubelet."""
        before, ours, after = (pages.summaries[endpoint] for pages in self[:3])
        _check(compare(before, ours, after, [*self.host_rules, *rules[endpoint]]))

    def check_age(self, endpoint: str, tolerated_seconds: float) -> None:
        """Fail if the oldest sample is older than the upstream kubelet's may be."""
        allowed = max(self.before.age(endpoint), self.after.age(endpoint), UPSTREAM_AGE_SECONDS)
        assert self.ours.age(endpoint) <= allowed + tolerated_seconds


def _check(differences: list[Difference]) -> None:
    """Fail with all differences, first those of most consequence."""
    assert not differences, "\n".join([f"{len(differences)} differences", *map(str, differences)])
