"""Exit codes of `pykubelet`, as the man page and the reference page of the commands show them.

Backquotes mark what is code.
"""

EXIT_CODES = (
    ("0", "The command worked."),
    (
        "1",
        "An error, in one line on standard error; `doctor` found a problem; a pod of `run` did not get "
        "ready, or a Job failed; a check of `self-test` failed; `cp` left something out; an image of "
        "`images rm` was not removed.",
    ),
    ("2", "The command line is wrong, in one line on standard error."),
    ("3", "`certs` found a certificate that needs attention."),
    ("128 + N", "Ended by signal N: 130 for Ctrl-C, 141 when the reader of a pipe has gone."),
)
EXIT_CODES_OF_PROCESSES = "`exec`, `attach` and `debug` exit with the code of the process in the container."
