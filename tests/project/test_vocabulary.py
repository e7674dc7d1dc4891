"""Names that were replaced by the field's terms do not come back in code or on pages."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

from repository import ROOT

REPLACED = {
    "BlendsUnderWay": "BlendExecutor",
    "ChunkStore": "ChunkSender",
    "ClientLeft": "ClientDisconnected",
    "Door": "Acceptor",
    "FirstUse": "DocumentWarmer",
    "FollowedText": "TeacherForcedText",
    "Follower": "EventSubscriber",
    "FollowingLookup": "EventLookup",
    "Loan": "RemoteSlots",
    "Look": "CompileInfo",
    "MAX_SHUNNED": "MAX_QUARANTINED",
    "Marked": "DelimitedDocuments",
    "NO_WISHES": "DEFAULT_REQUEST_POLICY",
    "NarrowedStore": "QuantisedStore",
    "Nobody": "NullClient",
    "OfRequest": "RequestRef",
    "OnHeld": "HeldListener",
    "OnTierHeld": "TierHeldListener",
    "Opener": "ForkGuard",
    "Promise": "PendingStore",
    "Promises": "PendingStores",
    "Put": "WriteJob",
    "PutQueue": "WriteQueue",
    "Puts": "WritePipeline",
    "Roof": "Roofline",
    "SHUNNED_S": "QUARANTINE_S",
    "Standing": "PendingAllocations",
    "Tally": "RequestStats",
    "TierSync": "TierBlocksStored",
    "TiersTold": "TierBlocksStored",
    "ToldChunk": "AnnouncedChunk",
    "answer_now": "lookup_inline",
    "at_place": "pages_at",
    "called_off": "cancelled_prefetches",
    "check_narrows": "check_quantisable",
    "count_leading": "match_prefix",
    "count_unneeded": "match_prefix",
    "even_places": "even_ranges",
    "fate": "outcome",
    "find_promised": "find_with_pending",
    "flaw": "rejection",
    "give_up": "abort",
    "hands_over": "can_disaggregate",
    "has_news": "has_pending_reset",
    "is_mine": "owned_by_rank",
    "kept_as": "storage_name",
    "meeting_place": "exchange_tier",
    "modest": "throttled",
    "narrowed_name": "quantised_name",
    "narrowed_shape": "quantised_shape",
    "passed_over": "circuit_open",
    "puts_under_way": "pending_writes",
    "shelve": "keep_in_staging",
    "snapshot_places": "snapshot_chunks",
    "space_of": "namespace_of",
    "surround": "write_framing",
    "take_wishes": "take_request_policy",
    "tells_stores": "reports_tiers",
    "unwanted": "released_transfers",
    "vacate": "end_reads",
    "worth_loading": "trim_by_cost",
}
ROOMS = ("kvkit", "kernels", "adapters")


def names_in_code(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def names_on_page(path: Path) -> set[str]:
    quoted = re.findall(r"`([^`\n]+)`", path.read_text())
    return {name for text in quoted for name in re.findall(r"\w+", text)}


def stems(name: str) -> set[str]:
    """The words of identifiers or a term, each up to five letters, which its other forms share."""
    return {word.lower().removesuffix("s")[:5] for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def glossary() -> dict[str, str]:
    """By term, the names of the code that it is at home in, below their modules' folders."""
    section = (ROOT / "docs/reference/glossary.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return {row[0].strip(): re.sub(r"\b\w+\.", "", row[-1], count=1) for row in rows}


def test_the_code_has_the_words_of_the_glossary() -> None:
    terms = glossary()
    assert len(terms) > 30
    assert [term for term, homes in terms.items() if not stems(term) & stems(homes)] == []


def test_the_glossary_has_no_replaced_word() -> None:
    words = {word for term in glossary() for word in re.findall(r"\w+", term.lower())}
    assert words & {name.lower() for name in REPLACED} == set()


def test_no_replaced_name_is_in_the_product() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}: want {REPLACED[name]}"
        for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
        for name in sorted(names_in_code(path) & REPLACED.keys())
    ]
    assert not found, "\n".join(found)


def test_no_replaced_name_is_on_a_page() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}: want {REPLACED[name]}"
        for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
        for name in sorted(names_on_page(path) & REPLACED.keys())
    ]
    assert not found, "\n".join(found)


def test_replaced_names_are_found(tmp_path: Path) -> None:
    code, page = tmp_path / "code.py", tmp_path / "page.md"
    code.write_text('queue = PutQueue()  # Puts\nerror = "Door"\n')
    page.write_text("A Door, and a `moving.puts.PutQueue`.\n")
    assert names_in_code(code) & REPLACED.keys() == {"PutQueue"}
    assert names_on_page(page) & REPLACED.keys() == {"PutQueue"}
