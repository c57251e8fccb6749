"""The checks of what containers and pods ask for: names, amounts, requests within limits."""

from __future__ import annotations

from pykubelet.api.meta import Resources
from pykubelet.api.names import dns_label_problem, qualified_name_problem
from pykubelet.api.pod import PodSpec, ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.api.text import quoted
from pykubelet.config.errors import Problem
from pykubelet.pods.checks import Problems, exactly_one, named, refused, unique
from pykubelet.pods.defaults import container_total

_STANDARD = ("cpu", "memory", "ephemeral-storage")
_OF_THE_POD = ("cpu", "memory")


def check_resources(path: str, resources: ResourceRequirements, spec: PodSpec) -> Problems:
    """Give everything that is wrong with one container's resources."""
    yield from _check_amounts(path, resources, _STANDARD, extended=True)
    claims = {claim.name for claim in spec.resource_claims}
    for index, claim in enumerate(resources.claims):
        message = f"{quoted(claim.name)} is not the name of one of spec.resourceClaims"
        yield from refused(f"{path}.claims[{index}].name", message, claim.name not in claims)
        if claim.request:
            yield from named(f"{path}.claims[{index}].request", claim.request, dns_label_problem)
    yield from unique(
        (f"{path}.claims[{index}]", f"{claim.name}/{claim.request}")
        for index, claim in enumerate(resources.claims)
    )


def check_pod_resources(spec: PodSpec) -> Problems:
    """Give everything that is wrong with the resources, claims and overhead of the whole pod."""
    for name, amount in spec.overhead.items():
        yield from _check_amount("spec.overhead", name, amount, _STANDARD, extended=True)
    for index, claim in enumerate(spec.resource_claims):
        path = f"spec.resourceClaims[{index}]"
        yield from named(f"{path}.name", claim.name, dns_label_problem)
        yield from exactly_one(
            path,
            "a claim",
            {
                "resourceClaimName": claim.resource_claim_name,
                "resourceClaimTemplateName": claim.resource_claim_template_name,
            },
        )
    yield from unique(
        (f"spec.resourceClaims[{index}].name", claim.name) for index, claim in enumerate(spec.resource_claims)
    )
    if (whole := spec.resources) is None:
        return
    yield from refused("spec.resources.claims", "are only for containers", whole.claims)
    yield from _check_amounts("spec.resources", whole, _OF_THE_POD, extended=False)
    yield from _check_covers("spec.resources.requests", whole.requests, container_total(spec, "requests"))
    for index, container in enumerate(spec.containers):
        for name, amount in container.resources.limits.items():
            most = whole.limits.get(name)
            message = f"is {amount}, but the whole pod may have only {most}"
            place = f"spec.containers[{index}].resources.limits[{name}]"
            yield from refused(place, message, most is not None and amount > most)
    pages = {
        name: amount
        for name, amount in container_total(spec, "limits").items()
        if name.startswith("hugepages-")
    }
    yield from _check_covers("spec.resources.limits", whole.limits, pages)


def _check_covers(path: str, whole: Resources, needed: Resources) -> Problems:
    for name, amount in needed.items():
        if name in whole and whole[name] < amount:
            yield Problem(f"{path}[{name}]", f"is {whole[name]}, but the containers together have {amount}")


def _check_amounts(
    path: str, resources: ResourceRequirements, standard: tuple[str, ...], *, extended: bool
) -> Problems:
    limits, requests = resources.limits, resources.requests
    for name, amount in limits.items():
        yield from _check_amount(f"{path}.limits", name, amount, standard, extended=extended)
    for name, amount in requests.items():
        place = f"{path}.requests[{name}]"
        yield from _check_amount(f"{path}.requests", name, amount, standard, extended=extended)
        limit = limits.get(name)
        if name in _STANDARD:
            message = f"is {amount}, more than the limit of {limit}"
            yield from refused(place, message, limit is not None and amount > limit)
        else:
            message = f"is {amount}, but must be the same as the limit ({'none' if limit is None else limit})"
            yield from refused(place, message, limit != amount)
    named_ones = {*limits, *requests}
    pages = any(name.startswith("hugepages-") for name in named_ones)
    yield from refused(
        path, "has huge pages, which need cpu or memory too", pages and not {"cpu", "memory"} & named_ones
    )


def _check_amount(
    path: str, name: str, amount: Quantity, standard: tuple[str, ...], *, extended: bool
) -> Problems:
    path = f"{path}[{name}]"
    yield from refused(path, f"is {amount}, but must not be negative", amount.nanos < 0)
    if name.startswith("hugepages-"):
        yield from _check_pages(path, name, amount)
    elif "/" in name and extended:
        yield from named(path, name, qualified_name_problem)
        yield from refused(path, "must not begin with 'requests.'", name.startswith("requests."))
        whole = amount.is_whole or "kubernetes.io/" in name
        yield from refused(path, f"is {amount}, but must be a whole number", not whole)
    elif name not in standard:
        more = ", hugepages-<size>" + (" or a name such as example.com/device" if extended else "")
        yield Problem(path, f"{quoted(name)} is not a resource: use {', '.join(standard)}{more}")


def _check_pages(path: str, name: str, amount: Quantity) -> Problems:
    try:
        size = Quantity.parse(name.removeprefix("hugepages-"))
    except ValueError:
        size = Quantity.of(0)
    if size.nanos <= 0 or not size.is_whole:
        yield Problem(path, f"{quoted(name)} must name the size of a page, such as hugepages-2Mi")
    elif amount.nanos % size.nanos:
        yield Problem(path, f"is {amount}, but must be a multiple of {size}")
