"""Seconds of each phase of a step, from FLOPs, bytes and what a GPU can do: a roofline with a few calibrated shares.

Legend: t, p, d: TP, PP, DP; P matrix parameters; L layers; H hidden size.
    training     3 forward passes of work (4 where all layers are recomputed) over peak * efficiency, stretched by the
                 pipeline's bubble, (m + (p - 1) / v) / m for m micro-batches (Narayanan et al., arXiv:2104.04473)
    generation   every decode step reads the weights and the cache once, or computes if that takes longer, and costs
                 the engine a fixed overhead; lengths follow the least-assuming distribution with their mean and bound
    transition   the exact bytes of the hybrid engine's plan, over links inside a node and over the network
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.planner.hardware import Hardware
from megatron_rl.planner.run_models import PlannedModel
from megatron_rl.planner.weights import EMBEDDING, is_tied

BF16, FP32 = 2, 4
MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that reading weights and cache reaches; assumed."""
LINK_EFFICIENCY = 0.7
"""Share of a link's or the network's bandwidth that collectives reach; assumed."""
COLLECTIVE_LATENCY = 10e-6
"""Seconds that a collective among the GPUs of a node takes however small; assumed."""
RL_SHARE = 0.73
"""What passes over short sequences of many lengths reach of the efficiency of long training; calibrated."""
DECODE_OVERHEAD = 6.35e-3
"""Seconds that the engine spends on a decode step beside the GPU's work; calibrated."""


