"""Output of `--help` and `--version`.

The help is generated from the flag table alone. Next to type and default it shows the field of the
configuration file that a flag sets, which helps to replace flags by a file.
"""

import json
import platform
import sys
import textwrap
from itertools import groupby

import pykubelet
from pykubelet.config.feature_gates import known_features
from pykubelet.config.flags.flag import Flag
from pykubelet.config.flags.flag_table import FLAGS, default_text, field_path
from pykubelet.config.load import baseline
from pykubelet.config.types import KubeletConfiguration

_INDENT = 34
_NARROWEST = 60
_INTRODUCTION = """\
The Kubernetes node agent. It runs the pods that the API server assigns to this machine \
(--kubeconfig), and the static pods of a directory (--pod-manifest-path) or URL (--manifest-url), \
and keeps them healthy."""


def help_text(width: int = 100) -> str:
    """Return the complete help, wrapped to `width` columns."""
    width = max(width, _NARROWEST)
    defaults = baseline()
    lines = [
        f"kubelet {reported_version()}",
        "",
        *textwrap.wrap(_INTRODUCTION, width),
        "",
        "Usage: kubelet [flags]",
        "",
        *textwrap.wrap(
            "[field] names the field of the configuration file that a flag sets; set it there where you "
            "can. Underscores in flags are taken as dashes.",
            width,
        ),
    ]
    for title, rows in groupby(FLAGS, lambda flag: flag.group):
        lines += ["", f"{title}:"]
        for flag in rows:
            lines += _flag_lines(flag, defaults, width)
    lines += ["", "Feature gates:"]
    lines += [f"  {feature}" for feature in known_features()]
    return "\n".join(lines) + "\n"


def version_line(form: str = "true") -> str:
    """Return the output of `--version`; `form` is `raw` for `--version=raw`."""
    if form != "raw":
        return f"Kubernetes {reported_version()}"
    major, minor, _ = pykubelet.KUBERNETES_VERSION.removeprefix("v").split(".")
    return json.dumps(
        {
            "major": major,
            "minor": minor,
            "gitVersion": reported_version(),
            "pykubeletVersion": pykubelet.__version__,
            "pythonVersion": platform.python_version(),
            "platform": f"{sys.platform}/{platform.machine()}",
        }
    )


def reported_version(form: str = "true") -> str:
    """Return the version that the node reports: pykubelet's, or that of `--version=v…`."""
    if form.startswith("v"):
        return form
    return f"{pykubelet.KUBERNETES_VERSION}+pykubelet{pykubelet.__version__}"


def _flag_lines(flag: Flag, defaults: KubeletConfiguration, width: int) -> list[str]:
    short = f"-{flag.short}, " if flag.short else "    "
    kind = "" if flag.kind.bare else f" {flag.kind.name}"
    head = f"  {short}--{flag.name}{kind}"
    body = textwrap.wrap(
        " ".join(_sentences(flag, defaults)), width - _INDENT, break_long_words=False, break_on_hyphens=False
    )
    lines = [] if len(head) < _INDENT - 1 else [head]
    for number, text in enumerate(body):
        start = head if number == 0 and not lines else ""
        lines.append(f"{start:<{_INDENT}}{text}")
    return lines


def _sentences(flag: Flag, defaults: KubeletConfiguration) -> list[str]:
    sentences = []
    if flag.status == "deprecated":
        sentences.append(f"DEPRECATED ({flag.note}).")
    sentences.append(flag.help if flag.status != "ignored" else f"{flag.note[0].upper()}{flag.note[1:]}.")
    default = default_text(flag, defaults)
    if default and flag.status != "ignored":
        # textwrap breaks a long list only at spaces.
        sentences.append(f"Default {default.replace(',', ', ') if len(default) > _INDENT else default}.")
    if flag.field:
        sentences.append(f"[{field_path(flag.field)}]")
    return sentences
