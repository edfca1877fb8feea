import pytest

from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def workers():
    pool = WorkerPool(4)
    yield pool
    pool.close()
