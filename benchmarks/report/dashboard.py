"""What docs/grafana.json shows of a P, a D and the router: its queries, answered by a Prometheus.

    python -m benchmarks.report.dashboard --prometheus PATH

Conversations and blended documents go over the router. In the middle the shared folder is gone for a while,
and what comes back is damaged. The queries are those of the file; what draws them here is matplotlib.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np

from benchmarks.folders import ROOT
from kvkit.adapters.huggingface import smollm2
from kvkit.environment import slug
from kvkit.lab.demo import pd
from kvkit.lab.files import about
from kvkit.lab.serve import memory
from kvkit.lab.serve.client import connect, drive
from kvkit.lab.serve.systems import Setup, ended_by_sigterm, free_port, serving, started
from kvkit.lab.serve.workloads import arriving, chat, rag

STEP_S = 5
RATE = "20s"
BLOCK_BYTES, TIER_BYTES = 1 << 30, 3 << 28
TOKEN = "token-of-this-benchmark"
_COLOURS = {"green": "#56a64b", "yellow": "#f2cc0c", "orange": "#ff780a", "red": "#e02f44"}


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels and headings."""
    found: list[dict[str, Any]] = json.loads((ROOT / "docs/grafana.json").read_text())["panels"]
    return found


def measure(prometheus: str, seconds: float) -> dict[str, Any]:
    """The series of each panel over `seconds` of traffic, one value per `STEP_S`."""
    with tempfile.TemporaryDirectory(prefix="kvkit-") as name, ExitStack() as stack:
        stack.enter_context(ended_by_sigterm())
        folder = Path(name)
        pool = folder / "pool"
        urls = {"P": "", "D": ""}
        caches = {role: f"127.0.0.1:{free_port()}" for role in urls}
        address = f"unix://{folder}/handoff/socket"
        model = str(smollm2.fetch())
        share = memory.share(model, servers=2, tiers=TIER_BYTES, most=BLOCK_BYTES)
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        for role, text in zip(urls, pd.settings("both", address, pool).values(), strict=True):
            server = f'[server]\nenabled = true\nport = {caches[role][10:]}\ntoken = "{TOKEN}"\n'
            small = text.replace("256", "128").replace('"512MiB"', '"256MiB"')
            (folder / role).mkdir()
            (folder / role / "kvkit.toml").write_text(small + server)
            setup = Setup(
                model, 1, folder / role / "kvkit.toml", (*share.options, "--enforce-eager"), folder / role
            )
            kind = "kvkit" if role == "P" else "kvkit-blend"
            urls[role] = stack.enter_context(started(kind, replace(setup, memory=share.description)))
        urls["router"] = stack.enter_context(_router(folder, urls, caches, address))
        metrics = stack.enter_context(_prometheus(prometheus, folder, urls, caches))
        start = time.time()
        fault = threading.Timer(seconds / 2, _fault, [pool, seconds / 8])
        fault.start()
        requests = arriving(chat(1, 45, 800, turns=3), 45 / seconds, 1)
        talk = threading.Thread(target=drive, args=(connect("router", urls["router"]), requests, 2, 120.0))
        talk.start()
        _blend(urls["router"], model, seconds)
        talk.join()
        fault.join()
        time.sleep(2 * STEP_S)  # for the last scrape
        return {"step_s": STEP_S, "panels": _answers(metrics, start, time.time())}


@contextmanager
def _router(folder: Path, urls: dict[str, str], caches: dict[str, str], address: str) -> Iterator[str]:
    """The URL of a router that sends longer prompts over P, and blends on D."""
    told = {
        role: f'url = "{urls[role]}"\ncache = "http://{caches[role]}"\ntoken_file = "{folder}/token"\n'
        for role in caches
    }
    (folder / "router.toml").write_text(
        f'direct_tokens = 128\n[prefill.P]\n{told["P"]}[decode.D]\n{told["D"]}handoff = "{address}"\n'
        '[blend]\nmarks = ["[[", "]]"]\nfirst_use = 1\n'
    )
    port = free_port()
    command = ["kvkit", "router", "--port", str(port), "--config", str(folder / "router.toml")]
    url = f"http://127.0.0.1:{port}"
    with serving("router", command, os.environ, folder, lambda: _answers_at(f"{url}/health")):
        yield url


