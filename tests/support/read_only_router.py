"""Build the router's image by its steps in a folder, and run it here, where the root becomes read-only.

Run as a program in a mount namespace, as root, with what is asked as JSON. Other packages are those of here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from repository import ROOT
from routers import fetch

from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for


def build(asked: dict[str, Any], environment: Path) -> None:
    """Run the image's steps, with `environment` in place of /opt/kvkit."""
    source = Path(asked["folder"]) / "src"
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().strip("\0").split("\0"):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    for run in asked["runs"]:
        run = run.replace("/opt/kvkit", str(environment)).replace("/src[", f"{source}[")
        run = run.replace("python -m venv", f"{sys.executable} -m venv")
        run = run.replace("--no-cache-dir", "--no-cache-dir --no-deps")
        if "pip install" in run:
            (site,) = environment.glob("lib/python*/site-packages")
            (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run(["sh", "-c", run], check=True, stdout=sys.stderr)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def open_way_to(path: Path) -> None:
    """Let anybody reach a folder, in this namespace: the closed folders above it show nothing but the way."""
    closed = [above for above in path.parents if not above.stat().st_mode & 0o001]
    if not closed:
        return
    way = Path(tempfile.mkdtemp(dir="/dev/shm"))
    mount("--bind", path, way)
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", closed[-1])
    path.mkdir(parents=True)
    mount("--bind", way, path)
    mount("-o", "remount,bind,ro", path)
    subprocess.run(["umount", way], check=True)
    way.rmdir()


def main() -> None:
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"])
    environment, settings = folder / "kvkit", folder / "router.toml"
    build(asked, environment)
    settings.write_text('[decode.e0]\nurl = "http://127.0.0.1:9"\n')
    (port,) = free_ports(1)
    user, group = map(int, asked["user"].split(":"))
    folder.chmod(0o755)
    mount("--make-rprivate", "/")
    for path in (Path(sys.base_prefix), Path(sysconfig.get_path("purelib")), folder):
        open_way_to(path)
    mount("-o", "remount,bind,ro", "/")
    scratch = folder / "tmp"
    written = True
    try:
        scratch.mkdir()
    except OSError:
        written = False
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    program = [str(environment / "bin" / asked["entry"][0]), *asked["entry"][1:]]
    router = subprocess.Popen(
        [*program, "--config", str(settings), "--port", str(port)],
        user=user,
        group=group,
        extra_groups=[],
        env={"PATH": os.environ["PATH"], "HOME": "/dev/shm", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=sys.stderr,
    )
    try:
        answers: dict[str, Any] = {}

        def live() -> bool:
            assert router.poll() is None
            try:
                answers["/livez"] = fetch(f"http://127.0.0.1:{port}", "GET", "/livez")[0]
            except OSError:
                return False
            return True

        wait_for(live)
        answers["/readyz"] = fetch(f"http://127.0.0.1:{port}", "GET", "/readyz")[0]
    finally:
        router.send_signal(signal.SIGTERM)
        router.wait(60)
    print(json.dumps(answers | {"written": written}))


if __name__ == "__main__":
    main()
