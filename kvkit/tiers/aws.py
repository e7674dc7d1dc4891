"""Credentials of S3 buckets, with AWS profiles: obstore itself only knows keys and credential servers.

The order of the search is that of AWS's own tools: keys, web identity, profiles, containers, EC2's metadata
service.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

Credentials = Mapping[str, Any]
"""Credentials as obstore takes them: access_key_id, secret_access_key, token, expires_at."""
_VALIDITY = timedelta(minutes=10)
"""Minimum validity of a profile's credentials: botocore renews them before they expire."""
_METADATA_PATH = re.compile(r"/latest/(?:api/token|meta-data)")
"""Paths of EC2's metadata service, in the text of an error."""
_DISABLED = "AWS_EC2_METADATA_DISABLED"


def s3_settings(
    options: Mapping[str, Any], timeout_s: float
) -> tuple[dict[str, Any], Callable[[], Credentials] | None]:
    """Return a bucket's options, completed from a profile, and a credential provider.

    The provider is None if obstore finds the credentials itself.

    Args:
        options: options of obstore; they override the environment, which overrides a profile.
        timeout_s: longest request to a server that supplies a profile's credentials, in seconds.

    Raises:
        ValueError: the profile does not exist or cannot be read; or there are no credentials and the metadata
            service is disabled. The message names the sources that were searched.
    """
    if _is_given(options, "access_key_id", "skip_signature", "web_identity_token_file"):
        return dict(options), None
    added, provider = _profile_settings(timeout_s)
    completed = {name: value for name, value in added.items() if not _is_given(options, name)} | dict(options)
    has_container = _is_given(options, "container_credentials_relative_uri", "container_credentials_full_uri")
    if provider is None and not has_container and _metadata_is_disabled():
        raise ValueError(missing_credentials())
    return completed, provider


def missing_credentials() -> str:
    """Return the error message that lists every source searched for credentials."""
    metadata_result = f"is not asked ({_DISABLED})" if _metadata_is_disabled() else "gives none"
    profiles = f"the profile {_profile_name() or 'default'!r} of {' and '.join(_profile_files())}"
    if find_spec("botocore") is None:
        profiles += " (not searched: pip install botocore)"
    return (
        "no credentials: none among the options (access_key_id, secret_access_key), in AWS_ACCESS_KEY_ID, "
        f"AWS_WEB_IDENTITY_TOKEN_FILE, AWS_CONTAINER_CREDENTIALS_*, or {profiles}, and EC2's metadata "
        f"service {metadata_result}; a public bucket needs skip_signature = true among the options"
    )


def asks_for_credentials(text: str) -> bool:
    """Return whether an error comes from requesting credentials from EC2's metadata service."""
    return _METADATA_PATH.search(text.partition("\n")[0]) is not None


def _profile_settings(timeout_s: float) -> tuple[dict[str, Any], Callable[[], Credentials] | None]:
    """Return options from the selected or default profile, and a provider of its credentials or None."""
    name = _profile_name()
    if find_spec("botocore") is None:
        if name:
            raise ValueError(
                f"AWS_PROFILE={name!r}: profiles need botocore: pip install botocore; or unset it and give "
                "access_key_id and secret_access_key among the options"
            )
        return {}, None
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    session = Session()
    session.set_default_client_config(
        Config(connect_timeout=timeout_s, read_timeout=timeout_s, retries={"total_max_attempts": 1})
    )
    try:
        profile = session.get_scoped_config()
        resolver = session.get_component("credential_provider")
        for provider in list(resolver.providers):
            if provider.METHOD in ("env", "assume-role-with-web-identity", "container-role", "iam-role"):
                resolver.remove(provider.METHOD)  # obstore queries these itself
        credentials = resolver.load_credentials()
    except BotoCoreError as error:
        raise ValueError(f"AWS_PROFILE={name!r}: {error}; read {' and '.join(_profile_files())}") from None
    key_of_option = {"region": "region", "endpoint": "endpoint_url"}
    added = {option: profile[key] for option, key in key_of_option.items() if key in profile}
    if credentials is None:
        return added, None

    def provide() -> Credentials:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _VALIDITY,
        }

    return added, provide


def _is_given(options: Mapping[str, Any], *names: str) -> bool:
    """Return whether one of these settings is among the options or in the environment, and not "false"."""
    by_name = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    more_aliases = {"region": ("REGION", "DEFAULT_REGION"), "endpoint": ("ENDPOINT", "ENDPOINT_URL")}
    aliases = [alias for name in names for alias in more_aliases.get(name, (name.upper(),))]
    values = [by_name.get(alias.lower(), os.environ.get(f"AWS_{alias}")) for alias in aliases]
    return any(value and str(value).lower() != "false" for value in values)


def _profile_name() -> str | None:
    """Return the name of the profile that the environment selects."""
    return os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")


def _profile_files() -> tuple[str, str]:
    """Return the paths of the files with profiles."""
    return (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )


def _metadata_is_disabled() -> bool:
    return os.environ.get(_DISABLED, "").lower() == "true"
