"""Problems that attention and its helpers are compiled, tuned and checked with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import numpy as np
import torch

from kvkit.format.rope import Rope
from kvkit.kernels.attention import hopper, reference, triton
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.tuning.cases import INTERLEAVED, LLAMA_ROPE, Case, Problem, Work, fill, not_close, rope_of
from kvkit.kernels.tuning.configs import KernelConfig, Launch, Runnable
from kvkit.kernels.tuning.gpus import GPUS
from kvkit.kernels.tuning.shapes import ModelShape


def problems() -> Iterator[Problem]:
    """Yield all problems, grouped by operation; made on the CPU without contents."""
    yield from map(attention_problem, ATTENTIONS)
    yield from (hopper_problem(spec) for spec in ATTENTIONS if spec.on_hopper)
    yield from map(scatter_problem, SCATTERS)
    yield deviation_problem()


def model_problems(shape: ModelShape) -> Iterator[Problem]:
    """Yield the problems of a model: attention to few, some and many keys, and the helpers."""
    sizes = shape.heads, shape.kv_heads, shape.head, shape.v_size
    heads = Heads(*sizes, shape.torch_dtype, latent=bool(shape.latent))
    spec = partial(
        AttentionSpec,
        heads=heads,
        block_tokens=shape.block,
        window=shape.window or None,
        softcap=shape.softcap or None,
    )
    for length in (4096, 8192, 32768):
        length = -(-length // shape.block) * shape.block
        attention = spec(name=f"attention {shape}, {length} keys", length=length)
        yield attention_problem(attention)
        if attention.on_hopper:
            yield hopper_problem(attention)
    kinds: tuple[Literal["lse", "scores", "scores x v"], ...] = ("lse", "scores", "scores x v")
    for what in kinds:
        length = -(-8192 // shape.block) * shape.block
        yield attention_problem(spec(name=f"{what} {shape}", length=length, what=what))
    if not shape.latent:
        rope = rope_of(shape.rotary or shape.head, 10000.0)
        for deviation in (False, True):
            name = f"scatter {shape}{', deviation' * deviation}"
            yield scatter_problem(ScatterSpec(name, heads, rope, deviation))
    yield deviation_problem(8192, shape.kv_heads, shape.head, shape.torch_dtype, f"deviation {shape}")


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a model's attention; with `latent`, V is the first channels of K."""

    query_heads: int
    heads: int
    size: int
    v_size: int
    dtype: torch.dtype = torch.bfloat16
    latent: bool = False

    @property
    def page_size(self) -> int:
        """Channels of a token and head in pages."""
        return self.size + (0 if self.latent else self.v_size)


LLAMA_8B = Heads(32, 8, 128, 128)
LLAMA_70B = Heads(64, 8, 128, 128)
LLAMA_2 = Heads(32, 32, 128, 128)
GEMMA_2 = Heads(16, 8, 256, 256)
SMOLLM_HEADS = Heads(9, 3, 64, 64, torch.float32)
DEEPSEEK_V3 = Heads(128, 1, 576, 512, latent=True)
"""Absorbed multi-head latent attention (https://arxiv.org/abs/2405.04434)."""

SHARE = 0.15
"""Share of the rows that are computed again."""

LAST_ROWS = 64
"""Rows at the end of a request, such as a user's question, which are all computed."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A `blend_attention` of SHARE of the rows and the last rows, or `query_scores` of the last rows.

    Args:
        name: name of the problem.
        heads: heads of the model.
        length: number of keys.
        block_tokens: tokens of a block; None: one block has all keys.
        what: "o": attention; "lse": only its logsumexp; "scores", or "scores x v" with the norms of V.
        window, softcap: as in `blend_attention`.
        gated: as in `Problem`.
        split: keys at whose multiples tiles are split, 0: nowhere; None: see `schedule`.
    """

    name: str
    heads: Heads
    length: int
    block_tokens: int | None = 16
    what: Literal["o", "lse", "scores", "scores x v"] = "o"
    window: int | None = None
    softcap: float | None = None
    gated: bool = True
    split: int | None = None

    @property
    def kernel(self) -> str:
        """Name of the kernel that is tuned."""
        return "weigh" if self.what.startswith("scores") else "attend"

    @property
    def on_hopper(self) -> bool:
        """True if the kernel for Hopper GPUs computes it, and this Triton has Gluon."""
        heads = self.heads
        plain = self.what == "o" and heads.size == heads.v_size and not heads.latent
        known = hopper.KERNEL is not None and heads.size in hopper.SIZES
        return plain and known and heads.dtype.itemsize == 2


