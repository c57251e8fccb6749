"""From a decision to containers: what to do (`actions.py`), and the doing of it through CRI."""
