"""Losses that clients sum over several passes: the step does not depend on how they were cut, and is torch's.

Why: a sum of sums is the sum. The reduction over ranks is linear, so once at the end is as good as after each pass;
only the order of additions changes. Where two models take turns in the same buffers, copies of bytes are exact.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from sweeps import often
from task_cases import PlainLoop, answer_batch, one_update, task_config, token_batch
from tiny_models import random_batch, run_config, save_qwen2
from torch.nn.functional import logsigmoid
from updates import OPTIMIZER, relative, whole_weights

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.config.tasks import DPO, SFT
from megatron_rl.losses.summed import OF_THE_API
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.served_states import state_bytes
from megatron_rl.records import Batch, answer_rows, ragged

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 14
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo")
# A large epsilon makes the step proportional to the gradient, so that new weights compare gradients.
ADAM = {"learning_rate": 0.05, "eps": 1.0, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.0, "grad_clip_norm": 1.0}
LAYOUTS = {"one": (1, 1, 1, 0), "DP2": (2, 1, 1, 0), "TP2xPP2": (4, 2, 2, 0), "adapters, DP2": (2, 1, 1, 4)}


def rows_of_clients() -> torch.Tensor:
    """Rows with weights of both signs, and log-probs of another policy near this one."""
    batch = random_batch(NUM_ROWS)
    batch.add(old_log_probs=batch.per_sampled_token(batch.flat("rollout_log_probs") * 0.3 - 4.0))
    batch.add(kept=batch.per_sampled_token((torch.arange(int(batch.num_sampled.sum())) % 3 > 0).float()))
    return batch.read_by(ACTOR_UPDATE)


def stepped(config) -> dict:
    """Weights of this rank after one step, by loss and calls; then those of two models that take turns."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters
    from megatron_rl.roles.training_states import STATE

    worker = RankHost(config)
    worker.build("actor")
    where, actor, batch = worker.coordinates(), worker.roles["actor"], rows_of_clients()
    sizes = {part: actor.keep_state("start", (part,)) for part in STATE}
    actor.keep_state("start", STATE)

    def add(loss: str, rows: torch.Tensor) -> dict:
        mine = rows.tensor_split(where.dp_size)[where.dp_rank]
        share = batch[mine] if len(mine) else batch[:1].neutral()
        return actor.add_gradients(share, loss, OF_THE_API[loss].defaults)[0]

    def weights() -> dict:
        return {name: p.detach().clone() for name, p in named_parameters(actor.trainable.models).items()}

    of_rank = {"sizes": sizes, "where": where, "place": worker.groups.grid.place(worker.groups.rank, vocab_multiple=64)}
    for loss in LOSSES:
        for calls in (1, 3, 7):
            actor.take_state("start", STATE)
            sums = [add(loss, rows) for rows in torch.arange(NUM_ROWS).tensor_split(calls)]
            metrics = actor.step_client(ADAM)
            of_rank[loss, calls] = {"actor_weights": weights(), "sums": sums, "metrics": metrics}
    of_rank["turns"] = turns_of_two_players(actor, batch, where)
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
        of_rank[name] = weights()
    return of_rank


def turns_of_two_players(actor, batch: Batch, where) -> dict[str, list]:
    """Gradients of a player whose turns are every other token of the rows: of these, with other log-probs for the
    turns between, and of none. The other player's whole state before and after a pass and a step of the first.
    """
    from megatron_rl.roles.training_states import GRADIENTS, STATE

    is_first = (torch.arange(int(batch.num_sampled.sum())) % 2).bool()
    advantages, log_probs = batch.flat("advantages"), batch.flat("old_log_probs")
    turns = {
        "first": (advantages * is_first, log_probs),
        "others drawn otherwise": (advantages * is_first, torch.where(is_first, log_probs, log_probs - 1)),
        "none": (advantages * 0, log_probs),
        "second": (advantages * ~is_first, log_probs),
    }

    def play(name: str) -> list[torch.Tensor]:
        """Begin a model with the pass of a player."""
        rows, flat = batch[:], turns[name]
        rows.add(advantages=rows.per_sampled_token(flat[0]), old_log_probs=rows.per_sampled_token(flat[1]))
        actor.take_state("start", STATE)
        share = rows[torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]]
        actor.add_gradients(share, "importance_sampling", {})
        return present((GRADIENTS,))

    def present(parts: tuple[str, ...]) -> list[torch.Tensor]:
        with TemporaryDirectory() as folder:
            actor.write_state(folder, parts)
            [file] = Path(folder).iterdir()
            return [tensor.clone() for _, tensor in sorted(load_file(file).items())]

    states = {name: play(name) for name in turns}
    actor.keep_state("second", STATE)
    states["before"] = present(STATE)
    play("first")
    actor.step_client(ADAM)
    states["of the first"] = present(STATE)
    actor.take_state("second", STATE)
    return states | {"after": present(STATE)}


