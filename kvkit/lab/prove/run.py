"""A run of `kvkit prove`: the answers of the reference, then the scenarios on the engine to prove."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvkit.lab.files import BenchError
from kvkit.lab.prove.engines import ADAPTER, EngineLaunch, ProvedEngine, SentPrompt, opening
from kvkit.lab.prove.models import ChangedWeights
from kvkit.lab.prove.page_probe import prompt_name
from kvkit.lab.prove.pages import compare_files
from kvkit.lab.prove.scenarios import Act, AskedPrompt, Scenario, crowd_of
from kvkit.lab.prove.verdict import (
    LOGPROB_TOLERANCE,
    PAGE_TOLERANCE,
    Compared,
    Observed,
    Reply,
    ScenarioVerdict,
    compare,
    judge,
)
from kvkit.observe.progress import Report, counted

MOST_CROWD = 200_000
"""Maximum tokens of the prompts that fill an engine's blocks; an engine with more room is not filled."""
ATTEMPTS_S = 10.0
"""Longest time to retry prompts until KV is loaded, in seconds: stores may complete late."""
_PREEMPTIONS = 3
ExpectedKey = tuple[str, bool, bool]
"""(name of a prompt, whether it uses the adapter, whether the weights are changed)."""


@dataclass(slots=True)
class ToProve:
    """The engines, scenarios and prompts of a proof, and its state.

    Attributes:
        changed_reference: the reference with the changed weights, if a scenario changes them.
        missing: reasons by missing requirement of scenarios: adapter, weights, own, store.
        changed: whether the engine runs with the changed weights.
        failed: whether the engine returned an error in place of an answer, and may be about to end.
    """

    reference: EngineLaunch | str
    engine: ProvedEngine
    scenarios: Sequence[Scenario]
    prompts: dict[str, list[int]]
    seed: int
    folder: Path
    dtype: str
    changed_reference: EngineLaunch | None = None
    weights: ChangedWeights | None = None
    store_pid: int | None = None
    missing: dict[str, str] = field(default_factory=dict)
    expected: dict[ExpectedKey, Reply] = field(default_factory=dict)
    changed: bool = False
    failed: bool = False


def run(proof: ToProve, report: Report) -> list[ScenarioVerdict]:
    """Run all scenarios and return their verdicts, in order.

    Raises:
        BenchError: an engine does not start, the reference does not answer, or the dtypes differ.
    """
    chosen = [scenario for scenario in proof.scenarios if not _missing_requirements(proof, scenario)]
    engines = [ProvedEngine("reference", proof.reference)] if chosen else []
    if proof.changed_reference is not None and any(map(changes_weights, chosen)):
        engines.append(ProvedEngine("changed", proof.changed_reference))
    verdicts = []
    with ExitStack() as stack:
        if engines:
            for engine in (*engines, proof.engine):
                stack.callback(engine.close)
            concurrent = isinstance(proof.reference, EngineLaunch) and proof.reference.concurrent
            with opening([*engines, proof.engine], concurrent) as openers:
                if concurrent:
                    report(f"starting {len(engines) + 1} engines")
                    openers[-1]()  # fails early if the engine to prove does not start
                for changed, engine in enumerate(engines):
                    if not concurrent:
                        report(f"{engine.name}: starting" if engine.is_own else f"{engine.name}: connecting")
                    openers[changed]()
                    _ask_reference(proof, engine, chosen, bool(changed), report)
                    engine.close()
                if not concurrent:
                    is_own = proof.engine.is_own
                    report("starting the engine with the connector" if is_own else "connecting to the engine")
                    openers[-1]()
            proof.engine.watch(proof.folder / "found")
            if proof.engine.dtype not in ("", proof.dtype):
                raise BenchError(f"dtype = {proof.dtype}: the engine has {proof.engine.dtype}")
        for scenario in proof.scenarios:
            if reason := _missing_requirements(proof, scenario):
                verdicts.append(ScenarioVerdict(scenario.name, "not run", reason))
            else:
                report(f"{scenario.name}: begins")
                verdicts.append(prove_scenario(proof, scenario))
            report(
                f"{scenario.name}: {verdicts[-1].outcome}"
                + (f", {verdicts[-1].why}" if verdicts[-1].why else "")
            )
            if verdicts[-1].log:
                report(f"the engine's log ends:\n{verdicts[-1].log}")
    return verdicts


