"""The daemon's end of the connection to the interposer's agent in a target: one method for each command of wire.h.

How it is said is channel.py's. The descriptors that arrive belong to the result that is returned, or are closed when
none is. Must never touch GPU memory: it only passes descriptors on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from woodfrog.errors import WoodfrogError
from woodfrog.target import wire
from woodfrog.target.channel import HELLO_TIMEOUT_S, AgentChannel
from woodfrog.target.hosted import Hosted, Named
from woodfrog.target.memory import Exported, Handle, Survey, handle_batches, survey_of
from woodfrog.target.tracking import KernelUse, Tracked

# Beyond the time that the agent itself was given for a command: scheduling on a loaded machine, and the packet's way.
_ANSWER_GRACE_S = 10.0
_DEFAULT_TIMEOUT_S = 60.0

# native/wire/wire.h WF_HELD_…
_HELD_IDLE, _HELD_CAPTURING, _HELD_SUBMITTED_SHIFT, _HELD_WAITING_SHIFT = 1, 2, 8, 32


@dataclass(frozen=True)
class Guarded:
    """A handle (as its agent numbers it) and its units in the page of a snapshot by copy-on-write."""

    handle: int
    first: int
    count: int


@dataclass(frozen=True)
class Held:
    """What a process is like whose gate was closed: `idle` (no thread in the driver, no work on a GPU), `capturing`
    (its gate is still open), `waiting` threads at the gate, and how many that were let on gave the GPU work."""

    idle: bool
    capturing: bool
    waiting: int
    submitted: int


class AgentLink(AgentChannel):
    """A connection that has said hello, and all that can be said on it."""

    def survey(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Survey:
        """Counts without stopping anything."""
        found: list[wire.Message] = []

        def collect(message: wire.Message) -> None:
            if message.type != "survey_result" or found:
                raise wire.WireError(f"a {message.type} came in answer to survey")
            found.append(message)

        self._command("survey", timeout_s=timeout_s, collect=collect)
        if not found:
            raise self._broken(wire.WireError("the reply to survey came without a result"))
        return survey_of(found[0])

    def quiesce(self, operation: int, timeout_s: float) -> float:
        """Close the gate and wait for the work in flight; seconds that it took.

        TimeoutExceededError: the work did not finish, the gate is open again and the target runs on.
        """
        body = {"operation": operation, "timeout_ms": max(1, min(int(timeout_s * 1000), 0xFFFFFFFF))}
        reply = self._command("quiesce", body, timeout_s=timeout_s + _ANSWER_GRACE_S)
        return float(reply.body["elapsed_us"]) / 1e6

    def hold(self, operation: int, look_s: float, *, admit: int = 0) -> Held:
        """Close the gate, without waiting for the work in flight longer than `look_s`; again and again, as long as the
        agent is held. `admit`: so many pieces of work threads that wait at the gate give the GPU before, a few at a
        time, as long as these are done within `look_s` each time."""
        body = {"operation": operation, "timeout_ms": round(look_s * 1000), "admit": admit}
        value = int(self._command("hold", body, timeout_s=look_s + _DEFAULT_TIMEOUT_S).body["value"])
        return Held(
            idle=bool(value & _HELD_IDLE),
            capturing=bool(value & _HELD_CAPTURING),
            waiting=value >> _HELD_WAITING_SHIFT,
            submitted=value >> _HELD_SUBMITTED_SHIFT & 0xFFFFFF,
        )

    def export_ahead(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> int:
        """While the target runs, it makes descriptors of its handles ready, so that it need not while it waits; how
        many it made. None by an interposer that is older than this message."""
        try:
            return int(self._command("export_ahead", timeout_s=timeout_s).body["value"])
        except WoodfrogError as failure:
            if failure.details.get("status") != "bad_message" or self.closed:
                raise
            return 0

    def stop_clock(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> int:
        """While the target runs: PyTorch's clock is to stand still from the coming quiesce to the resume. Of how many
        libraries; 0 without PyTorch, of one that is built otherwise, and by an interposer older than this message."""
        try:
            return int(self._command("stop_clock", timeout_s=timeout_s).body["value"])
        except WoodfrogError as failure:
            if failure.details.get("status") != "bad_message" or self.closed:
                raise
            return 0

    def export_memory(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Exported:
        """A descriptor for each handle that the interposer owns. The target still owns its memory afterwards."""
        exported = Exported()
        try:
            self._command("export_memory", timeout_s=timeout_s, collect=exported.add)
            exported.check()
        except wire.WireError as error:
            exported.close()
            raise self._broken(error) from None
        except BaseException:
            exported.close()
            raise
        return exported

    def dirty(self, operation: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Tracked:
        """What may have been written since the last committed image, told for the image of `operation`. Not `told` by a
        target that does not follow its launches, or whose interposer is older than this message."""
        tracked = Tracked()
        try:
            self._command("dirty", {"operation": operation}, timeout_s=timeout_s, collect=tracked.add)
        except WoodfrogError as failure:
            if failure.details.get("status") != "bad_message" or self.closed:
                raise
            return Tracked()
        return tracked

    def committed(self, operation: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """That image is committed: what was told for it need not be told again."""
        self._command("committed", {"operation": operation}, timeout_s=timeout_s)

    def release_memory(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """The target gives its memory up; from here only `return_memory` leads on. Its addresses stay reserved."""
        self._command("release_memory", timeout_s=timeout_s)

    def detach(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """The agent closes its end and sleeps with its state until it is woken. The link is closed afterwards."""
        self._command("detach", timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            # The agent's end must really be closed before CRIU looks at the target's descriptors.
            while True:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not self._socket.recv(1):
                    break
        except ConnectionResetError:
            pass  # closed with something unread: closed all the same
        except TimeoutError:
            raise self._timed_out("detach", timeout_s) from None
        finally:
            self.close()

    def return_memory(
        self,
        handles: Sequence[Handle],
        fds: Sequence[int],
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        *,
        same: bool = False,
    ) -> None:
        """Give the memory back: the agent maps each handle where it was. The descriptors stay the caller's.

        Allowed only while the driver has the target unlocked. `fds[k]` is the memory of `handles[k]`; `same`: the very
        memory that it released, so the agent need not ask the driver where it lies.
        """
        self.return_packed(self.packed_return(handles, fds, same=same), timeout_s)

    @staticmethod
    def packed_return(handles: Sequence[Handle], fds: Sequence[int], *, same: bool = False) -> list[wire.Message]:
        """What `return_memory` sends, to be made before the target waits for it."""
        batches = handle_batches("return_batch", handles, fds)
        for batch in batches:
            batch.same = same
        return batches

    def return_packed(self, batches: list[wire.Message], timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """`return_memory` with what `packed_return` made."""
        self._exchange("return_batch", batches, timeout_s=timeout_s)

    def spent(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> dict[str, dict[str, tuple[float, int]]]:
        """What the agent's time went to in this operation so far: seconds and number, by command and by wire.h's
        spendings. Empty of an interposer that is older than this message."""
        found: dict[str, dict[str, tuple[float, int]]] = {}
        table = wire.tables()

        def collect(message: wire.Message) -> None:
            if message.type != "spent_batch" or message.fds:
                raise wire.WireError(f"a {message.type} came in answer to spent")
            for entry in message.entries:
                command, spending = table.by_number.get(entry["command"]), table.spendings.get(entry["spending"])
                if command is None or spending is None:
                    raise wire.WireError("it spent time on something that there is not")
                found.setdefault(command.name, {})[spending] = (entry["ns"] / 1e9, entry["count"])

        try:
            self._command("spent", timeout_s=timeout_s, collect=collect)
        except WoodfrogError as failure:
            if failure.details.get("status") != "bad_message" or self.closed:
                raise
        return found

    def hosted(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Hosted:
        """Device memory of the target that lies on host memory as yet, with descriptors of that. In any state."""
        hosted = Hosted()
        try:
            self._command("hosted", timeout_s=timeout_s, collect=hosted.add)
            hosted.check()
        except wire.WireError as error:
            hosted.close()
            raise self._broken(error) from None
        except BaseException:
            hosted.close()
            raise
        return hosted

    def follow_access(self, on: bool, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """At rest: note which memory on the host launches name. `on` False, in any state: stop that."""
        self._command("follow_access", {"on": int(on)}, timeout_s=timeout_s)

    def accessed(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> list[int]:
        """The handles that launches have named since `follow_access` began, in the order of first use."""
        named = Named("accessed_batch")
        self._command("accessed", timeout_s=timeout_s, collect=named.add)
        return named.handles

    def replace_memory(
        self, handles: Sequence[Handle], fds: Sequence[int], timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> list[int]:
        """While it is quiesced: `fds[k]`, device memory with the contents of the host memory behind `handles[k]`, takes
        its place. The handles that were replaced; others were freed meanwhile, or may not be moved."""
        replaced = Named("replaced_batch")
        batches = handle_batches("replace_batch", handles, fds)
        self._exchange("replace_batch", batches, timeout_s=timeout_s, collect=replaced.add)
        return replaced.handles

    def guard(self, handles: Sequence[Guarded], page: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """From now on calls that write memory of these handles wait until it is captured. `page` stays the caller's.
        Between `return_memory` and `resume`; refused (status bad_message) by an interposer that is older than this."""
        self.guard_packed(self.packed_guard(handles, page), timeout_s)

    @staticmethod
    def packed_guard(handles: Sequence[Guarded], page: int) -> list[wire.Message]:
        """What `guard` sends, to be made before the target waits for it."""
        layout = wire.tables().by_name["guard"].entry
        assert layout.names == ("handle", "first", "count")
        step = wire.tables().max_entries
        starts = range(0, len(handles), step) or range(1)
        return [
            wire.Message(
                "guard",
                0,
                last=start == starts[-1],
                entries=layout.pack_rows((one.handle, one.first, one.count) for one in handles[start : start + step]),
                fds=[page] if start == 0 else [],
            )
            for start in starts
        ]

    def guard_packed(self, messages: list[wire.Message], timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """`guard` with what `packed_guard` made."""
        self._exchange("guard", messages, timeout_s=timeout_s)

    def guard_end(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> list[KernelUse]:
        """Nothing waits any more. The kernels that were launched meanwhile, most often launched first."""
        launched = Tracked()
        self._command("guard_end", timeout_s=timeout_s, collect=launched.add)
        return launched.kernels

    def resume(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> int:
        """Open the gate; how many bytes of the memory offered for the control state the driver had taken."""
        return int(self._command("resume", timeout_s=timeout_s).body["value"])

    def wanted_control_memory(self, size_bytes: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> int:
        """How many bytes of memory that is not its own the target would take for the driver's control state:
        `size_bytes` in whole huge pages, or as much as the driver took last time. 0: none."""
        return self._control_memory("ask", size_bytes, (), timeout_s)

    def offer_control_memory(
        self, size_bytes: int, fd: int | None = None, timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> int:
        """While the target runs, it makes memory for the driver's control state ready: `size_bytes`, or as much as the
        driver took last time; or with `fd` (the caller's) just `size_bytes` of that file. How many bytes that became; 0
        is no failure, the driver's checkpoint takes longer."""
        if fd is None:
            return self._control_memory("own", size_bytes, (), timeout_s)
        return self._control_memory("shared", size_bytes, (fd,), timeout_s)

    def withdraw_control_memory(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """What was offered and not taken is unmapped. Only while the target runs."""
        self._control_memory("withdraw", 0, (), timeout_s)

    def _control_memory(self, what: str, size_bytes: int, fds: Sequence[int], timeout_s: float) -> int:
        body = {"bytes": size_bytes, "offer": wire.tables().control[what]}
        message = wire.Message("control_memory", 0, body=body, fds=list(fds))
        return int(self._exchange("control_memory", [message], timeout_s=timeout_s).body["value"])

    def ping(self, timeout_s: float = HELLO_TIMEOUT_S) -> float:
        """Seconds until the agent answered."""
        begin = time.monotonic()
        self._command("ping", timeout_s=timeout_s)
        return time.monotonic() - begin
