"""Completion scripts for bash, zsh and fish, generated from the commands of `pykubelet`.

A script is static: commands, options and fixed values need no process. Names of pods, containers, objects of
manifests and images come from the hidden command `pykubelet __complete`, which ends after a second at the
latest and then prints nothing: a node or a runtime that hangs does not hang the shell. The flags of `kubelet`
are completed as well. `python -m pykubelet.cli.completion SHELL` prints a script.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pykubelet.cli.command_tree import Command, command_tree
from pykubelet.cli.options import NodeSelection

if TYPE_CHECKING:
    from pykubelet.cli.node_access import Node

SHELLS = ("bash", "zsh", "fish")
TIMEOUT_SECONDS = 1.0
"""Time of a completion from the start of its process on."""
_LEAST_SECONDS = 0.2
"""Time that the node has, however long the process took to start."""
_WITH_POD = frozenset(
    {"describe", "events", "exec", "logs", "attach", "port-forward", "restart", "top", "cp", "debug"}
)
"""Commands whose first argument is a pod."""
_WITH_OBJECTS = frozenset({"rm", "stop", "start"})
"""Commands whose arguments are objects of manifests; those of `get` are a kind and a name, or an object."""
_WITH_IMAGES = frozenset(f"images {name}" for name in ("ls", "pull", "save", "rm", "pin", "unpin"))
"""Commands whose arguments are images."""
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
"""What is offered: a shell would interpret other characters, and names of Kubernetes and images have none."""
_MAX_NAMES = 2000

_BASH = """\
# Completion of pykubelet and kubelet for bash.
_pykubelet_names() {
    local index option=()
    for ((index = 1; index < ${#COMP_WORDS[@]} - 1; index++)); do
        case ${COMP_WORDS[index]} in
            --data-dir|--root-dir) option=("${COMP_WORDS[index]}" "${COMP_WORDS[index + 1]}") ;;
        esac
    done
    command pykubelet __complete "${option[@]}" "$@" 2>/dev/null
}

_pykubelet() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
    local path="" word pod="" skip="" index count=0 commands options values
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if [[ $skip ]]; then skip=""; continue; fi
        case "$path $word" in
@VALUED@
        esac
        case "${path:+$path }$word" in
@PATHS@
            *) [[ $word == -* ]] || { count=$((count + 1)); [[ $pod ]] || pod=$word; } ;;
        esac
    done
    case $path in
@WORDS@
    esac
    case "$path $prev" in
@CHOICES@
        *" -c"|*" --container"|*" --target")
            mapfile -t COMPREPLY < <(compgen -W "$(_pykubelet_names containers "$pod")" -- "$cur"); return ;;
        *" --image")
            mapfile -t COMPREPLY < <(compgen -W "$(_pykubelet_names images)" -- "$cur"); return ;;
        *" --data-dir"|*" --root-dir") mapfile -t COMPREPLY < <(compgen -d -- "$cur"); return ;;
    esac
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
    elif [[ $commands ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$cur")
    else
        case $path in
            completion) values="bash zsh fish" ;;
            @PODS@) [[ $count == 0 ]] && values=$(_pykubelet_names pods) ;;
            get) [[ $count -lt 2 ]] && values=$(_pykubelet_names get $pod) ;;
            @OBJECTS@) values=$(_pykubelet_names objects) ;;
            @IMAGES@) _pykubelet_images; return ;;
        esac
        mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
        [[ ${COMPREPLY[0]} ]] || mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

# bash breaks words at colons: an image is matched as a whole, and what is before the last colon is left out.
_pykubelet_images() {
    local line=${COMP_LINE:0:COMP_POINT} word before
    word=${line##*[[:space:]]}
    [[ $line && $word == *"$cur" ]] || word=$cur
    before=${word%"$cur"}
    mapfile -t COMPREPLY < <(
        compgen -W "$(_pykubelet_names images)" -- "$word" | while IFS= read -r line; do
            printf '%s\\n' "${line#"$before"}"
        done
    )
}

_pykubelet_kubelet() {
    local cur=${COMP_WORDS[COMP_CWORD]}
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "@FLAGS@" -- "$cur")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
}