ATTENTIONS = (
    *(AttentionSpec(f"attention Llama-3.1-8B, {n} keys", LLAMA_8B, n) for n in (4096, 8192, 32768)),
    AttentionSpec("attention Llama-3.1-8B, one block", LLAMA_8B, 8192, None),
    AttentionSpec("attention Llama-3.1-8B, window", LLAMA_8B, 8192, window=4096),
    AttentionSpec("attention Llama-3-70B", LLAMA_70B, 8192, gated=False),
    AttentionSpec("attention Llama-2-7B", LLAMA_2, 8192, gated=False),
    AttentionSpec("attention Gemma-2-9B", GEMMA_2, 4096, softcap=50.0),
    AttentionSpec("attention SmolLM2, float32", SMOLLM_HEADS, 4096, None),
    AttentionSpec("attention DeepSeek-V3", DEEPSEEK_V3, 8192, 64),
    AttentionSpec(
        "attention DeepSeek-V3, an eighth", replace(DEEPSEEK_V3, query_heads=16), 8192, gated=False
    ),
    AttentionSpec("attention DeepSeek-V3, not absorbed", Heads(128, 128, 192, 128), 8192, 128, gated=False),
    AttentionSpec("attention heads of 512", Heads(16, 2, 512, 512), 8192),
    AttentionSpec("attention Phi-3-mini", Heads(32, 32, 96, 96), 8192, 128),
    AttentionSpec("attention Phi-2", Heads(32, 32, 80, 80), 8192),
    AttentionSpec("attention heads of 72", Heads(16, 16, 72, 72), 8192, gated=False),
    AttentionSpec("attention Qwen2-7B", Heads(28, 4, 128, 128), 8192, 64),
    AttentionSpec("attention Falcon-7B", Heads(71, 1, 64, 64), 8192),
    AttentionSpec("attention StarCoder", Heads(48, 1, 128, 128), 8192),
    AttentionSpec("attention Llama-3.1-8B, float32", replace(LLAMA_8B, dtype=torch.float32), 8192),
    AttentionSpec("attention Gemma-2-9B, float32", replace(GEMMA_2, dtype=torch.float32), 8192),
    AttentionSpec("logsumexp Llama-3.1-8B", LLAMA_8B, 8192, what="lse"),
    AttentionSpec("scores DeepSeek-V3", DEEPSEEK_V3, 8192, 64, what="scores"),
    AttentionSpec("scores Llama-3.1-8B", LLAMA_8B, 8192, what="scores"),
    AttentionSpec("scores x |v| Llama-3.1-8B", LLAMA_8B, 8192, what="scores x v"),
    AttentionSpec("scores SmolLM2, float32", SMOLLM_HEADS, 4096, None, what="scores"),
)


