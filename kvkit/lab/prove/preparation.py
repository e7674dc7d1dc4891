"""Preparation of `kvkit prove` from its options: engines to start, or running servers."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from kvkit.environment import gpu_name
from kvkit.lab.files import BenchError, model_folder, split_options
from kvkit.lab.prove.engines import PROBE, EngineLaunch, ProvedEngine, with_adapter
from kvkit.lab.prove.models import ChangedWeights, linked, make_adapter
from kvkit.lab.prove.options import ProveOptions
from kvkit.lab.prove.run import ToProve, changes_weights
from kvkit.lab.prove.scenarios import SCENARIOS, Scenario, prompts_of
from kvkit.lab.prove.verdict import LOGPROB_TOLERANCE
from kvkit.lab.serve import memory
from kvkit.lab.serve.systems import free_port, missing

_CONNECTOR = {
    "kv_connector": "KVKitConnector",
    "kv_connector_module_path": "kvkit.adapters.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_BLOCKS = 12
"""Chunks that fit in an engine's blocks: few, so that the blocks are soon full."""
_BLOCK_BYTES, _BESIDE_BYTES = 1 << 30, 1 << 30
"""Maximum bytes of an engine's blocks; bytes reserved for a connector."""
_LONGEST = 8
"""Longest prompt with its answer, in chunks."""


def chosen(names: str) -> list[Scenario]:
    """Return the scenarios with these comma-separated names, in the order of `SCENARIOS`.

    Raises:
        BenchError: a name is unknown.
    """
    known = {scenario.name: scenario for scenario in SCENARIOS}
    requested = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    for name in requested:
        if name not in known:
            raise BenchError(f"scenarios = {name!r}: want some of {', '.join(known)}")
    return [scenario for scenario in SCENARIOS if scenario.name in requested]


def transfer_of(text: str, folder: Path, chunk_tokens: int) -> dict[str, Any]:
    """Return the kv_transfer_config that `text` names or contains.

    Args:
        text: `kvkit`, a connector's name, JSON, or the path of a file with JSON.
        folder: folder of kvkit's disk tier.

    Raises:
        BenchError: the JSON is invalid, or has no kv_connector.
    """
    if text == "kvkit":
        tiers = {"memory": {"capacity": "512MiB"}, "disk": {"url": f"file://{folder}/kv"}}
        kvkit = {"chunk_tokens": chunk_tokens, "staging": "256MiB", "tiers": tiers}
        extra = {"kvkit": kvkit, "prefill_tokens_per_s": 0.01, "lookup_timeout_s": 20.0}
        return _CONNECTOR | {"kv_connector_extra_config": extra}
    if text.isidentifier():
        return {"kv_connector": text, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    try:
        transfer = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"kv_transfer_config = {text!r}: {error}; want a name, JSON or a file") from error
    if not isinstance(transfer, dict) or "kv_connector" not in transfer:
        raise BenchError(f"kv_transfer_config = {text!r}: want an object with kv_connector")
    return transfer


def command_of(options: ProveOptions, seed: int, scenarios: str = "") -> str:
    """Return the command that repeats the run, with all scenarios or some of them."""
    command = ["kvkit", "prove", "--seed", str(seed)]
    settings = asdict(options) | {"seed": None, "scenarios": scenarios or options.scenarios}
    for name, value in settings.items():
        if value:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(command)


@contextmanager
def prepared(options: ProveOptions, console: Console) -> Iterator[ToProve]:
    """Prepare the engines and prompts for `run`; removes its temporary folder on exit.

    Raises:
        BenchError: an option is wrong, or something is missing.
        ModelError: the model cannot be fetched.
    """
    dtype = options.dtype or ("bfloat16" if gpu_name() else "float32")
    if dtype not in LOGPROB_TOLERANCE:
        raise BenchError(f"dtype = {dtype!r}: want one of {', '.join(LOGPROB_TOLERANCE)}")
    if (options.url is None) != (options.reference is None):
        raise BenchError(
            "want both --url and --reference, or neither: without them, kvkit starts both engines"
        )
    scenarios = chosen(options.scenarios)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    unavailable: dict[str, str] = {}
    if options.store_pid is None:
        unavailable["store"] = "the store's process is not known: name it with --store-pid"
    with TemporaryDirectory(prefix="kvkit-prove-") as name:
        folder, weights, changed = Path(name), None, None
        if options.url is not None and options.reference is not None:
            unavailable |= dict.fromkeys(("own", "weights"), "the engine was not started here")
            unavailable["adapter"] = "it is not known whether the engines have an adapter"
            reference: EngineLaunch | str = options.reference
            engine = ProvedEngine("engine", options.url)
        else:
            if reason := missing("plain"):
                raise BenchError(reason)
            launch, weights = _launch(options, folder, dtype, unavailable, console)
            reference = launch
            if weights is not None and any(map(changes_weights, scenarios)):
                changed = replace(launch, model=_changed(weights, folder / "changed-model"))
            engine = _with_connector(options, launch, folder)
        yield ToProve(
            reference=reference,
            engine=engine,
            scenarios=scenarios,
            prompts=prompts_of(seed, options.chunk_tokens),
            seed=seed,
            folder=folder,
            dtype=dtype,
            changed_reference=changed,
            weights=weights,
            store_pid=options.store_pid,
            missing=unavailable,
        )


