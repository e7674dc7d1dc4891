"""Names, patches and attributes of vLLM that are not public, and the features that need them.

`NAMES` has a row for each import. `find` looks up a name when a feature asks for it, in all modules where
versions of vLLM have it. So the connector loads even if a feature cannot. Public names are imported where
they are used: a connector's base class, the specs of its KV cache, events on the wire and requests' states.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from operator import attrgetter
from typing import Any

from kvkit.settings import ConfigError

log = logging.getLogger(__name__)

TESTED = ("0.32", "0.33")
"""Versions of vLLM that the tests ran with."""

FEATURES = {
    "answers": "a request waits a step to learn what was handed off for it",
    "blend": "an engine with `blend` in its settings does not start",
    "drafts": "KV of an engine with a draft model is shared with no other engine",
    "events": "vLLM's KV events do not report kvkit's tiers",
    "lora": "requests with LoRA adapters are not cached",
    "media": "requests with images or other media are not cached",
    "modelscope": "KV of a model that is named by its hub id is shared with no other engine",
    "offloading": "pages of vLLM's own offloading outlive an engine only if their tier has an `identity`",
    "pages": "KV of an engine on a CPU is shared with no other engine",
    "pipeline": "an engine with `record_stages` in its settings does not start",
    "private blocks": "an engine with `blend` or a tier with `precision` does not start",
    "runner": "no engine with `blend` starts, and weights that a program loads itself are not noticed",
    "tuning": "`kvkit tune` does not compare kvkit's attention with vLLM's",
    "weights": "weights that change while an engine runs are not noticed, and have no version",
}
"""Consequence of a missing name, by feature."""


@dataclass(frozen=True, slots=True)
class VllmName:
    """A name of vLLM that may move.

    Attributes:
        features: features of `FEATURES` that need it.
        use: purpose for which kvkit needs it.
        location: its location in 0.32, "module:attribute".
        later_locations: its locations in later versions, by version, the newest first.
    """

    features: tuple[str, ...]
    use: str
    location: str
    later_locations: Mapping[str, str] = field(default_factory=dict)


class MissingName(ConfigError):
    """This version of vLLM lacks a name that a feature needs."""


_HASHES = "vllm.v1.core.kv_cache_utils"
_CONNECTOR = "vllm.distributed.kv_transfer:"

NAMES = {
    "Attention": VllmName(
        ("blend",), "recognise layers with K and V by head", "vllm.model_executor.layers.attention:Attention"
    ),
    "CommonAttentionMetadata": VllmName(
        ("blend",), "describe rows to attention", "vllm.v1.attention.backend:CommonAttentionMetadata"
    ),
    "IntermediateTensors": VllmName(
        ("blend",), "pass hidden states between stages", "vllm.sequence:IntermediateTensors"
    ),
    "cached_tokenizer_from_config": VllmName(
        ("blend",), "encode the marks of documents", "vllm.tokenizers:cached_tokenizer_from_config"
    ),
    "get_tp_group": VllmName(("blend",), "add up scores over ranks", "vllm.distributed:get_tp_group"),
    "get_world_group": VllmName(
        ("blend",), "make all ranks refuse together", "vllm.distributed:get_world_group"
    ),
    "is_quantized_kv_cache": VllmName(
        ("blend", "pages"),
        "refuse quantised pages",
        "vllm.utils.torch_utils:is_quantized_kv_cache",
        {"0.33": "vllm.v1.kv_cache_interface:is_quantized_kv_cache"},
    ),
    "set_forward_context": VllmName(
        ("blend",), "run the model for rows", "vllm.forward_context:set_forward_context"
    ),
    "EngineCore": VllmName(("weights",), "learn the version of weights", "vllm.v1.engine.core:EngineCore"),
    "Worker": VllmName(("weights",), "learn of new weights and of sleep", "vllm.v1.worker.gpu_worker:Worker"),
    "WorkerWrapperBase": VllmName(
        ("blend", "runner"), "reach the model runner", "vllm.v1.worker.worker_base:WorkerWrapperBase"
    ),
    "generate_block_hash_extra_keys": VllmName(
        ("events",), "name blocks with adapter, salt or media", f"{_HASHES}:generate_block_hash_extra_keys"
    ),
    "get_hash_fn_by_name": VllmName(
        ("events",), "hash blocks as the engine does", "vllm.utils.hashing:get_hash_fn_by_name"
    ),
    "hash_block_tokens": VllmName(
        ("events",), "hash blocks as the engine does", f"{_HASHES}:hash_block_tokens"
    ),
    "to_event_extra_keys": VllmName(("events",), "write extra keys", f"{_HASHES}:to_event_extra_keys"),
    "WorkerLoRAManager": VllmName(
        ("lora",), "note which files an adapter was read from", "vllm.lora.worker_manager:WorkerLoRAManager"
    ),
    "MultiModalHasher": VllmName(("media",), "digest media", "vllm.multimodal.hasher:MultiModalHasher"),
    "envs": VllmName(("modelscope",), "learn where a model comes from", "vllm:envs"),
    "_get_attn_isa": VllmName(
        ("pages",),
        "identify the order of K in a CPU's pages",
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
    ),
    "get_pp_group": VllmName(
        ("blend", "pipeline"), "gather other stages' layers", "vllm.distributed:get_pp_group"
    ),
    "Request": VllmName(("private blocks",), "name a request's own blocks", "vllm.v1.request:Request"),
    "make_block_hash_with_group_id": VllmName(
        ("private blocks",), "drop a request's own blocks", f"{_HASHES}:make_block_hash_with_group_id"
    ),
    "maybe_convert_block_hash": VllmName(
        ("events", "private blocks"),
        "write a block's hash as events do",
        f"{_HASHES}:maybe_convert_block_hash",
    ),
    "flash_attn_varlen_func": VllmName(
        ("tuning",), "time vLLM's attention", "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func"
    ),
    "get_flash_attn_version": VllmName(
        ("tuning",), "time vLLM's attention", "vllm.v1.attention.backends.fa_utils:get_flash_attn_version"
    ),
    "KVConnectorFactory": VllmName(
        ("offloading",),
        "tell secondary tiers whose KV they keep",
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
    ),
    "get_kv_transfer_group": VllmName(
        ("blend", "answers", "runner"), "find the worker's connector", f"{_CONNECTOR}get_kv_transfer_group"
    ),
    "has_kv_transfer_group": VllmName(
        ("blend", "answers", "runner"), "find the worker's connector", f"{_CONNECTOR}has_kv_transfer_group"
    ),
}
"""Locations, by name; `tests/vllm_adapter/test_vllm_compat.py` compares them with the installed vLLM."""


@cache
def _found(name: str) -> tuple[Any, ...]:
    """Return the object at the first location of a name that this vLLM has; empty if it has none."""
    row = NAMES[name]
    for location in (*row.later_locations.values(), row.location):
        module, _, attribute = location.partition(":")
        try:
            return (attrgetter(attribute)(import_module(module)),)
        except (ImportError, AttributeError):
            continue
    return ()


def find(name: str, feature: str = "") -> Any:
    """Return an object of `NAMES`, from the first location that this vLLM has.

    Args:
        feature: feature that asks for it, for the message; "": the first of its row.

    Raises:
        MissingName: this vLLM has none of the locations; the message names feature and version.
    """
    for found in _found(name):
        return found
    row = NAMES[name]
    raise missing_name(feature or row.features[0], f"{name} ({row.use})")


def missing_name(feature: str, name: str) -> MissingName:
    """Return the error of a feature that needs `name`, which this vLLM lacks."""
    try:
        version = import_module("vllm").__version__
    except ImportError:  # `kvkit tune` runs without vLLM
        version = "(not installed)"
    return MissingName(
        f"{feature}: vLLM {version} has no {name}, so {FEATURES[feature]}; "
        f"tested with vLLM {', '.join(TESTED)}"
    )


def check_feature(feature: str) -> None:
    """Look up all names of a feature.

    Raises:
        MissingName: this vLLM lacks one.
    """
    for name, row in NAMES.items():
        if feature in row.features:
            find(name, feature)


def missing_reason(feature: str) -> str:
    """Return the reason why a feature is not available with this vLLM; "" if it is available."""
    try:
        check_feature(feature)
    except MissingName as error:
        return str(error)
    return ""


def is_available(feature: str) -> bool:
    """Return whether a feature is available with this vLLM. Logs a warning if not."""
    reason = missing_reason(feature)
    if reason:
        log.warning("%s", reason)
    return not reason


def worker_shutdown_s() -> int:
    """Return the seconds that vLLM gives a worker's process to end before its SIGTERM."""
    envs = find("envs")
    return int(getattr(envs, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", 5))


def worker_connectors() -> list[Any]:
    """Return the connectors of the worker in this process; none if the worker is in another process."""
    if missing_reason("answers"):
        return []
    group = find("get_kv_transfer_group")() if find("has_kv_transfer_group")() else None
    return list(getattr(group, "sub_connectors", [group] if group else []))


_CHANGE_WEIGHTS = "reload_weights", "update_weights"
"""Methods of vLLM's worker that change weights."""
_SHARES = "_kvkit_shares_runner"
_WRAPPED = "_kvkit_wrapped"


def shares_runner() -> bool:
    """Return whether `share_runner` was called in this process; it was not if VLLM_PLUGINS excludes kvkit."""
    return hasattr(find("WorkerWrapperBase"), _SHARES)


def share_runner() -> None:
    """Call `open_runner(model runner)` of every connector that has it, once there are pages.

    vLLM gives its connectors the pages, but not the model runner. Every worker, whatever its platform and
    model runner, gets its pages in `WorkerWrapperBase.initialize_from_config`, after vLLM has loaded its
    plug-ins in that process: kvkit's plug-in wraps that method. The alternative, a `worker_cls` of kvkit,
    would need a class for each platform, named in the command that starts vLLM.

    May be called again. Mutates vLLM's class, for as long as the process lives; does nothing if the
    feature "runner" is not available.
    """
    if missing_reason("runner") or shares_runner():
        return
    wrapper_class = find("WorkerWrapperBase")
    initialize = wrapper_class.initialize_from_config

    def initialize_and_share(wrapper: Any, kv_cache_configs: list[Any]) -> None:
        initialize(wrapper, kv_cache_configs)
        for connector in worker_connectors():
            if hasattr(connector, "open_runner"):
                connector.open_runner(wrapper.worker.model_runner)

    wrapper_class.initialize_from_config = initialize_and_share
    setattr(wrapper_class, _SHARES, True)


def watch_worker() -> None:
    """Notify the worker's connectors of new weights and of sleep, by their methods.

    `weights_changed()` follows every change of weights through vLLM's worker, whether or not it succeeded,
    and every sleep that loses them. vLLM 0.33 reports sleep itself, by `unregister_kv_caches` and
    `restore_kv_caches`; 0.32 does not. May be called again. Mutates vLLM's class for as long as the process
    lives; logs a warning if this vLLM cannot be watched.
    """
    if not is_available("weights"):
        return
    worker = find("Worker")
    for name in _CHANGE_WEIGHTS:
        _wrap(worker, name, after=lambda *_, **__: _notify(worker_connectors(), "weights_changed"))

    def falls_asleep(_: Any, level: int = 1) -> None:
        _notify(worker_connectors(), "unregister_kv_caches")
        if level > 1:
            _notify(worker_connectors(), "weights_changed")

    def wakes_up(_: Any, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            _notify(worker_connectors(), "restore_kv_caches")

    _wrap(worker, "sleep", before=falls_asleep)
    _wrap(worker, "wake_up", after=wakes_up)


def watch_engine_core() -> None:
    """Notify the scheduler's connectors of new weights, their version, and resets of vLLM's own cache.

    Calls their methods `weights_changed()`, `set_weight_version(version)`, `own_cache_reset()`,
    `connector_reset()`, `falls_asleep()`, if weights are kept, and `wakes_up()` in the order of the events; a
    worker's report comes with the next step, possibly after a new version. Secondary tiers of vLLM's own
    offloading count as connectors. Otherwise as `watch_worker`.
    """
    if not is_available("weights"):
        return
    core = find("EngineCore")

    def versioned(engine: Any, weight_version: str) -> None:
        _notify(_scheduler_connectors(engine), "set_weight_version", weight_version)

    def reset(engine: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> None:
        method = "connector_reset" if reset_connector else "own_cache_reset"
        _notify(_scheduler_connectors(engine), method)

    def falls_asleep(engine: Any, level: int = 1, *_: Any, **__: Any) -> None:
        if level == 1:
            _notify(_scheduler_connectors(engine), "falls_asleep")

    def wakes_up(engine: Any, *_: Any, **__: Any) -> None:
        _notify(_scheduler_connectors(engine), "wakes_up")

    def called(engine: Any, method: Any, *_: Any, **__: Any) -> None:
        if method in _CHANGE_WEIGHTS:
            _notify(_scheduler_connectors(engine), "weights_changed")

    _wrap(core, "collective_rpc", after=called)
    _wrap(core, "set_weight_version", after=versioned)
    _wrap(core, "reset_prefix_cache", after=reset)
    _wrap(core, "sleep", before=falls_asleep)
    _wrap(core, "release_kv_cache_memory", before=falls_asleep, after=wakes_up)
    _wrap(core, "wake_up", after=wakes_up)


def complete_connector_settings(complete: Callable[[Any], object]) -> None:
    """Call `complete(vllm_config)` before vLLM makes its scheduler's connector. Mutates vLLM's class.

    vLLM's offloading tells its tiers little of the model; a plug-in can add that to their settings. May be
    called again; later calls have no effect.
    """
    if not is_available("offloading"):
        return

    def before(config: Any, role: Any, *_: Any, **__: Any) -> None:
        if role.name == "SCHEDULER":
            complete(config)

    _wrap(find("KVConnectorFactory"), "create_connector", before=before)


def watch_weight_loads(model: Any, call: Callable[[], object]) -> None:
    """Call `call` whenever weights are loaded into a model. Mutates the model."""
    load = getattr(model, "load_weights", None)
    if load is None:
        return

    def load_and_call(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        finally:
            call()

    model.load_weights = load_and_call


def _scheduler_connectors(engine: Any) -> list[Any]:
    """Return the connectors of an engine core's scheduler, and their secondary tiers."""
    connector = getattr(engine.scheduler, "connector", None)
    connectors = list(getattr(connector, "sub_connectors", [connector] if connector else []))
    managers = (getattr(getattr(c, "connector_scheduler", None), "manager", None) for c in connectors)
    return [*connectors, *(tier for m in managers for tier in getattr(m, "secondary_tiers", ()))]


def _notify(receivers: Iterable[Any], method: str, *arguments: Any) -> None:
    """Call a method of each connector that has it."""
    for connector in receivers:
        if hasattr(connector, method):
            getattr(connector, method)(*arguments)


def _wrap(
    owner: Any,
    name: str,
    before: Callable[..., object] = lambda *_, **__: None,
    after: Callable[..., object] = lambda *_, **__: None,
) -> None:
    """Wrap a method of a class, once, so that `before` and `after` get its arguments. Mutates the class."""
    method = getattr(owner, name, None)
    if method is None or hasattr(method, _WRAPPED):
        return

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        try:
            return method(*args, **kwargs)
        finally:
            after(*args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def watch_adapters(
    load: Callable[[Any, Any, Callable[[Any, Any], Any]], Any],
) -> Callable[[], None]:
    """Load LoRA adapters of this process by `load(manager, request, vLLM's own method)`.

    vLLM reports their loads nowhere else. Mutates vLLM's class until the returned function is called.

    Raises:
        MissingName: this vLLM has no method that loads them.
    """
    managers = find("WorkerLoRAManager")
    method = getattr(managers, "_load_adapter", None)
    if method is None:
        raise missing_name(
            "lora", "WorkerLoRAManager._load_adapter (note which files an adapter was read from)"
        )

    def load_and_note(manager: Any, request: Any) -> Any:
        return load(manager, request, method)

    def unwatch() -> None:
        if managers._load_adapter is load_and_note:
            managers._load_adapter = method

    managers._load_adapter = load_and_note
    return unwatch


@contextmanager
def active_adapter(runner: Any, lora: Any, tokens: int) -> Iterator[None]:
    """Apply an adapter (None: none) to `tokens` rows of a model runner, and then restore the step's own.

    Nothing is restored for model runner V2: it keeps no adapters in its batch, and sets them in each step.
    """
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        yield
        return
    before = manager._adapter_manager._last_mapping
    adapter_ids = (lora.lora_int_id if lora else 0,) * tokens
    runner._set_active_loras(adapter_ids, adapter_ids, {lora} if lora else set())
    try:
        yield
    finally:
        adapters = getattr(getattr(runner, "input_batch", None), "lora_id_to_lora_request", {})
        needed = set() if before is None else set(before.index_mapping) - {0}
        if before is not None and needed <= adapters.keys():
            manager.set_active_adapters({adapters[number] for number in needed}, before)


_RUNNER = ("attn_groups", "device", "get_model", "kv_cache_config", "supports_mm_inputs", "vllm_config")


def check_runner(runner: Any) -> None:
    """Check that a model runner has what blending needs: both runners of vLLM 0.32 and 0.33 do.

    Raises:
        MissingName: the model runner, or this vLLM, lacks a name.
    """
    check_feature("blend")
    for name in _RUNNER:
        if not hasattr(runner, name):
            raise missing_name("blend", f"{type(runner).__name__}.{name}")


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """Return vLLM's layers by name, once the model is loaded."""
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return layers


@contextmanager
def attention_instead(forwards: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the attention of layers by other functions inside the context. Mutates the layers' `impl`."""
    changed_impls: list[Any] = []
    try:
        for module, forward in forwards:
            changed_impls.append(module.impl)
            module.impl.forward = forward
        yield
    finally:
        for impl in changed_impls:
            impl.__dict__.pop("forward", None)


def inverse_frequencies(module: Any, factors: Any) -> Any:
    """Return the inverse frequencies of vLLM's rotary embedding, scaled by a factor each."""
    return module._compute_inv_freq(factors)


def cos_sin(module: Any) -> Any:
    """Return cos and sin of vLLM's rotary embedding, [positions, rotated channels]."""
    return module._compute_cos_sin_cache()


def cpu_page_order(vllm_config: Any) -> str:
    """Return a name for the order of K within vLLM's pages on a CPU: equal only if the order is.

    If this vLLM does not report the order, the name is unique to this engine.
    """
    if not is_available("pages"):
        return f"unknown-{uuid.uuid4().hex}"
    model, cache_config = vllm_config.model_config, vllm_config.cache_config
    order = find("_get_attn_isa")(
        model.dtype, cache_config.block_size, model.get_head_size(), cache_config.cache_dtype
    )
    return str(order)


def keeps_fewer_bits(vllm_config: Any) -> bool:
    """Return whether vLLM keeps K and V quantised; false if this vLLM does not report that."""
    if missing_reason("pages"):
        return False
    return bool(find("is_quantized_kv_cache")(vllm_config.cache_config.cache_dtype))


def keeps_draft_kv(draft: Any) -> bool:
    """Return whether a draft model (vLLM's `SpeculativeConfig`) has KV beside the model's.

    Raises:
        MissingName: this vLLM does not report that.
    """
    if not hasattr(draft, "uses_draft_kv_cache"):
        raise missing_name("drafts", "SpeculativeConfig.uses_draft_kv_cache")
    return bool(draft.uses_draft_kv_cache())


def draft_reads_ahead(draft: Any) -> bool:
    """Return whether a draft's KV of a token depends on later tokens; true if vLLM does not report that."""
    return draft is not None and bool(getattr(draft, "use_eagle_block_drop", lambda: True)())


def check_private_blocks(manager: Any) -> None:
    """Check that blocks of a request can be renamed: see `kvkit.adapters.vllm.blending.blocks`.

    Args:
        manager: vLLM's `KVCacheManager`.

    Raises:
        MissingName: this vLLM lacks a method or attribute that names blocks.
    """
    check_feature("private blocks")
    pool = manager.block_pool
    for attribute in ("cached_block_hash_to_block", "kv_event_queue", "take_events", "evict_blocks"):
        if not hasattr(pool, attribute):
            raise missing_name("private blocks", f"{type(pool).__name__}.{attribute}")
    if "_block_hasher" not in find("Request").__init__.__code__.co_names:
        raise missing_name("private blocks", "Request._block_hasher")


def block_hasher(request: Any) -> Any:
    """Return the function that names a request's next blocks."""
    return request._block_hasher


def name_blocks(request: Any, hasher: Any) -> None:
    """Make `hasher` name a request's next blocks. Mutates the request."""
    request._block_hasher = hasher


def before_events(manager: Any, call: Callable[[], object]) -> None:
    """Call `call` whenever vLLM is about to take its blocks' events. Mutates the block pool permanently."""
    pool = manager.block_pool
    take = pool.take_events

    def take_after() -> Any:
        call()
        return take()

    pool.take_events = take_after


def event_queue(manager: Any) -> list[Any]:
    """Return vLLM's own queue of its blocks' events."""
    queue: list[Any] = manager.block_pool.kv_event_queue
    return queue


def drop_block(manager: Any, name: Any) -> None:
    """Evict vLLM's cached blocks of a hash, in all KV cache groups, so that they are reused first."""
    pool = manager.block_pool
    for group in range(manager.num_kv_cache_groups):
        key = find("make_block_hash_with_group_id")(name, group)
        while (block := pool.cached_block_hash_to_block.get_one_block(key)) is not None:
            pool.evict_blocks({block.block_id})


def event_hash(name: bytes) -> Any:
    """Return a block's hash as vLLM's events write it."""
    return find("maybe_convert_block_hash")(name)


def extra_keys(request: Any, blocks: range) -> Any:
    """Return the extra keys of a request's block hashes, as events write them; None if there are none.

    Args:
        blocks: the first token of each block.
    """
    keys = find("generate_block_hash_extra_keys")
    block_keys = [keys(request, first, first + blocks.step, 0)[0] for first in blocks]
    return find("to_event_extra_keys")(block_keys) if any(block_keys) else None


def free_blocks(manager: Any) -> int:
    """Return the number of vLLM's free blocks."""
    return int(manager.block_pool.get_num_free_blocks())


def keeps_cached_blocks(manager: Any) -> bool:
    """Return whether vLLM's own prefix cache has any block; true if this vLLM does not report that."""
    blocks = getattr(manager.block_pool, "cached_block_hash_to_block", None)
    return bool(getattr(blocks, "_cache", True))


def computed_tokens(manager: Any, request: Any) -> int:
    """Return how many leading tokens of a request vLLM's own prefix cache has."""
    _, tokens, *_ = manager.get_computed_blocks(request)
    return int(tokens)


def after_steps(runner: Any, call: Callable[[Any], object]) -> None:
    """Call `call` with the scheduler's output after each step of a model runner.

    Mutates the model runner permanently.
    """
    execute = runner.execute_model

    def execute_and_call(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = execute(scheduled, *args, **kwargs)
        call(scheduled)
        return output

    runner.execute_model = execute_and_call
