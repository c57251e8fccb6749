"""A CSI driver for tests: a process of its own, with volumes that are directories or loop devices."""
