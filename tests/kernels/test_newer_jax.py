"""`make test-jax` finds a new enough Python, or says why there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jax_results import differences

from tests.tools import newer_jax

INDEXES = """bookworm-security http://mirror.example/debian-security/
bookworm http://mirror.example/debian/
nodistro https://packages.example/node/
"""


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Debian with an older Python, and an apt-get that answers INDEXES and brings nothing."""
    apt = tmp_path / "apt-get"
    apt.write_text(
        f"#!/bin/sh\n[ $1 = indextargets ] || {{ echo no route >&2; exit 100; }}\ncat <<E\n{INDEXES}E\n"
    )
    (tmp_path / "dpkg").write_text("#!/bin/sh\n")
    for tool in ("apt-get", "dpkg"):
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(newer_jax.sys, "version_info", (3, 11))
    release = {"VERSION_CODENAME": "bookworm"}
    monkeypatch.setattr(newer_jax.platform, "freedesktop_os_release", lambda: release)
    return apt


def test_the_archive_is_the_one_that_apt_uses(debian: Path) -> None:
    assert newer_jax.mirror() == "http://mirror.example/debian/"


def test_a_python_of_the_machine_comes_first(debian: Path) -> None:
    """One that runs: pyenv's own commands do not, where it is to take another version."""
    script = "#!/bin/sh\nexit {}\n"
    own = debian.parent / "pyenv" / "versions" / "3.13.0" / "bin" / "python3.13"
    own.parent.mkdir(parents=True)
    for path, status in ((debian.parent / "python3.13", 127), (own, 0)):
        path.write_text(script.format(status))
        path.chmod(0o755)
    assert newer_jax.interpreter() == own


def test_what_cannot_be_had_is_named_and_leaves_nothing(
    debian: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newer_jax.main("0.11.2", "0.4.1", "3.9.0") == 0
    printed = capsys.readouterr().out
    assert "JAX 0.11.2 is not tested here" in printed
    assert "no route" in printed
    assert list((debian.parent / "cache" / "kvkit").iterdir()) == []


def test_elsewhere_than_on_debian_it_says_so(
    debian: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert newer_jax.main("0.11.2", "0.4.1", "3.9.0") == 0
    assert "or apt-get and dpkg" in capsys.readouterr().out


def test_a_version_with_other_results_is_found() -> None:
    codes, values = np.arange(4, dtype=np.uint8), np.float32([1, np.nan])
    wanted = {"pack": codes, "o": values}
    assert differences({"pack": codes.copy(), "o": values + 1e-6}, wanted) == []
    assert differences({"pack": codes + 1, "o": values * 1.1}, wanted) == ["pack", "o"]
    assert differences({"pack": codes}, wanted) == ["o"]
