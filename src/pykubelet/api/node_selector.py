"""Choosing nodes by their labels and their names, as `nodeSelectorTerms` say it.

One of the terms must fit, and of a term all parts; a term without parts fits no node.
"""

from __future__ import annotations

from collections.abc import Mapping

from pykubelet.api.meta import ObjectStruct
from pykubelet.api.selector import LabelRequirement

_NAME = "metadata.name"


class NodeRequirement(LabelRequirement):
    """What one label of a node must be: as labels are chosen, or `Gt` or `Lt` a whole number."""

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether these labels are as required; raises ValueError for an operator that nobody knows."""
        if self.operator not in ("Gt", "Lt"):
            return super().fits(labels)
        try:
            found, bound = int(labels[self.key]), int(*self.values)
        except (KeyError, TypeError, ValueError):
            return False
        return found > bound if self.operator == "Gt" else found < bound


class NodeSelectorTerm(ObjectStruct):
    """All of these must fit."""

    match_expressions: list[NodeRequirement] = []
    match_fields: list[NodeRequirement] = []

    def fits(self, labels: Mapping[str, str], name: str) -> bool:
        """Whether a node is chosen; raises ValueError as its requirements do."""
        if not self.match_expressions and not self.match_fields:
            return False
        expressions = all(part.fits(labels) for part in self.match_expressions)
        return expressions and all(part.fits({_NAME: name}) for part in self.match_fields)


class NodeSelector(ObjectStruct):
    """One of these must fit."""

    node_selector_terms: list[NodeSelectorTerm] = []

    def fits(self, labels: Mapping[str, str], name: str) -> bool:
        """Whether a node is chosen; raises ValueError as its terms do."""
        return any(term.fits(labels, name) for term in self.node_selector_terms)