@dataclass(frozen=True)
class ModelCost:
    """What passes through a model cost.

    num_params: all of them, in bytes at BF16 what a whole read takes. matrix_params: those a token is multiplied with.
    experts_share: part of `num_params` that is experts', of which a token sees experts_per_token / num_experts.
    """

    num_params: int
    matrix_params: int
    num_layers: int
    hidden: int
    q_size: int
    kv_bytes_per_token: int
    num_experts: int = 0
    experts_per_token: int = 0
    experts_share: float = 0.0

    @classmethod
    def of(cls, model: PlannedModel) -> ModelCost:
        """From config.json's sizes, in bfloat16. An embedding is looked up, so unless tied it multiplies nothing."""
        shape, routing = model.shape, model.routing
        embedding = 0 if is_tied(model.specs) else model.specs[EMBEDDING].tensor.numel
        experts = sum(spec.tensor.numel for spec in model.specs.values() if spec.tensor.is_expert)
        cached = 2 * shape.num_kv_heads * shape.head_size if shape.latent is None else shape.latent.cached
        return cls(
            num_params=model.num_params,
            matrix_params=model.num_active_params - embedding,
            num_layers=shape.num_layers,
            hidden=shape.hidden_size,
            q_size=shape.num_heads * shape.head_size,
            kv_bytes_per_token=shape.num_layers * cached * BF16,
            num_experts=routing.num_experts if routing else 0,
            experts_per_token=routing.experts_per_token if routing else 0,
            experts_share=experts / model.num_params,
        )

    def forward_flops(self, length: float) -> float:
        """FLOPs of one token's forward pass in a sequence of `length`: matrices, and causal attention."""
        return 2 * self.matrix_params + 2 * self.num_layers * self.q_size * length

    def read_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a step of `num_tokens` reads: of experts those that any token is sent to."""
        seen = 1.0
        if self.num_experts:
            seen = 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_params * BF16 * (1 - self.experts_share * (1 - seen))


@dataclass(frozen=True)
class Layout:
    """GPUs and how training and generation share them."""

    num_gpus: int
    gpus_per_node: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    rollout_tp: int = 1

    @property
    def dp(self) -> int:
        return self.num_gpus // (self.tp * self.pp)

    @property
    def replicas(self) -> int:
        return self.num_gpus // self.rollout_tp


@dataclass(frozen=True)
class Load:
    """One step. Samples and tokens are of all ranks; `response` is the mean length, `max_response` the bound.

    mini_batch: samples of an optimizer step. block_tokens: tokens of one pass. max_seqs: sequences that a replica
    decodes at once. recompute: share of the layers that training runs forward twice. efficiency_share: of the
    hardware's, in training. overlaps_dp: data-parallel traffic is hidden.
    """

    num_samples: int
    prompt: float
    response: float
    max_response: int
    mini_batch: int
    block_tokens: int
    epochs: int = 1
    max_seqs: int = 256
    recompute: float = 0.0
    efficiency_share: float = RL_SHARE
    decode_overhead: float = DECODE_OVERHEAD
    overlaps_dp: bool = False

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def num_tokens(self) -> float:
        return self.num_samples * self.length


@dataclass(frozen=True)
class Estimator:
    """Times of one model on one layout."""

    model: ModelCost
    layout: Layout
    hardware: Hardware
    dtype: str = "bfloat16"

    def train(self, load: Load) -> float:
        """Seconds of all forward and backward passes and optimizer steps of a step."""
        steps = load.epochs * max(1, round(load.num_samples / load.mini_batch))
        tokens = load.num_tokens * load.epochs / steps
        seconds = self._passes(load, tokens, passes=3 + load.recompute, all_reduces=4 + 2 * load.recompute)
        return steps * (seconds + self._optimizer_step(load))

    def forward(self, load: Load) -> float:
        """Seconds of one forward pass over all tokens: log-probs, or values."""
        return self._passes(load, load.num_tokens, passes=1, all_reduces=2)

    def _passes(self, load: Load, tokens: float, passes: float, all_reduces: float) -> float:
        """Work of `passes` forward passes, tensor- and expert-parallel traffic in it, stretched by the bubble."""
        layout, gpu = self.layout, self.hardware
        rate = gpu.flops(self.dtype) * gpu.matmul_efficiency * load.efficiency_share
        compute = passes * self.model.forward_flops(load.length) * tokens / (layout.num_gpus * rate)
        mine = tokens / layout.dp
        layers = self.model.num_layers / layout.pp
        traffic = all_reduces * self._all_reduce(mine * self.model.hidden * BF16, layout.tp) * layers
        if layout.ep > 1:
            rows = mine / layout.tp * self.model.experts_per_token * self.model.hidden * BF16
            wide = layout.ep * layout.tp > layout.gpus_per_node
            traffic += passes * 2 * layers * rows * (layout.ep - 1) / layout.ep / self._bandwidth(wide)
        blocks = max(1, math.ceil(mine / max(load.block_tokens, load.length)))
        bubble = (layout.pp - 1) / layout.vpp / blocks
        hops = 2 * (passes > 1) + (passes == 1)
        wide = layout.tp * layout.dp >= layout.gpus_per_node
        sends = 0.0
        if layout.pp > 1:
            sends = hops * layout.vpp * mine / layout.tp * self.model.hidden * BF16 / self._bandwidth(wide)
        return (compute + traffic) * (1 + bubble) + sends

    def _optimizer_step(self, load: Load) -> float:
        """Reduce-scatter of float32 gradients, all-gather of parameters, and Adam's traffic in memory."""
        layout = self.layout
        mine = self.model.num_params / (layout.tp * layout.pp)
        if self.model.num_experts:
            mine *= 1 - self.model.experts_share + self.model.experts_share * layout.tp / max(layout.tp, layout.ep)
        wide = layout.tp * layout.dp > layout.gpus_per_node
        exchanged = mine * (FP32 + BF16) * (layout.dp - 1) / layout.dp / self._bandwidth(wide)
        adam = 40 * mine / layout.dp / (self.hardware.memory_bandwidth * MEMORY_EFFICIENCY)
        return adam + (0.0 if load.overlaps_dp else exchanged)

    def _bandwidth(self, wide: bool) -> float:
        bandwidth = self.hardware.network_bandwidth if wide else self.hardware.link_bandwidth
        return bandwidth * LINK_EFFICIENCY

    def _all_reduce(self, num_bytes: float, size: int) -> float:
        if size == 1:
            return 0.0
        return 2 * (size - 1) / size * num_bytes / self._bandwidth(size > self.layout.gpus_per_node)

    # Generation

    def generate(self, load: Load) -> float:
        """Seconds until the last replica has its last answer: prefill, then decoding with ever fewer sequences."""
        mine = load.num_samples / self.layout.replicas
        together = min(mine, load.max_seqs)
        lengths = Lengths.with_mean(load.response, load.max_response)
        longest = lengths.quantile(load.num_samples / (load.num_samples + 1))
        seconds = self._prefill(mine * load.prompt, load.prompt)
        # While others wait, as many as fit are decoded, each at a random point of its answer.
        waiting_steps = (mine - together) * load.response / together
        seconds += waiting_steps * self._decode_step(load, together, load.prompt + load.response / 2)
        points = 200
        for i in range(points):
            done = (i + 0.5) / points * longest
            active = max(1.0, together * lengths.survival(done))
            seconds += longest / points * self._decode_step(load, active, load.prompt + done)
        return seconds

    def token_seconds(self, load: Load, sequences: float) -> float:
        """Of one more token for each of so many sequences of mean length; prompts are spread over their answers."""
        started = sequences / load.response
        return self._decode_step(load, sequences, load.prompt + load.response / 2) + self._prefill(
            started * load.prompt, load.prompt
        )

    def _decode_step(self, load: Load, sequences: float, context: float) -> float:
        """Seconds of one token for each of `sequences`: the slower of memory and compute, traffic, overhead."""
        tp, gpu = self.layout.rollout_tp, self.hardware
        cache = sequences * context * self.model.kv_bytes_per_token
        read = (self.model.read_bytes(sequences) + cache) / tp / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)
        flops = sequences * self.model.forward_flops(context) / tp
        compute = flops / (gpu.flops(self.dtype) * gpu.matmul_efficiency)
        traffic = 0.0
        if tp > 1:
            message = sequences * self.model.hidden * BF16
            traffic = 2 * self.model.num_layers * (COLLECTIVE_LATENCY + self._all_reduce(message, tp))
        return max(read, compute) + traffic + load.decode_overhead

    def _prefill(self, tokens: float, length: float) -> float:
        tp, gpu = self.layout.rollout_tp, self.hardware
        compute = tokens * self.model.forward_flops(length) / tp / (gpu.flops(self.dtype) * gpu.matmul_efficiency)
        return compute + 2 * self.model.num_layers * self._all_reduce(tokens * self.model.hidden * BF16, tp)


