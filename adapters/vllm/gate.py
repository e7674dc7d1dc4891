"""Checks that an engine's model was found fit for blending or fewer bits, and names of verdicts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvkit.adapters.engine.weights import folder_fingerprint
from kvkit.adapters.huggingface.configs import NOT_KV, stable_json
from kvkit.adapters.vllm.identity import weights_of
from kvkit.adapters.vllm.settings import BlendSettings
from kvkit.blend import gate
from kvkit.blend.plan import BlendError, Selection
from kvkit.format.layout import Precision
from kvkit.settings import ConfigError
from kvkit.transfer import precision as measured


def folder_name(folder: Path, weights: str = "") -> str:
    """Return the name of verdicts on a folder's model: a digest of its weights and config.

    Args:
        weights: identity of the weights; empty: their fingerprint is computed.

    Raises:
        OSError: a file cannot be read.
        ValueError: config.json is not JSON.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    kv_fields = {name: value for name, value in config.items() if name not in NOT_KV}
    contents = [weights or folder_fingerprint(folder), kv_fields]
    return hashlib.blake2b(stable_json(contents), digest_size=16).hexdigest()


def verdict_name(vllm_config: Any, option: str, unless: str) -> str:
    """Return the name of verdicts on an engine's model.

    It depends on the weights and config in the model's files, not on the engine's `dtype`, quantisation and
    ranks, nor on the adapters of its requests.

    Args:
        option: option of `kvkit doctor` that measures the model, for the message.
        unless: setting that allows the model without a verdict, for the message.

    Raises:
        ConfigError: the engine changes the model's config.
    """
    model = vllm_config.model_config
    for setting in ("hf_overrides", "hf_config_path"):
        if value := getattr(model, setting):
            raise ConfigError(
                f"{setting} = {value!r}: a model is measured with its own config.json; "
                f"put this there, and run `kvkit doctor {option} MODEL`, or set {unless}"
            )
    _, name = weights_of(model, vllm_config.load_config)
    folder = Path(model.model)
    return folder_name(folder, name) if folder.is_dir() else name


def check_model(vllm_config: Any, selection: Selection, unless: str) -> gate.Context:
    """Refuse an engine whose model has not been found fit for blending.

    Returns:
        context in which documents are to be computed.

    Raises:
        BlendError: as `kvkit.blend.gate.check`, or the engine changes the model's config.
    """
    try:
        name = verdict_name(vllm_config, "--blend", unless)
    except ConfigError as error:
        raise BlendError(str(error)) from error
    return gate.check(name, selection, unless)


def documents_context(vllm_config: Any, blend: BlendSettings) -> gate.Context:
    """Return what documents are to be computed behind: the setting, or what was found better for the model.

    Raises:
        BlendError: the model has not been found fit for blending.
    """
    context: gate.Context = "prefix"
    if not blend.unchecked:
        selection = Selection(blend.methods[0], blend.ratio, drift=blend.drift, coverage=blend.coverage)
        context = check_model(vllm_config, selection, "blend.unchecked = true")
    return context if blend.context == "auto" else blend.context


def check_precision(vllm_config: Any, precision: Precision, unless: str) -> None:
    """Refuse an engine whose model's KV has not been found fit for records of this precision.

    Raises:
        ConfigError: as `kvkit.transfer.precision.check`, or the engine changes the model's config, or
            stores KV in a format that is not measured.
    """
    if vllm_config.model_config.use_mla:
        raise ConfigError(
            f"precision = {precision!r}: this engine stores latents (MLA), but only K and V are measured; "
            f"want none, or {unless}"
        )
    measured.check(verdict_name(vllm_config, f"--precision {precision}", unless), precision, unless)
