"""Rows in which tokens that were not drawn lie between drawn ones, and rows of several conversations: scores, losses
and gradients of both roles beside those of a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from plain_policy import hugging_face_model, reduced_gradients, token_loss
from ranks import run_ranks
from tiny_models import run_config
from updates import whole_weights

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.experience.micro_batches import NO_FIELDS, MicroBatching
from megatron_rl.records import Batch, first_true, ragged, ragged_from_lengths, row_lengths, single_turn

MEGATRON = "actor_rollout_ref__actor__megatron"
CP2 = {f"{MEGATRON}__context_parallel_size": 2}
LAYOUTS = {
    "one": ((1, 1, 1), {}),
    "DP2": ((2, 1, 1), {}),
    "TP2": ((2, 2, 1), {}),
    "PP2": ((2, 1, 2), {}),
    "CP2": ((2, 1, 1), CP2),
}
"""Name -> (ranks, tp, pp), further keys."""
CUTS = {"packed": MicroBatching(3), "padded": MicroBatching(3, remove_padding=False), "packed alone": MicroBatching(1)}
STARTS = {0: [4], 2: [9], 6: [5, 11]}
NUM_ROWS, KL, ENTROPY = 8, 0.1, 0.01


def rows_with_holes(anew: bool = False) -> Batch:
    """Tokens and masks: every other token or so is sampled. Rows 1 and 2 have one prompt, row 4 has no sampled token,
    and in row 5 the middle alone is sampled. anew: rows 0, 2 and 6 are two or three conversations.
    """
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randint(2, 70, (length,), generator=generator) for length in (9, 14, 20, 6, 7, 12, 17, 4)]
    masks = [torch.rand(len(row), generator=generator) < 0.5 for row in rows]
    rows[2][:6] = rows[1][:6]
    for row in (1, 2):
        masks[row][:6], masks[row][6] = False, True
    masks[4][:] = masks[5][:] = False
    masks[5][4:7] = True
    starts = [torch.zeros_like(mask) for mask in masks]
    for row, places in STARTS.items() if anew else ():
        starts[row][places] = True
    masks = [mask & ~start for mask, start in zip(masks, starts, strict=True)]
    for mask in masks:
        mask[0] = False
    columns = {"conversation_starts": ragged(starts)} if anew else {}
    return Batch(input_ids=ragged(rows), sampled=ragged(masks), **columns)


def filled(batch: Batch, own: torch.Tensor) -> Batch:
    """The batch with everything that updates read. own: the model's log-probs of the sampled tokens, flat."""
    generator = torch.Generator().manual_seed(12)

    def near(values: torch.Tensor, scale: float) -> torch.Tensor:
        return batch.per_sampled_token(values + scale * torch.randn(len(values), generator=generator))

    zeros = torch.zeros_like(own)
    names = {"old_log_probs": own, "ref_log_probs": own, "advantages": zeros, "old_values": zeros, "returns": zeros}
    batch.add(**{name: near(values, 0.3 if values is own else 1.0) for name, values in names.items()})
    return batch


def plain_rows(model: torch.nn.Module, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(log-prob, entropy) of the sampled tokens of each row."""
    found = []
    anew = (batch["conversation_starts"] if "conversation_starts" in batch else torch.zeros(len(batch), 0)).unbind()
    for ids, sampled, starts in zip(batch["input_ids"].unbind(), batch["sampled"].unbind(), anew, strict=True):
        ends = [*starts.nonzero().flatten().tolist(), len(ids)]
        parts = [model(ids[None, first:end]).logits[0] for first, end in zip([0, *ends], ends, strict=False)]
        log_probs = torch.cat(parts).log_softmax(-1)
        places = [place for place in range(1, len(ids)) if sampled[place]]
        drawn = [log_probs[place - 1, ids[place]] for place in places]
        entropies = [-(log_probs[place - 1].exp() * log_probs[place - 1]).sum() for place in places]
        found.append(tuple(torch.stack(each) if each else torch.zeros(0) for each in (drawn, entropies)))
    return found


def batch_of(path: str, make: Callable[[], Batch]) -> Batch:
    rows = make()
    with torch.no_grad():
        own = torch.cat([log_probs for log_probs, _ in plain_rows(hugging_face_model(path), rows)])
    return filled(rows, own)


def plain_gradients(
    path: str, make: Callable[[], Batch]
) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
    """(losses, gradients by name, log-probs) of PPO's clipped loss, a KL and the entropy, as means over tokens."""
    model, batch = hugging_face_model(path), batch_of(path, make)
    columns = (batch[name].unbind() for name in ("old_log_probs", "ref_log_probs", "advantages"))
    policy, kls, entropies, scores = [], [], [], []
    for (log_probs, entropy), old, ref, advantages in zip(plain_rows(model, batch), *columns, strict=True):
        scores.append(log_probs.detach())
        for t in range(len(log_probs)):
            policy.append(token_loss((log_probs[t] - old[t]).exp(), float(advantages[t])))
            kls.append((ref[t] - log_probs[t]).exp() - 1 - (ref[t] - log_probs[t]))
            entropies.append(entropy[t])
    losses = {
        "actor/pg_loss": torch.stack(policy).mean(),
        "actor/kl_loss": torch.stack(kls).mean(),
        "actor/entropy": torch.stack(entropies).mean(),
    }
    total = losses["actor/pg_loss"] + KL * losses["actor/kl_loss"] - ENTROPY * losses["actor/entropy"]
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: float(loss.detach()) for name, loss in losses.items()}, gradients, torch.cat(scores)