@dataclass(frozen=True)
class Lengths:
    """Lengths between 0 and `bound`: the distribution of most entropy with a given mean, density ~ exp(-rate * x).

    rate: 0 is uniform; below 0 most are near the bound (Jaynes, Phys. Rev. 106, 1957).
    """

    rate: float
    bound: float

    @classmethod
    def with_mean(cls, mean: float, bound: float) -> Lengths:
        """By bisection; a mean at the bound itself is the steepest slope that is tried."""
        low, high = -200 / bound, 200 / bound
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, bound).mean > mean else (low, middle)
        return cls((low + high) / 2, bound)

    @property
    def mean(self) -> float:
        """1 / rate - bound / (exp(rate * bound) - 1)."""
        steepness = self.rate * self.bound
        if abs(steepness) < 1e-6:
            return self.bound / 2
        return 1 / self.rate - self.bound / math.expm1(steepness)

    def survival(self, length: float) -> float:
        """Share of answers longer than `length`."""
        if length >= self.bound:
            return 0.0
        if abs(self.rate * self.bound) < 1e-6:
            return 1 - length / self.bound
        whole = math.expm1(-self.rate * self.bound)
        return (math.exp(-self.rate * length) - 1 - whole) / -whole

    def quantile(self, share: float) -> float:
        """The length that `share` of the answers do not exceed."""
        if abs(self.rate * self.bound) < 1e-6:
            return share * self.bound
        return -math.log1p(share * math.expm1(-self.rate * self.bound)) / self.rate