def check_turns(turns: dict[str, list]) -> None:
    """Bit for bit: the other's turns give no gradient, and the other's state stays."""
    assert any(one.any() for one in turns["first"]) and not any(one.any() for one in turns["none"][:-1])
    for name, other, is_equal in (
        ("first", "others drawn otherwise", True),
        ("first", "second", False),
        ("before", "after", True),
        ("before", "of the first", False),
    ):
        same = [torch.equal(one, two) for one, two in zip(turns[name], turns[other], strict=True)]
        assert all(same) == is_equal, (name, other)


def clipped(advantages: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    return torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))


def plain(path: str, loss: str) -> tuple[PlainLoop, float, float]:
    """transformers and torch's AdamW; (loop after its step, loss, gradient norm)."""
    loop, batch, total = PlainLoop(path), rows_of_clients(), torch.zeros(())
    columns = (batch[name].unbind() for name in ("input_ids", "old_log_probs", "advantages", "kept"))
    for tokens, given, advantages, kept in zip(*columns, strict=True):
        log_probs = loop.log_probs(tokens, len(advantages))
        ratio = (log_probs - given).exp()
        total = (
            total
            - {
                "cross_entropy": lambda a=advantages, p=log_probs: a * p,
                "importance_sampling": lambda a=advantages, r=ratio: a * r,
                "cispo": lambda a=advantages, r=ratio, p=log_probs: a * r.detach().clamp(0.0, 4.0) * p,
                "gspo": lambda a=advantages, r=ratio, p=log_probs, k=kept: clipped(
                    a, (r.detach().log() * k).sum().div(k.sum().clamp(min=1)).exp() * (p - p.detach()).exp()
                ),
                "ppo": lambda a=advantages, r=ratio: clipped(a, r),
            }[loss]().sum()
        )
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    torch.optim.AdamW(loop.model.parameters(), lr=0.05, betas=(0.8, 0.9), eps=1.0, weight_decay=0.0).step()
    return loop, float(total.detach()), float(norm)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


def check_planned_bytes(config, ranks: list[dict]) -> None:
    """The largest state of a stage's ranks is what `megatron-rl plan --served` counts with, byte for byte."""
    models = RunModels(config)
    num = models.grid.stage_size
    for stage in range(models.grid.pp_size):
        sizes = [of_rank["sizes"] for of_rank in ranks[num * stage : num * (stage + 1)]]
        largest = {part: max(size[part] for size in sizes) for part in sizes[0]}
        assert largest == asdict(state_bytes(models.training.ledger(models.actor_role), stage)), stage


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_do_not_depend_on_calls_and_are_torchs(layout, model_path) -> None:
    """1, 3 and 7 calls to 1e-6; torch's AdamW on transformers to 1e-5; a model alone bit for bit as beside another.

    Would not catch a wrong schedule of weight decay, which is 0 here.
    """
    world_size, tp_size, pp_size, rank = LAYOUTS[layout]
    keys = {"actor_rollout_ref__model__lora__rank": rank, "trainer__n_gpus_per_node": world_size}
    config = run_config(model_path, tp_size, pp_size, **keys)
    ranks = run_ranks(world_size, stepped, config)
    check_planned_bytes(config, ranks)
    for of_rank in ranks:
        check_turns(of_rank["turns"])
    for loss in LOSSES:
        for of_rank in ranks:
            once = of_rank[loss, 1]["actor_weights"]
            for calls in (3, 7):
                for name, weight in of_rank[loss, calls]["actor_weights"].items():
                    assert (weight - once[name]).abs().max() <= 1e-6, (loss, calls, name)
        sums = {calls: sum(one["loss:sum"] for one in ranks[-1][loss, calls]["sums"]) for calls in (1, 3, 7)}
        assert sums[3] == pytest.approx(sums[1], rel=1e-5, abs=1e-4) and sums[7] == pytest.approx(
            sums[1], rel=1e-5, abs=1e-4
        )
        if not rank:
            loop, total, norm = plain(model_path, loss)
            assert sums[1] == pytest.approx(total, rel=1e-5, abs=1e-4)
            assert ranks[-1][loss, 1]["metrics"]["client/grad_norm"] == pytest.approx(norm, rel=1e-5)
            results = [one[loss, 1] | {"place": one["place"], "where": one["where"]} for one in ranks]
            expected = loop.weights()
            for name, tensor in whole_weights(results, "actor", model_path).items():
                assert relative(tensor, expected[name]) < 1e-5, (loss, name)
    for of_rank in ranks:
        for name, weight in of_rank["alone"].items():
            assert torch.equal(weight, of_rank["taking turns"][name]), name
            assert not rank or "adapter" not in name or of_rank["alone"][name].abs().max() > 0


