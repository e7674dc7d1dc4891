"""Lives of a handoff: senders and a receiver over a network that is late, short and torn; what must hold.

One or two senders bring a few requests to a receiver that is short of room, over shared memory or TCP. They
make records in slots of their own or of the receiver's, cancel, stop in the middle, pull what is there; the
receiver uses what came, gives up, deletes. A process may be killed, or close while it is used.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from simulation.handoff_processes import (
    NAMES,
    SLACK_S,
    TIMEOUT_S,
    Node,
    Plan,
    Request,
    Side,
    WatchedPeerArena,
    WatchedStaging,
)
from simulation.network import Network, Process
from simulation.scheduler import START_S
from simulation.world import World

SETTLED_S = 1000.0
"""All that was on its way has arrived by then, and every deadline is over."""
SOCKETS = ("stream", "tcp", "unix", "channel")
"""Modules of the transport that call the system's sockets."""


class HandoffLife:
    """The processes, and what goes wrong."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler, self.check = world, world.scheduler, world.scheduler.check
        self.network = network = Network(world.scheduler, world.faults)
        self.plan = plan = Plan.of(world, network)
        self.hasty = world.scheduler.haste > 0
        network.on_death = self.died
        arena = type("_PeerArena", (WatchedPeerArena,), {"life": self})
        numbers = itertools.count(1)
        transport = "kvkit.handoff.transport"
        world.instead |= {(f"{transport}.{m}", "socket"): network.socket for m in SOCKETS}
        world.instead |= {
            (f"{transport}.stream", "select"): network.select,
            (f"{transport}.unix", "os"): network.os,
            (f"{transport}.unix", "PeerArena"): arena,
            (f"{transport}.unix", "map_shared"): mmap.mmap,
            (f"{transport}.unix", "_make_folder"): lambda path: None,
            (f"{transport}.unix", "_identity"): self.identity,
            (f"{transport}.link", "_numbers"): numbers,
            (f"{transport}.handshake", "new_nonce"): lambda: bytes(32),
            ("kvkit.staging", "map_shared"): mmap.mmap,
            ("kvkit.staging", "keep_from_forks"): lambda memory: None,
            ("kvkit.staging", "prefault"): lambda *_: None,
            ("kvkit.staging", "_current_gpu"): lambda: 0,
        }
        self.address = "unix:///simulated/d.sock" if plan.shared else "tcp://d:4000"
        self.nodes: dict[Process, Node] = {}
        self.sides: list[Side] = []
        self.arrived: set[str] = set()
        self.used = 0
        self.looks = 0
        self.restarts: Any = None
        self.over = False

    @property
    def node(self) -> Node:
        """The receiver, the last that was started."""
        return list(self.nodes.values())[-1]

    def identity(self, path: object) -> tuple[int, int]:
        listener = self.network.listeners.get(str(path))
        if listener is None:
            raise FileNotFoundError(str(path))
        return 1, id(listener)

    def say(self, what: str, *values: object) -> None:
        if self.scheduler.trace is not None:
            self.scheduler.say(what.format(*values))

    def dawdle(self) -> None:
        """What a copy takes on a busy machine."""
        late = not self.plan.calm and self.world.random.random() < 0.3
        self.scheduler.sleep(0.8 if late else 0.0)

    def on_time(self, began: float, limit_s: float, what: str) -> None:
        """Nobody waits past a deadline, unless the clock itself is hasty."""
        took = self.scheduler.now - began
        self.check(took <= limit_s + SLACK_S or self.hasty, "{} took {} s", what, took)

    # processes

    def start(self, process: Process, name: str, work: Callable[[], object]) -> Any:
        """A thread of a process."""

        def run() -> None:
            if not process.dead:
                self.scheduler.current.process = process
                work()

        thread = self.world.threading.Thread(target=run, name=f"{process.name}-{name}")
        with self.world.faults.threads_start():
            thread.start()
        return thread

    def calmly(self, process: Process, work: Callable[[], object]) -> None:
        """Have a process do something that nothing goes wrong with."""
        faults = self.world.faults
        before = faults.fails, self.network.calls_left
        faults.fails, self.network.calls_left = 0.0, -1
        with faults.threads_start():
            self.start(process, "main", work).join()
        faults.fails, self.network.calls_left = before
        if self.over:
            self.quiet()

    def open_node(self) -> Node:
        process = Process("D" if not self.nodes else f"D{len(self.nodes)}")

        def work() -> None:
            self.nodes[process] = Node(self, process)

        self.calmly(process, work)
        return self.nodes[process]

    def open_side(self, number: int) -> None:
        process = Process(f"P{number}")
        self.calmly(process, lambda: self.sides.append(Side(self, process)))

    def died(self, process: Process) -> None:
        self.wake_guard()

    def wake_guard(self) -> None:
        if self.restarts is not None:
            self.scheduler.wake(self.restarts)

    def watch_over(self) -> None:
        """Start a new receiver where one died, as long as anything is under way."""
        self.restarts = self.scheduler.current
        while True:
            if self.node.process.dead:
                self.open_node()
                self.use(self.node)
            elif not self.over:
                self.scheduler.block("a death")
            else:
                return

    def use(self, node: Node) -> list[Any]:
        return [
            self.start(node.process, f"use-{request.id}", partial(node.use, request))
            for request in self.plan.requests
        ]

    # the whole of it

    def live(self) -> None:
        """As the first thread."""
        plan, r = self.plan, self.world.random
        node = self.open_node()
        for number in range(plan.senders):
            self.open_side(number)
        self.scheduler.observe = self.look
        guard = self.world.threading.Thread(target=self.watch_over, name="guard")
        with self.world.faults.threads_start():
            guard.start()
        if plan.dies:
            processes = [side.process for side in self.sides] if plan.dies != "D" else [node.process]
            self.network.mortal = {processes[0]}
            self.network.calls_left = r.randrange(r.choice((20, 60, 150)))
        threads = self.use(node)
        for request in plan.requests:
            for part in range(len(request.parts)):
                side = self.sides[(request.sender + part) % plan.senders]
                work = partial(side.send, request, part)
                threads.append(self.start(side.process, f"send-{request.transfer(part)}", work))
        threads += [self.start(s.process, "pull", s.pull) for s in self.sides if s.peer is not None]
        if plan.busy:
            threads.append(self.start(node.process, "look", node.look_around))
            threads += [self.start(s.process, "meddle", s.meddle) for s in self.sides if not plan.calm]
        if plan.stranger:
            threads.append(self.start(Process("X"), "stranger", self.be_strange))
        if plan.closes:
            self.scheduler.sleep(r.choice((0.0, 0.01, 3.0)))
            closing: Node | Side = node if plan.closes == "D" else self.sides[0]
            self.close(closing)
        for thread in threads:
            thread.join()
        waited = self.scheduler.now - START_S
        self.check(not (plan.calm and waited), "somebody was told of nothing for {} s", waited)
        self.over = True
        self.scheduler.say("the faults are over")
        self.quiet()
        self.wake_guard()
        guard.join()
        self.scheduler.sleep(SETTLED_S)
        self.settled()
        self.works()
        for side in self.sides:
            self.close(side)
        self.close(self.node)
        self.scheduler.sleep(SETTLED_S)
        self.ended()

    def quiet(self) -> None:
        """Nothing goes wrong any more."""
        self.world.faults.stop()
        self.network.breaks = self.network.short = 0.0
        self.network.calls_left = -1

    def close(self, one: Node | Side) -> None:
        if not (one.closing or one.process.dead):
            self.say("{} closes", one.process.name)
            self.start(one.process, "closing", one.close).join()

    def be_strange(self) -> None:
        """Connect, say nothing of use, and stay or go."""
        r, socket = self.world.random, self.network.socket
        try:
            sock = self.network.new()
            sock.timeout_s = TIMEOUT_S
            where = self.address.removeprefix("unix://")
            sock.connect(where if self.plan.shared else ("d", 4000))
            said = r.choice((b"", b"\x05\0\0\0\0\0\0\0", bytes(40), b"\xff" * 40))
            if said:
                sock.sendmsg([said], (), socket.MSG_DONTWAIT)
            if not self.plan.calm:
                self.scheduler.sleep(r.choice((0.0, 3.0, 30.0)))
        except OSError:
            self.check(not self.plan.calm, "a stranger cannot connect")
        finally:
            self.scheduler.pause()

    def look(self) -> None:
        self.looks += 1
        if self.looks % 4 == 0:
            for node in self.nodes.values():
                node.look()
            for side in self.sides:
                side.look()

    def settled(self) -> None:
        """Nothing is under way, and every slot is back, while both sides are still connected."""
        for node in self.nodes.values():
            if node.process.dead or node.closing:
                continue
            receiver, arena = node.receiver, node.arena
            left = *receiver.transfers(), *dict(receiver.records())
            self.check(not left, "D is not done with {}", left)
            receiver.check_integrity()  # nor has it slots for what it does not list
            self.check(arena.free == arena.slots, "D has {} of {} slots", arena.free, arena.slots)
        for side in self.sides:
            if side.process.dead:
                continue
            name, staging = side.process.name, side.staging
            left = *side.sender.transfers(), *side.sender._lenders
            self.check(not left, "{} is not done with {}", name, left)
            self.check(staging.free == staging.slots, "{} has {} slots", name, staging.free)
            for handle in side.handles:
                self.check(handle.done.done(), "{} of {} never ends", handle.id, name)
                self.check(handle.admitted.done(), "{} of {} is never admitted", handle.id, name)
            for what, count in side.completed.items():
                self.check(count == 1, "{} was told {} times of {}", name, count, what)

    def works(self) -> None:
        """A request goes through, as soon as nothing is wrong any more."""
        if self.node.closing or self.node.process.dead:
            self.open_node()
        node, plan = self.node, self.plan
        plan.calm = True
        for number, side in enumerate(self.sides):
            if not (side.closing or side.process.dead):
                request = Request(f"last-{number}", number, [NAMES[:2]])
                used = self.start(node.process, f"use-{request.id}", partial(node.use, request))
                self.start(side.process, f"send-{request.id}", partial(side.send, request, 0)).join()
                used.join()

    def ended(self) -> None:
        """Every slot, thread, socket and descriptor is back."""
        for one in (*self.nodes.values(), *self.sides):
            if not one.process.dead:
                arena: WatchedStaging = one.arena if isinstance(one, Node) else one.staging
                arena.check_integrity()
                free, slots = arena.free, arena.slots
                self.check(free == slots, "{}: {} of {} slots", one.process.name, free, slots)
            elif isinstance(one, Node) and one.arena.descriptor is not None:
                os.close(one.arena.descriptor)
        tasks = [t for t in self.scheduler.tasks if not (t.done or t.killed)]
        left = [t.name for t in tasks if t.name.startswith("kvkit-handoff")]
        self.check(not left, "threads are left: {}", ", ".join(left))
        sockets = [str(sock) for sock in self.network.sockets if sock.process.name != "X"]
        self.check(not sockets, "sockets are left: {}", ", ".join(sockets))
        self.check(not self.network.descriptors, "descriptors are left: {}", len(self.network.descriptors))


def handoff_life(world: World) -> Callable[[], None]:
    """What the first thread of a simulation is to do."""
    return HandoffLife(world).live
