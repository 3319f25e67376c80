"""Seconds of each phase of a step, from FLOPs, bytes and what a GPU can do: a roofline with a few calibrated shares.

Legend: t, p, d: TP, PP, copies of the model (DP x CP); P matrix parameters; L layers; H hidden size.
    training     3 forward passes of work (4 where all layers are recomputed) over peak * efficiency, or reading the
                 weights or launching kernels where that takes longer, for the fullest rank, in micro-batches through
                 stages whose slowest sets the pace (`pipeline_seconds`): the last one also has the head
    generation   every decode step reads the weights and the cache once, or computes if that takes longer, and costs
                 the engine a fixed overhead; lengths follow the least-assuming distribution with their mean and bound
    transition   the exact bytes of the hybrid engine's plan, over links inside a node and over the network
Where the machine was profiled, its overheads and the latency of its collectives come on top, and ranks that share
cores take turns: a phase takes its critical path, or all of its work over the ranks that can work at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.ledger.planner.hardware import Hardware, Overheads, latency
from megatron_rl.ledger.planner.run_models import PlannedModel
from megatron_rl.ledger.planner.weights import EMBEDDING, is_tied
from megatron_rl.model.families import HEAD

BF16, FP32 = 2, 4
MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that reading weights and cache reaches; assumed."""
LINK_EFFICIENCY = 0.7
"""Share of a link's or the network's bandwidth that collectives reach; assumed."""
LAUNCH_SECONDS = Overheads().launch
"""Of a layer's kernels in a forward pass, however few tokens it has; assumed. It counts where they compute less."""
ROW_MOVES = 4
"""Times that a row of an expert is read or written to bring rows into one order and back."""
COLLECTIVE_LATENCY = 47.2e-6
"""Seconds that a collective of a decode step takes however small, with waiting for the last rank; calibrated."""
DP_COLLECTIVES, ALL_COLLECTIVES = 4, 2
"""Of one optimizer step: counted tokens, gradients, parameters and metrics among data-parallel ranks; norms of all."""
RL_SHARE = 0.777
"""What passes over short sequences of many lengths reach of the efficiency of long training; calibrated."""
DECODE_OVERHEAD = 6.35e-3
"""Seconds that the engine spends on a decode step beside the GPU's work; calibrated."""


def pipeline_seconds(total: float, slowest: float, num_micro_batches: int, vpp_size: int = 1) -> float:
    """Return the seconds of all passes through a pipeline (Narayanan et al., arXiv:2104.04473).

    total, slowest: seconds of one micro-batch, forward and backward, through all stages and through the slowest one.
    m micro-batches take m * slowest; filling and draining add total - slowest, divided by the chunks of a stage.
    """
    return num_micro_batches * slowest + (total - slowest) / vpp_size


@dataclass(frozen=True)
class ModelCost:
    """What passes through a model cost.

    num_params: all of them, in bytes at BF16 what a whole read takes. matrix_params: those a token is multiplied with.
    head_params: of these the last stage's, beside its layers; 0 counts them as spread evenly.
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
    head_params: int = 0

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
            head_params=model.specs[HEAD].tensor.numel,
        )

    def forward_flops(self, length: float) -> float:
        """FLOPs of one token's forward pass in a sequence of `length`: matrices, and causal attention."""
        return 2 * self.matrix_params + 2 * self.num_layers * self.q_size * length

    def attention_flops(self, length: float) -> float:
        """Of these what attention takes."""
        return 2 * self.num_layers * self.q_size * length

    def read_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a step of `num_tokens` reads: of experts those that any token is sent to."""
        seen = 1.0
        if self.num_experts:
            seen = 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_params * BF16 * (1 - self.experts_share * (1 - seen))


@dataclass(frozen=True)
class Layout:
    """GPUs and how training and generation share them. stage_layers: of each stage; None: as many on each.

    etp: TP of experts; None is TP.
    """

    num_gpus: int
    gpus_per_node: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    rollout_tp: int = 1
    cp: int = 1
    cp_comm_type: str = "p2p"
    stage_layers: tuple[int, ...] | None = None
    etp: int | None = None

    @property
    def dp(self) -> int:
        """Copies of the model in training, of which CP share every sequence."""
        return self.num_gpus // (self.tp * self.pp)

    @property
    def expert_ranks(self) -> int:
        """Ranks that share all experts of a stage: EP x ETP, which are consecutive."""
        return self.ep * (self.tp if self.etp is None else self.etp)

    @property
    def replicas(self) -> int:
        return self.num_gpus // self.rollout_tp


@dataclass(frozen=True)
class Load:
    """One step. Samples and tokens are of all ranks; `response` is the mean length, `max_response` the bound.

    mini_batch: samples of an optimizer step. block_tokens: tokens of one pass. max_seqs: sequences that a replica
    decodes at once. recompute: share of the layers that training runs forward twice. efficiency_share: of the
    hardware's, in training. overlaps_dp: data-parallel traffic is hidden. mixed: what every optimizer step reads beside
    its samples, as their number and prompts.
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
    collective_latency: float = COLLECTIVE_LATENCY
    overlaps_dp: bool = False
    mixed: Load | None = None

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def num_tokens(self) -> float:
        return self.num_samples * self.length

    @property
    def num_updates(self) -> int:
        """Optimizer steps of a step."""
        return self.epochs * max(1, round(self.num_samples / self.mini_batch))


