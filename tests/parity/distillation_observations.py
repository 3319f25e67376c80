"""Every loss of distillation, with a teacher of other sizes, against a loop through transformers' models.

Why no number can depend on the layout, but for rounding:

- Sampled tokens and the top-k: a token's log-prob is its logit minus the logarithm of a sum that is all-reduced over
  TP; the likeliest tokens of all ranks are the likeliest of each rank's likeliest.
- Whole distributions: a divergence is a sum over the vocabulary of what one rank knows of both models once both sums
  are all-reduced, because the teacher's rows are cut as the student's.
- PP, DP and CP change which rank computes a token, and nothing of its loss.

Not exercised: experts; teachers in another pool, which tests/e2e/test_distillation_runs.py has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from plain_policy import hugging_face_model, reduced_gradients, token_loss
from ranks import run_ranks
from rows_with_holes import CUTS, NUM_ROWS, assert_close, rows_with_holes
from scenarios import Runs, Scenario
from tiny_models import run_config, save_llama, save_qwen2
from updates import whole_weights

from megatron_rl.columns import ACTOR_UPDATE, SCORING
from megatron_rl.config.algorithms import teaching
from megatron_rl.config.distillation_keys import DistillationLossConfig
from megatron_rl.experience.micro_batches import MicroBatching
from megatron_rl.records import Batch
from megatron_rl.scoring.teachers import joined_rows

TEMPERATURE, TASK, WEIGHT, TOP = 0.7, 0.5, 2.0, 5
MODES = {
    "k1": {"use_policy_gradient": True},
    "k3": {},
    "k2": {},
    "forward_kl_topk": {"topk": TOP},
    "forward_kl_topk, cut": {"topk": TOP, "topk_tail": False},
    "reverse_kl_topk": {"topk": TOP, "log_prob_min_clamp": None},
    "forward_kl": {},
    "reverse_kl": {"temperature": 1.5},
    "mixed_kl": {"mixed_kl_weight": 0.3},
    "jsd": {"beta": 0.2},
}


def keys_of(mode: str) -> dict:
    return {
        "loss_mode": mode.split(",")[0],
        "use_policy_gradient": False,
        "task_loss_coef": TASK,
        "distillation_loss_coef": WEIGHT,
        **MODES[mode],
    }


def config_of(mode: str, paths: tuple[str, ...], tp_size: int, pp_size: int, **keys):
    """paths: of the student, then of the teachers."""
    student, *teachers = paths
    return run_config(
        student,
        tp_size,
        pp_size,
        actor_rollout_ref__rollout__temperature=TEMPERATURE,
        distillation__enabled=True,
        distillation__teacher_models={
            f"teacher_{number}": {"model_path": path, "key": str(number)} for number, path in enumerate(teachers)
        },
        **{f"distillation__distillation_loss__{key}": value for key, value in keys_of(mode).items()},
        **keys,
    )


def batch_with_advantages(log_probs: torch.Tensor) -> Batch:
    """Rows with holes, advantages, and old log-probs near the student's."""
    batch = rows_with_holes()
    generator = torch.Generator().manual_seed(3)
    noise = 0.3 * torch.randn(2, len(log_probs), generator=generator)
    batch.add(old_log_probs=batch.per_sampled_token(log_probs + noise[0]))
    batch.add(advantages=batch.per_sampled_token(3 * noise[1]))
    return batch


def distributions(model: torch.nn.Module, batch: Batch, temperature: float) -> torch.Tensor:
    """Log-probs [sampled tokens, vocabulary] where each was sampled."""
    found = []
    for ids, sampled in zip(batch["input_ids"].unbind(), batch["sampled"].unbind(), strict=True):
        log_probs = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
        found.append(log_probs[torch.tensor([place - 1 for place in range(1, len(ids)) if sampled[place]], dtype=int)])
    return torch.cat(found)


