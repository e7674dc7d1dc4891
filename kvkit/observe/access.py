"""Access to a cache's HTTP endpoint: the address it listens on, and the token that clients must show.

No message contains the token.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from kvkit.environment import is_loopback
from kvkit.settings import ConfigError

DEFAULT_PORT = 9477
MIN_TOKEN_CHARS = 16


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a socket that listens at this address (port 0: any free port), and its URL.
    Raises OSError or OverflowError if the address is not of this host, or is taken."""
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return listening, f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def default_token_file() -> Path:
    """Return the path of this user's token: kvkit/token below $XDG_STATE_HOME or ~/.local/state.
    Raises ConfigError if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvkit" / "token"
    except RuntimeError as error:
        raise ConfigError(f"server.token_file: none given, and there is no home: {error}") from error


def make_token(path: Path) -> str:
    """Return the token in `path`; if there is no such file, create one that only this user can read.
    Raises ConfigError if the file cannot be written, and as `read_token`."""
    if path.exists():
        return read_token(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            os.link(draft, path)  # appears complete, or not at all if another process was first
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    except OSError as error:
        raise ConfigError(f"server.token_file={str(path)!r}: {error}") from error
    return read_token(path)


def read_token(path: Path, setting: str = "server.token_file") -> str:
    """Return the token, or another secret, in `path`; messages name `setting`.
    Raises ConfigError if the file cannot be read, every user can read it, or it holds no token."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={str(path)!r}: {error}") from error
    if mode & 0o007:
        raise ConfigError(f"{setting}={str(path)!r}: has mode {mode:04o}; want 0600, for one user")
    check_token(token, f"{setting}={str(path)!r}")
    return token


def check_token(token: str, setting: str) -> None:
    """Check that `token` is a valid token.
    Raises ConfigError if it is too short, or no HTTP header can hold it."""
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{setting}: want at least {MIN_TOKEN_CHARS} printable ASCII characters, no spaces")


def token_for(url: str, token_file: Path | None = None) -> str:
    """Return the token for `url`: of `token_file`, else KVKIT_SERVER__TOKEN, else this user's own.

    The user's own token is sent to this host only: other hosts have no use for it.

    Raises:
        ConfigError: `url` is on another host and no token was given, or the file holds no token or every user
            can read it.
    """
    if token_file is not None:
        return read_token(token_file)
    if token := os.environ.get("KVKIT_SERVER__TOKEN"):
        return token
    host = urlsplit(url).hostname or ""
    if not is_loopback(host):
        raise ConfigError(f"{url}: give the token of that endpoint (--token-file, or KVKIT_SERVER__TOKEN)")
    return read_token(default_token_file())