complete -o filenames -F _pykubelet pykubelet
complete -o filenames -F _pykubelet_kubelet kubelet
"""
_ZSH_HEAD = """\
#compdef pykubelet kubelet
# zsh runs the completion functions of bash.
autoload -U +X compinit && { (( $+functions[compdef] )) || compinit; }
autoload -U +X bashcompinit && bashcompinit
mapfile() { shift; local line; eval "$1=()"; while IFS= read -r line; do eval "$1+=(\\"\\$line\\")"; done; }
"""


def script(shell: str) -> str:
    """Return the completion script of a shell."""
    tree = command_tree()
    if shell == "fish":
        return _fish(tree)
    text = _bash(tree)
    return text if shell == "bash" else _ZSH_HEAD + text.partition("\n")[2]


def limit_time() -> None:
    """Arrange for this process to end without output when its time for a completion is over.

    Timeouts of single calls would not suffice: a node that responds slowly needs several.
    """
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, max(TIMEOUT_SECONDS - _process_age(), _LEAST_SECONDS))


def _process_age() -> float:
    """Return the seconds since the start of this process."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)


def names(selection: NodeSelection, kind: str, of: str | None) -> list[str]:
    """Return the names of a kind that a shell offers; none when the node does not respond.

    `containers` are those of the pod `of`; `get` are kinds and objects, or the names of the kind `of`.
    """
    from pykubelet.cli.client import NodeError, SelectionError
    from pykubelet.cli.node_access import select_node
    from pykubelet.config.errors import ConfigError
    from pykubelet.standalone.instance import EmbeddedError
    from pykubelet.transport.errors import ConnectError, CriError

    try:
        node = select_node(selection)
        match kind:
            case "pods" | "containers":
                found = _pod_names(node, of if kind == "containers" else None, kind)
            case "objects" | "get":
                found = _object_names(node, kind, of)
            case "images":
                found = asyncio.run(_image_names(node))
            case _:
                found = []
    except (NodeError, SelectionError, EmbeddedError, ConfigError, ConnectError, CriError, OSError):
        return []
    return [name for name in found if _SAFE.fullmatch(name)][:_MAX_NAMES]


def _pod_names(node: Node, of: str | None, kind: str) -> list[str]:
    from pykubelet.cli.client import NodeClient, all_containers, choose_pod, manifest_name

    listed = NodeClient(node, timeout=TIMEOUT_SECONDS).pods()
    if kind == "pods":
        return sorted(manifest_name(one) for one in listed.pods)
    return [one.name for one in all_containers(choose_pod(listed.pods, of, listed.states))] if of else []


def _object_names(node: Node, kind: str, of: str | None) -> list[str]:
    """Return the objects of the manifests; for `get` also kinds, or the names of one kind."""
    from pykubelet.cli.manifests.inventory import KINDS, parse_kind, read_directory

    directory = node.manifests
    files = read_directory(directory, node) if directory is not None and directory.is_dir() else []
    objects = [found for file in files for found in file.objects]
    if kind == "objects":
        return sorted({found.reference for found in objects})
    if of is None:
        return [*(each.lower() for each in KINDS), *sorted({found.reference for found in objects})]
    of = parse_kind(of)
    return sorted({found.name for found in objects if found.kind == of})


async def _image_names(node: Node) -> list[str]:
    from pykubelet.cli.images.access import image_names, node_images

    async with node_images(node) as images:
        listed = await images.cri.images.list_images()
    return sorted({name for image in listed for name in image.repo_tags or image_names(image)[:1]})


def _flags() -> Iterable[str]:
    from pykubelet.config.flags.flag_table import FLAGS

    return (f"--{flag.name}" for flag in FLAGS)


