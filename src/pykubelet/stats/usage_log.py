"""Log of the usage of cAdvisor's own cgroup with `--log-cadvisor-usage`.

`UsageLog` listens to the samples of the collector. As upstream, it needs 60 samples within the two minutes
for which cAdvisor keeps them, so a line is logged only with a housekeeping interval of at most two seconds,
and on cgroup v2 the cgroup is the root. Nothing outlives the process.
"""

from __future__ import annotations

from collections import deque

from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.logs import get_logger
from pykubelet.stats.samples import Record, Usage

log = get_logger(__name__)
SAMPLES = 60
"""Samples that an average covers."""
_KEPT_SECONDS = 120.0


class UsageLog:
    """Listener of samples that logs the usage of one cgroup."""

    def __init__(self, path: str) -> None:
        """Initialize with the path of the cgroup."""
        self._path = path
        self._samples: deque[Usage] = deque(maxlen=SAMPLES)

    def on_sample(self, record: Record) -> None:
        """Log the usage if the sample is of the cgroup and there are enough of them."""
        usage = record.usage
        if record.target.path != self._path or usage is None:
            return
        samples = self._samples
        if samples and (usage.time <= samples[-1].time or usage.cpu < samples[-1].cpu):
            if usage.time == samples[-1].time:
                return  # reported again with details
            samples.clear()  # the clock was set back, or the cgroup was replaced
        samples.append(usage)
        if len(samples) < SAMPLES or usage.time - samples[0].time > _KEPT_SECONDS:
            return
        log.info(
            "Usage of own cgroup",
            cgroup=self._path,
            cores=f"{_cores(samples[-2], usage):.3f}",
            averageCores=f"{_cores(samples[0], usage):.3f}",
            memoryBytes=usage.memory,
        )


def _cores(first: Usage, last: Usage) -> float:
    return (last.cpu - first.cpu) / 1e9 / (last.time - first.time)


def own_cadvisor_cgroup(cgroups: Cgroups) -> str:
    """Return the cgroup that cAdvisor takes for its own: that of processor time, the root on cgroup v2."""
    return "/" if cgroups.unified else cgroups.own.get("cpu", "/")
