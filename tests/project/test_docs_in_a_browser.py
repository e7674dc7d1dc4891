"""The built site in a headless browser: no page scrolls sideways, and no other host is asked for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import browser
import pytest
from browser import Browser
from repository import ROOT
from run_sizes import nightly

WIDTHS = (1280, 390)
WIDER = """
(() => {
    document.getAnimations().forEach(animation => animation.finish());
    const overflow = element => getComputedStyle(element).overflowX;
    const root = document.documentElement;
    const clipped = element => element != document.body
        && (overflow(element) != "visible" || clipped(element.parentElement));
    const beyond = [...document.body.querySelectorAll("*")].filter(
        element => element.getBoundingClientRect().right > root.clientWidth + 1
            && element.checkVisibility({visibilityProperty: true, opacityProperty: true})
            && !clipped(element.parentElement));
    if (beyond.length) return beyond.at(-1).outerHTML.slice(0, 200);
    return root.scrollWidth > root.clientWidth && overflow(root) == "visible" ? "the page" : null;
})()
"""
"""Return the element beyond the window's right edge, where nothing around it scrolls or clips; else null.

The theme lets pages clip it (`overflow-x: hidden`), so that `scrollWidth` alone does not tell.
"""
SEARCH = """
new Promise(found => {
    const input = document.querySelector("input.md-search__input");
    input.focus();
    input.value = "eviction";
    input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    const look = () => {
        const links = [...document.querySelectorAll(".md-search-result__link")].map(link => link.href);
        links.length ? found(links) : setTimeout(look, 50);
    };
    look();
})
"""


class Handler(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser's window. Where there is none the tests are skipped, but never in CI."""
    path = browser.find()
    if path is None and not os.environ.get("CI"):
        pytest.skip("there is no Chromium here: `make browser` brings one")
    assert path is not None, "`make browser` brought no Chromium"
    with Browser(path, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_a_table_wider_than_the_window_is_noticed(window: Browser) -> None:
    window.resize(390)
    table = "<table style='width: 500px'><tr><td>wide</table>"
    window.open(f"data:text/html,{table}")
    assert window.evaluate(WIDER)
    window.open(f"data:text/html,<div style='overflow-x: auto'>{table}</div>")
    assert window.evaluate(WIDER) is None


@pytest.mark.parametrize("share", [5, *nightly(1)])
def test_no_page_scrolls_sideways_or_asks_another_host(
    site: Path, address: str, window: Browser, share: int
) -> None:
    """Every page in `make nightly`, one of five in CI."""
    wider = []
    pages = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    assert len(pages) > 50
    # every page would read it anew, which takes most of the time
    window.call("Network.setBlockedURLs", urls=["*/search_index.json"])
    for page in pages[::share]:
        window.open(f"{address}{page}/")
        for width in WIDTHS:
            window.resize(width)
            if found := window.evaluate(WIDER):
                wider.append(f"{page} at {width} px scrolls sideways: {found}")
    window.call("Network.setBlockedURLs", urls=[])
    assert not wider, "\n".join(wider)
    hosts = {urlsplit(url).netloc for url in window.requested if not url.startswith("data:")}
    assert hosts == {urlsplit(address).netloc}


def test_words_of_pages_are_found(address: str, window: Browser) -> None:
    window.resize(1280)
    window.open(address)
    found = window.evaluate(SEARCH)
    assert any("simulate/" in link for link in found), found


def test_code_can_be_copied(address: str, window: Browser) -> None:
    window.open(address)
    buttons = window.evaluate("document.querySelectorAll('.highlight button').length")
    assert buttons == window.evaluate("document.querySelectorAll('.highlight pre').length") > 0


@pytest.mark.parametrize(("preferred", "scheme"), [("dark", "slate"), ("light", "default")])
def test_colours_follow_the_system(address: str, window: Browser, preferred: str, scheme: str) -> None:
    window.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": preferred}])
    window.open(address)
    assert window.evaluate("document.body.dataset.mdColorScheme") == scheme


@pytest.mark.parametrize("language", ["json", "python", "sh", "toml", "yaml"])
def test_code_is_highlighted(site: Path, language: str) -> None:
    block = rf'<div class="language-{language} highlight">.*?</div>'
    blocks = [b for path in site.rglob("index.html") for b in re.findall(block, path.read_text(), re.DOTALL)]
    assert any(re.search(r'<span class="[a-z]', b) for b in blocks)