def as_suffix(batch: Batch) -> Batch:
    """Return rows that are sampled from their first sampled token to the end; `kept` is 0 in the former holes."""
    mask, lengths = batch.flat("sampled"), row_lengths(batch["sampled"])
    suffix = single_turn(batch["input_ids"], lengths - first_true(batch["sampled"]))
    if "conversation_starts" in batch:
        is_drawn = suffix.flat("sampled") & ~batch.flat("conversation_starts")
        suffix.add(sampled=ragged_from_lengths(is_drawn, lengths), conversation_starts=batch["conversation_starts"])
    in_suffix = suffix.flat("sampled")

    def widened(values: torch.Tensor) -> torch.Tensor:
        whole = torch.full((len(mask),), 7.0)  # nothing may read it
        whole[mask] = values
        return suffix.per_sampled_token(whole[in_suffix])

    names = [name for name in batch.names if name not in NO_FIELDS]
    suffix.add(**{name: widened(batch.flat(name)) for name in names}, routed_experts=batch.get("routed_experts"))
    suffix.add(kept=suffix.per_sampled_token(mask[in_suffix].float()))
    return suffix


def of_holes(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """values [N] of the sampled tokens of `as_suffix(batch)` -> of those of the batch."""
    return values[batch.flat("sampled")[as_suffix(batch).flat("sampled")]]


def gradients_of(role, batch: Batch, group) -> dict:
    metrics = role.compute_gradients(batch)
    return {"metrics": metrics, "gradients": {k: v.clone() for k, v in reduced_gradients(role, group).items()}}


def all_cuts(make: Callable[[], Batch], cuts: dict[str, MicroBatching], config) -> dict[str, dict]:
    """What a rank has of its data-parallel rank's rows: scores, metrics and gradients of both roles, for each cut."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("critic")
    actor, critic, where = worker.roles["actor"], worker.roles["critic"], worker.coordinates()
    settings = actor.config
    settings.use_kl_loss, settings.kl_loss_coef, settings.entropy_coeff = True, KL, ENTROPY
    whole = batch_of(config.actor_rollout_ref.model.path, make)
    mine = whole[torch.arange(len(whole)).tensor_split(where.dp_size)[where.dp_rank]]
    # Ranks of a context-parallel group have parts of the optimizer, too.
    group = worker.groups.dp_group if worker.groups.grid.cp_size == 1 else None
    if worker.groups.grid.most_sharing is not None:  # all replicas of a stage, of which passes choose some
        group = worker.groups.cp_group
    found = {}
    for name, cut in cuts.items():
        actor.cut = actor.score_cut = critic.cut = critic.score_cut = cut
        scores, values = actor.log_probs(mine.read_by(SCORING)), critic.values(mine.read_by(SCORING))
        values_of_all = critic.values(as_suffix(mine).read_by(SCORING))
        found[name] = {
            "where": where,
            "log_probs": None if scores is None else scores.flat("old_log_probs"),
            "values": None if values is None else values.flat("old_values"),
            "values of all": None if values_of_all is None else of_holes(values_of_all.flat("old_values"), mine),
            "actor": gradients_of(actor, mine.read_by(ACTOR_UPDATE), group),
            "critic": gradients_of(critic, mine.read_by(CRITIC_UPDATE), group),
            "critic of all": gradients_of(critic, as_suffix(mine).read_by(CRITIC_UPDATE), group),
            "place": worker.groups.grid.place(worker.groups.rank, vocab_multiple=64),
        }
    return found


def whole(ranks: list[dict], name: str, role: str, path: str) -> dict[str, torch.Tensor]:
    held = [{f"{role}_weights": rank[name]["gradients"], "place": rank["place"]} for rank in ranks]
    return whole_weights(held, role, path)


def assert_close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within 1e-5 of the largest gradient, and of each one's own largest where that is not rounding."""
    assert ours.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((ours[name] - gradient).abs().max()) < 1e-5 * largest, name


def check_layout(
    size: tuple[int, int, int],
    keys: dict,
    path: str,
    plain: tuple,
    cuts: dict[str, MicroBatching],
    run: Callable[..., dict[str, dict]] = all_cuts,
) -> None:
    """Scores, losses and gradients of both roles on a layout, for each cut, beside the plain loop's."""
    world_size, tp_size, pp_size = size
    make, losses, gradients, log_probs = plain
    ranks = run_ranks(world_size, partial(run, make, cuts), run_config(path, tp_size, pp_size, **keys))
    for cut in cuts:
        ours = [rank[cut] for rank in ranks]
        collectors = sorted((r for r in ours if r["where"].dp_collector), key=lambda r: r["where"].dp_rank)
        torch.testing.assert_close(torch.cat([r["log_probs"] for r in collectors]), log_probs, atol=1e-5, rtol=1e-5)
        metrics = collectors[0]["actor"]["metrics"]
        assert {name: metrics[name] for name in losses} == pytest.approx(losses, rel=1e-5, abs=1e-6), cut
        assert_close(whole(ours, "actor", "actor", path), gradients)
        for rank in collectors:
            torch.testing.assert_close(rank["values"], rank["values of all"], atol=1e-5, rtol=1e-5)
            assert rank["critic"]["metrics"] == pytest.approx(rank["critic of all"]["metrics"], rel=1e-5, abs=1e-6)
        critic = (whole(ours, name, "critic", path) for name in ("critic", "critic of all"))
        assert_close(*critic)
