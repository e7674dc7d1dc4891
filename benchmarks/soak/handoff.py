"""Handoff under random requests: small buffers, cancels, delays, kill -9 of senders and of a receiver.

    python -m benchmarks.soak.handoff --minutes 30 --json FILE

Sending processes hand random runs of records to two receivers, over shared memory and TCP, and are killed
at random; one receiver is killed, too, the other is in this process and is checked. Every request must end,
what a receiver shows must have the bytes of its name, and after each phase, when all senders have been
killed, every slot must be free. The exit status is 1 if anything was wrong, or this process grew.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak.leaks import Flat
from benchmarks.soak.phases import Phases, options, phases_of, report
from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.protocol.states import Limits, Phase
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import HandoffError, Sender, Sending
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport.handshake import Identity
from kvkit.staging import Staging, release_all
from kvkit.tiers.testing.contract import SLOT_BYTES, record_bytes, record_names

IDENTITY = Identity(
    "soak", namespace="soak", layout="soak", slot_bytes=SLOT_BYTES, secret=b"of the soak test"
)
SLOTS, LONGEST, POOL = 12, 10, 40
"""Slots of a receiver, records of the longest request, and of all requests: they share many."""

SENDERS, AT_A_TIME, SENDER_SLOTS = 3, 4, 6
"""Sending processes; requests that each has under way; its slots, fewer than one request may take."""

EACH = 50
"""Requests of each thread of a process: then it proves that it has lost nothing, and another begins."""

PAUSE_S = 1.0
"""Between two requests of a thread, on average; none with `--quick`."""

QUICK_REQUESTS = 120
"""Of all, with `--quick`."""

LIMITS = Limits(allocation_s=5.0, transfer_s=5.0, idle_s=0.5)
FATES = {"sent": 0.75, "cancelled": 0.15, "cut short": 0.1}
KILLED, DELAYED, UNUSED = 0.01, 0.1, 0.1
"""Shares of requests: after which a process is killed, that dawdle, and that nobody uses."""

GIVEN_UP = 0.01
"""The share of looks of a receiver at a transfer under way that end it."""

HANGS_S = 600.0
"""A request that has not ended after so long hangs. Others may have nearly all of the machine."""


class Node:
    """A receiver with its endpoint, and a thread that uses what comes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.receiver = Receiver(Staging(SLOT_BYTES, SLOTS, shared=True), LIMITS)
        self.tier = HandoffTier(self.receiver, None)
        listen = [f"unix://{folder}/{name}/socket", "tcp://127.0.0.1:0"]
        self.endpoint = Endpoint(self.receiver, (), IDENTITY, listen, timeout_s=5.0, pin_s=0.0)
        self.used = 0
        self.wrong = 0
        self._chance = random.Random(name)
        self._closed = threading.Event()
        self._user = threading.Thread(target=self._use, daemon=True)
        self._user.start()

    def rest(self) -> list[str]:
        """When all senders are dead, and what they left has ended: what is wrong."""
        arena, deadline = self.receiver.arena, time.monotonic() + HANGS_S
        while arena.free != arena.slots and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._check()

    def close(self) -> list[str]:
        """End it; what is wrong with it."""
        self._closed.set()
        self._user.join()
        self.receiver.close(HANGS_S)
        self.endpoint.close(HANGS_S)
        return self._check()

    def _check(self) -> list[str]:
        """What is wrong, where nobody sends."""
        arena = self.receiver.arena
        wrong = [f"{self.wrong} records had other bytes than their names say"] if self.wrong else []
        self.wrong = 0
        try:
            self.receiver.check_integrity()
            arena.check_integrity()
        except AssertionError as error:
            wrong.append(f"receiver: {error}")
        if arena.free != arena.slots:
            wrong.append(f"receiver: {arena.slots - arena.free} slots are lost")
        return wrong

    def _use(self) -> None:
        """Check and release transfers that are complete; leave some to their deadline."""
        left: set[str] = set()
        while not self._closed.wait(0.005):
            for name, _ in self.receiver.records():
                lease = self.receiver.borrow(name)
                if lease is not None:
                    with lease:
                        self.wrong += not np.array_equal(lease.record, record_bytes(name))
            transfers = self.receiver.transfers()
            left &= transfers.keys()
            for transfer, phase in transfers.items():
                if phase is Phase.COMMITTED and transfer not in left:
                    if self._chance.random() < UNUSED:
                        left.add(transfer)
                    else:
                        self.receiver.release(transfer)
                        self.used += 1
                elif phase is Phase.RECEIVING and self._chance.random() < GIVEN_UP:
                    self.receiver.release(transfer, "given up")


