"""Command line interfaces: `kubelet`, the drop-in replacement, and `pykubelet`, the node for interactive use.

- `kubelet`: entry point with upstream's flags, configuration file and exit codes.
- `pykubelet`: Typer application with all sub-commands; `restart` is implemented here.
- `up`: `pykubelet up` and `pykubelet down`.
- `run`, `ps`, `logs`, `exec`, `describe`, `doctor`, `config`, `dev`: the sub-commands of these names.
- `process`: logging, signals, event loop and exit code of a kubelet process.
- `client`: HTTP client of a running node and selection of pods and containers by name.
- `printers`: kubectl's columns, ages and pod status texts.
- `errors`: error output and exit codes.
"""
