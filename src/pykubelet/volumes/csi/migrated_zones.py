"""Where a volume of a kind of old can be reached from, in the words of the driver that has it now: pure.

Persistent volumes of old say so by the general labels of zones and regions, in their node affinity or, when
that says nothing, in labels of their own. Nodes have their drivers' labels, and perhaps those of today, but
not those from the times of beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pykubelet.api.node_selector import NodeRequirement, NodeSelector, NodeSelectorTerm
from pykubelet.api.persistent import VolumeNodeAffinity

ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
BETA_ZONE = "failure-domain.beta.kubernetes.io/zone"
BETA_REGION = "failure-domain.beta.kubernetes.io/region"

_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class ZoneKeys:
    """A driver's labels for zones and regions; empty for one that has none."""

    zone: str = ""
    region: str = ""


NO_ZONES = ZoneKeys()


def zones_of(labels: Mapping[str, str]) -> list[str]:
    """Give the zones that a volume's own labels name."""
    return [zone for zone in (labels.get(BETA_ZONE) or labels.get(ZONE, "")).split(_SEPARATOR) if zone]


def migrated_affinity(
    affinity: VolumeNodeAffinity | None, labels: Mapping[str, str], keys: ZoneKeys
) -> VolumeNodeAffinity | None:
    """Give a volume's node affinity by its driver's labels; as it is for a driver that has none."""
    if not keys.zone:
        return affinity
    terms = list(affinity.required.node_selector_terms) if affinity and affinity.required else []
    zone, region = _general(terms, labels)
    terms = _renamed(terms, zone, keys.zone, _split(labels.get(zone, ""), several=not keys.region))
    if keys.region:
        terms = _renamed(terms, region, keys.region, _split(labels.get(region, ""), several=False))
    elif region == BETA_REGION:
        terms = _renamed(terms, region, REGION, ())
    return VolumeNodeAffinity(required=NodeSelector(node_selector_terms=terms)) if terms else affinity


def _general(terms: list[NodeSelectorTerm], labels: Mapping[str, str]) -> tuple[str, str]:
    """Say by which general labels the volume speaks of its place."""
    named = {part.key for term in terms for part in term.match_expressions}
    for known in (named, labels):
        if ZONE in known:
            return ZONE, REGION
        if BETA_ZONE in known:
            return BETA_ZONE, BETA_REGION
    return ZONE, REGION


def _renamed(
    terms: list[NodeSelectorTerm], old: str, new: str, otherwise: tuple[str, ...]
) -> list[NodeSelectorTerm]:
    """Give a requirement another label; or have all terms require what the volume's labels say."""
    if any(part.key == old and part.values for term in terms for part in term.match_expressions):
        return [
            msgspec.structs.replace(
                term,
                match_expressions=[
                    msgspec.structs.replace(part, key=new) if part.key == old else part
                    for part in term.match_expressions
                ],
            )
            for term in terms
        ]
    if not otherwise:
        return terms
    more = NodeRequirement(key=new, operator="In", values=list(otherwise))
    return [
        msgspec.structs.replace(term, match_expressions=[*term.match_expressions, more])
        for term in terms or [NodeSelectorTerm()]
    ]


def _split(label: str, *, several: bool) -> tuple[str, ...]:
    parts = label.split(_SEPARATOR) if several else [label]
    return tuple(sorted({part.strip() for part in parts if part.strip()}))
