"""Settings of kvkit's storage for SGLang, in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from pydantic import ConfigDict

from kvkit.adapters.engine.tier_settings import PageSettings

WHERE = "hicache-storage-backend-extra-config: "


class StorageSettings(PageSettings):
    """Settings of the storage; other keys are SGLang's."""

    model_config = ConfigDict(extra="ignore")
