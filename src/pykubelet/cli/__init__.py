"""Command line interfaces: `kubelet`, the drop-in replacement, and `pykubelet`, the node for interactive use.

- `kubelet`: entry point with upstream's flags, configuration file and exit codes.
- `pykubelet`: Typer application, assembled from the `commands` modules of the sub-packages `node`, `pods` and
  `manifests`; each command is a module there.
- `options`: options and arguments that several commands have.
- `process`: logging, signals, event loop and exit code of a kubelet process.
- `node_access`: selection of the node by data directory, root directory or running process.
- `client`: HTTP client of a running node and selection of pods and containers by name.
- `offline`: pods of a stopped node, from its runtime.
- `output`: formats of listing commands.
- `command_tree`, `completion`, `manpages`: completion scripts and man pages, generated from the commands.
- `printers`: kubectl's columns, ages and pod status texts.
- `errors`: error output and exit codes.
"""
