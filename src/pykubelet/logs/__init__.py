"""The agent's voice: klog text and JSON, verbosity per file, secrets masked.

    log = get_logger(__name__)
    log.info("Pod started", pod="default/web", podUID=uid)
    log.v(4).info("Nothing to do")
    log.error(err, "Could not pull the image", image=name)

`setup.py` decides where lines go and how they look; until it ran, lines of level 0 go to
standard error in klog's text format, so that nothing said early is lost.
"""

from pykubelet.logs.logger import Log, get_logger

__all__ = ["Log", "get_logger"]