class Work:
    """One sender and its random requests."""

    def __init__(self, seed: str) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.sender = Sender(IDENTITY, timeout_s=5.0, transfer_s=5.0)
        self.staging = Staging(SLOT_BYTES, SENDER_SLOTS)
        self.pool = record_names(POOL)

    def request(self, number: int, addresses: Sequence[str]) -> str:
        """Play one request; how it ended."""
        chance = self.chance
        start = chance.randrange(POOL)
        names = (self.pool * 2)[start : start + chance.randint(1, LONGEST)]
        transfer = self.sender.open(f"{self.seed}-{number}", chance.choice(addresses), names, 5.0)
        (outcome,) = chance.choices(list(FATES), list(FATES.values()))
        stop = chance.randrange(-1, len(names))  # -1: before there is room
        try:
            if outcome != "cancelled" or stop >= 0:
                transfer.admitted.result(HANGS_S)
            for i, name in enumerate(names):
                if outcome == "cancelled" and i >= stop:
                    self.sender.cancel(transfer.id)
                if outcome == "cut short" and i >= stop:
                    break
                if chance.random() < DELAYED:
                    time.sleep(chance.random() / 50)
                self.put(name)
            self.sender.finish(transfer.id)
            return self._end(transfer)
        except HandoffError as error:
            return "gone" if "is gone" in str(error) else str(error).partition(": ")[2]
        except TimeoutError:
            return "hangs"

    def close(self) -> list[str]:
        """End it; what is wrong with it."""
        self.sender.close(HANGS_S)
        self.staging.check_integrity()
        lost = self.staging.slots - self.staging.free
        return [f"sender {self.seed}: {lost} slots are lost"] if lost else []

    def put(self, name: str) -> None:
        leases = self.staging.acquire(1, HANGS_S)
        leases[0].array[:] = record_bytes(name)
        leases[0].used = SLOT_BYTES
        self.sender.put([name], leases, lambda name, error: None)
        release_all(leases)

    def _end(self, transfer: Sending) -> str:
        return "partly done" if transfer.done.result(HANGS_S) else "done"


