"""Keys of generation: the groups `actor_rollout_ref.rollout` and `async_training`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from annotated_types import Ge, Gt, Le

from megatron_rl.config.constraints import (
    OURS,
    AtMost,
    Count,
    Nearest,
    NotNegative,
    OneOf,
    Or,
    PassTokens,
    Positive,
    Size,
)
from megatron_rl.config.megatron import follows
from megatron_rl.config.multi_turn import MultiTurnConfig
from megatron_rl.config.trainer import MOST_RANKS

NGRAM, EARLIER, MTP = "ngram", "earlier", "mtp"
"""Choices of `rollout.speculative`."""
DRAFT_KEYS = (
    "speculative",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "earlier_answers_per_prompt",
    "speculative_disable_by_batch_size",
)
"""Keys of `rollout` for speculative decoding: they decide how many tokens an engine step brings."""
FP8 = "fp8"
SMALLEST_BLOCK = 16
"""Smallest block: below it the scales would take more than a fiftieth of the FP8 weights."""
KV_CACHE_CHOICES = ("keep", "recompute")
STRAGGLER_POLICIES = ("wait", "truncate", "resample")


class MTPUse(Enum):
    """Uses of a model's multi-token prediction (MTP) layer: not at all; by generation; by generation, and
    trained."""

    NONE = "none"
    FROZEN = "frozen"
    TRAINED = "trained"


@dataclass
class ValKwargsConfig:
    """Sampling in validation."""

    n: Annotated[int, Ge(1), AtMost(10**5)] = 1
    """Responses to each held-out prompt; more than one needs do_sample=true."""
    do_sample: bool = False
    """Sample the validation responses; false: greedy decoding."""
    temperature: Positive = 1.0
    """Temperature of the validation samples, with do_sample=true."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling (top-p) mass of the validation samples."""
    top_k: Annotated[int, Or(-1, "all tokens"), Ge(1)] = -1
    """Sample the validation responses among the k likeliest tokens; -1: all tokens."""