def changes_weights(scenario: Scenario) -> bool:
    """Return whether an act of the scenario changes the model's weights."""
    return any(act.do == "change weights" for act in scenario.acts)


def _missing_requirements(proof: ToProve, scenario: Scenario) -> str:
    """Return the reasons that a scenario cannot run; empty: it can."""
    actions = {act.do for act in scenario.acts}
    requirements = [
        *(["adapter"] if any(prompt.adapter for prompt in scenario.all_prompts()) else []),
        *(["own"] if actions & {"restart", "kill"} else []),
        *(["weights"] if "change weights" in actions else []),
        *(["store"] if "kill store" in actions else []),
    ]
    return "; ".join(proof.missing[name] for name in requirements if name in proof.missing)


def reference_prompts(scenarios: Sequence[Scenario], changed: bool) -> set[tuple[str, bool]]:
    """Return (prompt, whether with adapter) to send to the reference, with changed weights if `changed`."""
    scenarios = [scenario for scenario in scenarios if changes_weights(scenario) or not changed]
    prompts = {(prompt.name, prompt.adapter) for scenario in scenarios for prompt in scenario.all_prompts()}
    return prompts | {(prompt.name, prompt.adapter) for s in scenarios for prompt in s.unlike or ()}


def _ask_reference(
    proof: ToProve, engine: ProvedEngine, scenarios: Sequence[Scenario], changed: bool, report: Report
) -> None:
    """Send the scenarios' prompts to an engine without the connector, in turn. Mutates `proof`."""
    engine.watch(proof.folder / ("changed" if changed else "expected"))
    prompts = sorted(reference_prompts(scenarios, changed))
    for name, adapter in counted(prompts, f"{engine.name}: prompts", len(prompts), report):
        (reply,) = engine.send_prompts([SentPrompt(tuple(proof.prompts[name]), adapter=adapter)])
        if reply.error is not None:
            raise BenchError(f"the reference does not answer: {reply.error}")
        proof.expected[name, adapter, changed] = reply


def prove_scenario(proof: ToProve, scenario: Scenario) -> ScenarioVerdict:
    """Run a scenario and return its verdict. Mutates `proof`; restarts an engine that is gone."""
    observed: list[Observed] = []
    if proof.engine.is_own and (proof.changed or proof.failed):
        proof.engine.close()
    proof.failed = False
    if proof.changed:
        assert proof.weights is not None
        proof.weights.restore()
        proof.changed = False
    try:
        _restart_if_gone(proof.engine)
    except BenchError as error:
        reason, log = f"the engine is gone: {_first_line(error)}", proof.engine.log()
        return ScenarioVerdict(scenario.name, "not run", reason, log=log, gone=True)
    try:
        for act in scenario.acts:
            observed += _carry_out(proof, act)
    except BenchError as error:
        proof.failed = True
        reason = f"the engine does not answer: {_first_line(error)}"
        return ScenarioVerdict(scenario.name, "differs", reason, log=proof.engine.log())
    control = None
    if scenario.unlike is not None:
        first, second = scenario.unlike
        control = compare(
            proof.expected[first.name, first.adapter, False],
            proof.expected[second.name, second.adapter, changes_weights(scenario)],
            LOGPROB_TOLERANCE[proof.dtype],
        )
    verdict = judge(scenario, observed, control, proof.engine.handed_off)
    return replace(verdict, log=proof.engine.log()) if proof.failed else verdict


def _first_line(error: BenchError) -> str:
    return str(error).partition("\n")[0]


def _restart_if_gone(engine: ProvedEngine) -> None:
    """Restart the engine if the last scenario ended it.

    Raises:
        BenchError: the engine does not start, or is gone and was not started here.
    """
    try:
        engine.read_counts()
    except BenchError:
        if not engine.is_own:
            raise
        engine.close()
        engine.open()


def _carry_out(proof: ToProve, act: Act) -> list[Observed]:
    """Carry out an act; return the results of its prompts, or the reason that it did not happen."""
    engine, prompts = proof.engine, [_to_send(proof, prompt) for prompt in act.prompts]
    if act.do == "ask":
        return _ask_until_loaded(proof, act)
    if act.do == "preempt":
        return [_ask_and_preempt(proof, act)]
    missing = ""
    if act.do == "forget":
        missing = "" if engine.reset_prefix_cache() else _fill_blocks(proof)
    elif act.do == "crowd":
        missing = _fill_blocks(proof)
    elif act.do in ("abort", "kill"):
        if not engine.abandon_prompts(prompts, engine.kill if act.do == "kill" else lambda: None):
            missing = "no prompt was seen running"
        if act.do == "kill":
            engine.open()
    elif act.do == "kill store":
        assert proof.store_pid is not None
        os.kill(proof.store_pid, signal.SIGKILL)
    else:
        engine.close()
        if act.do == "change weights":
            assert proof.weights is not None
            proof.weights.change()
            proof.changed = True
        engine.open()
    return [Observed((), "any", (), 0, missing=missing)] if missing else []