class Process:
    """A process of this script; its lines are read by a thread."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.handoff", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.lines = self._process.stdout
        """Closed by who reads them."""

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait(HANGS_S)


class Soak:
    """The whole of it."""

    def __init__(self, phases: Phases, folder: Path, pause_s: float = PAUSE_S, seed: int = 0) -> None:
        self.phases = phases
        self.folder = folder
        self.pause_s = pause_s
        self.chance = random.Random(seed)
        self.seed = seed
        self.outcomes: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._generation = 0

    def run(self) -> dict[str, Any]:
        """Play all requests; the result, "wrong" among it."""
        seconds = 0.0
        node, flat = Node(self.folder, "kept"), Flat(os.getpid())
        self.other = self._receiver()
        for _ in self.phases:
            began = time.monotonic()
            self._work(node)
            seconds += time.monotonic() - began
            self.wrong += node.rest()
            flat.rest()
        self.wrong += self._last_request(node)
        self._end_receiver()
        self.wrong += node.close()
        if self.outcomes["hangs"]:
            self.wrong.append(f"{self.outcomes['hangs']} requests hang")
        return {
            "seconds": round(seconds, 1),
            "done": {"requests": self._requests, "of them used where it is checked": node.used},
            "processes": self._generation,
            "outcomes": dict(self.outcomes.most_common()),
            "killed": dict(self.killed),
            "faults": {f"{who} killed": count for who, count in self.killed.items()}
            | {f"requests {what}": self.outcomes[what] for what in ("cancelled", "given up")},
            "wrong": self.wrong,
            "flat": {"the receiver that lives on": flat.result()},
        }

    @property
    def _requests(self) -> int:
        with self._lock:
            return self.outcomes.total()

    def _work(self, node: Node) -> None:
        """A phase; in the end all senders are killed."""
        addresses = [*node.endpoint.addresses, self.other[1]]
        senders = [self._sender(addresses) for _ in range(SENDERS)]
        while self.phases.goes_on(self._requests):
            for index, (process, thread) in enumerate(senders):
                if not thread.is_alive():
                    self._finished(process)
                    senders[index] = self._sender(addresses)
            due = self.chance.random() < 0.5 and self._requests * KILLED > self.killed.total()
            if due and self.chance.random() < 0.25:
                self._end_receiver()
                self.killed["receivers"] += 1
                self.other = self._receiver()
                addresses[-1] = self.other[1]
            elif due:
                self.chance.choice(senders)[0].kill()
                self.killed["senders"] += 1
            time.sleep(0.02)
        for process, thread in senders:
            process.kill()
            self.killed["senders"] += 1
            thread.join(HANGS_S)

    def _receiver(self) -> tuple[Process, str]:
        process = Process("--receiver", str(self.folder / "other"))
        return process, process.lines.readline().strip()

    def _end_receiver(self) -> None:
        process, _ = self.other
        process.kill()
        process.lines.close()

    def _sender(self, addresses: Sequence[str]) -> tuple[Process, threading.Thread]:
        self._generation += 1
        process = Process("--sender", f"{self.seed}-{self._generation}", str(self.pause_s), *addresses)

        def read() -> None:
            with process.lines:
                for line in process.lines:
                    with self._lock:
                        self.outcomes[line.strip()] += 1

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return process, thread

    def _finished(self, process: Process) -> None:
        """A sender that ended by itself must have ended well."""
        if process.wait() not in (0, -signal.SIGKILL):
            self.wrong.append(f"a sender ended with status {process.status}")

    def _last_request(self, node: Node) -> list[str]:
        """After all of that, a request of the whole buffer is served."""
        work = Work("last")
        names = record_names(SLOTS, "e" * 16)
        transfer = work.sender.open("last", node.endpoint.addresses[0], names, 5.0)
        try:
            transfer.admitted.result(HANGS_S)
            for name in names:
                work.put(name)
            transfer.done.result(HANGS_S)
        except (HandoffError, TimeoutError) as error:
            return [f"the last request failed: {error}", *work.close()]
        return work.close()


def be_receiver(folder: Path) -> None:
    """The receiver that is killed; ends with its parent."""
    node = Node(folder.parent, folder.name)
    print(node.endpoint.addresses[0], flush=True)
    while os.getppid() != 1:
        time.sleep(0.2)


def be_sender(seed: str, pause_s: float, addresses: Sequence[str]) -> int:
    """A sender: some requests at a time, then a proof that no slot is lost."""
    work = Work(seed)
    lock = threading.Lock()

    def play(worker: int) -> None:
        chance = random.Random(f"{seed}-{worker}")
        for number in range(EACH):
            time.sleep(chance.uniform(0, 2 * pause_s))
            outcome = work.request(worker * 1000 + number, addresses)
            with lock:
                print(outcome, flush=True)

    threads = [threading.Thread(target=play, args=(worker,)) for worker in range(AT_A_TIME)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = work.close()
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--receiver", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sender", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.receiver is not None:
        be_receiver(given.receiver)
        return 0
    if given.sender is not None:
        seed, pause_s, *addresses = given.sender
        return be_sender(seed, float(pause_s), addresses)
    phases = phases_of(given, QUICK_REQUESTS)
    with tempfile.TemporaryDirectory(prefix="kvkit-soak-") as folder:
        soak = Soak(phases, Path(folder), 0.0 if given.quick else PAUSE_S)
        return report(given, "soak.handoff", soak.run())


if __name__ == "__main__":
    sys.exit(main())