PAIRS, BETA = (2,) * 7, 0.1
AS_A_STAGE = {"learning_rate": OPTIMIZER["lr"], "eps": OPTIMIZER["eps"], "beta1": 0.9, "beta2": 0.999}
AS_A_STAGE |= {"grad_clip_norm": OPTIMIZER["clip_grad"]}


def client_rows(input_ids: list, weights: list) -> Batch:
    """Rows in which each token but the first has a weight."""
    sampled = ragged([torch.arange(len(row)) > 0 for row in input_ids])
    return Batch(input_ids=ragged(input_ids), sampled=sampled, advantages=ragged(weights))


def by_a_client(config, task: str) -> dict:
    """Weights after one step by a client: cross-entropy in two passes, or DPO's gradient with regard to log-probs."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    where, actor = worker.coordinates(), worker.roles["actor"]
    batch = token_batch() if task == SFT else answer_batch(PAIRS, score_token=False)
    mine = batch[torch.arange(len(batch)).tensor_split(where.dp_size)[where.dp_rank]]
    rows = mine if task == SFT else answer_rows(mine)
    tokens, counts = rows["input_ids"].unbind(), [row[1:].float() for row in rows["sampled"].unbind()]
    if task == SFT:
        weights = [row / int(batch.num_sampled.sum()) for row in counts]
    else:
        scored = actor.client_log_probs(client_rows(tokens, counts))
        flat = [torch.zeros(sum(map(len, counts)))]  # before the last stage weights do not matter
        if scored is not None:
            log_probs = scored.flat("old_log_probs").float().requires_grad_()
            parts = zip(log_probs.split([len(row) for row in counts]), counts, strict=True)
            ratios = torch.stack([(row * count).sum() for row, count in parts]) - mine.flat("given")
            (-logsigmoid(BETA * (ratios[::2] - ratios[1::2])).sum() / len(batch)).backward()
            flat = [-log_probs.grad]
        weights = list(flat[0].split([len(row) for row in counts]))
    given = client_rows(tokens, weights)
    for part in torch.arange(len(given)).tensor_split(2):
        actor.add_gradients(given[part], "cross_entropy", {})
    actor.step_client(AS_A_STAGE)
    return {name: p.detach().clone() for name, p in named_parameters(actor.trainable.models).items()}


STAGES = {SFT: (token_batch, (), 1e-6), DPO: (lambda: answer_batch(PAIRS, score_token=False), (len(PAIRS),), 1e-5)}
CUTS = {"one": (1, 1, 1), "TP2": (2, 2, 1), "PP2": (2, 1, 2), "DP2": (2, 1, 1)}


@pytest.mark.parametrize("cut", often(CUTS, ["one"], CUTS))
@pytest.mark.parametrize("task", STAGES)
def test_a_clients_step_is_that_of_a_stage(task, cut, model_path) -> None:
    """Cross-entropy with `sft`'s weights is `sft` to 1e-6; DPO by weights -dL/dp, as the SDK's custom losses send, is
    `dpo` to 1e-5.

    Would not catch what both have in common: the model's passes.
    """
    (make, arguments, most), (world_size, tp_size, pp_size) = STAGES[task], CUTS[cut]
    expected = run_ranks(world_size, one_update, task_config(model_path, task, tp_size, pp_size), make(), *arguments)
    of_ranks = run_ranks(world_size, by_a_client, run_config(model_path, tp_size, pp_size), task)
    for by_client, stage in zip(of_ranks, expected, strict=True):
        for name, weight in stage["actor_weights"].items():
            assert (by_client[name] - weight).abs().max() <= most, name
