"""The node as the cluster sees it: registered, reported, kept alive. Start reading at `reporter.py`."""
