"""Losses that clients sum over several passes: the step does not depend on how they were cut, and is torch's.

Why: a sum of sums is the sum. The reduction over ranks is linear, so once at the end is as good as after each pass;
only the order of additions changes. Where two models take turns in the same buffers, copies of bytes are exact.
"""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from task_cases import PlainLoop, task_config, token_batch
from tiny_models import random_batch, run_config, save_qwen2
from updates import OPTIMIZER, relative, whole_weights

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.config.tasks import SFT
from megatron_rl.losses.summed import SUMMED_LOSSES
from megatron_rl.records import Batch, ragged

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 14
LOSSES = ("cross_entropy", "importance_sampling", "ppo")
# A large epsilon makes the step proportional to the gradient, so that new weights compare gradients.
ADAM = {"learning_rate": 0.05, "eps": 1.0, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.0, "grad_clip_norm": 1.0}
LAYOUTS = {"one": (1, 1, 1, 0), "DP2": (2, 1, 1, 0), "TP2xPP2": (4, 2, 2, 0), "adapters, DP2": (2, 1, 1, 4)}


def rows_of_clients() -> torch.Tensor:
    """Rows with weights of both signs, and log-probs of another policy near this one."""
    batch = random_batch(NUM_ROWS)
    batch.add(old_log_probs=batch.per_sampled_token(batch.flat("rollout_log_probs") * 0.3 - 4.0))
    return batch.read_by(ACTOR_UPDATE)


def stepped(config) -> dict:
    """Weights of this rank after one step, by loss and calls; then those of two models that take turns."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters
    from megatron_rl.roles.training_states import STATE

    worker = RankHost(config)
    worker.build("actor")
    where, actor, batch = worker.coordinates(), worker.roles["actor"], rows_of_clients()
    actor.keep_state("start", STATE)

    def add(loss: str, rows: torch.Tensor) -> dict:
        mine = rows.tensor_split(where.dp_size)[where.dp_rank]
        share = batch[mine] if len(mine) else batch[:1].neutral()
        return actor.add_gradients(share, loss, SUMMED_LOSSES[loss].defaults)[0]

    def weights() -> dict:
        return {name: p.detach().clone() for name, p in named_parameters(actor.trainable.models).items()}

    found = {"where": where, "place": worker.groups.grid.place(worker.groups.rank, vocab_multiple=64)}
    for loss in LOSSES:
        for calls in (1, 3, 7):
            actor.take_state("start", STATE)
            sums = [add(loss, rows) for rows in torch.arange(NUM_ROWS).tensor_split(calls)]
            metrics = actor.step_client(ADAM)
            found[loss, calls] = {"actor_weights": weights(), "sums": sums, "metrics": metrics}
    halves = torch.arange(NUM_ROWS).tensor_split(2)
    for name, others in (("alone", ()), ("taking turns", ("other",))):
        for model in ("mine", *others):
            actor.take_state("start", STATE)
            actor.keep_state(model, STATE)
        for _ in range(2):
            for half in halves:
                for model in ("mine", *others):
                    actor.take_state(model, STATE)
                    add("ppo" if model == "mine" else "cross_entropy", half)
                    actor.keep_state(model, STATE)
            for model in ("mine", *others):
                actor.take_state(model, STATE)
                actor.step_client(ADAM)
                actor.keep_state(model, STATE)
        actor.take_state("mine", STATE)
        found[name] = weights()
    return found


def plain(path: str, loss: str) -> tuple[PlainLoop, float, float]:
    """transformers and torch's AdamW; (loop after its step, loss, gradient norm)."""
    loop, batch, total = PlainLoop(path), rows_of_clients(), torch.zeros(())
    columns = (batch[name].unbind() for name in ("input_ids", "old_log_probs", "advantages"))
    for tokens, given, advantages in zip(*columns, strict=True):
        log_probs = loop.log_probs(tokens, len(advantages))
        ratio = (log_probs - given).exp()
        total = (
            total
            - {
                "cross_entropy": lambda a=advantages, p=log_probs: a * p,
                "importance_sampling": lambda a=advantages, r=ratio: a * r,
                "ppo": lambda a=advantages, r=ratio: torch.minimum(a * r, a * r.clamp(0.8, 1.2)),
            }[loss]().sum()
        )
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    torch.optim.AdamW(loop.model.parameters(), lr=0.05, betas=(0.8, 0.9), eps=1.0, weight_decay=0.0).step()
    return loop, float(total.detach()), float(norm)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_do_not_depend_on_calls_and_are_torchs(layout, model_path) -> None:
    """1, 3 and 7 calls to 1e-6; torch's AdamW on transformers to 1e-5; a model alone bit for bit as beside another.

    Would not catch a wrong schedule of weight decay, which is 0 here.
    """
    world_size, tp_size, pp_size, rank = LAYOUTS[layout]
    config = run_config(model_path, tp_size, pp_size, actor_rollout_ref__model__lora__rank=rank)
    ranks = run_ranks(world_size, stepped, config)
    for loss in LOSSES:
        for found in ranks:
            once = found[loss, 1]["actor_weights"]
            for calls in (3, 7):
                for name, weight in found[loss, calls]["actor_weights"].items():
                    assert (weight - once[name]).abs().max() <= 1e-6, (loss, calls, name)
        sums = {calls: sum(one["loss:sum"] for one in ranks[-1][loss, calls]["sums"]) for calls in (1, 3, 7)}
        assert sums[3] == pytest.approx(sums[1], rel=1e-5) and sums[7] == pytest.approx(sums[1], rel=1e-5)
        if not rank:
            loop, total, norm = plain(model_path, loss)
            assert sums[1] == pytest.approx(total, rel=1e-5)
            assert ranks[-1][loss, 1]["metrics"]["client/grad_norm"] == pytest.approx(norm, rel=1e-5)
            results = [one[loss, 1] | {"place": one["place"], "where": one["where"]} for one in ranks]
            expected = loop.weights()
            for name, tensor in whole_weights(results, "actor", model_path).items():
                assert relative(tensor, expected[name]) < 1e-5, (loss, name)
    for found in ranks:
        for name, weight in found["alone"].items():
            assert torch.equal(weight, found["taking turns"][name]), name
            assert not rank or "adapter" not in name or found["alone"][name].abs().max() > 0


