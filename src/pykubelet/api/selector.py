"""Choosing objects by their labels, as `matchLabels` and `matchExpressions` say it.

An empty selector chooses everything; "no selector" (None) is for the asker to decide.

Choosing nodes by their labels and their names, as `nodeSelectorTerms` say it.

One of the terms must fit, and of a term all parts; a term without parts fits no node.
"""

from __future__ import annotations

from collections.abc import Mapping

from pykubelet.api.meta import ObjectStruct


class LabelRequirement(ObjectStruct):
    """What one label must be: `In`, `NotIn`, `Exists` or `DoesNotExist`."""

    key: str = ""
    operator: str = ""
    values: list[str] = []

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether these labels are as required; raises ValueError for an operator that nobody knows."""
        match self.operator:
            case "In":
                return self.key in labels and labels[self.key] in self.values
            case "NotIn":
                return self.key not in labels or labels[self.key] not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
        raise ValueError(f'"{self.operator}" is not a valid label selector operator')


class LabelSelector(ObjectStruct):
    """All of these must fit."""

    match_labels: dict[str, str] = {}
    match_expressions: list[LabelRequirement] = []

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is chosen; raises ValueError for a selector that is none."""
        same = all(labels.get(key) == value for key, value in self.match_labels.items())
        return same and all(requirement.fits(labels) for requirement in self.match_expressions)


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
