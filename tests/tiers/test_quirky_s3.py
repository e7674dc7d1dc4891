"""Buckets work on S3 servers that forbid listing, lack conditions or report conflicts."""

from __future__ import annotations

import numpy as np
import pytest
from quirky_s3 import Quirk, quirky_s3
from two_tier_caches import make_engine, open_cache, sequence, store

from kvkit.staging import Staging
from kvkit.tiers.base import TierError
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import get, put, record_bytes, record_names
from kvkit.transfer.policy import Policy

URL = "s3://bucket/prefix"
PROMPTS = 6


def test_unknown_prompts_cost_no_known_one_its_hit(caplog: pytest.LogCaptureFixture) -> None:
    """Without s3:ListBucket, what is missing is denied."""
    engine, tokens = make_engine(), sequence(64)
    with quirky_s3("no list") as (server, options):
        tier = ObjectTier(TierConfig(url=URL, options=options), name="bucket")
        policy = Policy(("bucket",), ("bucket",))
        with open_cache(engine, None, memory_slots=0, policy=policy, extra=[tier]) as cache:
            store(cache, engine, tokens)
            for seed in range(1, PROMPTS):
                assert cache.lookup(sequence(64, seed)).tokens == 0
            assert cache.tier_states() == {"bucket": "ok"}
            hit = cache.lookup(tokens)
            assert hit.tokens == 64
            table = engine.table(64)
            assert cache.load(hit, engine.places(table)).tokens == 64
            engine.assert_loaded(tokens, table, 8)
        assert caplog.text.count("without s3:ListBucket") == 1
        assert server.asked["HEAD"] == 1, "it is asked in a way that says why"


def test_what_vanishes_without_permission_to_list_is_missing(
    staging: Staging,
) -> None:
    names = record_names(2)
    with quirky_s3("no list") as (server, options):
        tier = ObjectTier(TierConfig(url=URL, options=options))
        assert put(tier, staging, names) == [None, None]
        assert tier.match_prefix(names) == 2
        server.objects.clear()
        assert tier.size(names[0]) is None
        assert all(isinstance(found, FileNotFoundError) for found in get(tier, staging, names))
        assert tier.match_prefix(names) == 0
        tier.close()
    staging.close()


@pytest.mark.parametrize("quirk", ["501", "400"])
def test_where_no_condition_is_known_records_are_put_without(quirk: Quirk, staging: Staging) -> None:
    names = record_names(3)
    with quirky_s3(quirk) as (server, options):
        tier = ObjectTier(TierConfig(url=URL, options=options, threads=1))
        assert put(tier, staging, names[:1]) == [None]
        first = server.asked["PUT"]
        assert put(tier, staging, names[1:]) == [None, None]
        assert server.asked["PUT"] == first + 2, "one request for each that follows"
        found = get(tier, staging, names)
        assert all(np.array_equal(one, record_bytes(name)) for one, name in zip(found, names, strict=True))
        tier.close()
    staging.close()


def test_a_setting_says_that_no_condition_is_known(staging: Staging) -> None:
    with quirky_s3("501") as (server, options):
        tier = ObjectTier(TierConfig(url=URL, options=options | {"conditional_put": "disabled"}))
        assert put(tier, staging, record_names(1)) == [None]
        assert server.asked["PUT"] == 1
        tier.close()
    staging.close()


def test_a_conflict_is_no_record(staging: Staging) -> None:
    """HTTP 409: another's put of it is under way, which nobody knows to succeed."""
    (name,) = record_names(1)
    with quirky_s3("409") as (server, options):
        tier = ObjectTier(TierConfig(url=URL, options=options))
        (error,) = put(tier, staging, [name])
        assert isinstance(error, TierError)
        assert "another put of it in flight" in str(error)
        assert tier.match_prefix([name]) == 0
        assert not server.objects
        tier.close()
    with quirky_s3("409 once") as (server, options):
        tier = ObjectTier(TierConfig(url=URL, options=options))
        assert put(tier, staging, [name]) == [None]
        assert list(server.objects) == [f"/bucket/prefix/{name}"]
        tier.close()
    staging.close()
