"""What a client may ask of an instance, and what is refused before anything is done."""

from __future__ import annotations

from typing import Any

import pytest

from woodfrog.daemon.instances import INSTANCE_PARAMETERS, instance_of
from woodfrog.daemon.targets import MAX_NAME, names_like
from woodfrog.errors import UsageError
from woodfrog.store.names import check_name


def test_nothing_asked_is_a_restore_as_ever() -> None:
    fields = instance_of({})
    assert not fields["new_pid_namespace"]
    assert fields["ports"] == fields["environment"] == {}
    assert (fields["name"], fields["hook"], fields["binds"]) == ("", "", ())
    assert set(INSTANCE_PARAMETERS) >= {"ports", "hook", "new_pid_namespace"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_name": "frog"},
        {"target_name": "../frog", "new_pid_namespace": True},
        {"new_pid_namespace": "yes"},
        {"ports": {"8000": 65536}},
        {"ports": {"0": 1}},
        {"ports": {"-1": 1}},
        {"ports": {"8000": "http"}},
        {"ports": {"1": 5, "2": 5}},
        {"ports": [8000]},
        {"binds": [["/a", "/b"]]},
        {"binds": [["/a"]], "new_pid_namespace": True},
        {"binds": ["ab"], "new_pid_namespace": True},
        {"environment": {"": "x"}},
        {"environment": {"A=": "x"}},
        {"environment": {"A": 1}},
        {"environment": {"A": "x" * (1 << 16)}},
        {"hook": "a\0b"},
        {"hook": "a" * (1 << 17)},
        {"hook": "true", "hook_timeout_s": float("inf")},
        {"hook": "true", "hook_timeout_s": -1},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        instance_of(wrong)


def test_ports_are_numbers_and_zero_is_any() -> None:
    assert instance_of({"ports": {"8000": 0, "9000": 0, "1": 65535}})["ports"] == {8000: 0, 9000: 0, 1: 65535}


def test_names_follow_each_other_and_stay_names() -> None:
    for wanted in ("llama", "x" * MAX_NAME):
        names = names_like(wanted)
        found = [next(names) for _ in range(12)]
        assert found[0] == wanted
        assert len(set(found)) == 12
        assert all(check_name(name) for name in found)
    assert found[11].endswith("-12")
