"""`--runonce`: start the pods that the sources have now, and say how that went.

For images and boot scripts: the agent reads its folder and URL once, brings every pod to Running (or
to its end), and exits; the containers stay.
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
"""Reasons to wait that trying again does not change soon; a slow registry is worth the wait."""


def unfinished(pods: Sequence[Pod]) -> list[str]:
    """Names of the pods of which some container has yet to run, and may do so soon."""
    return [
        pod.full_name
        for pod in pods
        if pod.status.phase not in ("Running", "Succeeded", "Failed") and not _is_hopeless(pod)
    ]


def _is_hopeless(pod: Pod) -> bool:
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    return any(s.state.waiting is not None and s.state.waiting.reason in HOPELESS for s in statuses)


def failed(pods: Sequence[Pod]) -> list[str]:
    """What is wrong with the pods that did not get anywhere, one line each."""
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
    """Wait until every pod runs or has ended, at most ten minutes; gives the problems."""
    deadline = asyncio.get_running_loop().time() + LONGEST_SECONDS
    while not all_reported() or unfinished(pods()):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(POLL_SECONDS)
    found = pods()
    log.info("Processed the pods once", pods=len(found), failed=len(failed(found)))
    return failed(found)
