"""Defects of the router, planted one at a time."""

from __future__ import annotations

from functools import partial

from simulation.mutant import Mutant

DISPATCH, ENGINES = "kvkit/router/dispatch.py", "kvkit/router/engines.py"
EVENTS, ANSWERS = "kvkit/router/events.py", "kvkit/router/answers.py"
CLIENTS = "kvkit/router/clients.py"

planted = partial(Mutant, scenario="router")

ROUTER_MUTANTS = (
    # what is counted
    planted(
        "a request whose client leaves stays counted at its engine",
        ENGINES,
        """\
        try:
            yield share
        finally:
            self._shares.remove(share)
""",
        """\
        try:
            yield share
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._shares.remove(share)
            raise
        self._shares.remove(share)
""",
    ),
    planted(
        "the deadline of a request that failed stays",
        ENGINES,
        """\
                finally:
                    del self._deadlines[deadline]
""",
        """\
                except TimeoutError:
                    del self._deadlines[deadline]
                    raise
                del self._deadlines[deadline]
""",
    ),
    # what fails
    planted(
        "an engine that fails a request is asked by it again",
        DISPATCH,
        "                routed.failed.add(failure.engine.name)\n",
        "                pass\n",
    ),
    planted(
        "an engine that refuses a connection is not noted to be down",
        ENGINES,
        "            self.up = False\n            self._suspected.set()\n",
        "            self._suspected.set()\n",
    ),
    planted(
        "what is under way at an engine that is found down is left there",
        ENGINES,
        "                    deadline.reschedule(now)\n",
        "                    pass\n",
    ),
    planted(
        "a stream that goes silent after its first event is waited for",
        DISPATCH,
        "                    deadline.reschedule(_now() + self._config.idle_timeout_s)\n",
        "",
    ),
    planted(
        "a stream that broke off begins again, after what the client has",
        DISPATCH,
        "            if not routed.client.stream_began:\n                routed.restart()\n",
        "            if not routed.answer.finished:\n                routed.restart()\n",
    ),
    planted(
        "an answer that its engine gave up is taken for whole",
        DISPATCH,
        """\
    if openai.is_aborted(event):
        raise EngineFailed(decode, "aborted", "it aborted the request")
    try:
""",
        "    try:\n",
    ),
    planted(
        "who takes an answer over gets tokens whose text the client has again",
        ANSWERS,
        "        self._position, self._given_tokens = dict(self._aligned), kept\n",
        "        self._given_tokens = kept\n",
    ),
    planted(
        "usage that a broken stream still owes is left out",
        DISPATCH,
        '                    last = b"" if usage is None else openai.event_bytes(usage)\n',
        '                    last = b""\n',
    ),
    # who leaves
    planted(
        "a client that leaves does not end its request to the engine",
        DISPATCH,
        "        reply = await engine.ask("
        '"POST", routed.engine_request.path, body, headers, limit_s, read)\n',
        "        asking = engine.ask("
        '"POST", routed.engine_request.path, body, headers, limit_s, read)\n'
        "        reply = await asyncio.shield(asyncio.ensure_future(asking))\n",
    ),
    planted(
        "a client that takes nothing is waited for",
        CLIENTS,
        "            async with asyncio.timeout(self._timeout_s):\n",
        "            async with asyncio.timeout(None):\n",
    ),
    # KV events
    planted(
        "a gap in the numbers of KV events is not noticed",
        EVENTS,
        "        if number != self._next:\n            return False\n",
        "",
    ),
    planted(
        "an engine that was started anew is taken for the same",
        EVENTS,
        "if not verified and not self._is_applied(number, batch):\n",
        "if False:\n",
    ),
    planted(
        "sockets for what was missed are not closed",
        EVENTS,
        "        with closing(_socket(zmq.DEALER)) as socket:\n",
        "        for socket in [_socket(zmq.DEALER)]:\n",
    ),
)
