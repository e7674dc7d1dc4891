"""Addresses of endpoints: unix:///path on one host, tcp://host:port or nixl://host:port between hosts."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from kvkit.format.urls import shown
from kvkit.handoff.transport import nixl, tcp, unix
from kvkit.handoff.transport.channel import Channel, Listener

RANK = "{rank}"


def listen(address: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> Listener:
    """Listen at `address`; port 0 picks a free port.

    Args:
        timeout_s: limit for one frame of this listener's channels, in seconds.
        tls: context from `kvkit.handoff.transport.tls.server_context`; for tcp only.

    Raises:
        ValueError: the address is invalid, NIXL is missing or given TLS, or other users may enter a unix
            socket's folder.
        OSError: the address is in use, or not one of this host.
    """
    location = parse(address)
    if isinstance(location, Path):
        return unix.LocalListener(location, timeout_s)
    host, port = location
    if _is_nixl(address, tls):
        return nixl.NixlListener(host, port, timeout_s)
    return tcp.TcpListener(host, port, timeout_s, tls)


def connect(address: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> Channel:
    """Return a channel to the endpoint that listens at `address`.

    Args:
        timeout_s: limit for connecting and for each frame of the channel, in seconds.
        tls: context from `kvkit.handoff.transport.tls.client_context`; for tcp only.

    Raises:
        ValueError: the address is invalid, or NIXL is missing or given TLS.
        ChannelError: no endpoint listens there, or it did not answer in time.
    """
    location = parse(address)
    if isinstance(location, Path):
        return unix.connect(location, timeout_s)
    if _is_nixl(address, tls):
        return nixl.connect(*location, timeout_s)
    return tcp.connect(*location, timeout_s, tls)


def check_secret(address: str, secret: bool) -> None:
    """Refuse an address that needs a secret if there is none. A unix address needs none.

    Raises:
        ValueError: the address is invalid, or needs a secret and has none.
    """
    if not isinstance(parse(address), Path) and not secret:
        raise ValueError(
            f"{address} has no secret, and every user of this host, or others, could be its peer: "
            "give secret or secret_file, the same at both sides, or use unix:///<path>"
        )


def of_rank(address: str, rank: int) -> str:
    """Return the address of a rank: its number replaces `{rank}`."""
    return address.replace(RANK, str(rank))


def parse(address: str) -> Path | tuple[str, int]:
    """Return the path of a unix address, or (host, port) of another one.

    Raises:
        ValueError: the address is invalid.
    """
    with suppress(ValueError):
        url = urlsplit(address)
        plain = "@" not in url.netloc and not {"?", "#"} & {*address}
        if url.scheme == "unix" and not url.netloc and url.path.startswith("/") and plain:
            return Path(url.path)
        if url.scheme in ("tcp", "nixl") and url.hostname and not url.path and plain and url.port is not None:
            return url.hostname, url.port
    raise ValueError(
        f"{quoted(address)}: want unix:///<path>, tcp://<host>:<port> or nixl://<host>:<port>, and no more"
    )


def quoted(address: str) -> str:
    """Return `address` for messages: without user name, password and token."""
    return shown(address) if "://" in address else shown(f"://{address}").removeprefix("://")


def _is_nixl(address: str, tls: ssl.SSLContext | None) -> bool:
    if not address.startswith("nixl:"):
        return False
    if tls is not None:
        raise ValueError(f"{address}: NIXL does not encrypt; want tcp:// with TLS")
    return True
