"""Defects of caches and tiers, planted one at a time."""

from __future__ import annotations

from simulation.mutant import Mutant

STAGING, WORKERS, PROMISES = "kvkit/staging.py", "kvkit/workers.py", "kvkit/transfer/pending_stores.py"
READS, WRITES = "kvkit/transfer/read_pipeline.py", "kvkit/transfer/write_pipeline.py"
TIERS = "kvkit/transfer/tier_set.py"
LOOKUP, STORE, LOAD = "kvkit/transfer/lookup.py", "kvkit/transfer/store.py", "kvkit/transfer/load.py"
MEMORY, STORE_INDEX, BASE = "kvkit/tiers/memory.py", "kvkit/tiers/store_index.py", "kvkit/tiers/base.py"
HEALTH, LAYERS = "kvkit/tiers/health.py", "kvkit/transfer/layer_reads.py"
CLOSING = "kvkit/transfer/closing.py"

CACHE_MUTANTS = (
    # locks that are not taken
    Mutant(
        "two threads give back shares of one slot, and one of them does not count",
        STAGING,
        """\
        with self._changed:
            if not self._drop_reference(lease):
                return
""",
        """\
        if not self._drop_reference(lease):
            return
        with self._changed:
""",
    ),
    Mutant(
        "puts that end are counted without the lock",
        WRITES,
        """\
        with self._lock:
            self._in_flight -= 1
            self._progress_s = time.monotonic()
""",
        """\
        left = self._in_flight - 1
        self._progress_s = time.monotonic()
        self._in_flight = left
""",
    ),
    Mutant(
        "a job is taken without the lock: another thread takes it first",
        WORKERS,
        """\
                self._idle -= 1
                job = (self._urgent or self._jobs).popleft()
            job()
""",
        """\
                self._idle -= 1
            job = (self._urgent or self._jobs).popleft()
            job()
""",
    ),
    Mutant(
        "a record that is reported twice is counted twice: two threads find it not reported yet",
        TIERS,
        """\
        with self._lock:
            unreported = self._unreported.pop(name, None)
            if unreported is None:  # reported before
                return
            job, share = unreported
            self._bytes += 0 if error is not None else share.used
            last = not self._unreported
""",
        """\
        with self._lock:
            unreported = self._unreported.get(name)
            if unreported is None:  # reported before
                return
            job, share = unreported
            self._bytes += 0 if error is not None else share.used
            last = len(self._unreported) == 1
        self._unreported.pop(name)
""",
    ),
    # notifications
    Mutant(
        "who returns a slot wakes nobody",
        STAGING,
        """\
            self._free.appendleft(lease.slot)  # the slot used last is the one in cache
            self._changed.notify_all()
""",
        """\
            self._free.appendleft(lease.slot)  # the slot used last is the one in cache
""",
    ),
    Mutant(
        "one thread is woken for many jobs",
        WORKERS,
        """\
            self._changed.notify(len(jobs))
""",
        """\
            self._changed.notify(0)
""",
    ),
    Mutant(
        "threads are not told that they are to end",
        WORKERS,
        """\
            self._closed = True
            self._changed.notify_all()
        deadline""",
        """\
            self._closed = True
        deadline""",
    ),
    Mutant(
        "a flush does not hear of the last put",
        WRITES,
        """\
                del self._unreported[start]
                self._changed.notify_all()
""",
        """\
                del self._unreported[start]
""",
    ),
    Mutant(
        "who waits for a promise does not hear that it is kept",
        PROMISES,
        """\
                    del stores_of[name]
            changed.notify_all()
""",
        """\
                    del stores_of[name]
""",
    ),
    Mutant(
        "a load does not hear that its record was read",
        READS,
        """\
            self.error, self.ended = error, True
            self.reads.changed.notify()
""",
        """\
            self.error, self.ended = error, True
""",
    ),
    # waits
    Mutant(
        "slots are taken without a look whether they are still there after the wait",
        STAGING,
        """\
                    if ready():
                        return self._lease(""",
        """\
                    if not self._closed:
                        return self._lease(""",
    ),
    Mutant(
        "a load waits for its records without a deadline",
        READS,
        "self.changed.wait_for(finished, deadline - time.monotonic())",
        "self.changed.wait_for(finished)",
    ),
    Mutant(
        "a question to a tier has no deadline",
        TIERS,
        "future.result(self.timeout_s if timeout_s is None else max(0.0, timeout_s))",
        "future.result(None if timeout_s is None else max(0.0, timeout_s))",
    ),
    Mutant(
        "who waits for slots has no deadline",
        STAGING,
        """\
                    if remaining_s <= RECLAIM_S:
""",
        """\
                    if remaining_s <= -1e9:
""",
    ),
    # slots
    Mutant(
        "a tier reads into a slot that it has no share of",
        BASE,
        """\
    shares = [lease.share() for lease in leases]
    jobs""",
        """\
    shares = list(leases)
    jobs""",
    ),
    Mutant(
        "a load gives its slots back before it has used what is in them",
        LOAD,
        """\
                        try:
                            if ready:  # 4. used, 5. written back, later
""",
        """\
                        release_all(ready)
                        try:
                            if ready:  # 4. used, 5. written back, later
""",
    ),
    Mutant(
        "a put that waits has no share of its slot",
        WRITES,
        """\
                job.lease = job.lease.share()
            self._waiting""",
        """\
                job.lease = job.lease
            self._waiting""",
    ),
    Mutant(
        "puts that are asked for later forget their slots where the tier fails",
        WRITES,
        """\
            finally:
                release_all(shares)

        try:
            self._offering""",
        """\
            finally:
                if run < len(jobs):
                    release_all(shares)

        try:
            self._offering""",
    ),
    Mutant(
        "what was read for nothing is not given back",
        READS,
        """\
            read.ended = True
            read.lease.release()
        self.next = min(self.next, start)
""",
        """\
            read.ended = True
            if not read.error:
                read.lease.release()
        self.next = min(self.next, start)
""",
    ),
    Mutant(
        "evicted records keep their slots",
        MEMORY,
        """\
            released = [self._leases.pop(victim) for victim in victims]
""",
        """\
            released = [self._leases.pop(victim) for victim in victims[1:]]
""",
    ),
    # pages
    Mutant(
        "pages are packed after they were given back",
        STORE,
        """\
                    with transfer.pages:
                        if transfer.stopped:
                            break
                        pack_records(chunks, self.pages, numbers, leases, self.after)
""",
        """\
                    with transfer.pages:
                        if transfer.stopped:
                            break
                    pack_records(chunks, self.pages, numbers, leases, self.after)
""",
    ),
    # what is seen, and when
    Mutant(
        "a record is a hit while it is written",
        STORE_INDEX,
        "names[count] in known and names[count] not in writing",
        "names[count] in known",
    ),
    Mutant(
        "what could neither be deleted nor looked at takes no room any more",
        STORE_INDEX,
        """\
            size: int | None = largest  # unless the store reports its size
""",
        """\
            size: int | None = None
""",
    ),
    Mutant(
        "a record that is being written may be evicted",
        STORE_INDEX,
        """\
                may_evict=lambda victim: victim not in self._writing,
""",
        "",
    ),
    Mutant(
        "who stores is told of a chunk when the first of its records is there",
        PROMISES,
        "complete = self._stored[tier, chunk] == self._groups",
        "complete = self._stored[tier, chunk] == 1",
    ),
    Mutant(
        "a promise ends with the store, not with the tier that has it",
        PROMISES,
        """\
                    if kept or not self.attempts[name]:
""",
        """\
                    if kept or self.attempts[name] < 2:
""",
    ),
    Mutant(
        "what is promised is asked after the tiers: what ended in between is missed",
        LOOKUP,
        """\
    pending = tiers.pending_stores.among(chunks.names)  # first: what ends meanwhile is found in a tier
    plan = find(tiers, chunks, RetrievePlan(len(chunks)), sought=sought)
""",
        """\
    plan = find(tiers, chunks, RetrievePlan(len(chunks)), sought=sought)
    pending = tiers.pending_stores.among(chunks.names)
""",
    ),
    # queues, circuits, ends
    Mutant(
        "who starts puts does not look again for those that came meanwhile",
        WRITES,
        """\
                if not jobs:
                    self._starting = False
                    return
""",
        """\
                if not jobs:
                    break
""",
    ),
    Mutant(
        "a tier that is closed is given up before its threads have ended",
        TIERS,
        """\
            if not wait([end], max(0.0, until - time.monotonic())).done:
""",
        """\
            if end.cancel() or not wait([end], max(0.0, until - time.monotonic())).done:
""",
    ),
    Mutant(
        "closing has twice the time that it is given",
        CLOSING,
        """\
    until = time.monotonic() + timeout_s
""",
        """\
    until = time.monotonic() + 2 * timeout_s
""",
    ),
    Mutant(
        "a trial that ends undecided stays under way",
        HEALTH,
        """\
            if self._trial_pending:
                self._trial_pending, self._paused_until = False, now
""",
        """\
            if self._trial_pending:
                self._paused_until = now + 1e9
""",
    ),
    Mutant(
        "a store that is called off never says that it is done",
        STORE,
        """\
        transfer.add_done_callback(lambda done: self.abort() if done.cancelled() else None)
""",
        "",
    ),
    Mutant(
        "a layer's slots are given back while it is being read into them",
        LAYERS,
        """\
            share = read.lease.share()  # a late read must not write into a reused slot
""",
        """\
            share = read.lease
""",
    ),
)
