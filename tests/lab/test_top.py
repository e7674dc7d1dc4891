"""`kvkit top` shows what an endpoint serves, live in a terminal, and reports lost endpoints."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from stub_cache import ManagedCache, filled_counts
from terminals import COLUMNS, command, environment, in_terminal, open_terminal, piped

from kvkit.lab.watch.report import cache_section
from kvkit.lab.watch.top import Snapshot, TopError, fetch, frame
from kvkit.observe.access import token_for
from kvkit.observe.http import Server
from kvkit.settings import ConfigError
from kvkit.tiers.testing.contract import DEADLINE_S

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def cache() -> Iterator[ManagedCache]:
    cache = ManagedCache()
    yield cache
    cache.close()


@pytest.fixture
def server(cache: ManagedCache) -> Iterator[Server]:
    with Server(cache, token=TOKEN, port=0) as server:
        yield server


def shown(now: Snapshot, before: Snapshot | None = None) -> list[str]:
    """The lines of a frame with all columns, as it is without a terminal."""
    console = Console(color_system=None)
    with console.capture() as captured:
        console.print(frame(now, before, wide=True, endless=True), crop=False)
    return captured.get().splitlines()


def row(lines: list[str], tier: str) -> list[str]:
    """The cells of a tier's row."""
    (line,) = (line for line in lines if line.strip().startswith(tier))
    return re.split(r"\s{2,}", line.strip())


DEAD = "http://127.0.0.1:1"
PROXIES = {"http_proxy": DEAD, "HTTP_PROXY": DEAD}
"""A proxy that is not there must not matter."""


def test_a_single_frame_shows_totals(server: Server, cache: ManagedCache) -> None:
    cache.kept = counts = filled_counts()
    counts.lookup_tokens, counts.lookups = 4000, 1234
    counts.hit_tokens.update({"near": 1000 - counts.hit_tokens["near"], "[far]": -counts.hit_tokens["[far]"]})
    counts.loaded_bytes["near"] = 2_500_000_000
    counts.timeouts["[far]"] = 77
    lease = cache.staging.acquire(1, 1.0)[0]
    cache.break_tier("[far]")
    lines = shown(fetch(server.url, TOKEN, DEADLINE_S))
    lease.release()
    assert lines[0] == server.url
    assert lines[1] == "hit rate 25.0 %   lookups 1.234 k   tokens 4 k"
    assert lines[2] == "slots 1 of 12   pending puts 3"
    near, far = row(lines, "near"), row(lines, "[far]")
    assert near[:4] == ["near", "ok", "0", "1 k"]
    assert "2.5 G" in near
    assert far[:4] == ["[far]", "open", "7", "0"]
    assert far[-1] == "77"
    errors = counts.read_errors["[far]"] + counts.write_errors["[far]"]
    damaged = sum(n for (tier, _), n in counts.damaged.items() if tier == "[far]")
    gone = [counts.evicted_records["[far]"], counts.refused["[far]"], damaged, errors]
    assert far[-5:-1] == [f"{n:.4g}" if n < 1000 else f"{n / 1000:.4g} k" for n in gone]


def test_between_two_frames_all_is_per_second(server: Server, cache: ManagedCache) -> None:
    cache.kept = filled_counts()
    before = fetch(server.url, TOKEN, DEADLINE_S)
    cache.kept.lookup_tokens += 8000
    cache.kept.lookups += 5
    cache.kept.hit_tokens["near"] += 6000
    cache.kept.loaded_tokens["near"] += 2000
    cache.kept.stored_bytes["near"] += 3_000_000
    for _ in range(100):
        cache.kept.moved("near", "get", 1000, 0.003)
    now = fetch(server.url, TOKEN, DEADLINE_S)
    after_two_seconds = Snapshot(before.at + 2.0, now.url, now.tiers, now.samples)
    lines = shown(after_two_seconds, before)
    assert lines[1] == "hit rate 75.0 %   lookups/s 2.5   tokens/s 4 k"
    assert "hit tok/s" in lines[4]
    cells = row(lines, "near")
    assert cells[3:6] == ["3 k", "1 k", "0"]
    assert cells[6:8] == ["3.5 ms", "5.0 ms"], "of the interval alone: between 2 and 5 ms"
    assert cells[8] == "1.5 M"


