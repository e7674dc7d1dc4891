"""Effect of blending on a model's answers, measured in vLLM, for models that only vLLM can blend."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from kvkit.blend.methods.registry import served
from kvkit.blend.plan import BlendPlan, Selection, Span, observed_layers, plan_blend
from kvkit.environment import gpu_name
from kvkit.lab.files import BenchError
from kvkit.lab.quality.contexts import Context
from kvkit.lab.quality.judge import Judge, Measures, NotBlendable, figures_of, load_judge
from kvkit.lab.quality.methods import Method
from kvkit.lab.quality.statistics import f1
from kvkit.lab.quality.tasks.sample import SYSTEM_PROMPT, Encode, Sample
from kvkit.lab.serve import memory
from kvkit.observe.terminal import print_text

CHUNK_TOKENS = 128
TOKENS = 768
MORE_TOKENS = 768
"""Tokens beyond those requested: a prompt's question and answer, and documents that are longer."""
TIER_BYTES = 1 << 30


def is_served(method: Method) -> bool:
    """Return whether a request to vLLM can select this method."""
    selection = method.selection
    try:
        served(selection.method)
    except ValueError:
        return False
    plain = not method.imitates and method.context in ("prefix", "alone")
    named = Selection(selection.method, selection.ratio, selection.first_n, drift=selection.drift)
    return plain and selection == named


@contextmanager
def opened(
    model: str, console: Console, methods: Mapping[str, Method], tokens: int = TOKENS
) -> Iterator[tuple[Judge | EngineJudge, Encode, Mapping[str, Method]]]:
    """Yield a judge of a model, its tokenizer as a function, and the `methods` that the judge supports.

    If the model's layers differ from Llama's and vLLM is installed, the judge runs the model in vLLM until
    the context ends.

    Args:
        model: hub id or folder.
        tokens: approximate tokens of a prompt.

    Raises:
        BenchError: as `load_judge`; or vLLM does not start with the model or cannot blend it.
    """
    try:
        judge, encode, _ = load_judge(model, console)
    except NotBlendable as error:
        reason = str(error)
    else:
        yield judge, encode, methods
        return
    gc.collect()  # frees the memory of the failed load, also on a GPU
    torch.cuda.empty_cache()
    supported = {name: method for name, method in methods.items() if is_served(method)}
    try:
        engine = EngineJudge(model, supported, tokens)
    except ImportError:
        raise NotBlendable(reason) from None
    unsupported = "; ".join(name for name in methods if name not in supported)
    message = f"{reason}: measured in vLLM" + (
        f", which does not support: {unsupported}" if unsupported else ""
    )
    print_text(message, console)
    try:
        yield engine, engine.encode, supported
    finally:
        engine.close()


