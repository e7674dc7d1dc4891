"""Names of the documented metrics, and of those that moved between scrapes."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def documented(text: str | None) -> set[str]:
    """The names in the table of a module that exports metrics."""
    return set(re.findall(r"^\| ((?:vllm:)?(?:kvkit|kv_offload)_\w+) \|", text or "", re.MULTILINE))


def samples(text: str) -> Samples:
    """What a scrape shows, by name and labels; of a histogram how many values it has, by its own name."""
    return {
        (sample.name.removesuffix("_count"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_sum", "_created"))
    }


def moved(*scrapes: Samples) -> set[str]:
    """Names of which a sample has not the same value in all of these; one that is not there is 0."""
    keys = {key for scrape in scrapes for key in scrape}
    return {key[0] for key in keys if len({scrape.get(key, 0.0) for scrape in scrapes}) > 1}
