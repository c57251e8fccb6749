"""Structured logging: klog text and JSON, verbosity per module, masking of secrets.

    log = get_logger(__name__)
    log.info("Pod started", pod="default/web", podUID=uid)
    log.v(4).info("Nothing to do")
    log.error(err, "Failed to pull image", image=name)

- `logger.py`: the logging calls, and `--vmodule`.
- `formats.py`: klog's text format and JSON.
- `mask.py`: masking of secrets.
- `setup.py`: handlers and verbosity from the configuration.

Until `configure` has run, lines go to standard error in klog's text format (`configure_early`), so that early
messages are not lost.
"""

from pykubelet.logs.logger import Log, get_logger

__all__ = ["Log", "get_logger"]
