"""Remedies: what an operator does about a reason of the kubelet, as one instruction.

The reasons are those of waiting and terminated containers, of rejected pods and of events. The message
narrows some of them down: a pull fails differently when the registry denies access and when the tag does not
exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
VOLUME_REASONS = frozenset(
    {
        "FailedMount",
        "FailedAttachVolume",
        "FailedMapVolume",
        "FailedMountOnFilesystemMismatch",
        "FailedPrepareDynamicResources",
    }
)
SANDBOX_REASONS = frozenset({"FailedCreatePodSandBox", "FailedPodSandBoxStatus", "NetworkNotReady"})

_BY_REASON: Mapping[str, str] = {
    "ErrImagePull": "Check the image's name and tag, and that the node reaches the registry.",
    "ErrImageNeverPull": (
        "The pull policy is Never and the image is not on the node: load it, or set imagePullPolicy to "
        "IfNotPresent."
    ),
    "InvalidImageName": "Correct the image's name, which must be lower case: registry/name:tag.",
    "ImageInspectError": "The runtime cannot read the image: see its log, then pull the image again.",
    "RegistryUnavailable": "The registry does not respond: check it and the network; the pull is retried.",
    "SignatureValidationFailed": "Sign the image, or change the signature policy of the container runtime.",
    "CrashLoopBackOff": "Read the log of the previous run; the container exits soon after each start.",
    "CreateContainerConfigError": (
        "Create the configMap, secret or key that the message names; the container then starts by itself."
    ),
    "CreateContainerError": "The runtime cannot create the container: correct what the message names.",
    "RunContainerError": "The command cannot be started: check that it exists in the image.",
    "PostStartHookError": "Correct the postStart hook, or what it connects to.",
    "OOMKilled": "Raise limits.memory, or reduce the memory that the container uses.",
    "DeadlineExceeded": "The pod ran longer than activeDeadlineSeconds: raise it, or make the work shorter.",
    "Evicted": "Free the resource that the message names, then create the pod again; set requests for it.",
    "Preempting": "A pod of higher priority took the resources: create the pod again when there are enough.",
    "NodeShutdown": "The node was shut down: create the pod again.",
    "Terminated": "The node was shut down: create the pod again.",
    "FailedMount": "Create or correct the volume's source that the message names; the mount is retried.",
    "FailedAttachVolume": "Check the volume and the CSI driver of its storage class; the attach is retried.",
    "FailedMapVolume": "Check the block device and its CSI driver; it is retried.",
    "FailedPrepareDynamicResources": "Check the driver of the resource claim; it is retried.",
    "FailedCreatePodSandBox": "Check the pod network (CNI) and the container runtime's log; it is retried.",
    "NetworkNotReady": "Install or start the network plugin (CNI) of this node.",
    "Unhealthy": "See why the probe fails: the log of the container at that time, the probe's port and path.",
    "AdmissionWaiting": "The pod is admitted when what the message names is available.",
    "SysctlForbidden": "Allow the sysctl with allowedUnsafeSysctls, or remove it from the pod.",
    "AppArmor": "Load the AppArmor profile on the node, or change it in the pod.",
    "NodeAffinity": "Change nodeSelector or affinity of the pod, or the labels of the node.",
    "NodePorts": "Another pod uses the host port: choose another one, or stop that pod.",
    "UnexpectedAdmissionError": "See the kubelet's log: an admission handler failed.",
}
_BY_EXIT_CODE: Mapping[int, str] = {
    126: "The command is not executable: check its permissions and its interpreter.",
    127: "The command does not exist in the image: check command, args and PATH.",
    137: "It was killed (SIGKILL): by the kernel for memory, or because it did not stop in its grace period.",
    139: "It crashed (SIGSEGV): read the log, and check that the image is for this processor.",
}

_STATUS_CODE = re.compile(r"(?<![\w.:@-])(40[134])(?![\w-]|\.\w)", re.ASCII)
"""An HTTP status in a message, not a part of a digest, an address or a tag."""


def remedy(reason: str, message: str = "", exit_code: int | None = None) -> str:
    """Return what to do about a reason; empty if nothing in particular helps."""
    text = message.lower()
    if reason in ("ErrImagePull", "ImagePullBackOff"):
        return _pull_remedy(text)
    if reason in ("FailedMount", "CreateContainerConfigError") and "not found" in text:
        for kind in ("configmap", "secret", "persistentvolumeclaim"):
            if kind in text:
                return f"Create the {kind} that the message names; the kubelet tries again by itself."
    if reason.startswith("OutOf"):
        resource = reason.removeprefix("OutOf")
        return f"The node has too little {resource}: reduce the requests, or stop another pod."
    if reason in ("ContainerCannotRun", "StartError"):
        return _BY_REASON["RunContainerError"]
    if reason in ("Error", "CrashLoopBackOff") and exit_code is not None:
        return _BY_EXIT_CODE.get(exit_code, _BY_REASON["CrashLoopBackOff"])
    return _BY_REASON.get(reason, "")


def _pull_remedy(text: str) -> str:
    codes = set(_STATUS_CODE.findall(text))
    if codes & {"401", "403"} or any(
        word in text for word in ("unauthorized", "authentication required", "denied")
    ):
        return "The registry denies access: check the pull secret, and the image's name."
    if "404" in codes or any(word in text for word in ("not found", "manifest unknown")):
        return "The registry does not have this image: check its name and tag."
    if any(
        word in text for word in ("no such host", "server misbehaving", "i/o timeout", "connection refused")
    ):
        return (
            "The node does not reach the registry: check its name, DNS and the network; the pull is retried."
        )
    if any(word in text for word in ("x509", "certificate", "tls:")):
        return "The registry's certificate is not trusted: install its CA on the node."
    if "no space left" in text:
        return "The disk of the images is full: remove images or enlarge it."
    return _BY_REASON["ErrImagePull"]
