"""`--runonce`: start the pods of the static sources once, and return the failures.

For image builds and boot scripts: the kubelet reads its manifest directory and URL once, waits until every
pod runs or has terminated, and exits; the containers stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger

log = get_logger(__name__)
POLL_SECONDS = 0.1
LONGEST_SECONDS = 600.0
HOPELESS = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CrashLoopBackOff")
"""Waiting reasons that a retry does not change soon; a slow registry is not among them."""


def unfinished(pods: Sequence[Pod]) -> list[str]:
    """Return the names of pods with a container that has not run yet and may run soon."""
    return [
        pod.full_name
        for pod in pods
        if pod.status.phase not in ("Running", "Succeeded", "Failed") and not _is_hopeless(pod)
    ]


def _is_hopeless(pod: Pod) -> bool:
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    return any(s.state.waiting is not None and s.state.waiting.reason in HOPELESS for s in statuses)


def failed(pods: Sequence[Pod]) -> list[str]:
    """Return one line per pod that failed to start."""
    problems = []
    for pod in pods:
        if pod.status.phase in ("Running", "Succeeded"):
            continue
        reasons = [
            f"{status.name}: {status.state.waiting.reason} {status.state.waiting.message}".strip()
            for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
            if status.state.waiting is not None
        ]
        details = "; ".join(reasons) or pod.status.message or "no details"
        problems.append(f"{pod.full_name} is {pod.status.phase or 'unknown'} ({details})")
    return problems


async def run_once(pods: Callable[[], list[Pod]], all_reported: Callable[[], bool]) -> list[str]:
    """Wait until every pod runs or has terminated, at most ten minutes; return the failures."""
    deadline = asyncio.get_running_loop().time() + LONGEST_SECONDS
    while not all_reported() or unfinished(pods()):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(POLL_SECONDS)
    found = pods()
    log.info("Processed the pods once", pods=len(found), failed=len(failed(found)))
    return failed(found)
