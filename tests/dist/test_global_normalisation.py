"""The gradient of one mini-batch is the same however it is cut: packed or padded, by rows or tokens, over all ranks.

Why: each way to aggregate is a sum of terms of tokens or answers with weights that are known before the first pass, as
lengths, masks and the mini-batch's counts are; a pass adds its own terms. Packed rows attend to themselves alone, and
padding weighs nothing, so a row's terms do not depend on its neighbours.

Not exercised: metrics that are medians or extremes; layouts of several axes, which `tests/parity` has.
"""

from __future__ import annotations

import pytest
import torch
from plain_policy import hugging_face_model, reduced_gradients, row_log_probs, token_loss
from ranks import run_ranks
from sweeps import often
from tiny_models import random_batch, run_config, save_qwen2
from updates import relative, whole_weights

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.schema import ActorConfig
from megatron_rl.experience.micro_batches import MicroBatching
from megatron_rl.parallel.balance import SequenceWork
from megatron_rl.records import Batch, ragged_from_lengths

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LAYOUTS = {"one": (1, 1, 1), "DP2": (2, 1, 1), "TP2": (2, 2, 1), "PP2": (2, 1, 2)}
OFTEN = ("one",)
"""What `make test` goes through; ranks that have other rows, or see no loss, are in `tests/parity`.
"""
NUM_ROWS = 7
CUTS = {
    "padded, 1": MicroBatching(1, remove_padding=False),
    "padded, 2": MicroBatching(2, remove_padding=False),
    "padded, all": MicroBatching(NUM_ROWS, remove_padding=False),
    "packed, 2": MicroBatching(2),
    "packed, all": MicroBatching(NUM_ROWS),
    "dynamic": MicroBatching(1, max_tokens=24, work=SequenceWork(10.0)),
    "dynamic, padded": MicroBatching(1, max_tokens=24, remove_padding=False, work=SequenceWork(10.0)),
}
WHOLE = "padded, all"
MODES = {
    "vanilla": "token-mean",
    "gspo": "seq-mean-token-mean",
    "geo_mean": "token-sum",
    "bypass_mode": "token-mean",
    "vespo": "seq-mean-token-sum",
}
FEW = (WHOLE, "packed, 2", "dynamic")
CUTS_OF = {"vanilla": tuple(CUTS), "gspo": tuple(CUTS), "geo_mean": FEW, "bypass_mode": FEW, "vespo": FEW}
DECIDED = {"bypass_mode": "rollout_corr/rollout_rs_masked_fraction", "vespo": "actor/off_policy_masked_fraction"}
MASK_THRESHOLD = 0.05
"""Of vespo's sequence mask."""
BYPASS = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold="0.5_1.5",
    rollout_rs="token_k2,seq_sum_k3",
    rollout_rs_threshold="0.12,0.45",
    bypass_mode=True,
    loss_type="reinforce",
)


def actor_batch(path: str) -> Batch:
    """Seven rows with everything a policy loss can read; some tokens, and all of row 5, are left out."""
    experience = random_batch(NUM_ROWS)
    generator = torch.Generator().manual_seed(1)

    def field(values: torch.Tensor) -> torch.Tensor:
        return ragged_from_lengths(values, experience.num_sampled)

    num_tokens = int(experience.num_sampled.sum())
    # Near the model's own, so that ratios fall on both sides of the clip.
    model, own = hugging_face_model(path), []
    for ids, length in zip(experience["input_ids"].unbind(), experience.num_sampled.tolist(), strict=True):
        with torch.no_grad():
            own.append(row_log_probs(model, ids, length).gather(-1, ids[-length:, None])[:, 0])
    own = torch.cat(own)
    experience.add(old_log_probs=field(own + 0.3 * torch.randn(num_tokens, generator=generator)))
    experience.add(ref_log_probs=field(own + 0.3 * torch.randn(num_tokens, generator=generator)))
    experience.add(rollout_weights=field(0.5 + torch.rand(num_tokens, generator=generator)))
    kept = (torch.rand(num_tokens, generator=generator) > 0.2).float()
    rows = torch.repeat_interleave(experience.num_sampled)
    experience.add(kept=field(torch.where(rows == 5, 0.0, kept)))
    experience.add(trained=field((torch.rand(num_tokens, generator=generator) > 0.3).float()))
    return experience.read_by(ACTOR_UPDATE)


