"""Commands for pods: ps, top, describe, logs, exec, attach and port-forward."""
