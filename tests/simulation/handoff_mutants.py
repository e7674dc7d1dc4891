"""Defects of senders, receivers and their connections, planted one at a time."""

from __future__ import annotations

from functools import partial

from simulation.mutant import Mutant

SENDER, RECEIVER = "kvkit/handoff/sender.py", "kvkit/handoff/receiver.py"
ENDPOINT, PEER = "kvkit/handoff/endpoint.py", "kvkit/handoff/peer.py"
DEADLINES, LINKS = "kvkit/handoff/deadlines.py", "kvkit/handoff/links.py"
LINK, CHANNEL = "kvkit/handoff/transport/link.py", "kvkit/handoff/transport/channel.py"
STREAM, UNIX = "kvkit/handoff/transport/stream.py", "kvkit/handoff/transport/unix.py"
DOOR, OUTGOING = "kvkit/handoff/transport/acceptor.py", "kvkit/handoff/protocol/outgoing.py"

planted = partial(Mutant, scenario="handoff")

HANDOFF_MUTANTS = (
    # locks that are not taken
    planted(
        "what a release makes of the state is worked out before the lock",
        RECEIVER,
        """\
        with self._changed:
            self._apply(states.release(self._buffer, request_id, reason, time.monotonic()))
""",
        """\
        outcome = states.release(self._buffer, request_id, reason, time.monotonic())
        with self._changed:
            self._apply(outcome)
""",
    ),
    planted(
        "what a lost connection makes of the state is worked out before the lock",
        RECEIVER,
        """\
        with self._changed:
            self._links.pop(link.number, None)
            self._apply(states.peer_lost(self._buffer, link.number, time.monotonic()), quiet=link.number)
""",
        """\
        outcome = states.peer_lost(self._buffer, link.number, time.monotonic())
        with self._changed:
            self._links.pop(link.number, None)
            self._apply(outcome, quiet=link.number)
""",
    ),
    planted(
        "a channel is shut down while a slot of its peer is being written",
        CHANNEL,
        "        with self._writing, suppress(OSError):\n",
        "        with suppress(OSError):\n",
    ),
    # notifications
    planted(
        "who closes deadlines may not be heard",
        DEADLINES,
        """\
            self._changed.clear()  # before `expire`: a later change ends the next wait
            if self._closed:
                return
""",
        """\
            if self._closed:
                return
            self._changed.clear()
""",
    ),
    planted(
        "a deadline that is nearer than those before is not heard of",
        DEADLINES,
        "            self._changed.set()\n\n    def close",
        "            pass\n\n    def close",
    ),
    planted(
        "nobody is told that a message waits to be sent",
        LINK,
        """\
                self._queue.append(item)
            self._changed.notify_all()
""",
        """\
                self._queue.append(item)
""",
    ),
    planted(
        "nobody hears that a transfer was committed",
        RECEIVER,
        """\
                link.queue_message(message)
        self._changed.notify_all()
""",
        """\
                link.queue_message(message)
""",
    ),
    # slots
    planted(
        "slots of a transfer that was given up go to others before its sender answers",
        RECEIVER,
        "                    unanswered += [lease.share() for lease in unfilled]\n",
        "                    unanswered += []\n",
    ),
    planted(
        "what a sender did not answer for is kept when it is gone",
        RECEIVER,
        "                release_all(self._unanswered.pop(key))\n",
        "                self._unanswered.pop(key)\n",
    ),
    planted(
        "a release is answered while a record is being made in its slots",
        SENDER,
        """\
        if self.borrowed:
            self.held_messages.append(message)
""",
        """\
        if self.borrowed and not isinstance(message, messages.Cancel):
            self.held_messages.append(message)
""",
    ),
    planted(
        "a record is queued without a share of its slot",
        LINK,
        "_Item(lease.share(), slot, wanted, on_sent)",
        "_Item(lease, slot, wanted, on_sent)",
    ),
    planted(
        "what is queued when a link ends is told to nobody",
        LINK,
        "        for item in unsent:\n            item.done(error)\n",
        "",
    ),
    planted(
        "a record that is sent to one who pulls keeps its slot",
        ENDPOINT,
        """\
            with lease:
                data = Data(pull.transfer, index, lease.used)
""",
        """\
            if lease:
                data = Data(pull.transfer, index, lease.used)
""",
    ),
    planted(
        "a pull that ends twice reports its records twice",
        PEER,
        "                pull = self._pulls.pop(transfer, None)\n            if pull is not None:\n",
        "                pull = self._pulls.get(transfer)\n            if pull is not None:\n",
    ),
    planted(
        "what a receiver says of a link that ended is not forgotten",
        ENDPOINT,
        "        if self._receiver is not None:\n            self._receiver.handle_ended(link)\n",
        "",
    ),
    # ends
    planted(
        "a release is not answered",
        OUTGOING,
        "    return refused(out, reason)[0], (Cancel(out.id),)\n",
        "    return refused(out, reason)[0], ()\n",
    ),
    planted(
        "the thread that ends first closes the descriptor",
        LINK,
        "channel = self._channel if not self._users else None",
        "channel = self._channel if self._users else None",
    ),
    planted(
        "a thread that cannot be started is counted as one that uses the channel",
        LINK,
        """\
            with self._changed:
                self._users -= 1
            raise ChannelError(f"no thread for a connection: {error}") from error
""",
        """\
            raise ChannelError(f"no thread for a connection: {error}") from error
""",
    ),
    planted(
        "no thread for a peer's slots is an error that nobody expects",
        UNIX,
        "            except RuntimeError as error:\n                raise ChannelError(",
        "            except ZeroDivisionError as error:\n                raise ChannelError(",
    ),
    # bytes
    planted(
        "what a short write leaves is taken for sent",
        STREAM,
        "            unsent[0] = memoryview(unsent[0])[sent:]\n",
        "            unsent[0] = memoryview(unsent[0])[max(1, sent):]\n",
    ),
    planted(
        "what a short read leaves is taken for received",
        STREAM,
        """\
            if count == 0:
                raise EOFError
""",
        """\
            if count == 0:
                raise EOFError
            break
""",
    ),
)