def _launch(
    options: ProveOptions, folder: Path, dtype: str, unavailable: dict[str, str], console: Console
) -> tuple[EngineLaunch, ChangedWeights | None]:
    """Return how to start the reference, and its weights. Adds missing requirements to `unavailable`."""
    model, weights = model_folder(options.model, console), None
    if Path(model).is_dir():
        model = str(linked(Path(model), folder / "model"))
        try:
            weights = ChangedWeights(Path(model))
        except BenchError as error:
            unavailable["weights"] = str(error)
    else:
        unavailable["weights"] = f"{model} is not a folder: its weights cannot be changed"
    vllm_options = split_options(options.vllm)
    share, concurrent = _share_memory(model, 1 if options.prefill_config is None else 2, vllm_options)
    extra_options = (*share.options, *vllm_options)
    block = int(dict(pairwise(extra_options)).get("--block-size", 16 if gpu_name() else 128))
    chunk = options.chunk_tokens
    engine_options = {
        "--dtype": dtype,
        "--max-model-len": _LONGEST * chunk,
        "--max-num-batched-tokens": chunk,
        "--max-num-seqs": 8,
        "--num-gpu-blocks-override": _BLOCKS * chunk // block,
        "--worker-extension-cls": PROBE,
    }
    arguments = [str(word) for pair in engine_options.items() for word in pair]
    arguments.append("--no-enable-prefix-caching")
    environment = dict(os.environ)
    if gpu_name() is None:  # eager mode starts sooner
        arguments.append("--enforce-eager")
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        environment.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow down the other engines
    launch = EngineLaunch(model, (*arguments, *extra_options), folder, environment, concurrent=concurrent)
    try:
        adapter = options.lora or make_adapter(Path(model), folder / "adapter")
    except BenchError as error:
        unavailable["adapter"] = str(error)
    else:
        launch = with_adapter(launch, adapter.absolute())
    return launch, weights


def _share_memory(model: str, servers: int, vllm_options: Sequence[str]) -> tuple[memory.Share, bool]:
    """Return each engine's share of memory, and whether all may start at once with both references.

    Raises:
        MemoryTooSmall: not even `servers` engines fit.
    """

    def share_for(servers: int) -> memory.Share:
        return memory.share(
            model, servers=servers, tiers=_BESIDE_BYTES, most=_BLOCK_BYTES, options=vllm_options
        )

    if gpu_name() is None:  # on a GPU, a starting vLLM measures free memory: one at a time
        with suppress(memory.MemoryTooSmall):
            share = share_for(servers + 2)
            return share, share.block_bytes is not None
    return share_for(servers), False


def _changed(weights: ChangedWeights, folder: Path) -> str:
    """Make a folder with the same model and the changed tensor; return its path."""
    ChangedWeights(linked(weights.folder, folder)).change()
    return str(folder)


def _with_connector(options: ProveOptions, launch: EngineLaunch, folder: Path) -> ProvedEngine:
    """Return the engine to prove, with its prefill engine if the options name one."""

    def with_transfer(text: str) -> EngineLaunch:
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        transfer = transfer_of(text, folder, options.chunk_tokens)
        return replace(launch, transfer=transfer, environment={**launch.environment, **port})

    connected = with_transfer(options.kv_transfer_config)
    if options.prefill_config is not None:
        return ProvedEngine(
            "engine", connected, ProvedEngine("prefill", with_transfer(options.prefill_config))
        )
    off, on = "--no-enable-prefix-caching", "--enable-prefix-caching"
    return ProvedEngine(
        "engine",
        replace(connected, options=tuple(on if option == off else option for option in connected.options)),
    )
