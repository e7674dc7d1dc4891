"""What blending does to a model's answers: methods of selection against full recompute, on three data sets.

    contiguous   running text cut into documents, of which each continues the one before
    documents    different texts, then a request to continue one of them
    retrieval    texts with sentences "The access code for NAME is | 48217." cut at the end of a document,
                 then a request to repeat the codes

All text comes from `pydoc_data`, which every Python has. A sample's prompt is computed in full once, each of
its documents once alone; every method then blends the same documents. Compared are the distributions of the
tokens that follow the prompt in the text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.blended import HuggingFaceDecoder, paged
from kvkit.adapters.huggingface.cached import GrowingCache, model_fingerprint, probe_layout
from kvkit.bench.files import BenchError, load_model, model_folder
from kvkit.blend import gate
from kvkit.blend.plan import BlendError, BlendPlan, Selection, Span, plan_blend
from kvkit.blend.run import Blended, Positions, Sees, blend, recompute
from kvkit.kernels.pages import reference
from kvkit.simulate.report import panels

Encode = Callable[[str], Sequence[int]]
Texts = list[tuple[str, list[int]]]
"""Titles, and the token ids of what they are of."""
Measures = dict[str, float]

DOCUMENT_TOKENS = 256
CONTINUATION_TOKENS = 32
QUESTION_TOKENS = 32
"""Of `contiguous`: the text after the last document, up to where the continuation begins."""
NAMES = ("Alma", "Boris", "Chloe", "Dario", "Edith", "Felix", "Greta", "Henry", "Irene", "Jonas")
BLOCK_ROWS = 32
RESAMPLES = 2000

GATE_SAMPLES = 4
GATE_METHODS = ("naive", "default .15")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A prompt made of documents and a question, and the text that follows it."""

    prompt: NDArray[np.int32]  # [T]
    documents: tuple[tuple[int, int], ...]  # (start, stop) of each
    continuation: NDArray[np.int32]  # [C]
    answer: int = 0  # how many leading tokens of the continuation are the exact answer; 0 for none


@dataclass(frozen=True, slots=True)
class Method:
    """A way to fill in a prompt's KV.

    Args:
        selection: None: tokens chosen at random.
        mask: "" for the right one, or that of another system: `bottom right` (CacheBlend's code: of M rows
            and N keys, row i sees keys up to N - M + i) or `blocks` (LMCache 0.5's sparse kernel: 32 selected
            rows see the keys before the last one's block of 32; rows of an incomplete block get zeros).
    """

    selection: Selection | None
    mask: str = ""


_BY_K = {ratio: Selection("k_deviation", ratio, 0) for ratio in (0.05, 0.15, 0.30)}
METHODS: Mapping[str, Method] = {
    "naive": Method(Selection("first_n", 0.0, 0)),
    "first n .15": Method(Selection("first_n", 0.15, 0)),
    "random .15": Method(None),
    "v deviation .15": Method(Selection("v_deviation", 0.15, 0)),
    "question .15": Method(Selection("question_attention", 0.15, 0)),
    "default .15, 4 layers": Method(Selection(layers=4)),
    "default .15, 16 layers": Method(Selection(layers=16)),
    "default .15, no value norm": Method(Selection(value_norm=False)),
    "default .15, no fade": Method(Selection(fade=0)),
    **{f"k deviation .{100 * ratio:02.0f}": Method(by_k) for ratio, by_k in _BY_K.items()},
    **{f"default .{100 * ratio:02.0f}": Method(Selection(ratio=ratio)) for ratio in _BY_K},
    "k deviation .15, bottom-right mask": Method(_BY_K[0.15], "bottom right"),
    "k deviation .15, block mask": Method(_BY_K[0.15], "blocks"),
}