@dataclass(frozen=True)
class Busy:
    """What passes take of ranks that have a device, or a core, each.

    critical: seconds from the start to the end. work: seconds that a rank works in them, in the mean.
    """

    critical: float
    work: float

    def __add__(self, other: Busy) -> Busy:
        """One after the other."""
        return Busy(self.critical + other.critical, self.work + other.work)

    def times(self, number: float) -> Busy:
        """So many of them, one after the other."""
        return Busy(self.critical * number, self.work * number)


@dataclass(frozen=True)
class Estimator:
    """Times of one model on one layout."""

    model: ModelCost
    layout: Layout
    hardware: Hardware
    dtype: str = "bfloat16"

    def train(self, load: Load) -> float:
        """Seconds of all forward and backward passes and optimizer steps of a step."""
        return self.seconds(self.trained(load))

    def forward(self, load: Load) -> float:
        """Seconds of one forward pass over all tokens: log-probs, or values."""
        return self.seconds(self.scored(load))

    def seconds(self, busy: Busy) -> float:
        """On this machine, where ranks that share cores take turns: all of their work decides, or the critical path."""
        return max(busy.critical, busy.work * self._crowding)

    @property
    def _crowding(self) -> float:
        return self.hardware.crowding(min(self.layout.num_gpus, self.layout.gpus_per_node))

    def trained(self, load: Load) -> Busy:
        """What `train` takes of its ranks."""
        steps = load.num_updates
        samples = load.num_samples * load.epochs / steps
        passes = self._passes(load, samples, passes=3 + load.recompute, all_reduces=4 + 2 * load.recompute)
        if load.mixed is not None:
            times = {"passes": 3 + load.recompute, "all_reduces": 4 + 2 * load.recompute}
            passes += self._passes(load.mixed, load.mixed.num_samples, **times)
        return (passes + self._optimizer_step(load)).times(steps)

    def scored(self, load: Load) -> Busy:
        """What `forward` takes of its ranks."""
        return self._passes(load, load.num_samples, passes=1, all_reduces=2)

    def _passes(self, load: Load, samples: float, passes: float, all_reduces: float) -> Busy:
        """Work of `passes` forward passes of so many samples, with tensor- and expert-parallel traffic, by stages."""
        layout, gpu, model = self.layout, self.hardware, self.model
        # Samples are dealt out whole: where they are fewer than the ranks, some have none.
        mine = math.ceil(samples * layout.cp / layout.dp - 1e-9) * load.length / layout.cp
        blocks = max(1, math.ceil(mine / max(load.block_tokens, load.length / layout.cp)))
        if layout.vpp > 1:
            blocks = math.ceil(blocks / layout.pp) * layout.pp
        tokens = mine / blocks
        rate = gpu.flops(self.dtype) * gpu.matmul_efficiency * load.efficiency_share * tokens / (tokens + gpu.half_rows)
        head = passes * tokens * 2 * model.head_params / (layout.tp * rate)
        attention = model.attention_flops(load.length) * (1 / gpu.attention_share - 1)
        layer = passes * tokens * (model.forward_flops(load.length) + attention - 2 * model.head_params)
        layer = layer / model.num_layers / (layout.tp * rate)
        layer += all_reduces * self._all_reduce(tokens * model.hidden * BF16, layout.tp)
        layer += self._experts(tokens, passes, rate) + self._key_exchange(tokens, passes)
        layers = layout.stage_layers or (model.num_layers / layout.pp,) * layout.pp
        read = passes * self._weight_bytes() / layout.pp / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)
        launch = passes * gpu.overheads.launch * model.num_layers / layout.pp
        slowest = max(max(layers) * layer, layers[-1] * layer + head, read, launch)
        total = max(model.num_layers * layer + head, layout.pp * read, layout.pp * launch, slowest)
        on_stage, on_layer = self._pass_overheads(tokens, passes, all_reduces)
        slowest += on_stage + max(layers) * on_layer
        total += layout.pp * on_stage + model.num_layers * on_layer
        seconds = pipeline_seconds(total, slowest, blocks, layout.vpp)
        if layout.pp > 1:
            hops = 2 * (passes > 1) + (passes == 1)
            wide = layout.tp * layout.dp >= layout.gpus_per_node
            seconds += hops * layout.vpp * mine / layout.tp * model.hidden * BF16 / self._bandwidth(wide)
        return Busy(seconds, blocks * total / layout.pp)

    def _pass_overheads(self, tokens: float, passes: float, all_reduces: float) -> tuple[float, float]:
        """Seconds of one micro-batch beside FLOPs and bytes: on each stage, and of each of its layers.

        A stage is passed once for each of its chunks. Half of what tokens cost is taken to be on every TP rank, as
        norms and residuals are.
        """
        layout, hidden, known = self.layout, self.model.hidden, self.hardware.overheads
        mine, tokens = tokens, tokens * hidden * (1 + 1 / layout.tp) / 2
        on_stage, on_layer = known.score_pass, known.score_layer + tokens * known.score_token
        if passes > 1:
            again = (passes - 3) * on_layer
            on_stage, on_layer = known.update_pass, known.update_layer + tokens * known.update_token + again
        collective = latency(self.hardware.collectives, layout.tp)
        hops = 2 * (passes > 1) + (passes == 1) if layout.pp > 1 else 0
        on_stage += all_reduces * collective + hops * latency(self.hardware.collectives, 2)
        on_layer += all_reduces * collective + self._context_overhead(mine, passes)
        return layout.vpp * on_stage, on_layer

    def _context_overhead(self, tokens: float, passes: float) -> float:
        """Seconds of one layer's attention across context-parallel ranks beside FLOPs and bytes.

        Keys come in blocks, one of each rank, that are worked with one by one; with a2a tokens and heads change ranks
        twice, and twice again backward.
        """
        layout, known = self.layout, self.hardware.overheads
        if layout.cp == 1:
            return 0.0
        if layout.cp_comm_type == "a2a":
            changes = 2 if passes == 1 else 2 * (passes - 1)
            return changes * latency(self.hardware.collectives, layout.cp)
        block = known.context_layer + tokens * self.model.hidden / layout.tp * known.context_token
        return passes * (layout.cp - 1) * block

    def _weight_bytes(self) -> float:
        """That one rank of TP and EP would hold of all stages."""
        return self._params_of_rank * (FP32 if self.dtype == "float32" else BF16)

    @property
    def _params_of_rank(self) -> float:
        """Of all stages together."""
        experts = self.model.num_params * self.model.experts_share
        return (self.model.num_params - experts) / self.layout.tp + experts / self.layout.expert_ranks

    def _experts(self, tokens: float, passes: float, rate: float) -> float:
        """Seconds of one layer's experts beyond those of as many dense FLOPs.

        Rows, of each token one for each of its experts, are sent there and back; before and after that they are read
        and written to bring them into the order of ranks and, with EP, of experts. That, and FLOPs of many small
        products, reach `expert_share`.
        """
        layout, model, gpu = self.layout, self.model, self.hardware
        if not model.num_experts:
            return 0.0
        mine = passes * tokens / layout.tp
        active = model.num_params * model.experts_share * model.experts_per_token / model.num_experts
        dense = mine * 2 * active / model.num_layers / rate
        rows = mine * model.experts_per_token * model.hidden * BF16
        moved = rows * (ROW_MOVES if layout.ep == 1 else 2 * ROW_MOVES) / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)
        sent = 2 * rows * (layout.ep - 1) / layout.ep / self._bandwidth(layout.expert_ranks > layout.gpus_per_node)
        return (dense + moved) / gpu.expert_share + sent - dense

    def _key_exchange(self, tokens: float, passes: float) -> float:
        """Seconds of one layer's attention across context-parallel ranks, taken not to be hidden behind its work.

        Forward keys and values reach every other rank; backward they do again, and gradients in float32 come back.
        """
        layout, model = self.layout, self.model
        if layout.cp == 1:
            return 0.0
        pair = model.kv_bytes_per_token / model.num_layers / layout.tp
        if layout.cp_comm_type == "a2a":
            # Queries and outputs change ranks as well, but each number only once.
            sent = (pair + 2 * model.q_size * BF16 / layout.tp) * (layout.cp - 1) / layout.cp
            sent *= passes if passes == 1 else passes - 1
        else:
            sent = pair * (layout.cp - 1) * (passes if passes == 1 else passes + 1)
        return tokens * sent / self._bandwidth(layout.tp * layout.cp > layout.gpus_per_node)

    def _optimizer_step(self, load: Load) -> Busy:
        """Reduce-scatter of float32 gradients, all-gather of parameters, and Adam's traffic in memory."""
        layout = self.layout
        mine = self._params_of_rank / layout.pp
        exchanged = mine * (FP32 + BF16) * (layout.dp - 1) / layout.dp / self._replica_bandwidth
        adam = 40 * self.model.num_params / layout.num_gpus / (self.hardware.memory_bandwidth * MEMORY_EFFICIENCY)
        known = self.hardware.overheads
        own = known.optimizer_step + known.optimizer_layer * self.model.num_layers / layout.pp
        own += DP_COLLECTIVES * latency(self.hardware.collectives, layout.dp)
        own += ALL_COLLECTIVES * latency(self.hardware.collectives, layout.num_gpus)
        seconds = adam + own + (0.0 if load.overlaps_dp else exchanged)
        return Busy(seconds, seconds)

    @property
    def _replica_bandwidth(self) -> float:
        """Of collectives among the copies of a rank: those of one node send to the next one over the NICs of all."""
        layout, gpu = self.layout, self.hardware
        on_node = max(1, layout.gpus_per_node // layout.tp)
        if layout.dp <= on_node:
            return self._bandwidth(False)
        return min(gpu.link_bandwidth, on_node * gpu.network_bandwidth) * LINK_EFFICIENCY

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
        mine = math.ceil(load.num_samples / self.layout.replicas)
        together = min(mine, load.max_seqs)
        lengths = Lengths.with_mean(load.response, load.max_response)
        longest = lengths.quantile(load.num_samples / (load.num_samples + 1))
        known = self.hardware.overheads
        seconds = self._prefill(mine * load.prompt, load.prompt) + known.generation + mine * known.request
        # While others wait, as many as fit are decoded, each at a random point of its answer.
        waiting_steps = (mine - together) * load.response / together
        seconds += waiting_steps * self._decode_step(load, together, load.prompt + load.response / 2)
        points = 200
        for i in range(points):
            done = (i + 0.5) / points * longest
            active = max(1.0, together * lengths.survival(done))
            seconds += longest / points * self._decode_step(load, active, load.prompt + done)
        return seconds * self._crowding

    def token_seconds(self, load: Load, sequences: float) -> float:
        """Of one more token for each of so many sequences of mean length; prompts are spread over their answers."""
        started = sequences / load.response
        seconds = self._decode_step(load, sequences, load.prompt + load.response / 2)
        seconds += self._prefill(started * load.prompt, load.prompt) + started * self.hardware.overheads.request
        return seconds * self._crowding

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
            traffic = 2 * self.model.num_layers * self._all_reduce(message, tp) + self._step_latency(load)
        return max(read, compute) + traffic + self._step_overhead(load, sequences)

    def _step_latency(self, load: Load) -> float:
        """Of a decode step's collectives however small: two a layer, and where they were measured also the ends'."""
        layers, known = self.model.num_layers, self.hardware.engine_collectives
        if not known:
            return 2 * layers * load.collective_latency
        return (2 * layers + 2) * latency(known, self.layout.rollout_tp)

    def _step_overhead(self, load: Load, sequences: float) -> float:
        """Of the engine, beside the work of a decode step."""
        known = self.hardware.overheads
        if known.engine_step is None:
            return load.decode_overhead
        return known.engine_step + self.model.num_layers * known.engine_layer + sequences * known.engine_sequence

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
