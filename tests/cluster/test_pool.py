"""A group of four processes: what arrives where, and what comes back, whatever has launched them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from launchers import BOTH, RAY, reserved
from replica_cluster import eventually
from toy_worker import ToyWorker, toy

from megatron_rl.cluster.launcher import Launcher, Ranks
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.errors import WorkerFailure
from megatron_rl.records import Batch, ragged

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=BOTH)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pool(launcher: Launcher, kind: str) -> Iterator[Ranks]:
    """Four ranks, through Ray on two nodes of two."""
    with reserved(launcher, *((2, 2) if kind == RAY else (4,))) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def group(pool: Ranks) -> Iterator[ProcessPool]:
    with ProcessPool("toys", pool, ToyWorker, options=PoolOptions(env={"TOY_COLOUR": "red"})) as group:
        yield group


def toys(num_rows: int) -> Batch:
    tokens = ragged([torch.full((row + 1,), row) for row in range(num_rows)])
    return toy(torch.arange(num_rows), tokens)


def test_dp_splits_rows_unevenly_and_collects_one_answer_per_dp_rank(group: ProcessPool) -> None:
    """Would not catch a worker that mixes rows within its chunk."""
    doubled = group.host(ToyWorker).double(toys(5)).get()
    assert doubled["groups"].tolist() == [0, 1, 2, 3, 4]
    assert doubled["weights"].tolist() == [0, 0, 0, 2, 2]
    assert [row.tolist() for row in doubled["input_ids"].unbind()] == [[2 * row] * (row + 1) for row in range(5)]
    rows = [received[0] for received in group.host(ToyWorker).last_received().get()]
    assert rows == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]


def test_fewer_rows_than_chunks_are_padded_neutrally_and_unpadded(group: ProcessPool) -> None:
    """Would not catch padding in an argument that is not a record."""
    doubled = group.host(ToyWorker).double(toys(1)).get()
    assert doubled["groups"].tolist() == [0] and doubled["weights"].tolist() == [0]
    assert group.host(ToyWorker).last_received().get() == [([0], [1.0])] * 2 + [([0], [0.0])] * 2


def test_each_replica_gets_its_own_entry(group: ProcessPool) -> None:
    """Rank r is replica 3 - r. Would not catch an entry that travels to a rank and is dropped there."""
    answers = group.host(ToyWorker).given({0: "a", 2: "c"}, every="all").get()
    assert answers == [(3, {0: "a"}, "all"), (2, {}, "all"), (1, {2: "c"}, "all"), (0, {}, "all")]


def test_other_answers_come_from_the_collectors(group: ProcessPool) -> None:
    """Would not catch metrics that differ between ranks, since the first collector's count."""
    assert group.host(ToyWorker).describe("dict", batch=toys(3)).get() == {"rank": 0}
    assert group.host(ToyWorker).describe("list", batch=toys(3)).get() == [[0, 0, 1], [2, 2]]
    assert group.host(ToyWorker).describe("none", batch=toys(3)).get() is None


def test_calls_overlap_and_a_time_out_leaves_the_group_alive(group: ProcessPool) -> None:
    """Would not catch calls that run one after the other but fast."""
    nap = group.host(ToyWorker).nap(1.0)
    behind = group.host(ToyWorker).environment("RANK")
    with pytest.raises(TimeoutError, match=r"nap: no report from ranks \[0, 1, 2, 3\] in 0.1 s"):
        nap.get(timeout=0.1)
    assert behind.get() == ["0"]
    assert nap.get() == nap.get() == [0, 1, 2, 3]


