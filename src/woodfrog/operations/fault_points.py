"""The list of every operation's phases, and with it of every fault point that tests can walk.

The names follow DESIGN's phase table. An operation that gains a phase must be entered here: the tests compare this
list with what a real run passes, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator

CHECKPOINT = (
    "survey",
    "prepare",
    "precopy",
    "quiesce",
    "handover",
    "import",
    "control",
    "cpu",
    "snapshot",
    "hash",
    "capture",
    "drain",
    "restore",
    "return",
    "write",
    "commit",
    "end",
)
RESTORE = (
    "survey",
    "prepare",
    "extract",
    "locate",
    "allocate",
    "refill",
    "cpu",
    "control",
    "hook",
    "return",
    "verify",
    "commit",
)
PROMOTE = ("survey", "move", "commit")
SUSPEND = ("survey", "prepare", "quiesce", "handover", "import", "control", "drain", "commit", "end")
STANDBY = (*RESTORE[: RESTORE.index("return")], "connect", "commit")
TAKE = ("survey", "allocate", "refill", "verify", "hook", "commit", "return", "end")
RESUME = ("survey", "allocate", "refill", "control", "return", "commit", "end")

SWITCH = (
    "out_survey",
    "out_prepare",
    "out_quiesce",
    "out_handover",
    "in_survey",
    "out_import",
    "out_control",
    "in_control",
    "in_allocate",
    "in_refill",
    "out_drain",
    "out_commit",
    "in_commit",
    "in_return",
    "out_end",
    "in_end",
)

MIGRATE = (
    "survey",
    "prepare",
    "precopy",
    "quiesce",
    "handover",
    "import",
    "allocate",
    "copy",
    "control",
    "restore",
    "commit",
    "return",
    "end",
)

PHASES: dict[str, tuple[str, ...]] = {
    "checkpoint": CHECKPOINT,
    "restore": RESTORE,
    "promote": PROMOTE,
    "standby": STANDBY,
    "take": TAKE,
    "suspend": SUSPEND,
    "resume": RESUME,
    "switch": SWITCH,
    "migrate": MIGRATE,
}


def fault_points(operation: str) -> Iterator[str]:
    """Every fault point of `operation`, in the order of its phases."""
    for phase in PHASES[operation]:
        yield f"{operation}.{phase}.before"
        yield f"{operation}.{phase}.after"
