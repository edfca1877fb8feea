import os

import pytest

from tests.titan import harness
from tests.workers import TIMEOUT, WorkerPool


class TitanPool:
    """Scenarios over a pool of processes in which torchtitan is imported once."""

    def __init__(self, num_processes: int = 4, timeout: float = TIMEOUT):
        self._pool = WorkerPool(num_processes, init_groups=False, timeout=timeout)

    def train(self, world_size: int, *args: str, log_rank: int = -1) -> harness.Run:
        """What the rank that logs losses saw: the last one, but for stages placed in a V."""
        runs = self._pool.run(
            harness.train, world_size, world_size=world_size, port=harness.free_port(), args=list(args)
        )
        return runs[log_rank]

    def verify(self, world_size: int, *args: str, dtype: str = "float64", steps: int = 2, plant=None):
        results = self._pool.run(
            harness.verify, world_size, world_size=world_size, port=harness.free_port(), args=list(args), dtype=dtype,
            steps=steps, plant=plant,
        )  # fmt: skip
        assert len(results[0]) == steps
        return results[0]

    def call(self, function, world_size: int, *args: str, **kwargs) -> list:
        """What `function` of the harness returned on every rank."""
        port = harness.free_port()
        return self._pool.run(function, world_size, world_size=world_size, port=port, args=list(args), **kwargs)

    def forget_meshes(self) -> None:
        self._pool.run(harness.forget_meshes, self._pool.world_size)

    def close(self) -> None:
        self._pool.close()


nightly = pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "nightly", reason="HYPOTHESIS_PROFILE=nightly runs it"
)


@pytest.fixture
def eight():
    """Eight processes, for one layout: torch caches by mesh and would find another layout's process groups."""
    pool = TitanPool(8, timeout=800)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def titan():
    pool = TitanPool()
    yield pool
    pool.close()


@pytest.fixture
def four(titan):
    """The pool for a layout whose meshes are not torchtitan's: what torch keeps of meshes is let go, see `eight`."""
    titan.forget_meshes()
    yield titan
    titan.forget_meshes()
