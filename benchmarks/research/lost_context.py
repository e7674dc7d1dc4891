"""By how much a question overpays tokens that were computed without what stands before them.

    python -m benchmarks.research.lost_context --json benchmarks/results/lost-context-<machine>.json

The question's queries are those of a full prefill. Each is put to the keys of that, and to the keys of
documents that were computed alone and turned to their places; the first tokens of documents, which blending
always computes again, are left out. Tokens go together by what they lost: the logarithm of how many stand up
to them in the prompt over how many stood up to them where they were computed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from kvkit.adapters.huggingface.blended import paged
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.blend.drift import missed_context
from kvkit.blend.methods.method import offsets
from kvkit.blend.plan import Selection
from kvkit.kernels.attention.api import blend_attention, query_scores, rope_scatter
from kvkit.kernels.attention.layer import RowRotations
from kvkit.kernels.attention.rows import Rows
from kvkit.lab.files import write_figures
from kvkit.lab.quality.judge import Judge, load_judge
from kvkit.lab.quality.tasks.registry import samples
from kvkit.lab.quality.tasks.sample import Sample

TASKS = ("retrieval", "needle keys", "qa", "hops", "code")
EDGES = (0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75, 4.25, 5.25)
"""Of what tokens lost."""


@torch.inference_mode()
def paid(judge: Judge, sample: Sample) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """What the question pays each token of its prompt, and what each lost.

    Returns:
        float64 [2, N]: to keys of a full prefill, and to those that were found, as shares of what the
        first pays in all; the mean over layers, heads and the question's rows. Float32 [N]: `missed_context`,
        0 for the first tokens of documents too.
    """
    decoder, sample = judge.decoder, sample.behind(judge.lead)
    total = len(sample.prompt)
    full = GrowingCache(judge.layout, total, decoder.device)
    judge.logits(sample.prompt, full)
    found, plan = judge.document_kv(sample, total)
    ends, one_block = np.array([0, len(plan.question_positions)]), np.zeros((1, 1), np.int64)
    rows = Rows.of(plan.question_positions, ends, np.array([total]), one_block, total, decoder.device)
    ids = torch.from_numpy(sample.prompt[plan.question_positions].astype(np.int64)).to(decoder.device)
    h, sums = decoder.embed(ids), torch.zeros(2, total, device=decoder.device)
    for layer, ((k, v), (alone, _)) in enumerate(zip(paged(full).layers, paged(found).layers, strict=True)):
        form = decoder.attention(layer)
        angles = torch.from_numpy(form.rope.table(plan.question_positions.astype(np.int64))).to(
            decoder.device
        )
        q = rope_scatter(*decoder.qkv(layer, h), RowRotations(form.rope, angles), rows.slots, k, v)
        o, lse = blend_attention(q, k, v, rows, form.scoring)
        sums += torch.stack(
            [query_scores(q, keys, None, rows, form.scoring, lse).mean(0) for keys in (k, alone)]
        )
        h = decoder.post(layer, h, o)
    lost = missed_context(plan)
    lost[offsets(plan.starts, total) < Selection().first_n] = 0
    return (sums / (decoder.layers * len(plan.question_positions))).double().cpu().numpy(), lost


def by_loss(shares: NDArray[np.float64], lost: NDArray[np.float32]) -> list[dict[str, float]]:
    """For each interval of `EDGES`: what tokens that lost so much are paid, and the log of the ratio."""
    found = []
    for low, high in itertools.pairwise(EDGES):
        exact, alone = shares[:, (lost >= low) & (lost < high)].sum(1)
        if exact > 0:
            ratio = float(np.log(alone / exact))
            found.append({"from": low, "to": high, "exact": float(exact), "log_ratio": ratio})
    return found


def slope(shares: NDArray[np.float64], lost: NDArray[np.float32]) -> float:
    """The power of what tokens lost, exp(lost), by which they are overpaid: least squares, weighed by pay."""
    bins = by_loss(shares, lost)
    x = np.array([(one["from"] + one["to"]) / 2 for one in bins])
    weight, y = (np.array([one[name] for one in bins]) for name in ("exact", "log_ratio"))
    return float((weight * x * y).sum() / (weight * x * x).sum())


def measure(model: str | None, lengths: list[int], count: int, seed: int) -> dict[str, Any]:
    """Means over samples of every task, for each length of prompts."""
    judge, encode, name = load_judge(model, Console())
    runs = []
    for tokens in lengths:
        each = {
            task: [paid(judge, sample) for sample in samples(task, encode, count, tokens, seed)]
            for task in TASKS
        }
        every = [one for of_task in each.values() for one in of_task]
        shares, lost = (
            np.concatenate([s for s, _ in every], 1) / len(every),
            np.concatenate([x for _, x in every]),
        )
        reused = lost > 0
        exact, alone = shares[:, reused].sum(1)
        runs.append(
            {
                "tokens": tokens,
                "exact": float(exact),
                "alone": float(alone),
                "slope": slope(shares, lost),
                "slopes": {
                    task: slope(np.concatenate([s for s, _ in some], 1), np.concatenate([x for _, x in some]))
                    for task, some in each.items()
                },
                "by_loss": by_loss(shares, lost),
            }
        )
    return {"model": name, "samples": count, "seed": seed, "runs": runs}


def main() -> None:
    """Measure what the command line says, print it and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.research.lost_context")
    parser.add_argument("--model", help="hub id or folder, with layers like Llama's; default: SmolLM2-135M")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="of a prompt, about")
    parser.add_argument("--samples", type=int, default=3, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("lost-context.json"))
    asked = parser.parse_args()
    found = measure(asked.model, asked.tokens, asked.samples, asked.seed)
    write_figures(asked.json, command="python -m benchmarks.research.lost_context", **found)
    print(json.dumps(found["runs"], indent=1))


if __name__ == "__main__":
    main()