def test_workers_find_their_place_in_the_environment(group: ProcessPool) -> None:
    """Two "nodes" on one machine are one, and all meet in a new file of the run's folder. Would not catch a file that
    others may read, as the folder lets nobody in (`test_scratch.py`).
    """
    num_local = group._ranks.num_ranks_per_node
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TOY_COLOUR", "NODE_RANK", "NODE_ADDRESS")
    *place, node, address = group.host(ToyWorker).environment(*names).get()
    assert place == ["0", "4", "0", str(num_local), "red"]
    assert (node, address) == ("0", "127.0.0.1")
    master, store = group.host(ToyWorker).environment("MASTER_ADDR", "MASTER_STORE").get()
    run = Path(store).parent
    assert master == "127.0.0.1" and (run.name, run.stat().st_mode & 0o777) == (group._ranks.run_id, 0o700)
    assert Path(store).stat().st_mode & 0o777 == 0o600


def test_the_title_of_a_process_says_what_it_does(group: ProcessPool) -> None:
    """`ps` shows the title, in a method and between two methods. Would not catch a title that is cut off."""
    [rank] = [psutil.Process(pid) for pid in group.pids[3:]]
    nap = group.host(ToyWorker).nap(1.0)
    assert eventually(lambda: rank.cmdline()[0] == "rank 3 of toys: host.nap")
    nap.get()
    assert eventually(lambda: rank.cmdline()[0] == "rank 3 of toys") and rank.name() == "rank 3"


def test_large_and_many_messages_arrive_in_order(group: ProcessPool) -> None:
    """Messages of 8 MB, which no pipe holds, while the ranks are busy; each answer is that of its own call."""
    nap = group.host(ToyWorker).nap(0.5)
    calls = []
    for number in range(6):
        tokens = ragged([torch.full((500_000,), number), torch.full((500_000,), number)])
        calls.append(group.host(ToyWorker).double(toy(torch.full((2,), number), tokens)))
    for number, call in enumerate(calls):
        answer = call.get()
        assert answer["groups"].tolist() == [number] * 2 and answer.flat("input_ids").eq(2 * number).all()
    assert nap.get() == [0, 1, 2, 3]


def test_verbs_are_visible_and_unknown_ones_name_them(group: ProcessPool) -> None:
    """Would not catch a call with wrong arguments, which only the worker refuses."""
    assert list(inspect.signature(group.host(ToyWorker).double).parameters) == ["batch"]
    assert group.host(ToyWorker).double.__doc__ == ToyWorker.double.__doc__
    with pytest.raises(AttributeError, match="no method 'triple'.*: .*double, environment"):
        group.host(ToyWorker).triple()


def test_a_mistake_in_the_call_does_not_end_the_group(group: ProcessPool) -> None:
    """Would not catch a mistake that only shows on the worker, which does end it."""
    with pytest.raises(ValueError, match="same number of rows"):
        group.host(ToyWorker).double(toys(3), toys(2))
    assert group.host(ToyWorker).nap(0).get() == [0, 1, 2, 3]


def test_shutdown_leaves_no_process_and_later_calls_say_so(group: ProcessPool) -> None:
    """Would not catch processes left on another node. It ends the shared group."""
    pids = group.pids
    assert all(psutil.pid_exists(pid) for pid in pids)
    group.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(WorkerFailure, match="shut down"):
        group.host(ToyWorker).nap(0)


def test_worker_classes_that_cannot_be_a_group_are_refused(pool: Ranks) -> None:
    """Would not catch a `coordinates` method that answers with something else."""

    class Unplaced:
        pass

    with pytest.raises(TypeError, match="Unplaced must have a ONE_TO_ALL method `coordinates`"):
        ProcessPool("toys", pool, Unplaced)
    with pytest.raises(RuntimeError, match="start the pool toys before calling nap"):
        ProcessPool("toys", pool, ToyWorker).host(ToyWorker).nap(0)


def test_a_start_raises_what_it_has_failed_with(launcher: Launcher) -> None:
    """Also what is no error of ours: a host that takes itself for one of four ranks, on a pool of two."""
    with reserved(launcher, 2) as two, pytest.raises(ValueError, match="DP needs one collector"):
        ProcessPool("toys", two, ToyWorker).start()