def test_an_idle_interval_has_no_rate_and_no_latency(server: Server, cache: ManagedCache) -> None:
    cache.kept = filled_counts()
    snapshot = fetch(server.url, TOKEN, DEADLINE_S)
    later = Snapshot(snapshot.at + 1, snapshot.url, snapshot.tiers, snapshot.samples)
    lines = shown(later, snapshot)
    assert "hit rate -" in lines[1]
    assert row(lines, "near")[3:8] == ["0", "0", "0", "-", "-"]


def test_histograms_arrive_as_they_were(server: Server, cache: ManagedCache) -> None:
    cache.kept = counts = filled_counts()
    snapshot = fetch(server.url, TOKEN, DEADLINE_S)
    for (tier, direction), histogram in counts.seconds.items():
        found = snapshot.histogram("kvkit_transfer_seconds", tier, direction)
        assert found is not None
        assert (found.bounds, found.buckets) == (histogram.bounds, histogram.buckets)
    assert snapshot.histogram("kvkit_transfer_seconds", "other", "get") is None


def test_the_command_prints_one_frame(server: Server, cache: ManagedCache, tmp_path: Path) -> None:
    cache.kept = filled_counts()
    token_file = tmp_path / "kvkit" / "token"
    token_file.parent.mkdir()
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    for arguments, variables in (
        (["--token-file", str(token_file)], {"KVKIT_SERVER__TOKEN": "wrong-wrong-wrong-wrong"}),
        ([], {"KVKIT_SERVER__TOKEN": TOKEN}),
        ([], {"XDG_STATE_HOME": str(tmp_path)}),
    ):
        done = subprocess.run(
            command("top", server.url, "--once", *arguments),
            env=environment(**PROXIES, **variables),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "hit rate" in done.stdout
        assert row(done.stdout.splitlines(), "[far]")[1] == "ok"


@contextmanager
def terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command in a terminal of its own, and the file descriptor of what it shows."""
    master, slave = open_terminal()
    process = subprocess.Popen(
        command("top", *arguments),
        env=environment(**PROXIES, KVKIT_SERVER__TOKEN=TOKEN),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # whoever started us may ignore it
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)


def read_until(descriptor: int, words: str) -> str:
    """What is shown up to `words`, or to the end."""
    text, deadline = b"", time.monotonic() + DEADLINE_S
    while words.encode() not in text:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{words!r} did not come: {text[-2000:].decode()}"
        try:
            text += os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
    assert words.encode() in text, text[-2000:].decode()
    return text.decode()


def test_all_of_a_frame_is_in_a_terminal_of_80_columns(server: Server, cache: ManagedCache) -> None:
    """And as JSON, one snapshot."""
    cache.kept = counts = filled_counts()
    counts.loaded_bytes["near"] = 123_456_789_012_345
    counts.stored_bytes["near"] = 987_654_321_098_765
    variables = PROXIES | {"KVKIT_SERVER__TOKEN": TOKEN}
    wide = in_terminal("top", server.url, "--once", "--wide", **variables)
    few = in_terminal("top", server.url, "--once", **variables)
    through = piped("top", server.url, "--once", "--wide", **variables)
    for lines in (few, wide):
        assert server.url in lines
        assert max(map(len, lines)) <= COLUMNS
        for word in ("near", "[far]", "123.5 T", "987.7 T", "ok"):
            assert word in "\n".join(lines)
    (titles,) = (line for line in through if line.startswith("tier "))
    for title in re.split(r"\s{2,}", titles.strip()):
        assert title in "\n".join(wide)
    assert row(through, "near")[0] == "near"
    assert not any("…" in line or "\x1b" in line for line in few + wide + through)
    (line,) = piped("top", server.url, "--json", **variables)
    found = json.loads(line)
    near, far = found["tiers"]
    assert (near["name"], near["state"], far["name"]) == ("near", "ok", "[far]")
    assert (near["loaded_bytes"], near["stored_bytes"]) == (123_456_789_012_345, 987_654_321_098_765)
    assert far["errors"] == counts.read_errors["[far]"] + counts.write_errors["[far]"]
    assert found["lookup_tokens"] == counts.lookup_tokens
    assert found["hit_rate"] == pytest.approx(sum(counts.hit_tokens.values()) / counts.lookup_tokens)
    times = counts.seconds["near", "get"]
    assert (near["get_p50_s"], near["get_p99_s"]) == (times.quantile(0.5), times.quantile(0.99))


@pytest.mark.parametrize("arguments", [("top", "{}", "--once"), ("top", "{}", "--json"), ("report", "{}")])
def test_without_a_server_no_token_is_to_blame(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Where there is one, and no token here, it is."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

    def said(url: str) -> str:
        done = subprocess.run(
            command(*(argument.format(url) for argument in arguments)),
            env=environment(XDG_STATE_HOME=str(tmp_path)),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    silent = said(url)
    assert silent.startswith(f"error: {url}: nothing answers there")
    assert "token" not in silent
    cache = ManagedCache()
    with Server(cache, token=TOKEN, port=0) as server:
        asked = said(server.url)
    cache.close()
    assert asked.startswith(f"error: {server.url}: requires a token: server.token_file=")
    assert str(tmp_path) in asked


def test_it_goes_on_until_interrupted(server: Server, cache: ManagedCache) -> None:
    with terminal(server.url, "--interval", "0.1") as (process, shown_at):
        read_until(shown_at, "lookups 0")
        read_until(shown_at, "lookups/s 0")
        cache.break_tier("[far]")
        read_until(shown_at, "open")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0


def test_it_says_when_the_endpoint_goes_away(server: Server) -> None:
    with terminal(server.url, "--interval", "0.1") as (process, shown_at):
        read_until(shown_at, "lookups/s 0")
        server.close()
        assert "Traceback" not in read_until(shown_at, "nothing answers there")
        assert process.wait(DEADLINE_S) == 1


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(TopError, match=rf"{url}: nothing answers there: .*refused. Name the URL .* or start"):
        fetch(url, TOKEN, DEADLINE_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TopError, match=r"nothing answers there: no whole answer within 0\.1 s\. Name"):
            fetch(url, TOKEN, 0.1)
    assert capsys.readouterr().out == ""


def test_a_wrong_token_is_said_and_not_shown(server: Server) -> None:
    with pytest.raises(TopError, match=r"refuses the token; .*--token-file") as caught:
        fetch(server.url, "another-token-altogether", DEADLINE_S)
    assert "altogether" not in str(caught.value)


class UnauthenticatedPeer(BaseHTTPRequestHandler):
    """Answers /<n>/... with the n-th of `replies`."""

    replies = (
        (200, b"<html>hello</html>"),
        (200, b"kvkit_slots 1\n"),
        (404, b""),
        (302, b""),
        (200, b"\xff\xfe"),
    )
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        status, body = self.replies[int(self.path.split("/")[1])]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 302:
            self.send_header("Location", "/1/metrics")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_what_is_no_endpoint_of_ours_is_said() -> None:
    UnauthenticatedPeer.seen = []
    with HTTPServer(("127.0.0.1", 0), UnauthenticatedPeer) as stranger:
        thread = threading.Thread(target=stranger.serve_forever, args=(0.05,))
        thread.start()
        for number in range(len(UnauthenticatedPeer.replies)):
            with pytest.raises(TopError, match=r"answers, but is no endpoint of kvkit's"):
                fetch(f"http://127.0.0.1:{stranger.server_port}/{number}", TOKEN, DEADLINE_S)
        stranger.shutdown()
        thread.join(DEADLINE_S)
    assert UnauthenticatedPeer.seen.count("/1/metrics") == 1, (
        "a redirect is not followed: it would take the token along"
    )


def test_what_forbids_is_said_to_refuse_the_token() -> None:
    """As proxies in front of an endpoint do."""
    with answering(b"", b"", status=403) as url, pytest.raises(TopError, match="refuses the token"):
        fetch(url, TOKEN, DEADLINE_S)


@contextmanager
def answering(metrics: bytes, tiers: bytes, status: int = 200) -> Iterator[str]:
    """The URL of an endpoint that answers so."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = metrics if self.path.endswith("/metrics") else tiers
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(DEADLINE_S)


BUCKET = b'kvkit_transfer_seconds_bucket{tier="near",direction="get"%s} %s\n'
NEAR = b'[{"name": "near", "state": "ok"}]'


@pytest.mark.parametrize(
    ("metrics", "tiers"),
    [
        (b"kvkit_slots 1\n", b"[" * 100_000),
        (b"kvkit_slots 1\n", b'{"a":' * 100_000),
        (b"kvkit_slots 1\n", b"{}"),
        (b"kvkit_slots 1\n", b"[[]]"),
        (BUCKET % (b',le="1"', b"NaN"), NEAR),
        (BUCKET % (b',le="1"', b"+Inf"), NEAR),
        (BUCKET % (b',le="x"', b"1"), NEAR),
        (BUCKET % (b"", b"1"), NEAR),
        (BUCKET % (b',le="+Inf"', b"1"), NEAR),
        (BUCKET % (b',le="1"', b"5") + BUCKET % (b',le="2"', b"1"), NEAR),
        (b"# TYPE\n", NEAR),
        (b"\x1b[2J\n", NEAR),
    ],
)
def test_an_answer_that_cannot_be_shown_is_no_endpoint_s(metrics: bytes, tiers: bytes) -> None:
    no_endpoint = pytest.raises(TopError, match=r"answers, but is no endpoint of kvkit's: .")
    with answering(metrics, tiers) as url, no_endpoint as caught:
        fetch(url, TOKEN, DEADLINE_S)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", [b"a\\ud800b", b"a\\u001b[2Jb", b"a\\nb", b"[red]"])
def test_whatever_a_tier_is_called_is_shown(name: bytes) -> None:
    """As a terminal and a page can show it; also where the endpoint has other buckets from now on."""
    known = BUCKET % (b',le="1"', b"1") + BUCKET % (b',le="+Inf"', b"1")
    with answering(known, b'[{"name": "%s", "state": "%s"}, {"name": "near"}]' % (name, name)) as url:
        before = fetch(url, TOKEN, DEADLINE_S)
    with answering(known.replace(b'"1"', b'"2"'), NEAR) as url:
        now = fetch(url, TOKEN, DEADLINE_S)
    for lines in (shown(before), shown(now, before)):
        assert "".join(lines).isprintable()
    page = cache_section(before)
    page.encode()
    assert page.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n"]
)
def test_who_sends_a_byte_at_a_time_is_left(head: bytes) -> None:
    """Each byte comes in time, the answer never does."""
    left = threading.Event()

    def drip(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(head)
            while not left.wait(0.005):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with pytest.raises(TopError, match=r"nothing answers there: no whole answer within 0\.5 s"):
                fetch(url, TOKEN, 0.5)
        finally:
            left.set()
            dripping.join(DEADLINE_S)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:9477", "ftp://127.0.0.1", "http://", "http://x:port", "http://x:99999", "http://u:p@x"],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(TopError, match=r"want an address such as http://127\.0\.0\.1:9477"):
        fetch(url, TOKEN, DEADLINE_S)


def test_the_users_own_token_stays_on_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVKIT_SERVER__TOKEN", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="give the token of that endpoint"):
        token_for("http://192.0.2.1:9477")
    with pytest.raises(ConfigError, match="No such file"):
        token_for("http://127.0.0.1:9477")
    monkeypatch.setenv("KVKIT_SERVER__TOKEN", TOKEN)
    assert token_for("http://192.0.2.1:9477") == TOKEN