@dataclass
class RolloutConfig:
    """The group `actor_rollout_ref.rollout`."""

    name: Annotated[str, OneOf(("vllm",))] = "vllm"
    """Generation engine; vllm is the only one."""
    pool: Annotated[str, OURS] = "${actor_rollout_ref.actor.pool}"
    """The pool whose ranks generate. In the actor's pool vLLM reads the actor's memory; to another pool weights are
    sent."""
    nnodes: Annotated[int, Ge(0), Le(MOST_RANKS)] = 0
    """Nodes of rollout_pool, a pool for generation only; needs actor_rollout_ref.hybrid_engine=false."""
    n_gpus_per_node: int = follows("trainer.n_gpus_per_node")
    """Ranks per node of rollout_pool: GPUs, or processes when trainer.device=cpu."""
    min_replicas: Annotated[Count, OURS] = 0
    """Elastic rollout: smallest number of replicas. Further ones join as soon as the cluster has room; one leaves when
    its node is lost, its process gets SIGTERM, or a drain notice names it (`docs/scale/fault_tolerance.md`). The run
    ends (exit code 3) after trainer.repair_wait_s with fewer. 0: not elastic, nnodes x n_gpus_per_node ranks
    throughout."""
    max_replicas: Annotated[Count, OURS] = 0
    """With min_replicas: largest number of replicas at a time. 0: those of nnodes x n_gpus_per_node."""
    drain_url: Annotated[str | None, OURS] = None
    """With min_replicas: a URL that the controller reads every five seconds. Each line names replicas that are to
    leave, by the index of a replica or the address of a node, as in the file `drain` of the run's folder."""
    drain_s: Annotated[NotNegative, OURS] = 120.0
    """Seconds after which a replica that left because of SIGTERM may join again."""
    n: Annotated[int, Ge(1), AtMost(10**5)] = 1
    """Samples (responses) per prompt: the size of a group."""
    limit_images: Annotated[int | None, Ge(1), AtMost(10**4)] = None
    """Most images of a prompt, and of a conversation with turns, with data.image_key; null: any number."""
    temperature: Annotated[float, Ge(0.01)] = 1.0
    """Sampling temperature, also applied to the trainer's log-probs; at least 0.01, the engine's lowest."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling (top-p) mass. Below 1 the sampled distribution differs from the trained one."""
    top_k: Annotated[int, Or(-1, "all tokens"), Ge(1)] = -1
    """Sample among the k likeliest tokens; -1: all tokens."""
    tensor_model_parallel_size: Size = follows("actor_rollout_ref.actor.megatron.tensor_model_parallel_size")
    """Tensor parallel size of generation; it may differ from the training TP."""
    expert_parallel_size: Size = 1
    """Expert parallel size of generation: 1, where TP cuts every expert, or tensor_model_parallel_size *
    data_parallel_size, where every rank holds its share of the experts whole. It may differ from the training EP and
    ETP. Responses are the same."""
    data_parallel_size: Size = 1
    """Attention data parallelism (attention DP) of generation, with expert_parallel_size above 1: a replica is this
    many TP groups, each with attention and requests of its own, which share the experts. No effect with
    expert_parallel_size=1, where ranks / tensor_model_parallel_size replicas generate anyway."""
    max_num_seqs: Annotated[int, Ge(1), AtMost(2**20)] = 256
    """Largest number of sequences that one replica decodes together; with attention DP, each TP group of it."""
    max_loras: Annotated[int, Ge(1), AtMost(2**10)] = 1
    """`serve`: versions of LoRA adapters that vLLM holds at once and samples together. 1: one, whose place the next
    takes."""
    max_num_batched_tokens: Annotated[int, Ge(1), AtMost(2**24)] = 8192
    """Largest number of tokens in one engine step."""
    over_sample_rate: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Over-sampling: train_batch_size / (1 - rate) groups are generated at a time, and a step takes the first
    train_batch_size groups that finish; the others continue in the next step and keep their tokens (verl drops them).
    Needs trainer.rollout_ahead >= 1, the number of steps that a group may be late; on a rollout pool of its own one
    more. async_training.straggler_policy acts on groups that may not be late any more."""
    longest_first: Annotated[bool, OURS] = False
    """Start requests whose prompt had the longest response in the last epoch first, so that no long response starts
    late. Useful where an engine has more requests than max_num_seqs, from the second epoch on. Samples do not depend on
    it."""
    kv_cache_memory_bytes: Annotated[int, Ge(1), AtMost(2**50), OURS] = 1 << 30
    """Bytes of the KV cache of each rank; it is allocated only during generation."""
    gpu_memory_utilization: Annotated[float | None, Gt(0), Le(1), Nearest(0.5)] = None
    """Share of a GPU's memory for weights, KV cache and forward passes of generation, as in vLLM. The KV cache gets
    what the planner finds left of it, in place of kv_cache_memory_bytes. No effect on CPUs."""
    prefix_match_unit: Annotated[int | None, Or(None, "whole blocks"), Ge(1), AtMost(2**10), OURS] = None
    """Prefix sharing: samples of a prompt share its KV cache up to a multiple of this number of tokens, which must
    divide the tokens of a KV cache block. Smaller shares more and costs more look-ups. null: whole blocks, so a prompt
    shorter than a block is computed for every sample. vLLM's name; CPUs only."""
    speculative: Annotated[str | None, OneOf((NGRAM, EARLIER, MTP)), OURS] = None
    """Speculative decoding: where draft tokens come from. ngram: what followed the last tokens where they occurred
    before, in the prompt or the response (prompt lookup) | earlier: also in responses of earlier epochs to the same
    prompt | mtp: the model's multi-token prediction layer | null: none, one token per engine step. Samples are the
    same with and without."""
    num_speculative_tokens: Annotated[int, Ge(1), AtMost(128), OURS] = 3
    """Largest number of draft tokens per engine step and request."""
    prompt_lookup_min: Annotated[int, Ge(1), AtMost(2**10), OURS] = 2
    """ngram, earlier: smallest number of last tokens that must have occurred before."""
    prompt_lookup_max: Annotated[int, Ge(1), AtMost(2**10), OURS] = 4
    """ngram, earlier: largest number of last tokens that are compared; the longest match wins. Among equal matches
    ngram takes the first one, earlier the most frequent continuation."""
    earlier_answers_per_prompt: Annotated[int, Ge(1), AtMost(2**10), OURS] = 4
    """speculative=earlier: number of last different responses to a prompt that the controller keeps, also in
    checkpoints."""
    speculative_disable_by_batch_size: Annotated[int | None, Or(None, "never"), Ge(1), AtMost(2**20), OURS] = None
    """No draft tokens in an engine step with more requests than this; null: in every step."""
    quantization: Annotated[str | None, OneOf((FP8,))] = None
    """fp8: generate with FP8 weights (e4m3, one scale per square block) in the linears of attention and MLPs and in
    experts; half their bytes are transferred | null: generate with the weights as they are trained."""
    quantization_block_size: Annotated[int, Ge(SMALLEST_BLOCK), AtMost(2**16), OURS] = 128
    """quantization=fp8: rows and columns of a block with one scale. Tensor parallelism must cut weights between
    blocks."""
    drop_train_weights: Annotated[bool, OURS] = False
    """Free the training copy of the weights during generation where rollout TP < training TP: the rollout shards
    contain all of it, and it is rebuilt from them bit for bit afterwards. Saves memory, costs a copy."""
    verify_weights_every: Annotated[Count, OURS] = 1
    """Compare checksums of all received weights with their owners' at every Nth resharding; 0: at the first only, which
    is always checked."""
    update_weights_bucket_megabytes: Size = 32
    """Scratch memory of resharding in MiB, and the largest message of a weight transfer."""
    weight_deltas: Annotated[bool, OURS] = False
    """With a rollout pool of its own: send only weights that changed since the last transfer. Training ranks then keep
    what they sent last: one more copy of the rollout weights, spread over them."""
    async_scheduling: Annotated[bool, OURS] = False
    """Asynchronous scheduling: vLLM schedules the next engine step while one still runs, and finds out one step later
    that a response has ended. Samples are the same with and without. For steps that generate their whole batch, without
    draft tokens."""
    enforce_eager: bool = True
    """false: vLLM compiles the model and captures CUDA graphs over weights and KV cache, which keep their addresses.
    true: neither. Default: false on GPUs; on CPUs, which have no graphs, true is the only choice."""
    disable_custom_all_reduce: Annotated[bool, OURS] = True
    """false: vLLM reduces small tensors over NVLink with its own all-reduce kernel, in groups of 2, 4, 6 or 8 ranks on
    one node. Ranks then see all GPUs of their node, and torch's allocator uses no expandable segments, which that
    kernel cannot share. No effect on CPUs."""
    bitwise: Annotated[bool, OURS] = False
    """Trainer and rollout compute log-probs that are equal to the last bit, with products of one shape: an oracle that
    finds a wrong weight, position, mask or cache block which rounding would hide. For plain attention in float32 on
    CPUs, with rollout TP = training TP; a step takes several times as long."""
    log_prob_micro_batch_size_per_gpu: Size = 128
    """Samples per forward pass when the trainer recomputes log-probs, where log_prob_use_dynamic_bsz is false."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill the micro-batches of the recomputed log-probs by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: PassTokens = follows("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens per forward pass that recomputes log-probs, where log_prob_use_dynamic_bsz is true."""
    enable_rollout_routing_replay: bool = False
    """MoE models: let the engine return the experts of every token, so that metrics compare them with the trainer's.
    actor.router_replay.mode=R3 always does."""
    logprob_diff_bound: Annotated[Positive, OURS] = 1e-3
    """Largest allowed |rollout log-prob - trainer log-prob| of 99% of a step's sampled tokens; above it the run stops.
    Rounding in float32 gives about 1e-5 (at most 3e-5 in the demo), a stale or misplaced weight 1e-2 and more. Default:
    1e-3 for float32, 0.5 for bfloat16, 0.05 for float16, 1 for fp8. With top_p or top_k the part that their cut
    explains does not count."""
    logprob_diff_mean_bound: Annotated[Positive, OURS] = 1e-4
    """Largest allowed mean of |rollout log-prob - trainer log-prob| over a step's sampled tokens; above it the run
    stops. Default: 1e-4 for float32, 0.05 for bfloat16, 0.005 for float16, 0.1 for fp8."""
    logprob_diff_warn_steps: Annotated[int | None, Or(None, "5 on GPUs, else 0"), Ge(0), OURS] = None
    """First N steps of a run in which a log-prob difference above the bounds is only a warning; null: 5 on GPUs, else
    0."""
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)

    def ep_size_at(self, tp_size: int) -> int:
        """Return the expert parallel size at another TP size: all ranks of a replica where experts are whole on ranks,
        else 1.
        """
        return tp_size * self.attention_dp_size if self.expert_parallel_size > 1 else 1

    @property
    def attention_dp_size(self) -> int:
        """TP groups of a replica."""
        return self.data_parallel_size if self.expert_parallel_size > 1 else 1

    @property
    def replica_size(self) -> int:
        """Ranks of a replica."""
        return self.tensor_model_parallel_size * self.attention_dp_size

    @property
    def is_elastic(self) -> bool:
        """Whether replicas may join and leave."""
        return self.min_replicas > 0


