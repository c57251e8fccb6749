"""Choosing objects by their labels, as `matchLabels` and `matchExpressions` say it.

An empty selector chooses everything; "no selector" (None) is for the asker to decide.
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
