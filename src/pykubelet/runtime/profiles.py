"""Which seccomp and AppArmor profiles confine a container."""

from __future__ import annotations

from posixpath import join, normpath

from pykubelet.api.pod import Container, Pod, Profile
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.runtime.problems import ConfigProblem

APPARMOR_ANNOTATION_PREFIX = "container.apparmor.security.beta.kubernetes.io/"
"""The old way to name a profile; static pods may still do it."""

_RUNTIME_DEFAULT = cri.SecurityProfile.RuntimeDefault
_UNCONFINED = cri.SecurityProfile.Unconfined
_LOCALHOST = cri.SecurityProfile.Localhost


def seccomp_profile(pod: Pod, container: Container, root: str, default: bool) -> cri.SecurityProfile:
    """Give the container's profile, or else the pod's, or else the runtime's if that is the `default`.

    Profiles of the host are files below `root`. Raises ConfigProblem for one without a name.
    """
    own = container.security_context.seccomp_profile if container.security_context else None
    profile = own or pod.spec.security_context.seccomp_profile
    if profile is None:
        return cri.SecurityProfile(profile_type=_RUNTIME_DEFAULT if default else _UNCONFINED)
    match profile.type:
        case "RuntimeDefault":
            return cri.SecurityProfile(profile_type=_RUNTIME_DEFAULT)
        case "Localhost":
            if not profile.localhost_profile:
                raise ConfigProblem("localhostProfile must be set if seccompProfile type is Localhost.")
            return cri.SecurityProfile(
                profile_type=_LOCALHOST, localhost_ref=_below(root, profile.localhost_profile)
            )
    return cri.SecurityProfile(profile_type=_UNCONFINED)


def apparmor_profile(pod: Pod, container: Container) -> tuple[cri.SecurityProfile | None, str]:
    """Give the profile as a message and in the words of older runtimes; (None, "") for the runtime's choice.

    Raises ConfigProblem for a profile of the host without a name, or of an unknown type.
    """
    own = container.security_context.app_armor_profile if container.security_context else None
    profile = own or _annotated(pod, container) or pod.spec.security_context.app_armor_profile
    if profile is None:
        return None, ""
    match profile.type:
        case "RuntimeDefault":
            return cri.SecurityProfile(profile_type=_RUNTIME_DEFAULT), "runtime/default"
        case "Unconfined":
            return cri.SecurityProfile(profile_type=_UNCONFINED), "unconfined"
        case "Localhost":
            if profile.localhost_profile is None:
                raise ConfigProblem("missing localhost apparmor profile name")
            name = profile.localhost_profile
            return cri.SecurityProfile(profile_type=_LOCALHOST, localhost_ref=name), f"localhost/{name}"
    raise ConfigProblem(f'unknown apparmor profile type: "{profile.type}"')


def _below(root: str, name: str) -> str:
    path = normpath(join(root, name.lstrip("/")))
    if not path.startswith(f"{normpath(root).rstrip('/')}/"):
        raise ConfigProblem(f'the seccomp profile "{name}" is not below {root}: name a file that is')
    return path


def _annotated(pod: Pod, container: Container) -> Profile | None:
    text = pod.metadata.annotations.get(APPARMOR_ANNOTATION_PREFIX + container.name)
    match text:
        case "runtime/default":
            return Profile(type="RuntimeDefault")
        case "unconfined":
            return Profile(type="Unconfined")
    if text is not None and text.startswith("localhost/"):
        return Profile(type="Localhost", localhost_profile=text.removeprefix("localhost/"))
    return None
