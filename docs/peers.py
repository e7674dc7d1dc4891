"""List what users of other KV caches report, and the tests of kvkit for it: docs/evidence/peers.md."""

from __future__ import annotations

from dataclasses import dataclass

_VLLM, _LMCACHE, _SGLANG = "vllm-project/vllm", "LMCache/LMCache", "sgl-project/sglang"
_MOONCAKE, _DYNAMO, _LLM_D = "kvcache-ai/Mooncake", "ai-dynamo/dynamo", "llm-d router"


@dataclass(frozen=True, slots=True)
class Report:
    """A fault or a wish that users of another cache report.

    Attributes:
        cache: whose.
        repository: of the issues.
        issues: their numbers.
        what: the report in short.
        kvkit: "solved", "in part", "open" or "not tried", and how.
        tests: "file under tests/::test", one for each thing that is solved.
    """

    cache: str
    repository: str
    issues: tuple[int, ...]
    what: str
    kvkit: str
    tests: tuple[str, ...] = ()


REPORTS = (
    Report(
        "vLLM's file tier",
        _VLLM,
        (54779,),
        "it grows without bound",
        "solved: capacity and eviction",
        (
            "support/page_attacks.py::test_kills",
            "engine/test_keyed_pages.py::test_a_capacity_holds",
        ),
    ),
    Report(
        "vLLM's file tier",
        _VLLM,
        (54363,),
        "no checksums, no deadlines",
        "solved: every byte is verified, a hanging store ends in time",
        (
            "support/page_attacks.py::test_damage",
            "engine/test_keyed_pages.py::test_a_store_into_a_tier_that_hangs_ends_in_time",
        ),
    ),
    Report(
        "vLLM's file tier",
        _VLLM,
        (49261, 55904),
        "other revisions and layouts are taken for the same",
        "solved: weights and layout are in the namespace",
        (
            "vllm_tier/test_offloading_identity.py::test_weights_are_known_by_their_contents",
            "vllm_tier/test_offloading_tier.py::test_another_engine_finds_nothing",
        ),
    ),
    Report(
        "LMCache",
        _LMCACHE,
        (4463, 4247),
        "wrong KV from fused layouts and hybrid models",
        "solved in vLLM: 53 architectures answer as without a cache",
        ("vllm_adapter/test_vllm_zoo.py::test_every_way_gives_the_same_answers",),
    ),
    Report(
        "LMCache",
        _LMCACHE,
        (4676,),
        "a deadlock",
        "solved: seeds of a simulated scheduler find none",
        ("simulation/test_simulation.py::test_no_seed_finds_anything",),
    ),
    Report(
        "LMCache",
        _LMCACHE,
        (1175, 4778),
        "what is on the disk is lost by a restart",
        "solved, also below LMCache's own server",
        (
            "tiers/test_folder.py::test_a_restart_finds_what_was_written",
            "lmcache_adapter/test_server.py::test_a_restart",
        ),
    ),
    Report(
        "SGLang's HiCache",
        _SGLANG,
        (33268,),
        "keys leave out the dtype",
        "solved: dtype, layout and ranks are in the namespace",
        ("sglang_adapter/test_hicache.py::test_another_engines_pages_are_not_found",),
    ),
    Report(
        "SGLang's HiCache",
        _SGLANG,
        (38428,),
        "the backup thread dies of an error of the storage",
        "solved: no error of a tier leaves the storage",
        ("sglang_adapter/test_hicache.py::test_a_store_that_fails_does_not_raise",),
    ),
    Report(
        "SGLang's HiCache",
        _SGLANG,
        (38031,),
        "wrong KV of models with sparse attention (DSA)",
        "not tried: it takes a GPU",
    ),
    Report(
        "Mooncake",
        _MOONCAKE,
        (3140,),
        "checksums are an option",
        "solved: a record is verified wherever it comes from",
        ("engine/test_keyed_pages.py::test_a_changed_byte_ends_a_load_before_its_page",),
    ),
    Report(
        "Mooncake",
        _MOONCAKE,
        (3465,),
        "what is not offloaded is not told",
        "solved: a store says whether a tier has every page",
        ("engine/test_keyed_pages.py::test_a_store_that_no_tier_takes_says_so",),
    ),
    Report(
        "Mooncake",
        _MOONCAKE,
        (3052, 3817),
        "what is on SSD is lost by a restart",
        "solved: a folder is read again",
        ("tiers/test_folder.py::test_a_restart_finds_what_was_written",),
    ),
    Report(
        "Dynamo's KVBM",
        _DYNAMO,
        (15079,),
        "wrong KV is served",
        "solved: what is damaged is computed anew",
        ("vllm_adapter/test_vllm_engine.py::test_damaged_records_are_computed_anew",),
    ),
    Report(
        "Dynamo's KVBM",
        _DYNAMO,
        (5012,),
        "it hangs",
        "solved: lookups, loads and stores have deadlines",
        ("tiers/test_bucket.py::test_a_server_that_never_answers",),
    ),
    Report(
        "llm-d's router",
        _LLM_D,
        (1650, 2292),
        "it knows the GPU's memory only",
        "solved in kvkit's router: engines say what their tiers hold",
        ("router/test_router.py::test_kvkits_endpoint_is_understood",),
    ),
)


def table() -> str:
    """Return the reports as a table in Markdown."""
    rows = ["| of | report | kvkit | test |", "|---|---|---|---|"]
    for report in REPORTS:
        issues = ", ".join(_link(report.repository, issue) for issue in report.issues)
        tests = "<br>".join(f"`{test.partition('::')[2]}`" for test in report.tests)
        rows.append(f"| {report.cache} | {report.what} ({issues}) | {report.kvkit} | {tests} |")
    return "\n".join(rows)


def _link(repository: str, issue: int) -> str:
    if "/" not in repository:
        return f"#{issue}"
    return f"[#{issue}](https://github.com/{repository}/issues/{issue})"
