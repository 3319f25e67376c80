"""Copies of the state in host memory: a lost node's part comes from another node, and any layout reads them.

Why bit for bit in the same layout, and to rounding in others: as in `resumed_observations.py`; a copy has what
a checkpoint has. Nodes are names here: a rank sees the files of its own node alone.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from resumed_training import RATES, metrics_of, take_step, whole_state
from tiny_models import run_config, save_llama

from megatron_rl.checkpoint.memory_checkpoint_plan import UNFINISHED, CopyFile, CopyPlace, node_tag
from megatron_rl.planning.run_models import RunModels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

ATTEMPT = 3


def train(config, prefix: str, nodes: str, first: int, last: int, loads: bool, copies: tuple[int, ...] = ()) -> dict:
    """Load the copy of step `first` - 1 if asked to, take steps first to last, copy after those in `copies`.

    nodes: a letter for each rank.
    """
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.memory_checkpoint import MemoryCheckpoint

    worker, place = RankHost(config), CopyPlace(prefix, ATTEMPT)
    worker.build("actor")
    worker.build("critic")
    where, states = worker.coordinates(), Path(f"{prefix}states")
    worker.copies = MemoryCheckpoint(worker.spec.name, where.rank, nodes[where.rank], timedelta(seconds=60))
    if loads:
        worker.load_copy(place, first - 1, pickle.loads(states.read_bytes()))
    metrics = []
    for step in range(first, last + 1):
        metrics.append(take_step(worker, where, step))
        if step in copies:
            numbers = worker.copy_state(place, step)
            if where.rank == 0:
                states.write_bytes(pickle.dumps(numbers))
    worker.copies.settle()
    return {
        "metrics": metrics if where.dp_collector else None,
        "state": {name: whole_state(worker, name) for name in worker.trained},
    }


def files_on(folder: Path, node: str) -> list[Path]:
    return sorted(folder.glob(f"run-copy-{node_tag(node)}-*"))


def test_a_lost_node_comes_from_the_other(tmp_path: Path) -> None:
    """TP2xPP2 on nodes a and b copies after steps 1 and 2; b is lost. On a and a new node the last two steps and all
    state are bit for bit those of four steps; on one rank of a alone, metrics to 1e-5.

    Would not catch shared memory of a real node that is gone: tests/e2e/test_repaired_runs.py loses one.
    """
    prefix, path = f"{tmp_path}/run-", save_llama(tmp_path / "model")
    config = run_config(path, 2, 2, **RATES, trainer__n_gpus_per_node=4)
    whole = run_ranks(4, train, config, prefix, "aabb", 1, 4, False, (1, 2))
    names = [path.name for path in files_on(tmp_path, "a")]
    # Two files of each rank, with checksums, and of another node's rank; the copy after step 1 was removed by nobody,
    # as only the one after it was taken since.
    assert len([name for name in names if not name.endswith(".crc32")]) == 2 * 4 * 2 and not any(
        name.endswith(".unfinished") for name in names
    )
    own = [path for path in files_on(tmp_path, "b") if path.suffix != ".crc32" and f"-{ATTEMPT}-2-" in path.name]
    planned, stages = RunModels(config).pools["global_pool"], {0: 0, 1: 0, 2: 1, 3: 1}
    trained = [planned.ledger(role) for role in planned.spec.roles if role.is_trained]
    size = sum(ledger.saved_bytes(stages[rank]) for rank in range(4) for ledger in trained)
    assert sum(path.stat().st_size for path in own) == pytest.approx(size, rel=0.05)
    for file in files_on(tmp_path, "b"):
        file.unlink()
    resumed = run_ranks(4, train, config, prefix, "aacc", 3, 4, True)
    assert metrics_of(resumed) == metrics_of(whole)[2:]
    for ours, theirs in zip(resumed, whole, strict=True):
        for role in ("actor", "critic"):
            assert all(torch.equal(data, ours["state"][role][name]) for name, data in theirs["state"][role].items())
    alone = metrics_of(run_ranks(1, train, run_config(path, 1, 1, **RATES), prefix, "a", 3, 4, True))
    for step, metrics in enumerate(alone):
        assert metrics == pytest.approx(metrics_of(whole)[2 + step], rel=1e-5, abs=1e-5)


@pytest.mark.exhaustive
def test_old_copies_go_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    """Of three copies two are left. With one byte changed, every rank says what is lost, and none hangs; so it does
    where a node that held the only copy is gone.
    """
    prefix, path = f"{tmp_path}/run-", save_llama(tmp_path / "model")
    config = run_config(path, 1, 2, **RATES)
    torn = Path(f"{prefix}{CopyFile(ATTEMPT - 1, 7, 'global_pool', 1, 'weights').name('a')}{UNFINISHED}")
    torn.touch()
    run_ranks(2, train, config, prefix, "aa", 1, 3, False, (1, 2, 3))
    assert not torn.exists()
    files = [file for file in files_on(tmp_path, "a") if not file.name.endswith(".crc32")]
    assert sorted({file.name.split("-")[4] for file in files}) == ["2", "3"]
    (damaged,) = (file for file in files if f"-{ATTEMPT}-3-1-" in file.name and file.name.endswith("optimizer"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    for nodes, lost in (("aa", r"optimizer\.state\..*damaged: copy-"), ("bb", r"model\.embed_tokens")):
        with pytest.raises(Exception, match=rf"CopyLost: the copies in memory do not contain {lost}"):
            run_ranks(2, train, config, prefix, nodes, 4, 4, True)