def supervised(config) -> dict:
    """Weights after `sft`'s update."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    worker.roles["actor"].update(token_batch())
    return {name: p.detach().clone() for name, p in named_parameters(worker.roles["actor"].trainable.models).items()}


def as_a_client(config) -> dict:
    """Weights after the same by a client: two passes with weights, those of a mean over the tokens that count."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker, batch = RankHost(config), token_batch()
    worker.build("actor")
    actor, counts = worker.roles["actor"], batch["sampled"].unbind()
    num_tokens = int(batch.num_sampled.sum())
    rows = Batch(
        input_ids=batch["input_ids"],
        sampled=ragged([torch.arange(len(row)) > 0 for row in counts]),
        advantages=ragged([row[1:].float() / num_tokens for row in counts]),
    )
    for part in torch.arange(len(rows)).tensor_split(2):
        actor.add_gradients(rows[part], "cross_entropy", {})
    actor.step_client(
        {
            "learning_rate": OPTIMIZER["lr"],
            "eps": OPTIMIZER["eps"],
            "beta1": 0.9,
            "beta2": 0.999,
            "grad_clip_norm": OPTIMIZER["clip_grad"],
        }
    )
    return {name: p.detach().clone() for name, p in named_parameters(actor.trainable.models).items()}


def test_a_clients_cross_entropy_is_sft(model_path) -> None:
    """Weights to 1e-6. Would not catch what both have in common: the model's passes."""
    [expected] = run_ranks(1, supervised, task_config(model_path, SFT, 1, 1))
    [found] = run_ranks(1, as_a_client, run_config(model_path, 1, 1))
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= 1e-6, name
