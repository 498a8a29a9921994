"""Which images stay and which go, by number and age. Decides only; `Store.apply_retention` removes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from woodfrog.errors import UsageError
from woodfrog.store.entries import Entry


@dataclass(frozen=True)
class Policy:
    """An image stays if any rule that is set keeps it. The newest image of a name always stays."""

    keep_last: int | None = None  # so many of each name
    keep_within_s: float | None = None  # published within that time

    def __post_init__(self) -> None:
        if self.keep_last is None and self.keep_within_s is None:
            raise UsageError("no rule says which images to keep", advice="give --keep-last or --keep-within")
        if (self.keep_last is not None and self.keep_last < 1) or (
            self.keep_within_s is not None and self.keep_within_s < 0
        ):
            raise UsageError(
                "that rule would keep nothing", advice="keep at least one; `woodfrog rm` removes single images"
            )


@dataclass(frozen=True)
class Kept:
    entry: Entry
    reason: str


@dataclass(frozen=True)
class RetentionPlan:
    """Both in the order of name and number."""

    keep: list[Kept]
    remove: list[Entry]

    def lines(self) -> list[str]:
        """For a person."""
        return [
            *(f"remove {entry.reference}" for entry in self.remove),
            *(f"keep   {kept.entry.reference}  ({kept.reason})" for kept in self.keep),
        ]


def plan(entries: Iterable[Entry], policy: Policy, now_unix_s: float) -> RetentionPlan:
    """`now_unix_s`: by the same clock as the entries' times (Tier.clock_s)."""
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        by_name.setdefault(entry.name, []).append(entry)
    keep: list[Kept] = []
    remove: list[Entry] = []
    for _, images in sorted(by_name.items()):
        images.sort(key=lambda entry: entry.number)
        for newer, entry in zip(range(len(images) - 1, -1, -1), images, strict=True):
            if (reason := _reason(entry, newer, policy, now_unix_s)) is None:
                remove.append(entry)
            else:
                keep.append(Kept(entry, reason))
    return RetentionPlan(keep, remove)


def _reason(entry: Entry, newer: int, policy: Policy, now_unix_s: float) -> str | None:
    if policy.keep_last is not None and newer < policy.keep_last:
        return f"among the last {policy.keep_last}"
    if policy.keep_within_s is not None and now_unix_s - entry.created_unix_s <= policy.keep_within_s:
        return "young enough"
    return "the newest of its name" if newer == 0 else None
