"""Why a pod's volumes cannot be had, and how its author is told: in words that people search for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pykubelet.volumes.errors import KindError, VolumeError, set_up_failed, told

NO_ROOM = "VolumeAttachmentLimitExceeded"
"""Why a pod is refused whose volume does not fit on the node."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a volume cannot be had: `text` for the pod's author."""

    text: str
    retry_after: float | None = None
    stage: Literal["claim", "slow", "mount", "full"] = "mount"
    """Whether the claim is the problem, the volume takes long, or it cannot be mounted, or never will be."""


def failed(name: str, err: Exception, retry_after: float | None, *, block: bool) -> Problem:
    """Tell of what a kind has raised; `block`: the volume was wanted as a device."""
    action = err.action if isinstance(err, KindError) else KindError.action
    reason = told(err) if isinstance(err, OSError) else err
    return Problem(set_up_failed(name, reason, action, block=block), retry_after)


def told_together(problems: Mapping[str, Problem]) -> VolumeError:
    """Make one error of all volumes' problems: one text for each, and one for all that never came so far."""
    texts = [problem.text for problem in problems.values() if problem.stage == "mount"]
    claims = sorted(name for name, problem in problems.items() if problem.stage == "claim")
    full = sorted(name for name, problem in problems.items() if problem.stage == "full")
    if waiting := {name: problem for name, problem in problems.items() if problem.stage != "mount"}:
        reasons = "; ".join(dict.fromkeys(problem.text for problem in waiting.values()))
        text = (
            f"unmounted volumes=[{' '.join(sorted(problems))}], unattached volumes=[{' '.join(full)}], "
            f"failed to process volumes=[{' '.join(claims)}]: {reasons}"
        )
        if full:
            return VolumeError(
                f"Node has reached its volume attachment limit, rejecting pod. {text}", refusal=NO_ROOM
            )
        texts.append(f"Unable to attach or mount volumes: {text}")
    pauses = [problem.retry_after for problem in problems.values()]
    known = [pause for pause in pauses if pause is not None]
    return VolumeError(*texts, retry_after=min(known) if len(known) == len(pauses) else None)
