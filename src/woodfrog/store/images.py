"""Images as keys: listing them, giving out numbers, removing them. Manifests are bytes here; nothing looks into one."""

from __future__ import annotations

from collections.abc import Sequence

from woodfrog.errors import BadImageError, NoSpaceError
from woodfrog.faults import fault_point
from woodfrog.store import keys, names
from woodfrog.store.entries import Entry, Hold
from woodfrog.store.tiers.protocol import Tier


def entries(tier: Tier, name: str | None = None) -> list[Entry]:
    """Every image (of that name), by name and number."""
    found = []
    for listed in tier.list(keys.IMAGES if name is None else f"{keys.IMAGES}{names.check_name(name)}/"):
        if parsed := keys.parse_manifest(listed.key):
            reference = f"{parsed.name}@{parsed.number}"
            found.append(Entry(reference, parsed.name, parsed.number, listed.size_bytes, listed.modified_unix_s))
    return sorted(found, key=lambda entry: (entry.name, entry.number))


def next_number(tier: Tier, name: str) -> int:
    """One more than the highest that the name has or ever had."""
    # First the list, then the mark: an image that is removed in between has left its mark before.
    taken = [entry.number for entry in entries(tier, name)]
    return max([*taken, mark(tier, name)]) + 1


def mark(tier: Tier, name: str) -> int:
    """The highest number of that name that was ever removed, or 0."""
    data = tier.get(keys.mark_key(name), keys.MARK_MAX_BYTES)
    if data is None:
        return 0
    text = data.strip()
    if not text.isdigit():
        raise BadImageError(
            f"{tier.url}/{keys.mark_key(name)} does not hold a number",
            advice=f"write into it the highest number that {name} ever had, or remove the file",
        )
    return int(text)


def remove(tier: Tier, references: Sequence[str], lock: Hold) -> None:
    """Delete these manifests. The caller holds the exclusive lock.

    The mark is durable before a manifest goes, so that no crash lets a number be used twice."""
    highest: dict[str, int] = {}
    for reference in references:
        name, number = names.parse_reference(reference)
        assert number is not None
        highest[name] = max(number, highest.get(name, 0))
    for name, number in highest.items():
        if number > mark(tier, name):
            _write_mark(tier, name, number)
    fault_point("store.remove.marked")
    lock.check()
    tier.delete([key_of(reference) for key_of in (keys.profile_of, keys.manifest_of) for reference in references])
    fault_point("store.remove.deleted")


def _write_mark(tier: Tier, name: str, number: int) -> None:
    data = b"%d\n" % number
    try:
        tier.replace(keys.mark_key(name), data)
    except NoSpaceError:
        # Removing is the way out of a full disk: it must work on one.
        if not tier.release_reserve():
            raise
        tier.replace(keys.mark_key(name), data)