def configure(actor, loss_mode: str, cut: MicroBatching) -> None:
    from megatron_rl.losses.policy import load_policy_loss

    config: ActorConfig = actor.config
    config.policy_loss.loss_mode, config.loss_agg_mode = loss_mode, MODES[loss_mode]
    config.use_kl_loss, config.kl_loss_coef, config.entropy_coeff = True, 0.1, 0.01
    config.policy_loss.off_policy_mask_threshold = MASK_THRESHOLD if loss_mode == "vespo" else None
    config.kl_loss_unbiased = loss_mode == "vespo"
    actor.cut = cut
    actor.correction = BYPASS if loss_mode == "bypass_mode" else RolloutCorrectionConfig()
    actor.policy_loss = load_policy_loss(config, actor.correction)


def all_gradients(config) -> dict[tuple[str, str], dict]:
    """(loss mode, cut) -> metrics and gradients of the same mini-batch, as one rank has them."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    where = worker.coordinates()
    mine = actor_batch(config.actor_rollout_ref.model.path)[
        torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]
    ]
    found, whole = {}, mine
    for loss_mode in MODES:
        mine = whole if loss_mode == "vespo" else whole.without("trained")
        for name in CUTS_OF[loss_mode]:
            configure(worker.roles["actor"], loss_mode, CUTS[name])
            found[loss_mode, name] = {
                "metrics": worker.roles["actor"].compute_gradients(mine),
                "actor_weights": reduced_gradients(worker.roles["actor"], worker.groups.dp_group),
                "place": worker.groups.grid.place(worker.groups.rank, vocab_multiple=64),
            }
    return found


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_path) -> dict[tuple[str, str], dict]:
    return run_ranks(1, all_gradients, run_config(model_path, 1, 1))[0]


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN))
def test_gradient_does_not_depend_on_the_cut(layout, model_path, reference) -> None:
    """Seven cuts, five losses: within 1e-5 of one pass in one process. Would not catch a wrong loss shared by all."""
    world_size, tp_size, pp_size = LAYOUTS[layout]
    ranks = [reference]
    if world_size > 1:
        ranks = run_ranks(world_size, all_gradients, run_config(model_path, tp_size, pp_size))
    for loss_mode in MODES:
        expected = reference[loss_mode, WHOLE]
        expected_gradients = whole_weights([expected], "actor", model_path)
        decided = DECIDED.get(loss_mode, "actor/pg_clipfrac")
        assert 0 < expected["metrics"][decided] < 0.9 and expected["metrics"]["actor/kl_loss"] > 0
        for cut in CUTS_OF[loss_mode]:
            ours = [rank[loss_mode, cut] for rank in ranks]
            metrics = next(rank["metrics"] for rank in reversed(ours) if rank["metrics"])
            assert metrics == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-7), (loss_mode, cut)
            gradients = whole_weights(ours, "actor", model_path)
            largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
            for name, gradient in expected_gradients.items():
                # Some gradients are zero but for rounding, such as those of key biases.
                is_rounding = gradient.abs().max() < 1e-6 * largest
                assert is_rounding or relative(gradients[name], gradient) < 1e-5, (loss_mode, cut, name)


def geo_mean_loss(log_probs, old, advantages, weights, kept) -> torch.Tensor:
    """GMPO's term of one answer, with the geometric mean of its weights; ranges of 0.2."""
    rows = [t for t in range(len(kept)) if kept[t]]
    logs = []
    for t in rows:
        log_ratio, sign = log_probs[t] - old[t], torch.sign(advantages[t])
        logs.append(sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.2, 0.2)))
    ratio = torch.stack(logs).mean().exp() * weights[rows].log().mean().exp()
    return -advantages[rows].mean() * ratio


def vespo_losses(log_probs, old, advantages, weights, kept) -> list[torch.Tensor]:
    """VESPO's term of each token of one answer, with its rollout weight; 0 where the sequence mask leaves it out."""
    log_ratio = (log_probs - old).detach()
    log_w, losses = log_ratio[kept > 0].sum(), []
    for t in range(len(kept)):
        k, rate = (2.0, 3.0) if advantages[t] >= 0 else (3.0, 2.0)
        weight = log_w.exp() ** k * (rate * (1 - log_w.exp())).exp()
        is_masked = advantages[t] < 0 and -log_ratio[kept > 0].mean() > MASK_THRESHOLD
        losses.append(torch.zeros(()) if is_masked else -weight * advantages[t] * log_probs[t] * weights[t])
    return losses


