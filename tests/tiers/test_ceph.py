"""A bucket of Ceph's gateway fulfils the contract of tiers, and its death is an error in time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from ceph import Ceph, missing
from remote_tiers import finish, same
from two_tier_caches import make_engine, open_cache, sequence, store

from kvkit.staging import Staging
from kvkit.tiers.base import Tier, TierError
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import TierContract, get, put, record_names

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(missing() is not None, reason=f"Ceph is not tested here: {missing()}"),
]


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    with Ceph(tmp_path_factory.mktemp("ceph")) as cluster:
        cluster.make_bucket("records")
        yield cluster


@pytest.fixture
def settings(ceph: Ceph) -> dict[str, Any]:
    """Return settings of a prefix that nobody else uses."""
    url = f"s3://records/{uuid.uuid4().hex}"
    return {"url": url, "options": ceph.options, "scope": "shared", "timeout_s": 20.0}


class TestCeph(TierContract):
    @pytest.fixture
    def tier(self, settings: dict[str, Any]) -> Tier:
        return ObjectTier(TierConfig(**settings))


def test_a_restart_of_the_gateway_keeps_records_and_its_absence_is_an_error(
    ceph: Ceph, settings: dict[str, Any], staging: Staging
) -> None:
    tier, names = ObjectTier(TierConfig(**settings | {"timeout_s": 4.0})), record_names(4)
    assert put(tier, staging, names[:3]) == [None] * 3
    ceph.gateway.kill()
    ceph.gateway.wait()
    assert all(isinstance(found, TierError) for found in get(tier, staging, names[:3]))
    ceph.start_gateway()
    assert tier.match_prefix(names) == 3
    assert all(map(same, get(tier, staging, names[:3]), names[:3]))
    reopened = ObjectTier(TierConfig(**settings))
    assert {name for name, _ in reopened.scan()} == set(names[:3])
    reopened.close()
    finish(tier, staging)


def test_a_cache_finds_what_another_stored(settings: dict[str, Any]) -> None:
    engine, tokens = make_engine(), sequence(24)
    for turn in range(2):
        tier = ObjectTier(TierConfig(**settings), "bucket")
        with open_cache(engine, None, memory_slots=0, extra=[tier]) as cache:
            if turn == 0:
                store(cache, engine, tokens)
            else:
                assert cache.lookup(tokens).by_tier == {"bucket": 24}