@dataclass
class AsyncTrainingConfig:
    """The group `async_training`: generation in slices of engine steps, between which weights may change.

    `trainer.rollout_ahead` bounds the staleness.
    """

    trigger_parameter_sync_step: Size = 1
    """Training steps from one weight transfer to the rollout to the next."""
    partial_rollout: bool = False
    """Partial rollout: continue unfinished responses under new weights; false: every response is sampled from one
    version of the weights."""
    kv_cache: Annotated[str, OneOf(KV_CACHE_CHOICES), OURS] = "keep"
    """KV cache of an unfinished response when weights change: keep | recompute it with the new weights."""
    slice_steps: Annotated[Size, OURS] = 16
    """Engine steps of a slice. Between two slices a replica takes new weights and requests and returns finished
    ones."""
    deterministic: Annotated[bool, OURS] = False
    """true: the schedule (which replica generates what with which weights) depends only on the configuration and on
    response lengths; in multi-turn runs each turn then waits for all episodes | false: it depends on time, and is
    recorded in schedule.jsonl for `train --replay`."""
    second_buffer: Annotated[bool, OURS] = True
    """Receive new weights into a second buffer while slices continue; false: receive them between two slices. On GPUs
    only false is supported, and is the default."""
    straggler_policy: Annotated[str, OneOf(STRAGGLER_POLICIES), OURS] = "wait"
    """Stragglers, the last responses of a batch that keep the trainer waiting for more than straggler_slices: wait for
    them | truncate: use the tokens that they have | resample: start the response again with another seed."""
    straggler_slices: Annotated[Size, OURS] = 64
    """Slices that the trainer waits for a straggler: a response, when all others of its batch are finished."""
    straggler_attempts: Annotated[Count, OURS] = 1
    """straggler_policy=resample: number of times that a response is started again, before it is truncated."""
    max_replica_restarts: Annotated[Count, OURS] = 3
    """Restarts of each rollout replica; one that fails again is not restarted, and the pool continues without it."""


def extra_groups(num_groups: int, over_sample_rate: float) -> int:
    """Return the groups to generate beyond a batch, which a step leaves unfinished: at least one, unless the rate is
    0."""
    return max(1, round(num_groups * over_sample_rate / (1 - over_sample_rate))) if over_sample_rate else 0
