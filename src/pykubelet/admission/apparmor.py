"""AppArmor: a pod that asks to be confined does not run unconfined.

Profiles of the machine are looked up by the runtime, when the container starts; whether the kernel
enforces any is known here, and so is a profile without a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pykubelet.admission.link import Attempt, Refusal, Surroundings
from pykubelet.api.pod import Pod, Profile

REASON = "AppArmor"
ANNOTATION_PREFIX = "container.apparmor.security.beta.kubernetes.io/"


class AppArmor:
    """Refuses profiles where there is no AppArmor, and profiles of the machine without a name."""

    for_running = False

    def __init__(self, given: Surroundings) -> None:
        self._enabled = given.apparmor

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Look at the profiles of a pod that has not begun."""
        pod = attempt.pod
        if pod.status.phase != "Pending" or not _wants_confinement(pod):
            return None
        if not self._enabled:
            return _refusal("AppArmor is not enabled on the host")
        for profile in _profiles(pod):
            if profile.type == "Localhost" and not (profile.localhost_profile or "").strip():
                # Written as the reference prints the object.
                name = "nil" if profile.localhost_profile is None else f"*{profile.localhost_profile}"
                written = f"&AppArmorProfile{{Type:Localhost,LocalhostProfile:{name},}}"
                return _refusal(f'invalid empty AppArmor profile name: "{written}"')
        return None


def apparmor_is_enabled(sys: Path = Path("/sys")) -> bool:
    """Whether the running kernel enforces AppArmor profiles."""
    try:
        return (sys / "kernel/security/apparmor").exists() and (
            sys / "module/apparmor/parameters/enabled"
        ).read_text().startswith("Y")
    except OSError:
        return False


def _refusal(problem: str) -> Refusal:
    return Refusal(REASON, f"Cannot enforce AppArmor: {problem}")


def _wants_confinement(pod: Pod) -> bool:
    return any(profile.type != "Unconfined" for profile in _written(pod)) or any(
        value != "unconfined"
        for key, value in pod.metadata.annotations.items()
        if key.startswith(ANNOTATION_PREFIX)
    )


def _written(pod: Pod) -> Iterator[Profile]:
    """All profiles of the spec, in force or not."""
    spec = pod.spec
    if spec.security_context.app_armor_profile is not None:
        yield spec.security_context.app_armor_profile
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        if (
            container.security_context is not None
            and container.security_context.app_armor_profile is not None
        ):
            yield container.security_context.app_armor_profile


def _profiles(pod: Pod) -> Iterator[Profile]:
    """The profile in force for each container that has one: its own, the annotated, or the pod's."""
    spec = pod.spec
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        own = container.security_context.app_armor_profile if container.security_context is not None else None
        text = pod.metadata.annotations.get(ANNOTATION_PREFIX + container.name)
        profile = own or _annotated(text) or spec.security_context.app_armor_profile
        if profile is not None:
            yield profile


def _annotated(text: str | None) -> Profile | None:
    """Read the old way to name a profile; static pods may still use it."""
    if text == "runtime/default":
        return Profile(type="RuntimeDefault")
    if text == "unconfined":
        return Profile(type="Unconfined")
    if text is not None and text.startswith("localhost/"):
        return Profile(type="Localhost", localhost_profile=text.removeprefix("localhost/"))
    return None
