"""The processes of a simulated handoff: who takes records, and who sends and pulls them."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.peer import PeerTier
from kvkit.handoff.protocol import messages
from kvkit.handoff.protocol.states import Limits, Phase, RequestRef
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import HandoffError, Sender, Sending
from kvkit.handoff.transport.channel import ChannelError
from kvkit.handoff.transport.handshake import Identity
from kvkit.handoff.transport.unix import PeerArena
from kvkit.staging import Lease, Staging, StagingTimeout, release_all
from simulation.network import Network, Process
from simulation.world import World, short

if TYPE_CHECKING:
    from simulation.handoff_life import HandoffLife

NAMES = [f"0123456789abcdef/0/c.{i}.{i * 7919}.0.0.0.0" for i in range(8)]
SLOT_BYTES, POISON = mmap.PAGESIZE, 0xA5
TIMEOUT_S, ALLOCATION_S, TRANSFER_S, IDLE_S = 5.0, 4.0, 5.0, 8.0
SLACK_S = 3.0
"""Who keeps deadlines may have to wait for a copy that takes its time."""
IDENTITY = Identity("sim", namespace="n", layout="l", slot_bytes=SLOT_BYTES, secret=b"secret")


@functools.cache
def content(name: str) -> bytes:
    """The bytes that belong to a name."""
    number = NAMES.index(name)
    return bytes((17 * number + i) % 151 for i in range(60 + 30 * number))


class WatchedStaging(Staging):
    """Slots that are overwritten before they are given to anyone. `given`: how often each was."""

    def __init__(self, slots: int, shared: bool) -> None:
        self.given = [0] * slots
        super().__init__(SLOT_BYTES, slots, shared=shared)

    def _lease(self, count: int) -> list[Lease]:
        leases = super()._lease(count)
        for lease in leases:
            self.given[lease.slot] += 1
            lease.array[:400] = POISON
        return leases

    def is_leased(self, slot: int) -> bool:
        return self._references[slot] > 0


@dataclass
class Plan:
    """What a seed makes of a life.

    Attributes:
        calm: nothing goes wrong, nothing is called off: all arrives.
        shared: over shared memory, not TCP.
        room, slots: those of the receiver, and of each sender.
        busy: others of each process look records up, give up and cancel.
    """

    calm: bool
    shared: bool
    room: int
    senders: int
    slots: int
    requests: list[Request]
    dies: str
    closes: str
    pulls: bool
    busy: bool
    stranger: bool

    @staticmethod
    def of(world: World, network: Network) -> Plan:
        r, faults = world.random, world.faults
        calm = r.random() < 0.25
        network.room = r.choice((100, 1000, 1 << 16))
        network.short = r.choice((0.0, 0.3))
        kind = "none" if calm else r.choice(("none", "slow", "hangs", "fails", "breaks", "all"))
        if not calm:
            faults.slow = 0.3 if kind in ("slow", "hangs", "all") else 0.0
            faults.hangs = 0.03 if kind in ("hangs", "all") else 0.0
            faults.fails = r.choice((0.01, 0.04)) if kind in ("fails", "all") else 0.0
            network.breaks = r.choice((0.02, 0.1)) if kind in ("breaks", "all") else 0.0
            faults.threads = r.choice((0.0, 0.0, 0.0, 0.2))
            world.scheduler.haste = r.choice((0.0, 0.0, 0.0, 0.05))
        senders, room = r.choice((1, 1, 2)), r.randint(3, 8)
        requests = []
        for i in range(r.randint(1, 4)):
            parts = senders if r.random() < 0.3 else 1
            most = min(4, room // parts if calm else 4)
            start = [r.randrange(len(NAMES)) for _ in range(parts)]
            bring = [(NAMES * 2)[first : first + r.randint(1, most)] for first in start]
            if requests and r.random() < 0.3:
                bring = requests[0].parts  # the same records again
            requests.append(Request(f"r{i}", r.randrange(senders), bring))
        return Plan(
            calm=calm,
            shared=r.random() < 0.65,
            room=room,
            senders=senders,
            slots=r.randint(1, 3),
            requests=requests,
            dies="" if calm else r.choice(("", "", "P0", "D")),
            closes="" if calm else r.choice(("", "", "", "P0", "D")),
            pulls=r.random() < 0.4,
            busy=r.random() < 0.5,
            stranger=r.random() < 0.2,
        )


@dataclass
class Request:
    """`parts`: the names that each of so many senders brings; the first of them is `sender`."""

    id: str
    sender: int
    parts: list[list[str]]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.parts for name in part))

    def transfer(self, part: int) -> str:
        return self.id if len(self.parts) == 1 else f"{self.id}/{part}"


class Node:
    """A process that takes records, and uses what came."""

    def __init__(self, life: HandoffLife, process: Process) -> None:
        self.life, self.process = life, process
        self.scheduler, self.check, self.random = life.scheduler, life.check, life.world.random
        self.closing = False
        self.spoilt: set[tuple[int, int]] = set()
        self.arena = WatchedStaging(life.plan.room, shared=True)
        self.receiver = Receiver(self.arena, Limits(ALLOCATION_S, TRANSFER_S, IDLE_S))
        self.receiver.subscribe(self.hear)
        self.endpoint = Endpoint(
            self.receiver, (), IDENTITY, [life.address], timeout_s=TIMEOUT_S, pin_s=IDLE_S
        )

    def hear(self, _: object = None) -> None:
        """A transfer was committed, or is over."""
        for transfer in self.receiver._buffer.transfers.values():
            if transfer.phase is Phase.COMMITTED:
                self.life.arrived.add(transfer.id)

    def look(self) -> None:
        """What holds whenever nobody has the locks."""
        if not (self.process.dead or self.closing):
            self.scheduler.check_unlocked(self.receiver.check_integrity)
            self.scheduler.check_unlocked(self.check_records)

    def check_records(self) -> None:
        for name, _ in self.receiver.records():
            lease = self.receiver.borrow(name)
            self.check(lease is not None, "D has no record {}, and lists it", name)
            if lease is not None:
                with lease:
                    self.check_record(name, lease)

    def check_record(self, name: str, lease: Lease) -> None:
        """A slot holds what belongs to a name, unless a sender that was cut off wrote there."""
        arena, slot = self.arena, lease.slot
        same = arena.arrays[slot][: arena.used[slot]].tobytes() == content(name)
        spoilt = (slot, arena.given[slot]) in self.spoilt
        self.check(same or spoilt, "slot {} does not hold {}", slot, short(name))

    def use(self, request: Request) -> None:
        """Wait for a request, and load it; or give it up."""
        receiver, calm, r = self.receiver, self.life.plan.calm, self.random
        wait_s = 60.0 if calm else r.choice((0.01, 1.0, 6.0, 30.0))
        began = self.scheduler.now
        status = receiver.wait(request.id, wait_s)
        self.life.on_time(began, wait_s, "a wait for a request")
        came = status is not None and status.phase is Phase.COMMITTED
        self.life.say("{}: {}", request.id, status)
        self.check(came or not calm, "{} did not come: {}", request.id, status)
        if came:
            self.load(request)
        elif r.random() < 0.5:
            self.life.say("gives {} up", request.id)
            receiver.release(request.id, "given up")
        if not calm and r.random() < 0.1:
            receiver.delete([r.choice(NAMES)])

    def load(self, request: Request) -> None:
        receiver, calm, r = self.receiver, self.life.plan.calm, self.random
        leading = receiver.match_prefix(request.names)
        self.check(leading == len(request.names) or not calm, "{} of {} are there", leading, request.id)
        if r.random() < 0.1 and not calm:
            return  # nobody uses it in time
        leases = [(name, receiver.borrow(name)) for name in request.names]
        early = r.random() < 0.5
        if early:
            receiver.release(request.id)
        for name, lease in leases:
            self.check(lease is not None or not calm, "{} of {} is gone", short(name), request.id)
            if lease is not None:
                self.check_record(name, lease)
                if r.random() < 0.3 and not calm:
                    self.scheduler.sleep(r.choice((0.001, 2.0)))
                self.scheduler.pause()
                self.check_record(name, lease)
                lease.release()
        if not early:
            receiver.release(request.id)
        self.life.used += 1

    def look_around(self) -> None:
        """What others of the process do: they look records up, and give requests up."""
        r, requests = self.random, self.life.plan.requests
        for _ in range(r.randint(2, 6)):
            name = r.choice(r.choice(requests).names)
            lease = self.receiver.borrow(name)
            if lease is not None:
                self.check_record(name, lease)
                self.scheduler.pause()
                self.check_record(name, lease)
                lease.release()
            if not self.life.plan.calm:
                if r.random() < 0.3:
                    request = r.choice(requests).id
                    self.life.say("gives {} up", request)
                    self.receiver.release(request, "given up")
                self.scheduler.sleep(r.choice((0.0, 0.05, 1.0)))

    def close(self) -> None:
        began = self.scheduler.now
        self.closing = True
        self.receiver.close(TIMEOUT_S)
        self.endpoint.close(TIMEOUT_S)
        self.life.on_time(began, 10 * TIMEOUT_S, "closing D")


class Side:
    """A process that sends, and pulls."""

    def __init__(self, life: HandoffLife, process: Process) -> None:
        self.life, self.process = life, process
        self.scheduler, self.check, self.random = life.scheduler, life.check, life.world.random
        self.closing = False
        self.staging = WatchedStaging(life.plan.slots, shared=False)
        self.sender = Sender(IDENTITY, timeout_s=TIMEOUT_S, transfer_s=TRANSFER_S)
        self.peer = PeerTier("peer", life.address, IDENTITY, timeout_s=TIMEOUT_S) if life.plan.pulls else None
        self.completed: dict[str, int] = {}
        self.handles: list[Sending] = []

    def look(self) -> None:
        if not self.process.dead:
            self.scheduler.check_unlocked(self.staging.check_integrity)

    # sending

    def send(self, request: Request, part: int) -> None:
        """Bring a part of a request, or not all of it."""
        calm, r, transfer = self.life.plan.calm, self.random, request.transfer(part)
        names, began = request.parts[part], self.scheduler.now
        if not calm and r.random() < 0.3:
            self.scheduler.sleep(r.choice((0.001, 1.0, 6.0)))
        of = RequestRef(request.id, len(request.parts))
        try:
            handle = self.at_once(
                self.sender.open, transfer, self.life.address, names, ALLOCATION_S, self.hear, of
            )
        except HandoffError as error:
            self.check(not calm, "{} cannot be asked for: {}", transfer, error)
            return
        self.handles.append(handle)
        began = self.scheduler.now
        outcome = "sent" if calm else r.choices(("sent", "cancelled", "finished", "left"), (6, 2, 1, 1))[0]
        stop = r.randrange(-1, len(names)) if outcome != "sent" else len(names)
        if stop >= 0:
            try:
                handle.admitted.result(ALLOCATION_S + SLACK_S)
            except HandoffError as error:
                self.check(not calm, "{} is not admitted: {}", transfer, error)
            except TimeoutError:
                self.life.on_time(began, ALLOCATION_S, f"room for {transfer}")
        for name in names[: max(0, stop)]:
            self.bring(handle, name)
        self.end(handle, outcome)

    def end(self, handle: Sending, outcome: str) -> None:
        calm, r, transfer = self.life.plan.calm, self.random, handle.id
        if outcome == "cancelled":
            self.life.say("cancels {}", transfer)
            self.at_once(self.sender.cancel, transfer)
            if r.random() < 0.3:  # said twice
                handle.link.queue_message(messages.Cancel(transfer))
        elif outcome != "left":
            self.at_once(self.sender.finish, transfer)
        began = self.scheduler.now
        try:
            missing = handle.done.result(ALLOCATION_S + TRANSFER_S + SLACK_S)
        except HandoffError as error:
            self.check(not calm, "{} fails: {}", transfer, error)
            return
        except TimeoutError:
            self.life.on_time(began, ALLOCATION_S + TRANSFER_S, f"the end of {transfer}")
            return
        self.life.say("{} arrived", transfer)
        for node in self.life.nodes.values():
            node.hear()  # who is told may be faster than who watches
        self.check(transfer in self.life.arrived, "{} is said to have arrived, and has not", transfer)
        self.check(not (calm and missing), "{} records of {} are missing", missing, transfer)

    def hear(self, _: object) -> None:
        self.scheduler.pause()

    def bring(self, handle: Sending, name: str) -> None:
        """Make a record in a slot of the receiver, or in one's own, and put it."""
        if self.random.random() < 0.5 and self.lent(handle, name):
            return
        try:
            (lease,) = self.staging.acquire(1, TRANSFER_S)
        except StagingTimeout:
            self.check(not self.life.plan.calm, "no slot comes free")
            return
        self.fill(lease, name)
        self.put(name, lease)
        lease.release()

    def lent(self, handle: Sending, name: str) -> bool:
        """Make a record where it is to be; whether that was done, or came to nothing."""
        calm, r = self.life.plan.calm, self.random
        loan = self.at_once(self.sender.borrow_slots, [handle], [name])
        if loan is None:
            return False
        self.life.say("has a slot of D for {}", short(name))
        (lease,) = loan.leases
        if not calm and r.random() < 0.3:
            self.scheduler.sleep(r.choice((0.001, 1.0, 6.0)))
        try:
            with loan.writing():
                self.fill(lease, name)
        except (HandoffError, ChannelError):
            lease.release()
            return True
        if calm or r.random() < 0.85:
            self.put(name, lease)
        lease.release()
        return True

    def meddle(self) -> None:
        """Cancel what others of the process send, or end its connection."""
        for _ in range(self.random.randint(1, 3)):
            self.scheduler.sleep(self.random.choice((0.0, 0.0, 0.05, 1.0)))
            if self.handles:
                handle = self.random.choice(self.handles)
                if self.random.random() < 0.5:
                    self.life.say("calls {} off", handle.id)
                    self.at_once(self.sender.cancel, handle.id)
                else:
                    self.life.say("ends its connection")
                    self.at_once(handle.link.abort)

    def fill(self, lease: Lease, name: str) -> None:
        data = content(name)
        half = len(data) // 2
        for start, stop in ((0, half), (half, len(data))):
            lease.buffer[start:stop] = data[start:stop]
            self.life.dawdle()
        lease.used = len(data)

    def put(self, name: str, lease: Lease) -> None:
        number = f"{name} {len(self.completed)}"
        self.completed[number] = 0

        def complete(of: str, error: BaseException | None) -> None:
            self.completed[number] += 1

        self.at_once(self.sender.put, [name], [lease], complete)

    def at_once(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a call gives that never waits for a peer."""
        began = self.scheduler.now
        try:
            return call(*arguments)
        finally:
            self.life.on_time(began, 0.0, call.__name__)

    # pulling

    def pull(self) -> None:
        """Ask for what is there, and have it sent here."""
        calm, r = self.life.plan.calm, self.random
        assert self.peer is not None
        for _ in range(r.randint(1, 3)):
            start = r.randrange(len(NAMES))
            names = NAMES[start : start + self.life.plan.slots]
            began = self.scheduler.now
            try:
                count = self.peer.match_prefix(names)
                self.life.say("D has {} of {}", count, len(names))
            except OSError as error:
                self.check(not calm, "{} is not told: {!r}", short(names[0]), error)
            self.life.on_time(began, TIMEOUT_S, "an answer")
            self.get(names)

    def get(self, names: Sequence[str]) -> None:
        assert self.peer is not None
        try:
            leases = self.staging.acquire(len(names), TRANSFER_S, at_least=len(names))
        except StagingTimeout:
            return
        left, told = list(names), self.life.world.threading.Event()

        def complete(name: str, error: BaseException | None) -> None:
            lease = leases[names.index(name)]
            left.remove(name)
            if error is None:
                self.check(bytes(lease.record) == content(name), "{} is pulled wrongly", short(name))
            else:
                missing = isinstance(error, FileNotFoundError)
                self.check(missing or not self.life.plan.calm, "{}: {!r}", short(name), error)
            if not left:
                told.set()

        began = self.scheduler.now
        self.peer.get(names, leases, complete)
        limit = (len(names) + 1) * TIMEOUT_S
        if not told.wait(limit + SLACK_S):
            self.life.on_time(began, limit, f"a pull of {len(names)}")
            told.wait()
        release_all(leases)

    def close(self) -> None:
        began = self.scheduler.now
        self.closing = True
        self.sender.close(TIMEOUT_S)
        if self.peer is not None:
            self.peer.close()
        self.life.on_time(began, 20 * TIMEOUT_S, f"closing {self.process.name}")


class WatchedPeerArena(PeerArena):
    """The receiver's slots as a sender has them: each write is looked at, and is a copy in two halves."""

    life: HandoffLife

    def __init__(self, descriptor: int, slot_bytes: int, slots: int) -> None:
        self.from_socket = self.life.network.descriptors[descriptor]
        super().__init__(descriptor, slot_bytes, slots)

    def view(self, slot: int) -> memoryview:
        self.check_write(slot)
        return super().view(slot)

    def write(self, slot: int, payload: memoryview) -> None:
        half = len(payload) // 2
        for start, stop in ((0, half), (half, len(payload))):
            self.view(slot)[start:stop] = payload[start:stop]
            self.life.dawdle()

    def check_write(self, slot: int) -> None:
        """Someone still holds the slot for this side, unless the receiver cut it off."""
        end = self.from_socket
        node = self.life.nodes[end.process]
        if end.process.dead or node.closing:
            return
        if end.cut:
            node.spoilt.add((slot, node.arena.given[slot]))
            return
        taken = node.arena.is_leased(slot)
        self.life.check(taken, "a write into slot {} of D, which was given back", slot)
