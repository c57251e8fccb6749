"""Fuzzers of everything that reads what strangers write: `python -m tests.fuzz` (`make fuzz`)."""
