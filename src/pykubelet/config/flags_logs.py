"""Flags about the agent's own logs, and the flags that are accepted only for old times' sake."""

from pykubelet.api.text import quoted
from pykubelet.config.flag_rows import gone, group, in_both, in_file, old
from pykubelet.config.flag_types import (
    BOOL,
    DURATION,
    INT,
    LEVEL,
    QUANTITY,
    SEVERITY,
    STRING,
    TRACE_LOCATION,
    UINT,
    VMODULE,
    Kind,
)

_STDERR = "send standard error to where the logs should go"
_CADVISOR = "it set up a part of cAdvisor that does not exist here"


def _runtime(text: str) -> str:
    if text != "remote":
        raise ValueError(
            f"the built-in runtime {quoted(text)} does not exist any more: leave the flag out and name a "
            "CRI socket with --container-runtime-endpoint"
        )
    return text


CONTAINER_RUNTIME = Kind("string", _runtime)

ROWS = (
    *group(
        "Logging",
        in_both(
            "v", LEVEL, "logging.verbosity", "How much to say; 2 is usual, 4 is for debugging.", short="v"
        ),
        in_both(
            "vmodule", VMODULE, "logging.vmodule", "Verbosity of single files, such as loop=4,cgroup*=6."
        ),
        in_file("logging-format", STRING, "logging.format", "text or json."),
        in_both(
            "log-flush-frequency", DURATION, "logging.flush_frequency", "How long lines may be held back."
        ),
        in_file(
            "log-text-split-stream",
            BOOL,
            "logging.options.text.split_stream",
            "In text format, information to standard output and errors to standard error.",
        ),
        in_file(
            "log-text-info-buffer-size",
            QUANTITY,
            "logging.options.text.info_buffer_size",
            "In text format with split streams, bytes of information to hold back.",
        ),
        in_file(
            "log-json-split-stream",
            BOOL,
            "logging.options.json.split_stream",
            "In JSON format, information to standard output and errors to standard error.",
        ),
        in_file(
            "log-json-info-buffer-size",
            QUANTITY,
            "logging.options.json.info_buffer_size",
            "In JSON format with split streams, bytes of information to hold back.",
        ),
        old("logtostderr", BOOL, "Log to standard error instead of files.", _STDERR),
        old("alsologtostderr", BOOL, "Log to standard error as well as files.", _STDERR),
        old(
            "stderrthreshold",
            SEVERITY,
            "When logging to files, send this severity to standard error too.",
            _STDERR,
        ),
        old("log-file", STRING, "File to log to, with --logtostderr=false.", _STDERR),
        old("log-dir", STRING, "Directory to make a log file in, with --logtostderr=false.", _STDERR),
        old("log-file-max-size", UINT, "Megabytes at which --log-file starts over; 0: never.", _STDERR),
        old("skip-headers", BOOL, "Leave time, process and file out of the lines.", "it will be removed"),
        old("add-dir-header", BOOL, "Show the file's directory in the lines.", "it will be removed"),
    ),
    *group(
        "Accepted without effect",
        gone("one-output", BOOL, "", "a log file always has every severity once"),
        gone("skip-log-headers", BOOL, "", "log files have no opening lines to leave out"),
        gone("log-backtrace-at", TRACE_LOCATION, ":0", "raise -v or --vmodule instead"),
        gone("container-runtime", CONTAINER_RUNTIME, "remote", "every runtime is reached over CRI"),
        gone("cloud-config", STRING, "", "cloud providers run outside, see --cloud-provider=external"),
        gone("master-service-namespace", STRING, "default", "the API server's service is always in default"),
        gone("application-metrics-count-limit", INT, "100", _CADVISOR),
        gone("container-hints", STRING, "/etc/cadvisor/container_hints.json", _CADVISOR),
        gone("containerd", STRING, "/run/containerd/containerd.sock", "see --container-runtime-endpoint"),
        gone("containerd-namespace", STRING, "k8s.io", "the runtime knows its namespace"),
        gone("enable-load-reader", BOOL, "", _CADVISOR),
        gone("event-storage-age-limit", STRING, "default=0", _CADVISOR),
        gone("event-storage-event-limit", STRING, "default=0", _CADVISOR),
        gone("log-cadvisor-usage", BOOL, "", _CADVISOR),
        gone("storage-driver-buffer-duration", DURATION, "1m0s", _CADVISOR),
        gone("storage-driver-db", STRING, "cadvisor", _CADVISOR),
        gone("storage-driver-host", STRING, "localhost:8086", _CADVISOR),
        gone("storage-driver-password", STRING, "root", _CADVISOR, secret=True),
        gone("storage-driver-secure", BOOL, "", _CADVISOR),
        gone("storage-driver-table", STRING, "stats", _CADVISOR),
        gone("storage-driver-user", STRING, "root", _CADVISOR),
    ),
)
