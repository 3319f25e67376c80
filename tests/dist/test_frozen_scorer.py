"""A frozen role that scores every batch: one row, written here, and no line of the loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_llama, save_qwen2

from megatron_rl.columns import COLUMNS, SCORING, Column
from megatron_rl.config import roles
from megatron_rl.config.roles import REFERENCE, PassCall, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.records import Batch

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

TEACHER = "coach_log_probs"


def sampled() -> Batch:
    """Seven answers to prompts of their own."""
    rows = random_batch(7).select("input_ids", "sampled", "rollout_log_probs")
    rows.add(uid=torch.arange(7))
    return rows


def columns_of_a_step(config: RunConfig, teacher: str) -> Batch:
    """What the scorers of roles add to a batch, with one more row in the table."""
    from torch.distributed.constants import default_pg_timeout

    from megatron_rl.cluster.in_process import InProcessCluster
    from megatron_rl.cluster.pool_options import Hosting
    from megatron_rl.controller.run_scorers import role_scorers
    from megatron_rl.controller.run_setup import RunPools
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.role_classes import CLASSES
    from megatron_rl.scoring.batch_scorers import score
    from megatron_rl.scoring.sampled_batch import SampledBatch

    COLUMNS.declare(Column(TEACHER, "sampled token", "float32", "coach", (), "log-prob under another model"))

    reference = Placement.of(config).roles[REFERENCE]
    assert reference.score is not None
    passes = replace(reference.score, phase="coach", call=PassCall("log_probs", (SCORING,), TEACHER, is_added=True))
    row = replace(reference, name="coach", model_path=teacher, score=passes)
    roles.ROWS.insert(1, lambda config: [row])  # this process ends with the test

    placement = Placement.of(config)
    kinds = {name: CLASSES[role.kind.name] for name, role in placement.roles.items()}
    with InProcessCluster(placement.pools, Hosting(RankHost, (config, default_pg_timeout), kinds, "cpu")) as cluster:
        hosts = {name: pool.host(RankHost) for name, pool in cluster.pools.items()}
        for role in ("coach", REFERENCE, "critic"):
            hosts[placement.roles[role].pool].build(role).get()
        batch = SampledBatch(1, sampled())
        score(list(role_scorers(RunPools(placement, cluster, hosts))), batch)
    return batch.rows


@torch.no_grad()
def log_probs_by_transformers(folder: str, rows: Batch) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for tokens, number in zip(rows["input_ids"].unbind(), rows.num_sampled.tolist(), strict=True):
        table = torch.log_softmax(model(tokens[None]).logits[0, -number - 1 : -1], -1)
        found.append(table.gather(1, tokens[-number:, None])[:, 0])
    return torch.cat(found)


def test_a_row_of_the_table_is_a_scorer_of_the_loop(tmp_path) -> None:
    """Each column is its own model's, to 1e-5 of transformers; the critic's is beside them.

    Would not catch a role in a pool of its own, which handles reach in the same way.
    """
    policy = save_llama(tmp_path / "policy")
    teacher = save_qwen2(tmp_path / "teacher")
    config = run_config(policy, 1, 1, critic__model__path=policy, trainer__n_gpus_per_node=1)
    (rows,) = run_ranks(1, columns_of_a_step, config, teacher, timeout=120)
    for name, folder in (("ref_log_probs", policy), (TEACHER, teacher)):
        torch.testing.assert_close(rows.flat(name), log_probs_by_transformers(folder, rows), rtol=0, atol=1e-5)
    assert (rows.flat("ref_log_probs") - rows.flat(TEACHER)).abs().max() > 0.01
    assert torch.equal(rows["old_values"].offsets(), rows["ref_log_probs"].offsets())
