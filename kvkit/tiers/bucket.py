"""Objects in a bucket of S3, Google Cloud Storage or Azure, through obstore.

A put is a single request, so an object is visible only when it is complete. A read is streamed into its slot:
for large records this takes 0.6 of the time of collecting the body first (benchmarks/micro/bench_s3.py).

`Bucket` detects two peculiarities of stores from their answers: some deny access to missing objects, as S3
does to users who may not list, and some do not support conditional puts.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from kvkit.format.names import is_record
from kvkit.format.record import Damage
from kvkit.format.urls import hide, shown
from kvkit.tiers.aws import asks_for_credentials, missing_credentials, s3_settings
from kvkit.tiers.base import DamagedObject, Ranges, TierError, UnreadableObject, cut_short, too_large
from kvkit.tiers.folder import check_name

_PIECE_BYTES = 256 << 10  # of a body, copied at a time: fits the processor's cache
_RETRIES = 3
_PUT_ATTEMPTS = 2
"""Attempts of a put that the store rejects because of a concurrent put of the same object."""
_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
_CODES_OF_ONE_OBJECT = ("AccessDenied", "InvalidObjectState")
"""Error codes of S3 that may concern a single object: access is denied, or the object is archived."""
_UNCONDITIONAL = re.compile(r" (400|501) |NotImplemented|NotSupported")
"""Matches errors, of stores and of obstore, that may mean that `If-None-Match` is not supported."""
log = logging.getLogger(__name__)


class Bucket:
    """A `kvkit.tiers.base.ObjectStore` of the objects below a URL's prefix. Thread-safe.

    Args:
        url: s3://<bucket>/<prefix>, gs://<bucket>/<prefix>, az://<container>/<prefix>.
        options: settings by obstore's names; others come from the usual environment variables. S3 has
            endpoint, region, access_key_id, secret_access_key, session_token; GCS has service_account; Azure
            has account_name, account_key or sas_key.
        timeout_s: longest request, including its retries, in seconds.

    Raises:
        ValueError: obstore does not know the URL or an option; or as for `kvkit.tiers.aws.s3_settings`. The
            message shows no option's value.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_s: float) -> None:
        # a request and one retry, each with its own timeout, and the backoff between them add up to timeout_s
        timeout, backoff = timedelta(seconds=0.45 * timeout_s), timedelta(seconds=0.1 * timeout_s)
        scheme, _, location = url.partition("://")
        config, provider = dict(options), None
        if scheme in ("s3", "s3a"):
            config, provider = s3_settings(options, timeout_s)
        try:
            self._store: Any = from_url(
                f"{'gs' if scheme == 'gcs' else scheme}://{location}",
                config={name: _text(value) for name, value in config.items()},
                **({} if provider is None else {"credential_provider": provider}),
                # the user chooses http:// by the endpoint
                client_options={"allow_http": True, "timeout": timeout, "connect_timeout": timeout},
                retry_config={
                    "max_retries": _RETRIES,
                    "retry_timeout": timeout,
                    "backoff": {"init_backoff": backoff / 10, "max_backoff": backoff, "base": 2},
                },
            )
        except (BaseError, ValueError) as error:
            # the error may quote values of options, which may be secrets
            reason = hide(_first_line(error), url, options=options)
            raise ValueError(f"{shown(url)}: {reason}") from None
        self._timeout_s = timeout_s
        self._url = shown(url)
        self._denies_missing: bool | None = None  # True if access to missing objects is denied; None: unknown
        self._conditional = True  # False once the store has refused a conditional put

    def size(self, name: str) -> int | None:
        check_name(name)
        try:
            with self._translate_errors("cannot be looked up", name, reading=True):
                return self._size(name)
        except FileNotFoundError:
            return None

    def _size(self, name: str) -> int:
        if not self._denies_missing:
            try:
                return int(obstore.head(self._store, name)["size"])
            except BaseError as error:
                if " 403 " not in str(error) or not self._detect_denials():
                    raise
        return self._size_by_get(name)

    def _size_by_get(self, name: str) -> int:
        """Return the bytes of an object by GET: only its answer has the reason of a denial."""
        return int(obstore.get(self._store, name, options={"range": (0, 1)}).meta["size"])

    def _detect_denials(self) -> bool:
        """Return whether the store denies access to missing objects.

        Requests an object that cannot exist, at each call until the answer is conclusive.
        """
        if self._denies_missing is None:
            try:
                self._size_by_get(f"missing-{secrets.token_hex(16)}")
            except FileNotFoundError:
                self._denies_missing = False
            except BaseError as error:
                if _is_denied(error):
                    self._denies_missing = True
                    log.warning(
                        "%s: the store denies access to missing objects (HTTP 403), as S3 does without "
                        "s3:ListBucket: kvkit treats a denied record as missing",
                        self._url,
                    )
        return bool(self._denies_missing)

    def read(self, name: str, buffer: memoryview) -> int:
        check_name(name)
        with self._translate_errors("cannot be read", name, reading=True):
            result = obstore.get(self._store, name)
            size = result.meta["size"]
            if size > len(buffer):
                raise too_large(name, size, len(buffer))
            return _stream(result, buffer)

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        check_name(name)
        with self._translate_errors("cannot be read", name, reading=True):
            if len(ranges) == 1:
                (offset, size), buffer = ranges[0], buffers[0]
                result = obstore.get(self._store, name, options={"range": (offset, offset + size)})
                counts = [_stream(result, buffer[:size])]
            else:
                starts, sizes = [offset for offset, _ in ranges], [size for _, size in ranges]
                pieces = obstore.get_ranges(self._store, name, starts=starts, lengths=sizes, coalesce=0)
                counts = [len(piece) for piece in pieces]
                for piece, count, buffer in zip(pieces, counts, buffers, strict=True):
                    buffer[:count] = memoryview(piece)
        for count, (offset, size) in zip(counts, ranges, strict=True):
            if count < size:
                raise cut_short(name, count, offset, size)

    def write(self, name: str, data: memoryview) -> None:
        check_name(name)
        try:
            with self._translate_errors("cannot be written", name):
                self._put(name, data)
        except FileNotFoundError as error:
            raise TierError(f"{name} cannot be written: the bucket does not exist") from error

    def _put(self, name: str, data: memoryview) -> None:
        """Put an object unless it exists; overwrite it if the store does not support conditional puts."""
        for _ in range(_PUT_ATTEMPTS if self._conditional else 0):
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
                return
            except AlreadyExistsError:  # or another put of it is in flight, and may fail
                if self.size(name) is not None:
                    return
            except (BaseError, NotImplementedError) as error:
                if not _UNCONDITIONAL.search(str(error)):
                    raise
                obstore.put(self._store, name, data, mode="overwrite", use_multipart=False)
                self._conditional = False
                log.info("%s: the store has no conditional puts; kvkit uses unconditional ones", self._url)
                return
        if self._conditional:
            raise TierError(f"{name} cannot be written: the store reports another put of it in flight")
        obstore.put(self._store, name, data, mode="overwrite", use_multipart=False)

    def delete(self, name: str) -> None:
        check_name(name)
        try:
            with self._translate_errors("cannot be deleted", name):
                obstore.delete(self._store, name)
        except FileNotFoundError:
            return

    def scan(self) -> Iterator[tuple[str, int]]:
        with self._translate_errors("cannot be listed"):
            records = [
                (meta["last_modified"], meta["path"], meta["size"])
                for page in obstore.list(self._store)
                for meta in page
                if is_record(meta["path"])
            ]
        for _, name, size in sorted(records):
            yield name, size

    @contextmanager
    def _translate_errors(
        self, failure: str, name: str = "the bucket", reading: bool = False
    ) -> Iterator[None]:
        """Raise short tier errors in place of obstore's; an error that means a missing object is kept."""
        try:
            yield
        except BaseError as error:
            text = str(error)
            if reading and self._denies_missing and _is_denied(error):
                raise FileNotFoundError(f"{name} is missing, or denied") from None
            if "416 Range Not Satisfiable" in text:
                raise DamagedObject(f"{name}: it ends before the range does", Damage.TRUNCATED) from None
            if asks_for_credentials(text):
                reason = missing_credentials()
            elif "TimedOut" in text:
                reason = f"no answer within timeout_s={self._timeout_s}"
            elif " 403 " in text or " 401 " in text:
                reason = f"the store refuses these credentials; {_first_line(error)}"
                code = _ERROR_CODE.search(text)  # absent in an answer to HEAD
                if reading and " 403 " in text and (code is None or code[1] in _CODES_OF_ONE_OBJECT):
                    raise UnreadableObject(f"{name} {failure}: {reason}", name) from None
            else:
                reason = _first_line(error)
            raise TierError(f"{name} {failure}: {reason}") from None  # obstore's own text is pages long


def _is_denied(error: Exception) -> bool:
    """Return whether an answer means that the credentials are valid, but lack the permission."""
    code = _ERROR_CODE.search(str(error))
    return " 403 " in str(error) and code is not None and code[1] == "AccessDenied"


def _stream(result: Any, buffer: memoryview) -> int:
    """Copy the body of an answer into `buffer`, piece by piece; return its number of bytes.

    Raises:
        TierError: the body does not fit `buffer`.
    """
    copied = 0
    for piece in result.stream(_PIECE_BYTES):
        end = copied + len(piece)
        if end > len(buffer):
            raise TierError(f"the body is longer than the {len(buffer)} bytes that were announced")
        buffer[copied:end] = piece
        copied = end
    return copied


def _text(value: Any) -> str:
    """Return the value of an option as obstore takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(error: Exception) -> str:
    """Return the first line of obstore's error, without its dumped structures but with S3's error code."""
    text = str(error)
    line = text.partition("\n")[0].partition(": <?xml")[0].rstrip(": ")
    code = _ERROR_CODE.search(text)
    return f"{line} ({code[1]})" if code else line