def token_losses(mode: str, student: torch.Tensor, teacher: torch.Tensor, drawn: torch.Tensor, scored: torch.Tensor):
    """Loss of each token from whole distributions. scored: the student's log-probs when its top-k was taken."""
    keys = DistillationLossConfig(**keys_of(mode))
    log_p, log_q = (values.gather(-1, drawn[:, None])[:, 0] for values in (student, teacher))
    if mode.startswith(("k1", "k2", "k3")):
        estimates = {"k1": log_p - log_q, "k2": (log_p - log_q) ** 2 / 2, "k3": (log_q - log_p).expm1() + log_p - log_q}
        return estimates[mode].clamp(-10, 10)
    if "topk" in mode:
        is_forward = mode.startswith("forward")
        ids = (teacher if is_forward else scored).topk(TOP).indices
        pair = [values.gather(-1, ids) for values in (student, teacher)]
        if keys.topk_tail:
            pair = [torch.cat([each, torch.log1p(-each.exp().sum(-1, keepdim=True))], -1) for each in pair]
        if keys.log_prob_min_clamp is not None:
            pair = [each.clamp(min=keys.log_prob_min_clamp) for each in pair]
        p, q = pair
        return ((q.exp() * (q - p)) if is_forward else (p.exp() * (p - q))).sum(-1)
    forward, reverse = (teacher.exp() * (teacher - student)).sum(-1), (student.exp() * (student - teacher)).sum(-1)
    if mode == "jsd":
        mixture = (keys.beta * teacher.exp() + (1 - keys.beta) * student.exp()).log()
        parts = [(each.exp() * (each - mixture)).sum(-1) for each in (teacher, student)]
        return keys.beta * parts[0] + (1 - keys.beta) * parts[1]
    share = {"forward_kl": 0.0, "reverse_kl": 1.0, "mixed_kl": keys.mixed_kl_weight}[mode]
    return (1 - share) * forward + share * reverse


def plain(mode: str, paths: tuple[str, ...], teacher_of_row=lambda row: 0) -> tuple[dict, dict, torch.Tensor]:
    """(losses, gradients by name, the student's log-probs) of a loop."""
    student, teachers = hugging_face_model(paths[0]), [hugging_face_model(path) for path in paths[1:]]
    temperature = MODES[mode].get("temperature", TEMPERATURE)
    rows = rows_with_holes()
    drawn = rows.sampled_ids.values()
    with torch.no_grad():
        scored = distributions(student, rows, TEMPERATURE)
        own = scored.gather(-1, drawn[:, None])[:, 0]
        all_teachers = [distributions(teacher, rows, temperature) for teacher in teachers]
    numbers = torch.repeat_interleave(torch.tensor([teacher_of_row(row) for row in range(NUM_ROWS)]), rows.num_sampled)
    teacher = torch.stack(all_teachers)[numbers, torch.arange(len(numbers))]
    batch = batch_with_advantages(own)
    old, advantages = batch.flat("old_log_probs"), batch.flat("advantages")
    log_probs = distributions(student, rows, TEMPERATURE).gather(-1, drawn[:, None])[:, 0]
    whole = distributions(student, rows, temperature)
    if MODES[mode].get("use_policy_gradient"):
        log_q = teacher.gather(-1, drawn[:, None])[:, 0]
        divergence = (old - log_q).clamp(-10, 10)
        advantages = TASK * advantages - WEIGHT * divergence
    else:
        divergence = token_losses(mode, whole, teacher, drawn, scored)
    ratio = (log_probs - old).exp()
    policy = torch.stack([token_loss(ratio[t], float(advantages[t])) for t in range(len(ratio))]).mean()
    total = policy
    if not MODES[mode].get("use_policy_gradient"):
        policy = TASK * policy
        total = policy + WEIGHT * divergence.mean()
    total.backward()
    gradients = {name: parameter.grad for name, parameter in student.named_parameters()}
    losses = {"actor/pg_loss": float(policy.detach()), "distillation/loss": float(divergence.detach().mean())}
    return losses, gradients, own


BY_TOKENS = {"by tokens": MicroBatching(1, max_tokens=12)}
EVERY_CUT = CUTS | {"tries": MicroBatching(12, as_tree=True)}


