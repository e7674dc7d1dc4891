"""What handing off costs a prefill engine: prompts that it sends against prompts that it keeps.

    python -m benchmarks.serving.sending --json benchmarks/results/sending-<machine>.json

Two vLLM servers, one of which sends to the other's buffer. Rounds of prompts, all different, take turns: sent
and kept. A round is timed as a whole: all but the end of its last transfer is in it. On a machine whose cores
both servers share, the receiver's work is in the figures, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

from kvkit.adapters.huggingface import smollm2
from kvkit.lab.files import about
from kvkit.lab.serve import memory
from kvkit.lab.serve.systems import Setup, ended_by_sigterm, started
from kvkit.lab.serve.workloads import random_prefill

PREFILL = 'chunk_tokens = 256\nstaging = "256MiB"\n[handoff]\nrole = "prefill"\n'
DECODE = """chunk_tokens = 256
staging = "64MiB"
[handoff]
role = "decode"
buffer = "512MiB"
idle_timeout_s = 1.0
listen = ["{address}"]
"""
TIMEOUT_S = 300.0
BLOCK_BYTES = 1 << 30
"""Of each server, at most."""
TIER_BYTES = 1 << 30
"""Of both: staging, the buffer."""


def computed_s(url: str, model: str, prompt: str, address: str | None) -> float:
    """Seconds until the prefill engine has answered; `address`: where it sends the prompt's KV."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    if address is not None:
        send = {"do_remote_decode": True, "do_remote_prefill": False, "handoff": address}
        body["kv_transfer_params"] = send
    data = json.dumps(body).encode()
    began = time.perf_counter()
    request = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=TIMEOUT_S) as reply:
        answer = json.load(reply)
    took = time.perf_counter() - began
    assert address is None or answer["kv_transfer_params"]["remote_num_tokens"], answer
    return took


def measure(rounds: int, requests: int, words: int) -> dict[str, object]:
    """Rounds of `requests` prompts of `words` words, sent and kept in turn."""
    model = str(smollm2.fetch())
    with tempfile.TemporaryDirectory(prefix="kvkit-sending-") as name, ExitStack() as stack:
        stack.enter_context(ended_by_sigterm())
        folder = Path(name)
        address = f"unix://{folder}/handoff/socket"
        share = memory.share(model, servers=2, tiers=TIER_BYTES, most=BLOCK_BYTES)
        print(share.description)
        setup = Setup(model, 1, None, share.options, folder, memory=share.description)
        urls = []
        for role, text in {"prefill": PREFILL, "decode": DECODE.format(address=address)}.items():
            (folder / role).mkdir()
            config = folder / role / "kvkit.toml"
            config.write_text(text)
            urls.append(
                stack.enter_context(started("kvkit", replace(setup, config=config, folder=folder / role)))
            )
        took: dict[str, list[float]] = {"sent": [], "kept": []}
        each: dict[str, list[float]] = {"sent": [], "kept": []}
        for number in range(-1, rounds):  # the first warms up
            prompts = [request.text for request in random_prefill(number + 1, 2 * requests, words)]
            halves = {"sent": prompts[:requests], "kept": prompts[requests:]}
            for kind in ("sent", "kept") if number % 2 else ("kept", "sent"):
                began = time.perf_counter()
                times = [
                    computed_s(urls[0], model, prompt, address if kind == "sent" else None)
                    for prompt in halves[kind]
                ]
                if number >= 0:
                    took[kind].append(time.perf_counter() - began)
                    each[kind] += times
    ratios = [sent / kept for sent, kept in zip(took["sent"], took["kept"], strict=True)]
    return {
        "rounds": rounds,
        "requests_of_a_round": requests,
        "words": words,
        "ratio_of_medians": statistics.median(took["sent"]) / statistics.median(took["kept"]),
        "ratio_of_minima": min(took["sent"]) / min(took["kept"]),
        "median_of_ratios": statistics.median(ratios),
        "round_s": took,
        "request_s": each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--json", type=Path, default=Path("sending.json"))
    given = parser.parse_args()
    found = measure(given.rounds, given.requests, given.words)
    command = f"python -m benchmarks.serving.sending --rounds {given.rounds} --requests {given.requests}"
    given.json.write_text(json.dumps(about(command, seed=1) | found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if not key.endswith("_s")}, indent=1))


if __name__ == "__main__":
    main()