class EngineJudge:
    """Judge of selections on samples with a model that vLLM serves; see `kvkit.lab.quality.judge.Judge`.

    Args:
        model: hub id or folder.
        methods: methods to measure.
        tokens: approximate tokens of a prompt.

    Attributes:
        lead, system, prefix: as in `Judge`.
        weights: identifier of the model's weights.

    Raises:
        BenchError: vLLM does not start with the model or cannot blend it.
        ImportError: vLLM is not installed.
    """

    def __init__(self, model: str, methods: Mapping[str, Method], tokens: int = TOKENS) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from kvkit.adapters.vllm.gate import verdict_name
        from kvkit.lab.quality.teacher_forcing import TeacherForcedText

        share = memory.share(model, tiers=2 * TIER_BYTES, most=TIER_BYTES)
        kvkit = {
            "chunk_tokens": CHUNK_TOKENS,
            "staging": TIER_BYTES,
            "tiers": {"memory": {"capacity": TIER_BYTES}},
        }
        method_names = {Selection().method, *(method.selection.method for method in methods.values())}
        transfer = KVTransferConfig(
            kv_connector="KVKitConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "kvkit": kvkit,
                "blend": {"unchecked": True, "methods": sorted(method_names)},
                "save_generated": False,
                "lookup_timeout_s": 60.0,
                "prefill_tokens_per_s": 0.01,  # a hit is always faster than prefill
            },
        )
        try:
            self._llm = LLM(
                model=model,
                dtype="auto" if gpu_name() else "float32",
                enforce_eager=True,
                max_model_len=tokens + MORE_TOKENS,
                enable_prefix_caching=False,
                disable_log_stats=False,  # the statistics contain the time to first token
                logits_processors=[TeacherForcedText],
                kv_transfer_config=transfer,
                **({"kv_cache_memory_bytes": share.block_bytes} if share.block_bytes else {}),
            )
        except (RuntimeError, ValueError) as error:
            raise BenchError(f"model {model!r} cannot be blended in vLLM: {error}") from error
        self.config = self._llm.model_config.hf_config
        self.weights = verdict_name(self._llm.llm_engine.vllm_config, "--blend", "")
        tokenizer = self._llm.get_tokenizer()
        self.lead: NDArray[np.int32] = np.array(tokenizer("")["input_ids"], np.int32)
        self.encode: Encode = lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
        self.system: NDArray[np.int32] = np.array(self.encode(SYSTEM_PROMPT), np.int32)

    @property
    def prefix(self) -> NDArray[np.int32]:
        """First tokens of every prompt: `lead` and `system`."""
        return np.concatenate([self.lead, self.system])

    def measure(
        self, sample: Sample, methods: Mapping[str, Method], answered: bool = False
    ) -> dict[str, Measures]:
        """Return figures as `Judge.measure`; seconds are wall time and include loading documents.

        Raises:
            BenchError: the stored KV of a document was not found again.
        """
        sample = sample.behind(self.prefix)
        full, figures = self._answer(sample)
        measured = {"full": figures_of(full, full, sample, 1.0, 0.0) | figures}
        if answered and not measured["full"].get("exact"):
            return measured
        stored = []
        for context in {method.context for method in methods.values()}:
            texts = [[*self._before(context), *sample.prompt[a:b].tolist()] for a, b in sample.documents]
            prefix = sample.prompt[: len(self.prefix) + 1].tolist()
            stored += [{"prompt_token_ids": ids, "cache_salt": context} for ids in (prefix, *texts)]
        self._generate(stored, max_tokens=1)
        for name, method in methods.items():
            blended, figures = self._answer(sample, method)
            measured[name] = figures_of(full, blended, sample, 0.0, 0.0) | figures
        return measured

    def _before(self, context: Context) -> list[int]:
        before: list[int] = (self.lead if context == "alone" else self.prefix).tolist()
        return before

    def close(self) -> None:
        """Shut down the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    def _answer(self, sample: Sample, method: Method | None = None) -> tuple[torch.Tensor, Measures]:
        """Return log probabilities [C, V] of the continuation's tokens, and figures of the prompt.

        Each token is given the earlier ones. Figures: seconds until the first token; rows if the prompt is
        blended; f1 if the sample has an answer.
        """
        from kvkit.lab.quality.teacher_forcing import FOLLOW

        prompt: dict[str, Any] = {"prompt_token_ids": sample.prompt.tolist()}
        extra: dict[str, Any] = {}
        if method:
            selection = method.selection
            spans = [list(span) for span in sample.documents]
            blend_request = {
                "documents": spans,
                "prefix": len(self._before(method.context)),
                "method": selection.method,
                "ratio": selection.ratio,
                "first_n": selection.first_n,
                "drift": selection.drift,
            }
            prompt["cache_salt"] = method.context  # documents of other contexts are not found
            extra = {"kv_transfer_params": {"blend": blend_request}}
        else:
            prompt["cache_salt"] = uuid4().hex  # prevents hits
        tokens = sample.continuation.tolist()
        with tempfile.TemporaryDirectory(prefix="kvkit-") as folder:
            file = Path(folder) / "log_probabilities.npy"
            forced_args = extra | {FOLLOW: {"tokens": tokens, "file": str(file)}}
            (out,) = self._generate([prompt], max_tokens=len(tokens), extra_args=forced_args)
            logits = torch.from_numpy(np.load(file))
        figures: Measures = {"seconds": out.metrics.first_token_ts - out.metrics.queued_ts}
        if method:
            figures["rows"] = self._rows(sample, method, out.kv_transfer_params or {})
        if answer := tokens[: sample.answer]:
            predicted = logits.argmax(-1)[: sample.answer].tolist()
            if predicted != answer:  # then generate freely, each token after the model's own tokens
                (out,) = self._generate([prompt], max_tokens=sample.answer, extra_args=extra)
                predicted = list(out.outputs[0].token_ids)
            figures["f1"] = f1(predicted, answer)
        return logits, figures

    def _rows(self, sample: Sample, method: Method, params: Mapping[str, Any]) -> float:
        """Return a prompt's computed share of tokens * layers; `params`: its answer's kv_transfer_params."""
        plan = self._plan(sample, len(self._before(method.context)))
        counts: Mapping[str, int] = params.get("blend") or {"computed": 0}
        if not plan.reused.any():
            return len(plan.computed) / plan.tokens
        if counts["computed"] != len(plan.computed):
            raise BenchError(
                f"vLLM blended {counts} of a prompt that reuses {int(plan.reused.sum())} document tokens: "
                f"not all were kept; the memory tier of {memory.gib(TIER_BYTES)} may be too small"
            )
        layers: int = self._llm.model_config.hf_text_config.num_hidden_layers
        observed_rows = observed_layers(method.selection, plan, layers) * len(plan.computed)
        return ((counts["computed"] + counts["recomputed"]) * layers + observed_rows) / (plan.tokens * layers)

    def _plan(self, sample: Sample, before: int) -> BlendPlan:
        """Return vLLM's plan if every whole chunk of documents behind `before` tokens is found."""
        exact_tokens = len(self.prefix) // CHUNK_TOKENS * CHUNK_TOKENS
        spans = []
        for start, stop in sample.documents:
            found_tokens = (before + stop - start) // CHUNK_TOKENS * CHUNK_TOKENS
            exact_tokens = found_tokens if start == before else exact_tokens
            spans.append(Span(start, stop, before).found(found_tokens, exact_tokens))
        return plan_blend(len(sample.prompt), exact_tokens, spans)

    def _generate(self, prompts: Sequence[Mapping[str, Any]], **sampling: Any) -> Sequence[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **sampling)
        outputs: Sequence[Any] = self._llm.generate(list(prompts), params, use_tqdm=False)
        return outputs