def bypass_losses(log_probs, old, advantages) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE's term of each token of one answer, and which of them BYPASS accepts, by the policy's own log-probs."""
    log_ratio = (log_probs - old).detach()
    ratio, k2, k3 = log_ratio.exp(), log_ratio.square() / 2, log_ratio.exp() - 1 - log_ratio
    accepted = (k2 <= 0.12) & (k3.sum() <= 0.45)
    weights = torch.where((ratio >= 0.5) & (ratio <= 1.5), ratio, 0.0)
    return -advantages * log_probs * weights, accepted


def hugging_face_gradients(path: str, loss_mode: str) -> dict[str, torch.Tensor]:
    """The whole loss once more, row by row and token by token, on transformers' own model."""
    model, batch = hugging_face_model(path), actor_batch(path)
    names = ("old_log_probs", "ref_log_probs", "advantages", "rollout_weights", "kept", "trained")
    fields = zip(*(batch[name].unbind() for name in names), strict=True)
    answers: list[list[torch.Tensor]] = []
    whole_answers: list[torch.Tensor] = []
    for ids, length, row in zip(batch["input_ids"].unbind(), batch.num_sampled.tolist(), fields, strict=True):
        all_log_probs = row_log_probs(model, ids, length)
        log_probs = all_log_probs.gather(-1, ids[-length:, None])[:, 0]
        entropies = -(all_log_probs.exp() * all_log_probs).sum(-1)
        old, ref, advantages, weights, kept, trained = row
        ratios = (log_probs - old).exp()
        if loss_mode == "gspo" and kept.any():
            mean = (log_probs - old)[kept > 0].mean()
            ratios = mean.exp().detach() * (log_probs - log_probs.detach()).exp()
        losses = [token_loss(ratios[t], float(advantages[t])) * weights[t] for t in range(length)]
        accepted = torch.ones(length)
        if loss_mode == "bypass_mode":
            losses, accepted = bypass_losses(log_probs, old, advantages)
        if loss_mode == "vespo":
            losses, accepted = vespo_losses(log_probs, old, advantages, weights, kept), trained
        if loss_mode == "geo_mean":
            losses = torch.zeros(length)
            whole_answers += [geo_mean_loss(log_probs, old, advantages, weights, kept)] if kept.any() else []
        terms = []
        for t in range(length):
            if kept[t]:
                kl = (ref[t] - log_probs[t]).exp() - 1 - (ref[t] - log_probs[t])
                kl = kl * ratios[t] if loss_mode == "vespo" else kl
                # What is rejected in the loss itself is no part of it and still counts in what it is divided by.
                terms.append(losses[t] * accepted[t] + 0.1 * kl - 0.01 * entropies[t])
        answers += [terms] if terms else []
    everything = torch.stack([term for terms in answers for term in terms])
    total = {
        "token-mean": everything.mean(),
        "token-sum": everything.sum(),
        "seq-mean-token-sum": torch.stack([torch.stack(terms).sum() for terms in answers]).mean(),
        "seq-mean-token-mean": torch.stack([torch.stack(terms).mean() for terms in answers]).mean(),
    }[MODES[loss_mode]]
    if whole_answers:
        total = total + torch.stack(whole_answers).mean()
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss_mode", MODES)
def test_gradient_is_that_of_a_loop_on_transformers(loss_mode, model_path, reference) -> None:
    """Loss, masks, weights, KL, entropy and aggregation at once, within 2e-4. Would not catch a term that is tiny."""
    expected = hugging_face_gradients(model_path, loss_mode)
    ours = whole_weights([reference[loss_mode, "dynamic"]], "actor", model_path)
    assert ours.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    compared = [name for name, gradient in expected.items() if gradient.abs().max() > 1e-4 * largest]
    assert len(compared) > 30
    for name in compared:
        assert relative(ours[name], expected[name]) < 2e-4, name


def test_the_two_losses_differ(model_path, reference) -> None:
    """Guards the test above against comparing one loss with itself. Would not catch a mode that is ignored in part."""
    token, answer = (whole_weights([reference[mode, WHOLE]], "actor", model_path) for mode in ("vanilla", "gspo"))
    assert any(relative(token[name], answer[name]) > 0.01 for name in token)
