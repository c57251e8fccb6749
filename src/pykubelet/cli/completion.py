"""Completion scripts for bash, zsh and fish, generated from the commands of `pykubelet`.

A script is static: commands, options and fixed values need no process. Names of pods and containers come from
the hidden command `pykubelet __complete`, which prints nothing when the node cannot be reached in time. The
flags of `kubelet` are completed as well. `python -m pykubelet.cli.completion SHELL` prints a script.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable

from pykubelet.cli.command_tree import Command, command_tree
from pykubelet.cli.options import NodeSelection

SHELLS = ("bash", "zsh", "fish")
TIMEOUT_SECONDS = 1.0
"""Time in which the node has to respond to a completion."""
_WITH_POD = frozenset(
    {"describe", "events", "exec", "logs", "attach", "port-forward", "restart", "top", "cp", "debug"}
)
"""Commands whose first argument is a pod."""
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
        esac
        mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
        [[ ${COMPREPLY[0]} ]] || mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
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


def names(selection: NodeSelection, kind: str, pod: str | None) -> list[str]:
    """Return the names of pods, or of the containers of a pod; none when the node does not respond."""
    from pykubelet.cli.client import (
        NodeClient,
        NodeError,
        SelectionError,
        all_containers,
        choose_pod,
        manifest_name,
    )
    from pykubelet.cli.node_access import select_node
    from pykubelet.standalone.instance import EmbeddedError

    try:
        node = NodeClient(select_node(selection), timeout=TIMEOUT_SECONDS).pods()
        if kind == "pods":
            found = sorted(manifest_name(one) for one in node.pods)
        elif kind == "containers" and pod:
            found = [one.name for one in all_containers(choose_pod(node.pods, pod, node.states))]
        else:
            found = []
    except (NodeError, SelectionError, EmbeddedError):
        return []
    # A shell would interpret other characters; names of Kubernetes have none.
    return [name for name in found if name.replace("-", "").replace(".", "").isalnum()][:_MAX_NAMES]


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
            shown = " ".join(texts)
            lines.append(
                f"complete -c pykubelet {condition} {shown}{value} -d {_quoted(_summary(option.help))}"
            )
        if at in _WITH_POD:
            lines.append(f"complete -c pykubelet {condition} -a '(pykubelet __complete pods 2>/dev/null)'")
    lines.append("complete -c pykubelet -n '__pykubelet_at completion' -a 'bash zsh fish'")
    lines.append("complete -c pykubelet -n '__pykubelet_at run' -F")
    lines.append("complete -c pykubelet -n '__pykubelet_at cp' -F")
    lines += [f"complete -c kubelet -l {flag[2:]}" for flag in _flags()]
    return "\n".join(lines) + "\n"


def _summary(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SHELLS:
        sys.exit(f"usage: python -m pykubelet.cli.completion {'|'.join(SHELLS)}")
    print(script(sys.argv[1]), end="")
