"""S3 backend with a fake client: when it uses what it remembers about objects, and when it asks the object store."""

from types import SimpleNamespace

import pytest

from kvstore.clock import Nanos
from kvstore.messages import BlockKey
from kvstore.tiers.s3.backend import S3Backend
from kvstore.tiers.s3.settings import S3Settings
from kvstore.tiers.statistics import TierStatistics

KEY = BlockKey(b"d" * 16, b"n" * 16)
DEADLINE = Nanos(10**10)


class Missing(Exception):
    response = {"Error": {"Code": "404"}}  # noqa: RUF012 - the form of botocore's errors


class FakeClients:
    """Replaces `S3Clients`: every client looks up the same set of objects."""

    client_error = Missing
    errors = (Missing,)
    connection_closed = ConnectionError

    def __init__(self):
        self.objects: set[str] = set()

    def within(self, seconds: float) -> "FakeClients":
        return self

    def head_object(self, *, Bucket: str, Key: str) -> None:  # noqa: N803 - the names of boto3
        if Key not in self.objects:
            raise Missing

    def close(self) -> None:
        pass


@pytest.fixture
def clients():
    return FakeClients()


@pytest.fixture
def backend(clients):
    clock = SimpleNamespace(now=lambda: Nanos(0))
    backend = S3Backend(S3Settings(bucket="blocks"), clients, SimpleNamespace(), TierStatistics("s3"), clock)
    yield backend
    backend.close()


def test_object_deleted_after_it_was_seen_is_not_held(backend, clients):
    clients.objects = {f"fleet/{KEY.digest.hex()}/{KEY.name.hex()}"}
    assert backend.find([KEY], DEADLINE) == 1
    clients.objects.clear()

    assert backend.find([KEY], DEADLINE) == 1, "a look-up relies on what was seen lately"
    assert backend.holds([KEY], DEADLINE) == [False]
    assert backend.find([KEY], DEADLINE) == 0


def test_object_to_be_replaced_is_not_held(backend, clients):
    clients.objects = {f"fleet/{KEY.digest.hex()}/{KEY.name.hex()}"}
    backend.sightings.suspect(KEY)

    assert backend.holds([KEY], DEADLINE) == [False]
