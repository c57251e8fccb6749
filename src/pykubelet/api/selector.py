"""Label selectors (`matchLabels`, `matchExpressions`) and node selectors (`nodeSelectorTerms`).

An empty label selector matches everything; a missing selector (None) is up to the caller. A node selector
matches if one of its terms does, and a term if all its requirements do; an empty term matches no node.
"""

from __future__ import annotations

from collections.abc import Mapping

from pykubelet.api.meta import ObjectStruct


class LabelRequirement(ObjectStruct):
    """Requirement on one label: `In`, `NotIn`, `Exists` or `DoesNotExist`."""

    key: str = ""
    operator: str = ""
    values: list[str] = []

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels meet the requirement. Raises ValueError for an unknown operator."""
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
    """A label selector; all its requirements must match."""

    match_labels: dict[str, str] = {}
    match_expressions: list[LabelRequirement] = []

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels match. Raises ValueError for an unknown operator."""
        same = all(labels.get(key) == value for key, value in self.match_labels.items())
        return same and all(requirement.fits(labels) for requirement in self.match_expressions)


_NAME = "metadata.name"


class NodeRequirement(LabelRequirement):
    """Requirement on one label of a node: as `LabelRequirement`, or `Gt` or `Lt` with an integer."""

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels meet the requirement. Raises ValueError for an unknown operator."""
        if self.operator not in ("Gt", "Lt"):
            return super().fits(labels)
        try:
            found, bound = int(labels[self.key]), int(*self.values)
        except (KeyError, TypeError, ValueError):
            return False
        return found > bound if self.operator == "Gt" else found < bound


class NodeSelectorTerm(ObjectStruct):
    """A term of a node selector; all its requirements must match."""

    match_expressions: list[NodeRequirement] = []
    match_fields: list[NodeRequirement] = []

    def fits(self, labels: Mapping[str, str], name: str) -> bool:
        """Return whether a node matches. Raises ValueError for an unknown operator."""
        if not self.match_expressions and not self.match_fields:
            return False
        expressions = all(part.fits(labels) for part in self.match_expressions)
        return expressions and all(part.fits({_NAME: name}) for part in self.match_fields)


class NodeSelector(ObjectStruct):
    """A node selector; one of its terms must match."""

    node_selector_terms: list[NodeSelectorTerm] = []

    def fits(self, labels: Mapping[str, str], name: str) -> bool:
        """Return whether a node matches. Raises ValueError for an unknown operator."""
        return any(term.fits(labels, name) for term in self.node_selector_terms)