def taught(own: torch.Tensor, config) -> dict[str, dict]:
    """What a rank has of its data-parallel rank's rows for each cut: metrics and gradients of the actor."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("teacher_0")
    actor, teacher, where = worker.roles["actor"], worker.roles["teacher_0"], worker.coordinates()
    mine = batch_with_advantages(own)[torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]]
    group = worker.groups.dp_group if worker.groups.grid.cp_size == 1 else None
    found = {}
    for name, cut in (BY_TOKENS if worker.groups.grid.most_sharing else EVERY_CUT).items():
        actor.cut = actor.score_cut = teacher.cut = cut
        batch = mine.without()
        asked = batch.read_by(SCORING)
        if actor.num_top:
            scores = actor.log_probs(asked)
            asked.add(scores.select("student_top_ids") if scores is not None else None)
            batch.add(scores.select("student_top_ids") if scores is not None else None)
        if "student_top_ids" in asked or not actor.num_top or not worker.groups.is_last_stage:
            if actor.num_top and "student_top_ids" not in asked:  # a stage before the last reads none of them
                asked.add(student_top_ids=asked.per_sampled_token(torch.zeros(int(asked.num_sampled.sum()), TOP).int()))
            answer = getattr(teacher, teaching(config).method)(asked)
            batch.add(answer)
        batch.add(teachers=batch.per_sampled_token(torch.zeros(int(batch.num_sampled.sum()), dtype=torch.int64)))
        metrics = actor.compute_gradients(batch.read_by(ACTOR_UPDATE))
        found[name] = {
            "where": where,
            "metrics": metrics,
            "actor_weights": {name: grad.clone() for name, grad in reduced_gradients(actor, group).items()},
            "place": worker.groups.grid.place(worker.groups.rank, vocab_multiple=64),
        }
    return found


def taught_by_two(own: torch.Tensor, config) -> dict:
    """As `taught`, with odd rows taught by the second teacher; one process."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    batch, answers, rows = batch_with_advantages(own), [], []
    for number in range(2):
        worker.build(f"teacher_{number}")
        rows.append(torch.arange(number, NUM_ROWS, 2))
        answers.append(worker.roles[f"teacher_{number}"].hidden_states(batch.read_by(SCORING)[rows[-1]]))
    numbers = torch.repeat_interleave(torch.arange(NUM_ROWS) % 2, batch.num_sampled)
    sizes = [int(batch.num_sampled[mine].sum()) * size * 4 for mine, size in zip(rows, (64, 192), strict=True)]
    assert [answer.flat("teacher_hidden").nbytes for answer in answers] == sizes  # hidden size x dtype a token
    batch.add(teachers=batch.per_sampled_token(numbers), **joined_rows(answers, rows, batch.num_sampled))
    actor = worker.roles["actor"]
    metrics = actor.compute_gradients(batch.read_by(ACTOR_UPDATE))
    gradients = {name: grad.clone() for name, grad in reduced_gradients(actor, worker.groups.dp_group).items()}
    place = worker.groups.grid.place(worker.groups.rank, vocab_multiple=64)
    where = worker.coordinates()
    return {"where": where, "metrics": metrics, "actor_weights": gradients, "place": place}


TEACHER = Scenario(save_llama, "teacher", changes={"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2})
"""Smaller than the student, with a head of its own."""
WIDE = Scenario(save_qwen2, "teacher", changes={"hidden_size": 192, "num_attention_heads": 6})


def assert_as_plain(ranks: list[dict], losses: dict[str, float], gradients: dict, path: str) -> None:
    """Losses and gradients are the loop's within 1e-5."""
    collector = next(rank for rank in ranks if rank["where"].dp_collector)
    found = {name: collector["metrics"][name] for name in losses}
    assert found == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert_close(whole_weights(ranks, "actor", path), gradients)


@dataclass(frozen=True)
class Distilled:
    """Losses and gradients of rows with holes, packed with shared prompts, padded, alone and as tries, are a plain
    loop's; the policy loss joins.

    Would not catch a teacher that reads other rows than the student.
    """

    mode: str

    @property
    def name(self) -> str:
        return f"distilled by {self.mode}"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        paths = (runs.path(scenario), runs.path(TEACHER))
        expected = runs.once(("distilled", self.mode, paths), partial(plain, self.mode, paths))
        losses, gradients, own = expected
        num_ranks, *sizes = scenario.ranks
        ranks = run_ranks(num_ranks, taught, own, config_of(self.mode, paths, *sizes, **scenario.keys))
        for cut in ranks[0]:
            assert_as_plain([rank[cut] for rank in ranks], losses, gradients, paths[0])


@dataclass(frozen=True)
class DistilledByTwo:
    """Whole distributions, each row's of its own teacher, of other widths. Would not catch rows that are asked of the
    wrong one.
    """

    name: str = "distilled by two teachers"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        paths = tuple(runs.path(each) for each in (scenario, TEACHER, WIDE))
        losses, gradients, own = plain("forward_kl", paths, lambda row: row % 2)
        ranks = run_ranks(1, taught_by_two, own, config_of("forward_kl", paths, 1, 1))
        assert_as_plain(ranks, losses, gradients, paths[0])