def _bash(tree: Command) -> str:
    paths, words, valued, choices = [], [], [], []
    for command in tree.walk():
        path = " ".join(command.path)
        if path:
            paths.append(f"            {shlex.quote(path)}) path={shlex.quote(path)} ;;")
        options = " ".join(["--help", *(text for one in command.options for text in one.options)])
        inner = " ".join(one.path[-1] for one in command.commands)
        words.append(f'        {shlex.quote(path)}) commands="{inner}" options="{options}" ;;')
        for option in command.options:
            patterns = "|".join(shlex.quote(f"{path} {text}") for text in option.options)
            if option.takes_value:
                valued.append(f"            {patterns}) skip=1; continue ;;")
            if option.choices:
                reply = f'mapfile -t COMPREPLY < <(compgen -W "{" ".join(option.choices)}" -- "$cur")'
                choices.append(f"        {patterns}) {reply}; return ;;")
    return (
        _BASH.replace("@VALUED@", "\n".join(valued))
        .replace("@PATHS@", "\n".join(paths))
        .replace("@WORDS@", "\n".join(words))
        .replace("@CHOICES@", "\n".join(choices))
        .replace("@PODS@", "|".join(sorted(_WITH_POD)))
        .replace("@OBJECTS@", "|".join(sorted(_WITH_OBJECTS)))
        .replace("@IMAGES@", "|".join(shlex.quote(path) for path in sorted(_WITH_IMAGES)))
        .replace("@FLAGS@", " ".join(_flags()))
    )


def _fish(tree: Command) -> str:
    lines = [
        "# Completion of pykubelet and kubelet for fish.",
        "function __pykubelet_at",
        "    set -l words",
        "    for word in (commandline -opc)[2..-1]",
        "        string match -q -- '-*' $word; or set -a words $word",
        "    end",
        '    test "$words[1..(count $argv)]" = "$argv"',
        "end",
        "complete -c pykubelet -f",
    ]
    for command in tree.walk():
        at = " ".join(command.path)
        condition = f"-n '__pykubelet_at {at}'" if at else "-n __fish_use_subcommand"
        lines += [
            f"complete -c pykubelet {condition} -a {one.path[-1]} -d {_quoted(_summary(one.help))}"
            for one in command.commands
        ]
        for option in command.options:
            texts = [
                f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" for text in option.options
            ]
            value = " -r" if option.takes_value else ""
            value += f" -a '{' '.join(option.choices)}'" if option.choices else ""
            if not {"--container", "--target"}.isdisjoint(option.options):
                value += " -a '(pykubelet __complete containers (commandline -opc)[3] 2>/dev/null)'"
            if "--image" in option.options:
                value += " -a '(pykubelet __complete images 2>/dev/null)'"
            shown = " ".join(texts)
            lines.append(
                f"complete -c pykubelet {condition} {shown}{value} -d {_quoted(_summary(option.help))}"
            )
        if arguments := _fish_arguments(at):
            lines.append(
                f"complete -c pykubelet {condition} -a '(pykubelet __complete {arguments} 2>/dev/null)'"
            )
    lines.append("complete -c pykubelet -n '__pykubelet_at completion' -a 'bash zsh fish'")
    lines.append("complete -c pykubelet -n '__pykubelet_at run' -F")
    lines.append("complete -c pykubelet -n '__pykubelet_at cp' -F")
    lines += [f"complete -c kubelet -l {flag[2:]}" for flag in _flags()]
    return "\n".join(lines) + "\n"


def _fish_arguments(at: str) -> str:
    """Return the arguments of `__complete` for the arguments of a command; empty without names."""
    if at in _WITH_POD:
        return "pods"
    if at in _WITH_OBJECTS:
        return "objects"
    if at in _WITH_IMAGES:
        return "images"
    return "get (commandline -opc)[3]" if at == "get" else ""


def _summary(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SHELLS:
        sys.exit(f"usage: python -m pykubelet.cli.completion {'|'.join(SHELLS)}")
    print(script(sys.argv[1]), end="")
