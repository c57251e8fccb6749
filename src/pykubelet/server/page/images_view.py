"""Images and disk: usage per image, candidates of garbage collection, largest logs and volumes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykubelet.images.image_gc import (
    DiskUsage,
    ImageGCPolicy,
    ImageRecord,
    bytes_to_free,
    plan_by_age,
    plan_by_space,
    removal_order,
    usage_percent,
)
from pykubelet.server.page.drawings import Mark, bar
from pykubelet.server.page.facts import DiskFacts, ImagesFacts, PageSettings, VolumeFacts
from pykubelet.server.page.html import Html, Section, badge, card, count, join, percent, size, table, tag
from pykubelet.server.page.parts import pull_row
from pykubelet.status.columns import format_duration

MOST_IMAGES = 200
_MOST_USERS = 10


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What the next garbage collection would remove."""

    candidates: tuple[ImageRecord, ...]
    """Unused images, the first to be removed first."""
    next: frozenset[str]
    """Ids of the images that it would remove now."""
    reason: str


def gc_plan(
    records: Sequence[ImageRecord], policy: ImageGCPolicy, disk: DiskFacts | None, now: float
) -> GcPlan:
    """Return the plan of the next garbage collection; `now` is the time of the event loop."""
    candidates = removal_order(records)
    by_age = {item.key.id for item in plan_by_age(candidates, policy, now)}
    by_space: set[str] = set()
    verb = "is" if len(by_age) == 1 else "are"
    reason = f"{count(len(by_age), 'image')} {verb} older than imageMaximumGCAge" if by_age else ""
    if disk is not None and disk.capacity > 0:
        usage = DiskUsage(disk.capacity, min(disk.available, disk.capacity))
        amount = bytes_to_free(usage, policy)
        for item in plan_by_space(candidates, policy, now):
            if amount <= 0:
                break
            by_space.add(item.key.id)
            amount -= item.size
        if not reason:
            reason = (
                f"the disk is {usage_percent(usage)} % full; images are removed at {policy.high_percent} %"
            )
    return GcPlan(tuple(candidates), frozenset(by_age | by_space), reason)


def images_sections(settings: PageSettings, facts: ImagesFacts) -> list[Section]:
    """Return the cards of the view."""
    plan = gc_plan(facts.images, facts.policy, facts.disk, facts.loop_time)
    return [
        _disk(facts, plan),
        card("Pulls in progress", *map(pull_row, facts.pulls), id="pulls", kind="wide")
        if facts.pulls
        else tag("section", id="pulls", data_live=True, hidden=True),
        _images(settings, facts, plan),
        (
            _users("Largest logs", "logs", facts.logs, settings.command("top")),
            _users("Largest volumes", "volumes", facts.volumes, settings.command("top")),
        ),
        (_users("Largest writable layers", "layers", facts.layers, settings.command("top")),),
    ]


def _disk(facts: ImagesFacts, plan: GcPlan) -> Html:
    total = sum(image.size for image in facts.images)
    unused = sum(image.size for image in plan.candidates)
    disk, policy = facts.disk, facts.policy
    rows = []
    if disk is not None and disk.capacity:
        share = (disk.capacity - disk.available) / disk.capacity
        marks = [
            Mark(policy.low_percent / 100, f"images are removed down to {policy.low_percent} %"),
            Mark(
                policy.high_percent / 100, f"images are removed from {policy.high_percent} % on", "threshold"
            ),
        ]
        numbers = f"{size(disk.capacity - disk.available)} of {size(disk.capacity)}"
        rows.append(
            tag(
                "div",
                tag("span", "Disk of the images", class_="name"),
                tag("span", numbers, class_="numbers"),
                tag("span", percent(share), class_="share"),
                bar(share, f"Disk of the images: {numbers}", marks),
                class_="resource",
            )
        )
    texts = [f"{count(len(facts.images), 'image')}, {size(total)}", f"{size(unused)} unused", plan.reason]
    return tag(
        "section",
        tag("h1", "Images and disk"),
        tag("p", *(tag("span", text) for text in texts if text), class_="facts"),
        _list_state(facts),
        *rows,
        class_="summary wide",
        id="disk",
        data_live=True,
    )


def _list_state(facts: ImagesFacts) -> Html | None:
    """Return why the images that are shown are not those of now, and how old the list is."""
    age = None if facts.listed_at is None else format_duration(max(facts.loop_time - facts.listed_at, 0))
    if facts.waits_for:
        shown = f"this list is {age} old" if age else "they are shown when they have been listed"
        return tag("p", f"Now {facts.waits_for}; {shown}", class_="more")
    if not facts.problem:
        return None
    shown = f"; this list is {age} old" if age else ""
    return tag("p", f"The images could not be listed now: {facts.problem}{shown}", class_="problem")


def _images(settings: PageSettings, facts: ImagesFacts, plan: GcPlan) -> Html:
    order = {item.key: number for number, item in enumerate(plan.candidates, 1)}
    rows = []
    for image in sorted(facts.images, key=lambda image: (-image.size, image.key))[:MOST_IMAGES]:
        tags = sorted(name for name in image.names if "@" not in name)
        name = tags[0] if tags else min(image.names, default=image.key.id)
        others = f"and {count(len(tags) - 1, 'more name')}" if len(tags) > 1 else ""
        if image.in_use or image.pinned:
            badges = [badge("in use", "ok") if image.in_use else None, " "]
            use = join([*badges, badge("pinned", "off") if image.pinned else None])
        elif image.key.id in plan.next:
            use = badge("removed next", "bad")
        else:
            use = badge(f"unused, candidate {order.get(image.key, 0)}", "busy")
        # A pinned image is never removed, however long it is not used.
        idle = (
            ""
            if image.in_use or image.pinned
            else format_duration(max(facts.loop_time - image.idle_since, 0))
        )
        rows.append(
            tag(
                "tr",
                tag("td", name, tag("small", others)),
                tag("td", use),
                tag("td", size(image.size), class_="number"),
                tag("td", idle, class_="number"),
            )
        )
    headings = (
        "Image",
        "Use",
        tag("span", "Size", class_="number"),
        tag("span", "Unused for", class_="number"),
    )
    more = len(facts.images) - len(rows)
    return card(
        "Images",
        table(headings, rows, label="Images on the node")
        if rows
        else tag("p", "No images were listed yet.", class_="empty"),
        tag("p", f"{count(more, 'smaller image')} not shown.", class_="more") if more > 0 else None,
        id="images",
        kind="wide",
        command=settings.command("images ls"),
    )


def _users(title: str, id: str, users: Sequence[VolumeFacts], command: str) -> Html:
    shown = sorted(users, key=lambda user: -user.used)[:_MOST_USERS]
    if not shown:
        return tag("section", id=id, data_live=True, hidden=True)
    largest = max(user.used for user in shown) or 1
    rows = [
        tag(
            "tr",
            tag("td", user.pod, tag("small", user.name)),
            tag(
                "td",
                bar(user.used / (user.capacity or largest) if user.capacity else None, f"{size(user.used)}")
                if user.capacity
                else "",
            ),
            tag("td", size(user.used), class_="number"),
        )
        for user in shown
    ]
    return card(
        title,
        table(("Pod", "", tag("span", "Used", class_="number")), rows, label=title),
        id=id,
        command=command,
    )
