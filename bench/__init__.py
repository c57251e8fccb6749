"""Where claims about speed and memory come from: `make bench`."""
