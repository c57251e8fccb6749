"""`make bench`: every number that the project claims, measured in one run on this machine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from bench.node import running_node
from bench.processes import cost_over


@dataclass(frozen=True, slots=True)
class Result:
    """One measured number and the bound that it must keep."""

    what: str
    value: float
    unit: str
    bound: float

    @property
    def kept(self) -> bool:
        """Whether the number is within its bound."""
        return self.value <= self.bound

    def __str__(self) -> str:
        mark = "ok  " if self.kept else "OVER"
        return f"{mark} {self.what:<52} {self.value:8.2f} {self.unit:<10} (bound {self.bound:g})"


def idle(seconds: float) -> list[Result]:
    """The agent without pods: what it costs to have it."""
    with running_node() as node:
        print(f"     start to healthy, private runtime and seed images included: {node.start_seconds:.2f} s")
        cost_over(node.pid, 5)  # start-up's last work is not idling
        cost = cost_over(node.pid, seconds)
    return [
        Result(f"idle agent over {cost.seconds:.0f} s: processor", cost.cpu_percent, "% of core", 0.5),
        Result("idle agent: memory (PSS)", cost.pss_mb, "MB", 70),
    ]


def main() -> int:
    """Run the measurements and print them; non-zero when a bound is broken."""
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("--seconds", type=float, default=60, help="how long to watch the idle agent")
    options = parser.parse_args()
    results = idle(options.seconds)
    for result in results:
        print(result)
    return 0 if all(result.kept for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