@contextmanager
def _prometheus(path: str, folder: Path, urls: dict[str, str], caches: dict[str, str]) -> Iterator[str]:
    """The URL of a Prometheus that scrapes all of them."""
    places = {"vllm-" * (name != "router") + name: url[7:] for name, url in urls.items()} | caches
    targets = [{"targets": [place], "labels": {"instance": name}} for name, place in places.items()]
    job = {"job_name": "kvkit", "authorization": {"credentials": TOKEN}, "static_configs": targets}
    told = {"global": {"scrape_interval": f"{STEP_S}s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(told))
    place = f"127.0.0.1:{free_port()}"
    command = [path, f"--config.file={folder}/prometheus.yml", f"--web.listen-address={place}"]
    command.append(f"--storage.tsdb.path={folder}/prometheus")
    with serving("prometheus", command, os.environ, folder, lambda: _answers_at(f"http://{place}/-/ready")):
        yield f"http://{place}"


def _answers_at(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _blend(url: str, model: str, seconds: float) -> None:
    """Questions on documents, marked, until the time is over."""
    ends = time.monotonic() + seconds
    for request in rag(2, 36, 900):
        marked = "".join(f"[[{request.text[start:stop]}]]" for start, stop in request.documents)
        prompt = marked + request.text[request.documents[-1][1] :]
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
        with urlopen(
            Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"}), timeout=120
        ) as reply:
            reply.read()
        time.sleep(2.0)
        if time.monotonic() > ends:
            return


def _fault(pool: Path, seconds: float) -> None:
    """A folder that is no folder for a while; then each of its records has a bit flipped."""
    aside = pool.with_name("aside")
    pool.rename(aside)
    pool.write_text("")
    time.sleep(seconds)
    pool.unlink()
    for path in (path for path in aside.rglob("c.*") if path.is_file()):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    aside.rename(pool)


def _answers(prometheus: str, start: float, end: float) -> dict[str, list[dict[str, Any]]]:
    """What each panel shows: the legend and the values of its series, by the panel's id."""
    found: dict[str, list[dict[str, Any]]] = {}
    count = int((end - start) // STEP_S) + 1
    for panel in panels():
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", RATE).replace("$instance", ".*")
            asked = {"query": query, "start": start, "end": end, "step": STEP_S}
            with urlopen(f"{prometheus}/api/v1/query_range?{urlencode(asked)}", timeout=30) as reply:
                series = json.load(reply)["data"]["result"]
            for one in series:
                legend = target["legendFormat"]
                for name, value in one["metric"].items():
                    legend = legend.replace(f"{{{{{name}}}}}", value)
                values: list[float | None] = [None] * count
                for at, value in one["values"]:
                    number = float(value)
                    values[round((at - start) / STEP_S)] = (
                        float(f"{number:.4g}") if number == number else None
                    )
                legend = re.sub(r"{{\w+}} ?", "", legend)  # of an empty label
                found.setdefault(str(panel["id"]), []).append({"legend": legend, "values": values})
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the panels where the dashboard has them, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter
    from PIL import Image

    shown = panels()
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    figure = Figure(figsize=(10, 0.24 * height), facecolor="#f4f5f5")
    for panel in shown:
        at, unit = panel["gridPos"], panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        left, low = at["x"] / 24, 1 - (at["y"] + at["h"]) / height
        if panel["type"] == "row":
            figure.text(left + 0.005, low, panel["title"], weight="bold", fontsize=9)
            continue
        # within its frame: room for a title above, and for the numbers left and below
        inner = (left + 0.045, low + 0.9 / height, at["w"] / 24 - 0.055, (at["h"] - 2.2) / height)
        axes = figure.add_axes(inner)
        axes.set_title(panel["title"], fontsize=7, loc="left", pad=2)
        axes.tick_params(labelsize=5.5, length=2)
        axes.grid(alpha=0.3, linewidth=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        series = found["panels"].get(str(panel["id"]), [])
        values = [np.array(one["values"], float) for one in series]
        minutes = np.arange(len(values[0]) if values else 2) * found["step_s"] / 60
        form: Any = EngFormatter({"s": "s", "Bps": "B/s"}.get(unit, ""))
        form = PercentFormatter(1, decimals=0) if unit == "percentunit" else form
        axes.yaxis.set_major_formatter(form)
        if panel["type"] == "stat":
            last = values[0][np.isfinite(values[0])][-1] if values else 0.0
            axes.axis("off")
            axes.text(0.5, 0.4, form(last), ha="center", va="center", fontsize=14, color="#2e4057")
        elif panel["type"] == "state-timeline":
            names = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
            for row, one in enumerate(values):
                for state, told in names.items():
                    spans = [
                        (m, found["step_s"] / 60)
                        for m, v in zip(minutes, one, strict=True)
                        if v == float(state)
                    ]
                    axes.broken_barh(spans, (row - 0.4, 0.8), color=_COLOURS[told["color"]])
            axes.set_yticks(range(len(series)), [one["legend"] for one in series])
        else:
            stacked = "stacking" in panel["fieldConfig"]["defaults"]["custom"]
            base = np.zeros(len(minutes))
            for one, numbers in zip(series, values, strict=True):
                if stacked:
                    numbers = np.nan_to_num(numbers)
                    axes.fill_between(minutes, base, base + numbers, label=one["legend"], alpha=0.5)
                    base = base + numbers
                else:
                    axes.plot(
                        minutes, numbers, label=one["legend"] if np.nansum(numbers) else None, linewidth=0.8
                    )
            axes.set_ylim(bottom=0)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=5.5, frameon=False, ncols=2, loc="upper left", borderpad=0)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--seconds", type=float, default=180.0)
    given = parser.parse_args()
    found = about("python -m benchmarks.report.dashboard", [1, 2]) | measure(given.prometheus, given.seconds)
    (ROOT / f"benchmarks/results/dashboard-{slug()}.json").write_text(json.dumps(found) + "\n")
    draw(found, ROOT / "docs/pictures/dashboard.png")


if __name__ == "__main__":
    main()