def _rows(spec: AttentionSpec, device: torch.device) -> Rows:
    """Return the last rows and, for an attention, a random SHARE of the rows before."""
    random, last = np.random.default_rng(0), np.arange(spec.length - LAST_ROWS, spec.length)
    chosen = random.choice(spec.length - LAST_ROWS, int(SHARE * spec.length), replace=False)
    positions = last if spec.kernel == "weigh" else np.sort(np.concatenate([chosen, last]))
    tokens = spec.block_tokens or spec.length
    tables = random.permutation(spec.length // tokens)[None]
    return Rows.of(positions, np.array([0, len(positions)]), np.array([spec.length]), tables, tokens, device)


def attention_problem(spec: AttentionSpec) -> Problem:
    """Make the problem of an attention, on the CPU without contents."""
    cpu, heads = torch.device("cpu"), spec.heads
    rows, group = _rows(spec, cpu), heads.query_heads // heads.heads
    sizes = heads.size + (heads.v_size if spec.what in ("o", "scores x v") else 0)
    row_size = heads.size + (heads.v_size if spec.what == "o" else 0)
    read = heads.page_size if spec.what in ("o", "scores x v") else heads.size
    moved = spec.length * heads.heads * read + rows.count * heads.query_heads * row_size

    def work(config: KernelConfig) -> Work:
        """Count whole tiles, as the matrix units take them."""
        tiles = dict(config.tiles)
        tile_rows, channels = tiles["TILE_ROWS"], sizes
        if spec.kernel == "weigh":
            keys, channels = spec.length * -(-rows.count // tile_rows) * heads.query_heads, heads.size
        else:
            pack = triton.pack_of(config, group, rows.count)
            units = heads.heads * -(-group // pack)
            keys = rows.tiles(tile_rows // pack, window=spec.window).keys * units
        flops = 2 * tile_rows * keys * channels
        return Work(heads.dtype.itemsize * moved, flops, keys // tiles["TILE_KEYS"])

    problem = _problem(spec.name, spec.kernel, partial(_attention_case, spec), work, (2, 0), spec.gated)
    return replace(problem, spills={"sm_90": 192}) if heads.latent and spec.kernel == "attend" else problem


def hopper_problem(spec: AttentionSpec) -> Problem:
    """Make the problem of an attention by the Hopper kernel: elsewhere its default is that of `attend`."""
    plain = attention_problem(spec)
    (launch, *_) = plain.make(torch.device("cpu"), False).launches(None)
    assert isinstance(launch, Launch)
    space = hopper.configs(launch.arguments)

    def work(config: KernelConfig) -> Work:
        """Count the iterations of both warpgroups."""
        found = plain.work(config)
        return replace(found, iterations=2 * found.iterations) if config in space else found

    return replace(
        plain,
        name=f"{spec.name}, Hopper",
        bucket=plain.bucket._replace(op=hopper.OP),
        kernel=hopper.KERNEL,
        space=space,
        make=partial(_hopper_case, spec),
        work=work,
        wide={hopper.OP: (2, 0)},
        # with more channels, ptxas spills a few bytes outside of the loops
        gated=plain.gated and spec.heads.size <= 128,
        defaults={target: space[0] if target == hopper.TARGET else plain.defaults[target] for target in GPUS},
    )


def _hopper_case(spec: AttentionSpec, device: torch.device, filled: bool) -> Case:
    case = _attention_case(spec, device, filled)

    def launches(config: KernelConfig | None) -> tuple[Runnable, ...]:
        if config is None and hopper.available():
            (launch, *_) = case.launches(None)
            assert isinstance(launch, Launch)
            config = hopper.configs(launch.arguments)[0]
        found = case.launches(config)
        if config is None or "STAGES" not in dict(config.tiles):
            return found
        return hopper.with_kernel(tuple(one for one in found if isinstance(one, Launch)))

    return replace(case, launches=launches)


OPERATIONS = {
    "attend": "blend_attention",
    "weigh": "query_scores",
    "scatter_rows": "rope_scatter",
    "measure": "token_deviation",
}
"""Operation by the name of the kernel that is tuned."""


def _problem(
    name: str,
    kernel: str,
    make: Callable[[torch.device, bool], Case],
    work: Callable[[KernelConfig], Work],
    wide: tuple[int, int] = (0, 0),
    gated: bool = True,
) -> Problem:
    """Make the problem of a kernel, tuned with the launches of `make`."""
    launches = make(torch.device("cpu"), False).launches(None)
    (launch,) = (one for one in launches if isinstance(one, Launch) and one.kernel.__name__ == kernel)
    bucket, space = triton.bucket(launch), triton.configs(launch)
    defaults = {target: triton.configs(launch, target)[0] for target in GPUS}
    operation = OPERATIONS[kernel]
    return Problem(name, bucket, launch.kernel, space, make, work, {kernel: wide}, gated, defaults, operation)


def _attention_case(spec: AttentionSpec, device: torch.device, filled: bool) -> Case:
    heads, rows = spec.heads, _rows(spec, device)
    tokens = spec.block_tokens or spec.length
    blocks, scoring = spec.length // tokens, Scoring(heads.size**-0.5, spec.window, spec.softcap)
    new = partial(torch.empty, dtype=heads.dtype, device=device)
    q = new(rows.count, heads.query_heads, heads.size)
    pages = new(blocks, heads.heads, tokens, heads.page_size)  # K and V side by side, as in vLLM
    k_pages, v_pages = pages[..., : heads.size], pages[..., -heads.v_size :]
    if heads.latent:
        v_pages = pages[..., : heads.v_size]
    out = new(rows.count, heads.query_heads, heads.v_size)
    lse = torch.empty(rows.count, heads.query_heads, device=device)
    mass = torch.empty(heads.query_heads, spec.length, device=device)
    scored, known_lse = v_pages if spec.what == "scores x v" else None, lse
    if filled:
        fill(q)
        fill(pages)
        if spec.kernel == "weigh":
            known_lse = reference.blend_attention(q, k_pages, v_pages, rows, scoring)[1]

    def launches(config: KernelConfig | None) -> tuple[Launch, ...]:
        if spec.kernel == "weigh":
            return triton.scores(q, k_pages, scored, rows, scoring, known_lse, mass, config)
        values = (v_pages, out) if spec.what == "o" else (None, None)
        if config is not None and spec.split is not None:
            config = triton.with_split(config, spec.split)
        return triton.attention(q, k_pages, values[0], rows, scoring, values[1], lse, config)

    sample = np.unique(np.linspace(0, rows.count - 1, 64).astype(np.int64))
    sample_ids = torch.from_numpy(sample).to(device)

    @cache
    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        starts = np.array([0, len(sample)])
        sample_rows = Rows.of(rows.positions[sample], starts, rows.lengths, rows.tables, tokens, device)
        return reference.blend_attention(q[sample_ids], k_pages, v_pages, sample_rows, scoring)

    def fault() -> str:
        if spec.kernel == "weigh":
            want = reference.query_scores(q, k_pages, scored, rows, scoring)
            return not_close("scores", mass, want, TOLERANCE[heads.dtype], 1e-6)
        if lse.isnan().any() or (spec.what == "o" and out.isnan().any()):
            return "some rows were not written"
        found = not_close("lse", lse[sample_ids], expected()[1], 0, 1e-3)
        if not found and spec.what == "o":
            want, actual = expected()[0].double(), out[sample_ids].double()
            error = ((actual - want).norm(dim=2) / want.norm(dim=2)).max()  # of all rows and heads
            if not error <= TOLERANCE[heads.dtype]:
                found = f"o: a row is off by {error:.2g} of its norm"
        return found

    written = (mass,) if spec.kernel == "weigh" else (out, lse) if spec.what == "o" else (lse,)
    return Case(launches, partial(_poison, out, lse, mass), fault, written)


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Relative tolerance by dtype; weights are rounded to the dtype before the product with V."""


@dataclass(frozen=True, slots=True)
class ScatterSpec:
    """A `rope_scatter` of the rows of a blend.

    Args:
        name: name of the problem.
        heads: heads of the model.
        rope: rotary embedding of the model.
        deviation: whether the deviation is measured too.
        rows, tokens: number of rows, and of the tokens that they are drawn from.
    """

    name: str
    heads: Heads
    rope: Rope
    deviation: bool = False
    rows: int = 1292
    tokens: int = 8192


SCATTERS = (
    ScatterSpec("scatter Llama-3.1-8B", LLAMA_8B, LLAMA_ROPE),
    ScatterSpec("scatter Llama-3.1-8B, deviation", LLAMA_8B, LLAMA_ROPE, deviation=True),
    ScatterSpec("scatter interleaved", LLAMA_8B, INTERLEAVED),
    ScatterSpec("scatter SmolLM2, float32", SMOLLM_HEADS, rope_of(64, 100000.0)),
)


def scatter_problem(spec: ScatterSpec) -> Problem:
    """Make the problem of a scatter, on the CPU without contents."""
    heads, item = spec.heads, spec.heads.dtype.itemsize
    channels = (heads.query_heads + heads.heads) * heads.size + heads.heads * heads.v_size
    moved = spec.rows * (2 * item * channels + 4 * spec.rope.channels + 8)
    if spec.deviation:
        moved += spec.rows * (item * heads.heads * heads.size + 4)
    # no 16-byte accesses are expected: a head is too small for 16 bytes of each thread
    return _problem(spec.name, "scatter_rows", partial(_scatter_case, spec), lambda config: Work(moved))


def _scatter_case(spec: ScatterSpec, device: torch.device, filled: bool) -> Case:
    heads, random, tokens = spec.heads, np.random.default_rng(0), 16
    new = partial(torch.empty, dtype=heads.dtype, device=device)
    sizes = heads.query_heads * heads.size, heads.heads * heads.size, heads.heads * heads.v_size
    fused = new(spec.rows, sum(sizes))  # output of one projection
    sides = heads.size, heads.v_size
    projections = zip(fused.split_with_sizes(sizes, 1), (heads.size, *sides), strict=True)
    q, k, v = (projection.view(spec.rows, -1, size) for projection, size in projections)
    positions = np.sort(random.choice(spec.tokens, spec.rows, replace=False))
    rotations = RowRotations(spec.rope, torch.from_numpy(spec.rope.table(positions)).to(device))
    slots = torch.from_numpy(random.permutation(spec.tokens)[: spec.rows]).to(device)
    pages = new(spec.tokens // tokens, heads.heads, tokens, heads.size + heads.v_size)
    out = new(spec.rows, heads.query_heads, heads.size)
    deviation = torch.zeros(spec.rows, device=device)
    measured = deviation if spec.deviation else None
    before = torch.empty_like(pages)
    if filled:
        fill(fused)
        fill(before)

    def launches(config: KernelConfig | None) -> tuple[Launch, ...]:
        k_pages, v_pages = pages.split_with_sizes(sides, -1)
        return triton.scatter((q, k, v), rotations, slots, k_pages, v_pages, measured, out, config)

    def poison() -> None:
        pages.copy_(before)
        _poison(out, deviation)

    @cache
    def expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        want, moved_distance = before.clone(), torch.empty_like(deviation)
        k_pages, v_pages = want.split_with_sizes(sides, -1)
        rotated_q = reference.rope_scatter(q, k, v, rotations, slots, k_pages, v_pages, moved_distance)
        return want, rotated_q, moved_distance

    def fault() -> str:
        want, rotated_q, moved_distance = expected()
        close = 2 * torch.finfo(heads.dtype).eps, 1e-5
        found = not_close("pages", pages, want, *close) or not_close("q", out, rotated_q, *close)
        return found or (
            not_close("deviation", deviation, moved_distance, 1e-2, 1e-4) if spec.deviation else ""
        )

    return Case(launches, poison, fault, (pages, out, deviation) if spec.deviation else (pages, out))


def deviation_problem(
    tokens: int = 8192,
    heads: int = 8,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "deviation Llama-3.1-8B",
) -> Problem:
    """Make the problem of a deviation of keys, on the CPU without contents."""

    def make(device: torch.device, filled: bool) -> Case:
        new, old = (torch.empty(tokens, heads, size, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty(tokens, device=device)
        if filled:
            fill(new)
            old.copy_(new.flip(0))

        def fault() -> str:
            return not_close("deviation", out, reference.token_deviation(new, old), 1e-4, 1e-4)

        return Case(
            lambda config: triton.deviation(new, old, out, config), partial(_poison, out), fault, (out,)
        )

    work = Work(tokens * (2 * dtype.itemsize * heads * size + 4))
    return _problem(name, "measure", make, lambda config: work)


def _poison(*outputs: torch.Tensor) -> None:
    for tensor in outputs:
        tensor.fill_(torch.nan)