def samples(kind: str, encode: Encode, count: int, tokens: int, seed: int = 0) -> list[Sample]:
    """`count` samples of a data set whose prompts have about `tokens` tokens, always the same ones.

    Args:
        kind: one of `SETS`.
        encode: text to token ids, without special tokens.

    Raises:
        ValueError: an unknown set, or the text is too short for such prompts.
    """
    if kind not in SETS:
        raise ValueError(f"kind={kind!r}: want one of {', '.join(SETS)}")
    texts = [(title, list(encode(text))) for title, text in _corpus()]
    documents = max(2, tokens // DOCUMENT_TOKENS)
    make = SETS[kind]
    return [make(texts, encode, documents, default_rng([seed, i]), Fraction(i, count)) for i in range(count)]


def _corpus() -> list[tuple[str, str]]:
    """Titles and texts, in the order of their titles."""
    from pydoc_data.topics import topics

    return [(title, text.strip()) for title, text in sorted(topics.items())]


def _contiguous(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    stream = np.array([token for _, ids in texts for token in ids], np.int32)
    prompt = documents * DOCUMENT_TOKENS + QUESTION_TOKENS
    room = len(stream) - prompt - CONTINUATION_TOKENS
    if room < 0:
        raise ValueError(f"the text has {len(stream)} tokens, a prompt of {prompt} is too long")
    start = int(room * at)
    text = stream[start : start + prompt + CONTINUATION_TOKENS]
    cuts = np.arange(documents + 1) * DOCUMENT_TOKENS
    return _sample([text[a:b] for a, b in itertools.pairwise(cuts)], text[cuts[-1] :], 0)


def _documents(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    long = [(title, ids) for title, ids in texts if len(ids) >= DOCUMENT_TOKENS + CONTINUATION_TOKENS]
    chosen = [long[j] for j in rng.choice(len(long), documents, replace=len(long) < documents)]
    title, asked = chosen[int(rng.integers(documents))]
    parts, end = [], 0
    for name, ids in chosen:
        head = encode(f"\n\n# {name}\n\n")
        keep = DOCUMENT_TOKENS - len(head)
        parts.append(np.array([*head, *ids[:keep]], np.int32))
        if name == title:
            end = keep
    question = encode(f"\n\n# {title}, continued from where the text above ends\n\n")
    follows = [*asked[end - 8 : end], *asked[end : end + CONTINUATION_TOKENS]]  # a few words to go on from
    return _sample(parts, np.array([*question, *follows], np.int32), 0)


def _retrieval(texts: Texts, encode: Encode, documents: int, rng: Generator, at: Fraction) -> Sample:
    stream = [token for _, ids in texts for token in ids]
    names = [NAMES[j % len(NAMES)] for j in rng.permutation(max(documents - 1, len(NAMES)))[: documents - 1]]
    codes = [int(code) for code in rng.integers(10_000, 100_000, documents - 1)]
    start = int(rng.integers(len(stream) - documents * DOCUMENT_TOKENS))
    parts = []
    for d in range(documents):
        head = encode(f" {codes[d - 1]}.\n") if d else []
        tail = encode(f"\nThe access code for {names[d]} is") if d < documents - 1 else []
        keep = DOCUMENT_TOKENS - len(head) - len(tail)
        parts.append(np.array([*head, *stream[start : start + keep], *tail], np.int32))
        start += keep
    # a name that repeats in a long prompt would have two codes
    once = [d for d in range(documents - 1) if names.count(names[d]) == 1] or [0]
    order = [once[j] for j in rng.permutation(len(once))]
    asked = " ".join(f"The access code for {names[d]} is {codes[d]}." for d in order)
    lead = f"The access code for {names[order[0]]} is"
    question = encode(f"\n\nRepeat the access codes that the text above tells.\n{lead}")
    answer = encode(f" {codes[order[0]]}")
    rest = encode(f".{asked[len(lead) + 1 + len(str(codes[order[0]])) + 1 :]}\n" + " The end." * 16)
    follows = [*answer, *rest][:CONTINUATION_TOKENS]
    return _sample(parts, np.array([*question, *follows], np.int32), len(answer))


def _sample(parts: Sequence[NDArray[np.int32]], rest: NDArray[np.int32], answer: int) -> Sample:
    """Documents one after another, then `rest`: question and continuation."""
    ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    prompt = np.concatenate([*parts, rest[:-CONTINUATION_TOKENS]])
    documents = tuple(itertools.pairwise(ends))
    return Sample(prompt, documents, rest[-CONTINUATION_TOKENS:], answer)


SETS: Mapping[str, Callable[[Texts, Encode, int, Generator, Fraction], Sample]] = {
    "contiguous": _contiguous,
    "documents": _documents,
    "retrieval": _retrieval,
}
"""By kind, from the corpus' texts, how many documents, and how far into the corpus, a share of 1."""


class Judge:
    """Measures methods on samples, with one Hugging Face causal language model, in eval mode.

    Raises:
        BlendError: the model cannot be blended.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = HuggingFaceDecoder(model)
        self.layout = probe_layout(model)
        self.weights = model_fingerprint(model)

    @torch.inference_mode()
    def measure(self, sample: Sample, methods: Mapping[str, Method] = METHODS) -> dict[str, Measures]:
        """Figures of every method, and of `full` recompute.

        Returns:
            by method: kl, mean KL divergence from full recompute's distributions, in nats a token; top1,
            share of tokens where the most likely one is the same; nll, mean negative log likelihood of the
            continuation; exact, 1 if the most likely tokens are the answer, where one is asked for;
            rows, share of tokens * layers that were computed; seconds, of the processor, all its threads
            together, for the prefill, with the KV that was found elsewhere in place.
        """
        total = len(sample.prompt)
        room = total + len(sample.continuation)
        kv = GrowingCache(self.layout, room, self.decoder.device)
        began = time.process_time()
        last = self._logits(sample.prompt, kv)
        seconds = time.process_time() - began
        full = self._follow(last, sample, kv)
        measured = {"full": _figures(full, full, sample, 1.0, seconds)}
        found, plan = self._documents(sample, room)
        for name, method in methods.items():
            for layer, source in zip(kv.layers, found.layers, strict=True):
                layer.room_k.copy_(source.room_k)
                layer.room_v.copy_(source.room_v)
            began = time.process_time()
            blended = self._blend(method, sample, plan, kv)
            seconds = time.process_time() - began
            kv.mark_filled(total)
            logits = self._follow(blended.logits[None], sample, kv)
            rows = blended.row_layers / (total * self.decoder.layers)
            measured[name] = _figures(full, logits, sample, rows, seconds)
        return measured

    def _documents(self, sample: Sample, room: int) -> tuple[GrowingCache, BlendPlan]:
        """KV of every document computed alone and moved to its place, and the plan of the prompt."""
        found = GrowingCache(self.layout, room, self.decoder.device)
        for start, stop in sample.documents:
            alone = GrowingCache(self.layout, stop - start, self.decoder.device)
            self._logits(sample.prompt[start:stop], alone)
            turns = torch.from_numpy(self.decoder.rope.turns(np.array([start]))).to(self.decoder.device)
            for target, source in zip(found.layers, alone.layers, strict=True):
                k = reference.rotate(source.room_k, turns, self.decoder.rope)
                target.room_k[:, :, start:stop] = k
                target.room_v[:, :, start:stop] = source.room_v
        spans = [Span(start, stop, 0, exact=start == 0) for start, stop in sample.documents]
        return found, plan_blend(len(sample.prompt), 0, spans)

    def _blend(self, method: Method, sample: Sample, plan: BlendPlan, kv: GrowingCache) -> Blended:
        pages = paged(kv)
        if method.selection is None:
            reused = np.flatnonzero(plan.reused)
            count = round(Selection().ratio * len(reused))
            chosen = default_rng(len(reused)).permutation(reused)[:count]
            return recompute(self.decoder, pages, sample.prompt, plan, np.sort(chosen).astype(np.int32))
        if method.mask == "blocks":
            imitation = _BlockMask(self.decoder, plan)
            return blend(imitation, pages, sample.prompt, plan, method.selection, sees=imitation.sees)
        sees = _bottom_right(plan.tokens) if method.mask else None
        return blend(self.decoder, pages, sample.prompt, plan, method.selection, sees=sees)

    def _logits(self, ids: NDArray[np.int32], kv: GrowingCache, keep: int = 1) -> torch.Tensor:
        """Logits [keep, V] of the last tokens (0: of all) after those in `kv`, whose KV is appended."""
        inputs = torch.from_numpy(ids.astype(np.int64))[None].to(self.decoder.device)
        out = self.model(input_ids=inputs, past_key_values=kv, use_cache=True, logits_to_keep=keep)
        logits: torch.Tensor = out.logits[0]
        return logits

    def _follow(self, last: torch.Tensor, sample: Sample, kv: GrowingCache) -> torch.Tensor:
        """Log probabilities [C, V] of every token of the continuation, given those before it."""
        rest = self._logits(sample.continuation[:-1], kv, 0)
        return torch.cat([last, rest]).float().log_softmax(-1)


def _figures(full: torch.Tensor, ours: torch.Tensor, sample: Sample, rows: float, seconds: float) -> Measures:
    """Measures of log probabilities [C, V] against those of full recompute."""
    wanted = torch.from_numpy(sample.continuation.astype(np.int64)).to(ours.device)
    best = ours.argmax(-1)
    right = (best == wanted)[: sample.answer]
    return {
        "kl": float((full.exp() * (full - ours)).sum(-1).mean()),
        "top1": float((best == full.argmax(-1)).float().mean()),
        "nll": float(-ours.gather(-1, wanted[:, None]).mean()),
        **({"exact": float(right.all())} if sample.answer else {}),
        "rows": rows,
        "seconds": seconds,
    }


def _bottom_right(tokens: int) -> Sees:
    return lambda positions: np.arange(tokens - len(positions), tokens, dtype=np.int32)


class _BlockMask(HuggingFaceDecoder):
    """A decoder whose selected rows attend as with LMCache's sparse kernel; see `Method.mask`."""

    def __init__(self, decoder: HuggingFaceDecoder, plan: BlendPlan) -> None:
        vars(self).update(vars(decoder))  # the same model, which need not be probed again
        self.plan = plan
        self.zeros: NDArray[np.intp] = np.zeros(0, np.intp)

    def sees(self, positions: Positions) -> Positions:
        selected = np.flatnonzero(~np.isin(positions, self.plan.computed))
        if len(positions) == int((~self.plan.exact).sum()):  # layer 0, which is dense
            selected = selected[:0]
        seen = positions.copy()
        whole = len(selected) // BLOCK_ROWS * BLOCK_ROWS
        for block in range(0, whole, BLOCK_ROWS):
            rows = selected[block : block + BLOCK_ROWS]
            seen[rows] = positions[rows[-1]] // BLOCK_ROWS * BLOCK_ROWS - 1
        self.zeros = selected[whole:]
        return seen

    def post(self, layer: int, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        if layer < self.layers - 1:  # after the last layer there is only the question's last row
            o[torch.from_numpy(self.zeros)] = 0
        return super().post(layer, h, o)


def load_judge(model: str | None, console: Console) -> tuple[Judge, Encode, str]:
    """A model (None: SmolLM2-135M) ready to be measured, its tokenizer as a function, and its name.

    Raises:
        BenchError: a package is missing, the model cannot be loaded, or it cannot be blended.
    """
    folder = model_folder(model, console)
    try:
        with console.status("loading the model"):
            tokenizer, loaded = load_model(folder)
            judge = Judge(loaded)
    except BlendError as error:
        raise BenchError(str(error)) from error

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return judge, encode, model or smollm2.NAME


def run(
    judge: Judge,
    encode: Encode,
    path: Path,
    *,
    count: int,
    tokens: int,
    methods: Mapping[str, Method] = METHODS,
    sets: Sequence[str] = tuple(SETS),
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Measure `count` samples of every set; yields {"set", "sample", "measured"} as they are finished.

    Appends each to `path`, a line of JSON, and takes from there what an earlier run with the same model and
    text has finished: only methods that it did not measure are.
    """
    drawn = [[(kind, sample) for sample in samples(kind, encode, count, tokens, seed)] for kind in sets]
    work = [(i, *item) for i, one_of_each in enumerate(zip(*drawn, strict=True)) for item in one_of_each]
    finished: dict[str, dict[str, Measures]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            finished.setdefault(entry["of"], {}).update(entry["by_settings"])
    settings = {name: json.dumps(asdict(method)) for name, method in methods.items()}
    with path.open("a") as out:
        for i, kind, sample in work:
            of = _identity(judge, sample)
            known = finished.setdefault(of, {})
            left = {name: method for name, method in methods.items() if settings[name] not in known}
            if left:
                measured = judge.measure(sample, left)
                by_settings = {settings.get(name, name): figures for name, figures in measured.items()}
                out.write(json.dumps({"of": of, "by_settings": by_settings}) + "\n")
                out.flush()
                known.update(by_settings)
            figures = {"full": known["full"]} | {name: known[settings[name]] for name in methods}
            yield {"set": kind, "sample": i, "measured": figures}


def _identity(judge: Judge, sample: Sample) -> str:
    """A digest of all that decides a sample's figures, but for the method."""
    text = sample.prompt.tobytes() + sample.continuation.tobytes() + repr(sample.documents).encode()
    return hashlib.blake2b(judge.weights.encode() + text, digest_size=12).hexdigest()


def summarise(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of every set and method: mean figures, with a 95 % interval [low, high] for `kl`, `top1` and `exact`.

    `kl_of_k_deviation`: the KL divergence over that of K deviation at the same ratio, with its interval.
    `speedup`: full recompute's seconds of the processor over the method's, of the medians.
    """
    sets: dict[str, list[dict[str, Measures]]] = {}
    for entry in entries:
        sets.setdefault(entry["set"], []).append(entry["measured"])
    return {kind: {name: _summary(found, name) for name in found[0]} for kind, found in sets.items()}


def _summary(found: Sequence[Mapping[str, Measures]], name: str) -> dict[str, Any]:
    def of(method: str, figure: str) -> NDArray[np.float64]:
        return np.array([measured[method][figure] for measured in found])

    summary: dict[str, Any] = {"samples": len(found), "rows": float(of(name, "rows").mean())}
    for figure in ("kl", "top1", "exact"):
        if figure in found[0][name]:
            values = of(name, figure)
            summary[figure] = float(values.mean())
            summary[f"{figure}_interval"] = list(bootstrap(values))
    summary["perplexity"] = float(np.exp(of(name, "nll").mean()))
    summary["speedup"] = float(np.median(of("full", "seconds")) / np.median(of(name, "seconds")))
    other = name.replace("default", "k deviation").partition(",")[0]
    if name.startswith("default") and other in found[0]:
        a, b = of(name, "kl"), of(other, "kl")
        summary["kl_of_k_deviation"] = float(a.mean() / b.mean())
        summary["kl_of_k_deviation_interval"] = list(bootstrap(a, b))
    return summary


def bootstrap(
    values: NDArray[np.float64], over: NDArray[np.float64] | None = None, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of the mean of `values`, or of their mean over the mean of `over`, paired by sample.

    Percentiles of resampled means (Efron, https://doi.org/10.1214/aos/1176344552); equal for equal seeds.

    Raises:
        ValueError: there are no values, or the two differ in number.
    """
    if not len(values) or (over is not None and len(over) != len(values)):
        raise ValueError(
            f"values: {len(values)}, over: {0 if over is None else len(over)}; want as many, above 0"
        )
    picks = default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    means = values[picks].mean(1)
    if over is not None:
        means = means / over[picks].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def measure_gate(
    judge: Judge, encode: Encode, tokens: int = 768, count: int = GATE_SAMPLES
) -> dict[str, Any]:
    """Measure the default selection on a few samples of every set, and keep what `gate.decide` says of it.

    Returns:
        What `gate.decide` gives, with kl_interval, of_naive_interval, samples, path.
    """
    chosen = {name: METHODS[name] for name in GATE_METHODS}
    found = [
        judge.measure(sample, chosen) for kind in SETS for sample in samples(kind, encode, count, tokens)
    ]
    naive, ours = (np.array([measured[name]["kl"] for measured in found]) for name in GATE_METHODS)
    result = gate.decide(float(ours.mean()), float(naive.mean())) | {
        "kl_interval": list(bootstrap(ours)),
        "of_naive_interval": list(bootstrap(ours, naive)),
        "samples": len(ours),
    }
    path = gate.keep(model_fingerprint(judge.model), Selection(), result)
    return result | {"path": str(path)}


def table(kind: str, summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """One set's methods as a table, cheapest first."""
    count = next(iter(summary.values()))["samples"]
    shown = Table(title=f"{kind}, {count} samples: against full recompute, with 95 % intervals")
    shown.add_column("method")
    for heading in ("rows", "KL", "top-1", "perplexity", "exact", "speedup", "KL / K deviation's"):
        shown.add_column(heading, justify="right")
    for name, figures in sorted(summary.items(), key=lambda item: item[1]["rows"]):
        shown.add_row(
            name,
            f"{figures['rows']:.1%}",
            _with_interval(figures, "kl", 4),
            _with_interval(figures, "top1", 3),
            f"{figures['perplexity']:.2f}",
            _with_interval(figures, "exact", 2),
            f"{figures['speedup']:.1f}×",
            _with_interval(figures, "kl_of_k_deviation", 2),
        )
    return shown


def _with_interval(figures: Mapping[str, Any], name: str, digits: int) -> str:
    if name not in figures:
        return ""
    low, high = figures[f"{name}_interval"]
    return f"{figures[name]:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def draw(summary: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Draw quality against computed rows, a panel per set."""
    families = {"default": ("#2e4057", "o"), "k deviation": ("#d1495b", "s")}
    figure, each = panels(len(summary), 4.2, 3.8)
    for panel, (kind, methods) in zip(each, summary.items(), strict=True):
        for family, (color, marker) in families.items():
            names = [n for n in methods if n.startswith(f"{family} .") and "," not in n]
            points = sorted((methods[n]["rows"], methods[n]["kl"], *methods[n]["kl_interval"]) for n in names)
            if points:
                rows, kl, low, high = zip(*points, strict=True)
                panel.plot(rows, kl, color=color, marker=marker, label=family)
                panel.vlines(rows, low, high, color=color, alpha=0.5)
        for name, figures in methods.items():
            if name != "full" and (name.rpartition(" ")[0] not in families):
                panel.plot(figures["rows"], figures["kl"], ".", color="#777777")
                panel.annotate(name, (figures["rows"], figures["kl"]), fontsize=5.5, color="#555555")
        panel.set(title=kind, xlabel="rows computed, of all", yscale="log")
        panel.set_ylabel("KL from full recompute, nats a token")
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)
