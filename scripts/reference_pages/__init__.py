"""Generators of the pages below docs/reference; each module has a function `page`."""
