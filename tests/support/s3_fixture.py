"""The fixture `s3`: an S3 server for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvkit.lab.testbed.servers import S3Server, data_folder


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server; each test uses a prefix of its own. Whoever kills it starts it again."""
    with data_folder("s3") as folder, S3Server(folder) as server:
        yield server
