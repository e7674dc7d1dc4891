"""Settings of kvkit's tier under vLLM's own offloading: an entry of `secondary_tiers`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvkit.adapters.engine.tier_settings import PageSettings, SleepSettings
from kvkit.transfer.requests import RequestLimits

WHERE = "secondary_tiers: "


class TierSettings(PageSettings, SleepSettings):
    """Settings of the tier, without vLLM's own `type` and `module_path`."""

    locality: Literal["LOCAL", "REMOTE"] | None = Field(
        default=None, description="for vLLM's filters and events; none: by the tiers, if all are alike"
    )
    requests: RequestLimits = RequestLimits()
