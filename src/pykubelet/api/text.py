"""Showing a stranger's text in a message of ours: on one line, and never a page of it."""

LONGEST_SHOWN = 60


def quoted(text: str) -> str:
    """Quote a text for a message; line breaks are escaped and a long middle is left out."""
    if len(text) > LONGEST_SHOWN:
        half = LONGEST_SHOWN // 2
        text = f"{text[:half]}…{text[-half:]}"
    return repr(text)
