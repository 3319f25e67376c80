"""What ranks hold goes to other ranks without a copy on the driver, through both launchers, and is freed."""

from __future__ import annotations

import gc
import stat
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from launchers import BOTH, reserved
from remote_columns_worker import Maker, Reader, expected_sums, num_held_files, numbers, pool, rows
from replica_cluster import eventually
from resident import peak_growth

from megatron_rl.cluster.launcher import Launcher, Ranks
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.ranks import ReplicaRanks
from megatron_rl.cluster.scratch import PREFIX, SEGMENTS
from megatron_rl.errors import WorkerFailure
from megatron_rl.records import Batch
from megatron_rl.remote_columns import RemoteColumn

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
MIB = 1 << 20


@pytest.fixture(scope="module", params=BOTH)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def places(launcher: Launcher) -> Iterator[tuple[Ranks, Ranks]]:
    with reserved(launcher, 2) as makers, reserved(launcher, 2) as readers:
        yield makers, readers


@pytest.fixture
def pools(places: tuple[Ranks, Ranks]) -> Iterator[tuple[ProcessPool, ProcessPool]]:
    with ExitStack() as opened:
        kinds = zip(("makers", "readers"), places, (Maker, Reader), strict=True)
        makers, readers = (opened.enter_context(pool(*each)) for each in kinds)
        yield makers, readers


def left_after_a_call(reader: Reader, launcher: Launcher) -> int:
    """Count the held files after one more message, with which Ray's agents hear of what is freed."""
    reader.coordinates().get()
    return num_held_files(launcher)


def test_ranks_read_what_other_ranks_hold(pools, launcher: Launcher) -> None:
    """In another order and in other shares, joined with itself, step after step: sums are exact, the driver grows by
    less than a quarter of the 64 MiB, and no file is left. Would not catch a driver that copies in small pieces.
    """
    makers, readers = pools[0].host(Maker), pools[1].host(Reader)
    batch = rows(64, 512)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    sums: list[list[float]] = []

    def step() -> None:
        made = makers.make(batch).get()[1]
        assert isinstance(made.stored("teacher_hidden"), RemoteColumn)
        taken = Batch(input_ids=batch["input_ids"], sampled=batch["sampled"])
        taken.add(made)
        mixed = Batch.joined([taken[order][:40], taken[order][40:]])
        sums.append(readers.sums(mixed).get()[order.argsort()].flat("advantages").tolist())

    step()  # the first one makes connections
    for _ in range(2):
        assert peak_growth(step) < 16 * MIB
        assert eventually(lambda: left_after_a_call(readers, launcher) == 0, 10)
    assert sums == [expected_sums(batch)] * 3


def test_the_driver_reads_what_it_needs(pools, launcher: Launcher) -> None:
    """Some rows of a held column, and small columns as ever. Would not catch a driver that reads all of them."""
    batch = rows(8, 600)
    made = pools[0].host(Maker).make(batch).get()[1]
    assert made.flat("old_log_probs").tolist() == batch.sampled_ids.values().tolist()
    some = torch.tensor([5, 0, 7])
    assert torch.equal(made[some].flat("teacher_hidden"), numbers(batch[some].sampled_ids.values()))
    small = rows(2, 20)
    assert isinstance(pools[0].host(Maker).make(small).get()[1].stored("teacher_hidden"), torch.Tensor)
    assert num_held_files(launcher) == 2
    files = SEGMENTS.glob(f"{PREFIX}{launcher.scratch.run_id}-held-*")
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_killed_rank_ends_its_pool_and_not_what_it_held(pools, places, launcher: Launcher) -> None:
    """The pool fails as ever; rows of the dead are there for others, until the failure, which has frames that refer to
    them, is forgotten. Would not catch a lost node.
    """
    readers = pools[1].host(Reader)

    def batch_of_the_dead() -> Batch:
        with ProcessPool("doomed", places[0], Maker) as doomed:
            batch = rows(8, 600)
            batch.add(doomed.host(Maker).make(batch).get()[1])
            with pytest.raises(WorkerFailure, match=r"rank 1 \(host\)"):
                doomed.host(Maker).die(batch).get()
        return batch

    batch = batch_of_the_dead()
    assert readers.sums(batch).get().flat("advantages").tolist() == expected_sums(batch)
    del batch
    gc.collect()
    assert eventually(lambda: left_after_a_call(readers, launcher) == 0, 10)


def test_a_threshold_of_null_holds_nothing(places) -> None:
    """All columns pass through the driver with `trainer.held_bytes=null`. Would not catch another default."""
    options = PoolOptions(env={"MEGATRON_RL_HELD_BYTES": "inf"})
    with ProcessPool("makers", places[0], Maker, options=options) as makers:
        batch = rows(8, 600)
        made = makers.host(Maker).make(batch).get()[1]
    assert torch.equal(made.stored("teacher_hidden").values(), numbers(batch.sampled_ids.values()))


def test_what_a_lost_replica_has_answered_is_read(pools, places, launcher: Launcher) -> None:
    """A replica holds as others do where its node is not lost with it, and its rows are read when it is gone. Would not
    catch a node of its own: `test_held_on_nodes.py` has one.
    """
    readers, batch = pools[1].host(Reader), rows(8, 600)
    with ProcessPool("replica", ReplicaRanks("replica 0", places[0], 0, 2), Maker) as replica:
        batch.add(replica.host(Maker).make(batch).get()[1])
    assert isinstance(batch.stored("teacher_hidden"), RemoteColumn)
    assert readers.sums(batch).get().flat("advantages").tolist() == expected_sums(batch)
    del batch
    gc.collect()
    assert eventually(lambda: left_after_a_call(readers, launcher) == 0, 10)
