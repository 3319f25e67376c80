"""Every metric of a run: its name, its unit, and what it measures. docs/reference/metrics.md is made from this table.

In a name `{x}` stands for one part between slashes, as `{phase}` for a phase; `{source...}` for one or more parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    """The name in `metrics.jsonl`, with `{x}` where parts differ, or `{a|b}` for one of several texts."""
    unit: str
    text: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The name as a regular expression."""
        parts = re.split(r"(\{[^}]*\})", self.name)
        return re.compile("".join(_part(part) if part.startswith("{") else re.escape(part) for part in parts))


def _part(text: str) -> str:
    inner = text[1:-1]
    if "|" in inner:
        return f"(?:{'|'.join(re.escape(choice) for choice in inner.split('|'))})"
    return ".+" if inner.endswith("...") else "[^/]+"


STATISTICS = "{mean|max|min}"
SHARE, LOSS, LOG, SCORE, TOKENS, COUNT, SECONDS = "share", "loss", "nats", "score", "tokens", "count", "s"

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Rewards and advantages": (
        Metric(f"critic/score/{STATISTICS}", SCORE, "Task reward of each response, before any penalty."),
        Metric(f"critic/rewards/{STATISTICS}", SCORE, "Sum of a response's token rewards: score minus KL penalty."),
        Metric(f"critic/advantages/{STATISTICS}", SCORE, "Advantage of each sampled token."),
        Metric(f"critic/returns/{STATISTICS}", SCORE, "Return of each sampled token."),
        Metric(f"critic/values/{STATISTICS}", SCORE, "The critic's value of each sampled token, before the update."),
        Metric("critic/vf_explained_var", SHARE, "1 - Var(returns - values) / Var(returns): 1 is a perfect critic."),
        Metric("actor/reward_kl_penalty", LOG, "KL to the reference that was taken from the rewards, per token."),
        Metric("actor/reward_kl_penalty_coeff", "factor", "Its coefficient, which an adaptive controller changes."),
        Metric("reward/{name}/mean", SCORE, "Mean of each value that the reward function or a reward model returned."),
        Metric("reward/{name}/{running_mean|running_std}", SCORE, "Statistics that normalise a reward model's scores."),
        Metric("reward/failed_ratio", SHARE, "Responses that the reward function could not score."),
        Metric("reward/{raised|timed_out|crashed|no_score}", COUNT, "Those responses, by what went wrong."),
        Metric("train/num_gen_batches", "batches", "Dynamic sampling: batches generated for this step."),
        Metric("train/differing_groups", SHARE, "Dynamic sampling: groups of the step with different scores, or kept."),
        Metric("train/dropped_tokens", SHARE, "Dynamic sampling: sampled tokens of groups that were not trained."),
        Metric("filter_groups/kept_ratio", SHARE, "Generated groups that `algorithm.filter_groups.path` keeps."),
        Metric("filter_groups/{raised|timed_out|crashed|no_verdict}", COUNT, "Its verdicts that failed."),
    ),
    "Policy": (
        Metric("actor/loss", LOSS, "Total loss: policy loss, KL loss, entropy bonus, router and other losses."),
        Metric("actor/pg_loss", LOSS, "Policy loss alone."),
        Metric("actor/entropy", LOG, "Entropy of the policy per sampled token."),
        Metric("actor/kl_loss", LOG, "KL to the reference in the loss (`actor.use_kl_loss`)."),
        Metric("actor/kl_coef", "factor", "Its coefficient."),
        Metric("actor/ppo_kl", LOG, "Mean of log(p_old / p): how far the updates of this step have moved the policy."),
        Metric("actor/pg_clipfrac", SHARE, "Tokens whose gradient the clip of the ratio removed."),
        Metric("actor/pg_clipfrac_lower", SHARE, "Tokens with a negative advantage that `clip_ratio_c` bounded."),
        Metric("actor/low_entropy_masked_fraction", SHARE, "Tokens left out by `top_entropy_quantile`."),
        Metric("actor/off_policy_masked_fraction", SHARE, "Tokens left out by `off_policy_mask_threshold`."),
        Metric("actor/vespo_weight", "factor", "Mean weight of the vespo loss."),
        Metric("actor/ptx_loss", LOSS, "Loss of the pretraining mix (`actor.ptx_coef`)."),
        Metric("actor/mtp_loss", LOSS, "Loss of multi-token prediction layers."),
        Metric("distillation/loss", LOSS, "On-policy distillation: divergence from the teacher, per token."),
        Metric("distillation/{student_mass|teacher_mass}", SHARE, "Probability that each gives to the top-k tokens."),
    ),
    "Optimizer": (
        Metric("{actor|critic}/grad_norm", "norm", "Norm of the gradient before clipping."),
        Metric("{actor|critic}/lr", "rate", "Learning rate of the step."),
        Metric("{actor|critic}/loss_scale", "factor", "Scale of float16 losses."),
        Metric("{actor|critic}/skipped_updates", COUNT, "Updates skipped: gradient or loss not finite."),
        Metric("{actor|critic}/empty_updates", COUNT, "Updates without a token to learn from."),
        Metric("critic/loss", LOSS, "Loss of the critic, or of a reward model in training."),
        Metric("critic/vf_loss", LOSS, "Value loss alone."),
        Metric("critic/vf_clipfrac", SHARE, "Tokens whose value `cliprange_value` bounded."),
        Metric("critic/vpred_mean", SCORE, "Mean value that the critic predicts during its update."),
    ),
    "Experts": (
        Metric("{actor|critic}/expert_load/{max|mean}", "factor", "Load of the busiest expert; 1: even."),
        Metric("{actor|critic}/expert_load/idle", SHARE, "Experts without a token."),
        Metric("{actor|critic}/expert_load/layer_{layer}", "factor", "Load of one layer."),
        Metric("{actor|critic}/moe_{aux|z}_loss/mean", LOSS, "Router losses before coefficients; aux: 1 is even."),
        Metric("{actor|critic}/moe_{aux|z}_loss/layer_{layer}", LOSS, "Those of one layer."),
    ),
    "Rollout against trainer": (
        Metric("training/rollout_logprob_diff_{max|p99|mean}", LOG, "Difference of log-probs, vLLM against trainer."),
        Metric("training/rollout_probs_diff_{max|mean}", "probability", "The same of probabilities."),
        Metric(
            "training/rollout_logprob_outside_{max|p99|mean}", LOG, "Difference that top_p or top_k does not explain."
        ),
        Metric("training/rollout_{...}_without_replay", LOG, "The same without router replay, where it is compared."),
        Metric("training/rollout_experts_diff", SHARE, "Experts of the engine that the trainer would not have chosen."),
        Metric("rollout_corr/{kl|k3_kl}", LOG, "KL from trainer to rollout policy, two estimates."),
        Metric("rollout_corr/{training_ppl|rollout_ppl|ppl_ratio}", "perplexity", "Perplexities, and their ratio."),
        Metric("rollout_corr/{training_log_ppl|rollout_log_ppl}", LOG, "Their logarithms."),
        Metric("rollout_corr/log_ppl_{diff|abs_diff|diff_max|diff_min}", LOG, "Differences of those per response."),
        Metric("rollout_corr/{chi2_token|chi2_seq}", "variance", "E[ratio^2] - 1 of tokens and of responses."),
        Metric("rollout_corr/rollout_is_veto_fraction", SHARE, "Tokens of responses removed by the token veto."),
        Metric("rollout_corr/rollout_is_batch_norm_factor", "factor", "Mean that importance weights were divided by."),
        Metric("rollout_corr/rollout_is_{statistic}", "factor", "Importance weights, token or sequence level."),
        Metric(
            "rollout_corr/rollout_rs_{...}", SHARE, "Rejection sampling: masked shares, and the measured divergences."
        ),
    ),
    "Lengths and turns": (
        Metric(f"prompt_length/{STATISTICS}", TOKENS, "Tokens of the prompts."),
        Metric(f"response_length/{STATISTICS}", TOKENS, "Sampled tokens of the responses."),
        Metric("response_length/clip_ratio", SHARE, "Responses cut off before they ended."),
        Metric("response/aborted_ratio", SHARE, "Responses without a token."),
        Metric("response_length_non_aborted/{mean|max|min|clip_ratio}", TOKENS, "The same without those."),
        Metric(f"num_turns/{STATISTICS}", "turns", "Turns of the policy per episode."),
        Metric("environment/{name}/mean", SCORE, "Numbers that an environment or an agent reported, `reward` its sum."),
        Metric("episode/failed_ratio", SHARE, "Episodes that failed: nothing of them is trained on."),
        Metric("episode/drawn_again", COUNT, "Failed episodes that were sampled again."),
        Metric("episode/{cause}", COUNT, "Failed episodes by cause: raised, timed_out, crashed, no_answer ..."),
    ),
    "Asynchronous training": (
        Metric("staleness/{mean|max}", "steps", "Age of tokens: steps between their weights and the newest."),
        Metric("staleness/mixed_answers", SHARE, "Responses with tokens of several versions (partial rollouts)."),
        Metric("staleness/{age}/share", SHARE, "Tokens of that age."),
        Metric("staleness/{age}/{kl|k3}", LOG, "Their KL from the newest policy, two estimates."),
        Metric("trainer/idle_share", SHARE, "Time for which training waited for responses."),
        Metric("rollout/idle_share", SHARE, "Time for which rollout replicas were idle."),
        Metric("rollout/pause_s", SECONDS, "Longest pause of a replica for new weights."),
        Metric("rollout/replicas", COUNT, "Replicas that generate."),
        Metric("rollout/{replicas_lost|replicas_left}", COUNT, "Replicas lost, or released, since the run started."),
        Metric("rollout/renewed", COUNT, "Requests restarted under new weights."),
        Metric("rollout/moved", COUNT, "Requests moved to another replica."),
        Metric("rollout/{truncated|resampled}", COUNT, "Stragglers ended, or sampled again."),
        Metric("rollout/forgotten_tokens", TOKENS, "Sampled tokens that were thrown away."),
        Metric("rollout/late_groups", "groups", "Groups of an earlier batch that are trained in this step."),
        Metric("images/tower_passes", COUNT, "Images that the vision tower has read since the run's last start."),
        Metric("perf/requests_in_engines", "requests", "Requests in engines at the end of the step."),
        Metric("perf/requests_away", "requests", "Requests that wait for their environment."),
        Metric("perf/rollout_version", "step", "Newest version of weights that a replica has."),
    ),
    "Generation": (
        Metric(
            "rollout/tokens_per_step", TOKENS, "Tokens per request and engine step; 1 without speculative decoding."
        ),
        Metric("rollout/drafts_accepted", SHARE, "Speculative decoding: draft tokens that were accepted."),
        Metric("perf/kv_cache_usage", SHARE, "Largest share of a replica's KV cache in use."),
    ),
    "Resharding": (
        Metric("reshard/received_mb", "MB", "Bytes that a rank received to generate, the largest of all ranks."),
        Metric("reshard/received_network_mb", "MB", "Those that crossed nodes."),
        Metric("reshard/bound_mb", "MB", "Bytes that it had to receive; received never exceeds it."),
        Metric("reshard/changed_share", SHARE, "Elements of the weights that changed, where only those are sent."),
        Metric("reshard/exchange_s", SECONDS, "Time of the transfer."),
        Metric("reshard/verify_s", SECONDS, "Time of comparing checksums."),
    ),
    "Time and memory": (
        Metric("timing_s/step", SECONDS, "The whole step."),
        Metric("timing_s/{phase}", SECONDS, "One phase: gen, reward, old_log_prob, ref, values, adv, update_actor ..."),
        Metric("timing_planned_s/{phase}", SECONDS, "What the plan expected."),
        Metric("perf/time_per_step", SECONDS, "The same as timing_s/step."),
        Metric("perf/total_num_tokens", TOKENS, "Prompt and response tokens of the step."),
        Metric("perf/throughput", "tokens/s", "Tokens per second and rank."),
        Metric("perf/max_memory_allocated_gb", "GB", "Largest memory of a rank since the run started."),
        Metric("perf/memory_gb/{phase}", "GB", "Largest memory of a rank in a phase."),
        Metric("perf/memory_planned_gb/{phase}", "GB", "What the plan expected."),
        Metric("repair/number", COUNT, "Repairs of the run so far (fault tolerance)."),
        Metric("repair/seconds", SECONDS, "Time of the repair before this step."),
        Metric("repair/steps_lost", "steps", "Steps that were trained again."),
        Metric("repair/copy_seconds", SECONDS, "Time of the in-memory copy of the state."),
    ),
    "Validation": (
        Metric("val-core/{source...}/{name}/{kind}@{k}{...}", SCORE, "Main numbers of a data source: mean, maj, best."),
        Metric("val-core/{source...}/{name}/mean@{k}", SCORE, "Mean over prompts of the mean of k responses."),
        Metric("val-aux/{name...}", SCORE, "Further numbers of a validation, under the same names."),
        Metric("val/accuracy", SHARE, "Preferences: pairs in the right order."),
        Metric("val/loss", LOSS, "Validation loss of sft, reward or dpo."),
        Metric("val/perplexity", "perplexity", "exp of sft's validation loss."),
        Metric("val/score/{mean|std}", SCORE, "Scores of a reward model on held-out responses."),
        Metric("val/{name...}", SCORE, "Metrics of the loss on held-out data."),
    ),
    "Preferences and reward models": (
        Metric("{actor|critic}/accuracy", SHARE, "Pairs in the right order."),
        Metric("{actor|critic}/{chosen|rejected}", SCORE, "Implicit or explicit reward of each side."),
        Metric("{actor|critic}/margin", SCORE, "Their difference."),
        Metric("actor/{loss}/{metric}", LOSS, "Several DPO losses together: metrics of each, before its weight."),
    ),
}
"""Heading -> its metrics. The first row that matches a name describes it."""


@cache
def metric_of(name: str) -> Metric | None:
    """Return the row of a metric's name; None: it has none, as a metric of a user's scorer."""
    return next((row for rows in GROUPS.values() for row in rows if row.pattern.fullmatch(name)), None)
