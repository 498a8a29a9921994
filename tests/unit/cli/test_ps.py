"""What `woodfrog ps` says of a target whose memory is on its way to the GPU."""

from __future__ import annotations

from woodfrog.cli.ps import state_of
from woodfrog.results import TargetInfo


def test_a_promotion_is_seen_with_how_far_it_is_and_what_it_left() -> None:
    assert state_of(TargetInfo(state="running")) == "running"
    assert state_of(TargetInfo(state="running", operation="checkpoint")) == "running"
    assert state_of(TargetInfo(state="running", operation="migrating 35 %", hosted_bytes=1)) == "migrating 35 %"
    assert state_of(TargetInfo(state="running", hosted_bytes=3 << 20)) == "running, 3.15 MB on host memory"