def _to_send(proof: ToProve, asked: AskedPrompt) -> SentPrompt:
    return SentPrompt(tuple(proof.prompts[asked.name]), asked.salt, asked.adapter)


def _fill_blocks(proof: ToProve) -> str:
    """Fill every block with other prompts; return the reason that this is impossible; empty: done."""
    tokens = proof.engine.capacity_tokens()
    if tokens > MOST_CROWD:
        return f"blocks of {tokens} tokens are too many to fill: start the engine with VLLM_SERVER_DEV_MODE=1"
    longest = max(map(len, proof.prompts.values()))
    for prompt in crowd_of(proof.seed, tokens, longest):
        proof.engine.send_prompts([SentPrompt(tuple(prompt))])
    for path in (proof.folder / "found").glob("*.safetensors"):
        path.unlink()
    return ""


def _ask_until_loaded(proof: ToProve, act: Act) -> list[Observed]:
    """Send the prompts of an act; if KV must be loaded, repeat until it is. Return all results."""
    deadline = time.monotonic() + ATTEMPTS_S
    results = [_observe(proof, act)]
    while act.loads == "some" and not _is_settled(results[-1]) and time.monotonic() < deadline:
        if not proof.engine.reset_prefix_cache():
            _fill_blocks(proof)
        results.append(_observe(proof, act))
    return [*(replace(result, loads="any") for result in results[:-1]), results[-1]]


def _is_settled(observed: Observed) -> bool:
    wrong = any(comparison.wrong for comparison in observed.compared) or bool(observed.wrong_page)
    return bool(observed.loaded) or observed.loaded is None or wrong


def _observe(proof: ToProve, act: Act, then: Callable[[], None] | None = None) -> Observed:
    """Send the prompts of an act, and compare answers and pages with the reference."""
    prompts = [_to_send(proof, prompt) for prompt in act.prompts]
    before = proof.engine.read_counts()
    replies = proof.engine.send_prompts(prompts, then)
    proof.failed = proof.failed or any(reply.error is not None for reply in replies)
    loaded = proof.engine.read_counts()["loaded"] - before["loaded"]
    tolerance = LOGPROB_TOLERANCE[proof.dtype]
    compared: list[Compared] = []
    pages, wrong_page = 0, ""
    for prompt, reply in zip(act.prompts, replies, strict=True):
        compared.append(compare(proof.expected[prompt.name, prompt.adapter, proof.changed], reply, tolerance))
        name = prompt_name(proof.prompts[prompt.name], ADAPTER if prompt.adapter else None)
        reference_folder = proof.folder / ("changed" if proof.changed else "expected")
        count, difference = compare_files(
            reference_folder, proof.folder / "found", name, PAGE_TOLERANCE[proof.dtype]
        )
        pages += count
        wrong_page = wrong_page or (f"prompt {prompt.name!r}, {difference}" if difference else "")
    return Observed(act.prompts, act.loads, tuple(compared), loaded, pages, wrong_page)


def _ask_and_preempt(proof: ToProve, act: Act) -> Observed:
    """Send the prompts of an act and preempt the requests while they decode."""
    engine = proof.engine
    for _ in range(_PREEMPTIONS):
        before, skipped = engine.read_counts(), engine.skipped_tokens()
        observed = _observe(proof, act, engine.preempt_requests)
        if any(comparison.wrong for comparison in observed.compared):  # a failed engine may report no counts
            return observed
        increase, after = engine.read_counts() - before, engine.skipped_tokens()
        if increase["preempted"]:
            break
    else:
        return replace(
            observed, missing="no request was preempted: start the engine with VLLM_SERVER_DEV_MODE=1"
        )
    if skipped is None or after is None:
        return replace(observed, loaded=None)
    # vLLM does not count tokens found after a preemption
    found_at_first = increase["loaded"] + increase["own"]
    return replace(observed, loaded=max(0, after - skipped - found_at_first))
