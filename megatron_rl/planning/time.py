"""Seconds of each phase of a step from FLOPs, bytes and a GPU's rates: a roofline with a few calibrated shares.

Legend: t, p, d: TP, PP, copies of the model (DP x CP); P matrix parameters; L layers; H hidden size.
    training     3 forward passes of work (4 where all layers are recomputed) over peak * efficiency, or reading the
                 weights or launching kernels where that takes longer, for the fullest rank, in micro-batches through
                 stages whose slowest sets the pace (`pipeline_seconds`): the last one also has the head. Next to
                 adapters matrices are frozen: their third pass, the gradients of weights, is spared
    generation   every decode step reads the weights and the cache once, or computes if that takes longer, and has a
                 fixed overhead of the engine; lengths follow the maximum-entropy distribution with their mean and bound
    resharding   the exact bytes of the hybrid engine's plan, over links inside a node and over the network
On a profiled machine, overheads and latencies of collectives are added, and ranks may share cores: a phase takes its
critical path, or all of its work over the number of ranks that can compute at the same time, whichever is longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from megatron_rl.config.lora import LoraConfig
from megatron_rl.model.families import HEAD, Model
from megatron_rl.planning.adapter_costs import num_adapter_params
from megatron_rl.planning.answer_lengths import Lengths
from megatron_rl.planning.hardware import Hardware, Overheads, latency
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.weights import EMBEDDING, is_tied

BF16, FP32 = 2, 4
MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that reading weights and cache reaches; assumed."""
LINK_EFFICIENCY = 0.7
"""Share of a link's or the network's bandwidth that collectives reach; assumed."""
LAUNCH_SECONDS = Overheads().launch
"""Seconds to launch a layer's kernels in a forward pass; assumed. It counts where they compute less than that."""
ROW_MOVES = 4
"""Times that an expert's row is read or written to permute rows and back."""
DP_COLLECTIVES, ALL_COLLECTIVES = 4, 2
"""Collectives of one optimizer step: among data-parallel ranks (token counts, gradients, parameters, metrics) and among
all ranks (norms).
"""
ADAPTER_LAUNCHES = 0.5
"""Kernels of a layer's adapters as a share of the layer's own; assumed, where all linears have adapters."""


def pipeline_seconds(total: float, slowest: float, num_micro_batches: int, vpp_size: int = 1) -> float:
    """Return the seconds of all passes through a pipeline (Narayanan et al., arXiv:2104.04473).

    total, slowest: seconds of one micro-batch, forward and backward, through all stages and through the slowest one.
    m micro-batches take m * slowest; filling and draining add total - slowest, divided by the chunks of a stage.
    """
    return num_micro_batches * slowest + (total - slowest) / vpp_size


@lru_cache(maxsize=1024)
def share_read(length: int, size: int, window: int) -> float:
    """Return the share of other context-parallel ranks' tokens of a sequence that a rank reads with a window, on the
    average of ranks. Kept, as a search asks for few values again and again.
    """
    long, num_read = max(1, length // (2 * size)), 0
    for rank, chunk in product(range(size), range(2 * size)):
        mine = rank, 2 * size - 1 - rank  # as in `parallel/zigzag.py`
        if chunk < mine[1] and chunk != mine[0]:
            between = (mine[0] if chunk < mine[0] else mine[1]) - chunk - 1
            num_read += min(long, max(0, window - 1 - between * long))
    return num_read / (2 * size * long * (size - 1))


@dataclass(frozen=True)
class ModelCost:
    """The sizes of a model that decide the cost of a pass.

    num_params: all parameters. matrix_params: those that a token is multiplied with. head_params: of these the
    vocabulary head's, on the last stage; 0: counted as spread evenly. kv_ranks: the most TP ranks of generation that
    share the cache: more repeat it; None: any number do. experts_share: share of `num_params` in experts,
    of which a token uses experts_per_token / num_experts. adapter_params: of A and B, which are trained in place of the
    others; 0: all are trained. active_adapter_params: of these, those that a token passes. windows:
    (positions that a token sees, its own included, number of layers) of layers with a window.
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
    kv_ranks: int | None = None
    adapter_params: int = 0
    active_adapter_params: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, model: Model, lora: LoraConfig | None = None) -> ModelCost:
        """Read the sizes of a model, in bfloat16. An embedding is a lookup: unless tied, it multiplies nothing.

        lora: its adapters; None: none.
        """
        shape = model.shape
        near = ((layer.attention.num_seen, number) for layer, number in model.kinds.items())
        embedding = 0 if is_tied(model.specs) else model.specs[EMBEDDING].tensor.numel
        return cls(
            num_params=model.num_params,
            matrix_params=model.num_active_params - embedding,
            num_layers=shape.num_layers,
            hidden=shape.hidden_size,
            q_size=model.query_columns // shape.num_layers,
            kv_bytes_per_token=model.cached_elements(1) * BF16,
            num_experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
            experts_share=model.num_expert_params / model.num_params,
            head_params=model.specs[HEAD].tensor.numel,
            kv_ranks=model.cached_elements(1) // model.cached_elements(1 << 20),
            adapter_params=num_adapter_params(model, lora),
            active_adapter_params=num_adapter_params(model, lora, active=True),
            windows=tuple((seen, number) for seen, number in near if seen is not None),
        )

    @property
    def trained_params(self) -> int:
        """Parameters with gradients and Adam's moments."""
        return self.adapter_params or self.num_params

    def forward_flops(self, length: float) -> float:
        """Return the FLOPs of one token's forward pass in a sequence of `length` tokens: matrices and causal
        attention.
        """
        return 2 * (self.matrix_params + self.active_adapter_params) + self.attention_flops(length)

    def update_flops(self, length: float) -> float:
        """Return the FLOPs of one token's forward and backward pass without recomputation."""
        spared = self.spared_passes(3) * 2 * self.matrix_params
        return 3 * self.forward_flops(length) - spared

    def spared_passes(self, passes: float) -> int:
        """Return how many of `passes` forward passes frozen matrices do not need: the gradients of their weights."""
        return 1 if self.adapter_params and passes > 1 else 0

    def attention_flops(self, length: float) -> float:
        """Return the FLOPs of causal attention alone, of layers with a window within it."""
        unseen = sum(number * max(0.0, length - window) ** 2 / max(length, 1.0) for window, number in self.windows)
        return 2 * self.q_size * (self.num_layers * length - unseen)

    def share_read(self, length: float, cp_size: int) -> float:
        """Return the share of other context-parallel ranks' keys that a rank's queries see, on average over layers."""
        unseen = sum(number * (1 - share_read(int(length), cp_size, window)) for window, number in self.windows)
        return 1 - unseen / self.num_layers

    def read_bytes(self, num_tokens: float, sharing: int = 1) -> float:
        """Return the bytes of weights that a step of `num_tokens` reads: of the experts those that any token is routed
        to.

        sharing: groups of ranks, with as many tokens each, which share the experts, so that each reads a part of them.
        """
        seen = 1.0
        if self.num_experts:
            seen = 1 - (1 - self.experts_per_token / self.num_experts) ** (num_tokens * sharing)
        return self.num_params * BF16 * (1 - self.experts_share * (1 - seen / sharing)) + self.adapter_params * BF16


@dataclass(frozen=True)
class Busy:
    """Seconds of passes on ranks that have a device, or a core, of their own.

    critical: from start to end. work: mean seconds in which a rank computes.
    """

    critical: float
    work: float

    def __add__(self, other: Busy) -> Busy:
        """Run one after the other."""
        return Busy(self.critical + other.critical, self.work + other.work)

    def times(self, number: float) -> Busy:
        """Repeat `number` times, one after the other."""
        return Busy(self.critical * number, self.work * number)


@dataclass(frozen=True)
class Estimator:
    """Estimates the seconds of one model's passes on one layout."""

    model: ModelCost
    layout: Layout
    hardware: Hardware
    dtype: str = "bfloat16"

    def train(self, load: Load) -> float:
        """Return the seconds of all forward and backward passes and optimizer steps of a step."""
        return self.seconds(self.trained(load))

    def forward(self, load: Load) -> float:
        """Return the seconds of one forward pass over all samples: log-probs, or values."""
        return self.seconds(self.scored(load))

    def seconds(self, busy: Busy) -> float:
        """Return the seconds on this machine: the critical path, or all work over the shared cores if that is
        longer.
        """
        return max(busy.critical, busy.work * self._crowding)

    @property
    def _crowding(self) -> float:
        return self.hardware.crowding(min(self.layout.num_gpus, self.layout.gpus_per_node))

    def trained(self, load: Load) -> Busy:
        """Return the time that `train` takes on ranks with a device each."""
        return (self.passed(load) + self.optimizer_step(load.overlaps_dp)).times(load.num_updates)

    def passed(self, load: Load) -> Busy:
        """Return the time of the forward and backward passes of one optimizer step."""
        samples = load.num_samples * load.epochs / load.num_updates
        passes = self._passes(load, samples, passes=3 + load.recompute, all_reduces=4 + 2 * load.recompute)
        if load.mixed is not None:
            times = {"passes": 3 + load.recompute, "all_reduces": 4 + 2 * load.recompute}
            passes += self._passes(load.mixed, load.mixed.num_samples, **times)
        return passes + self._tower(load, samples)

    def _tower(self, load: Load, samples: float) -> Busy:
        """Return the time of a trained tower, whole on each rank of the first stage."""
        layout, gpu = self.layout, self.hardware
        one = load.tower_flops(gpu.attention_share) / (gpu.flops(self.dtype) * gpu.matmul_efficiency)
        return Busy(self.most_rows(samples) * one, samples * layout.cp / layout.dp * one / layout.pp)

    def most_rows(self, samples: float) -> int:
        """Return the samples of the fullest rank. Whole ones are distributed: of fewer than ranks, some have none."""
        return math.ceil(samples * self.layout.cp / self.layout.dp - 1e-9)

    @property
    def fills_node(self) -> bool:
        """Whether the ranks of a stage fill a machine, so that stages send to each other over the network."""
        return self.layout.tp * self.layout.dp >= self.layout.gpus_per_node

    def part_of(self, load: Load) -> tuple[object, ...]:
        """Return all of the numbers of ranks and machines that `passed` and `scored` of a load depend on."""
        samples = [load.num_samples, load.num_samples * load.epochs / load.num_updates]
        samples += [] if load.mixed is None else [load.mixed.num_samples]
        return (self.layout.gpus_per_node, self.fills_node, *map(self.most_rows, samples))

    def scored(self, load: Load) -> Busy:
        """Return the time that `forward` takes on ranks with a device each."""
        return self._passes(load, load.num_samples, passes=1, all_reduces=2)

    def _passes(self, load: Load, samples: float, passes: float, all_reduces: float) -> Busy:
        """Return the time of `passes` forward passes of samples through the pipeline, with TP, EP, CP and PP
        traffic.
        """
        layout, gpu, model = self.layout, self.hardware, self.model
        rows = self.most_rows(samples)
        mine, length = rows * load.computed_length(rows) / layout.cp, load.attended_length(rows)
        blocks = max(1, math.ceil(mine / max(load.block_tokens, load.length / layout.cp)))
        if layout.vpp > 1:
            blocks = math.ceil(blocks / layout.pp) * layout.pp
        tokens = mine / blocks
        rate = gpu.flops(self.dtype) * gpu.matmul_efficiency * load.efficiency_share * tokens / (tokens + gpu.half_rows)
        products = passes - model.spared_passes(passes)  # of matrices
        further = load.head_products * load.response / load.length if passes > 1 else 0.0
        head = (products + further) * tokens * 2 * model.head_params / (layout.tp * rate)
        attention = model.attention_flops(length) * (1 / gpu.attention_share - 1)
        layer = passes * tokens * (model.forward_flops(length) + attention - 2 * model.head_params)
        layer -= (passes - products) * tokens * 2 * (model.matrix_params - model.head_params)
        layer = layer / model.num_layers / (layout.tp * rate)
        layer += all_reduces * self._all_reduce(tokens * model.hidden * BF16, layout.tp)
        layer += self._experts(tokens, products, rate) + self._key_exchange(tokens, passes, length)
        layers = layout.stage_layers or (model.num_layers / layout.pp,) * layout.pp
        read = products * self._weight_bytes() / layout.pp / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)
        launch = passes * gpu.overheads.launch * self._launches * model.num_layers / layout.pp
        slowest = max(max(layers) * layer, layers[-1] * layer + head, read, launch)
        total = max(model.num_layers * layer + head, layout.pp * read, layout.pp * launch, slowest)
        on_stage, on_layer = self._pass_overheads(tokens, passes, all_reduces)
        slowest += on_stage + max(layers) * on_layer
        total += layout.pp * on_stage + model.num_layers * on_layer
        seconds = pipeline_seconds(total, slowest, blocks, layout.vpp)
        if layout.pp > 1:
            hops = 2 * (passes > 1) + (passes == 1)
            seconds += hops * layout.vpp * mine / layout.tp * model.hidden * BF16 / self._bandwidth(self.fills_node)
        return Busy(seconds, blocks * total / layout.pp)

    def _pass_overheads(self, tokens: float, passes: float, all_reduces: float) -> tuple[float, float]:
        """Return overhead seconds of one micro-batch: on each stage, and of each of its layers.

        A micro-batch passes a stage once for each of its chunks. Half of the overhead of tokens is assumed to be the
        same on every TP rank, like norms and residuals.
        """
        layout, hidden, known = self.layout, self.model.hidden, self.hardware.overheads
        mine, tokens = tokens, tokens * hidden * (1 + 1 / layout.tp) / 2
        on_stage, on_layer = known.score_pass, known.score_layer + tokens * known.score_token
        if passes > 1:
            again = (passes - 3) * on_layer
            on_stage, on_layer = known.update_pass, known.update_layer + tokens * known.update_token + again
        on_layer *= self._launches
        collective = latency(self.hardware.collectives, layout.tp)
        hops = 2 * (passes > 1) + (passes == 1) if layout.pp > 1 else 0
        on_stage += all_reduces * collective + hops * latency(self.hardware.collectives, 2)
        on_layer += all_reduces * collective + self._context_overhead(mine, passes)
        return layout.vpp * on_stage, on_layer

    def _context_overhead(self, tokens: float, passes: float) -> float:
        """Return overhead seconds of one layer's attention across context-parallel ranks.

        The keys of each rank are one block, and blocks are processed one by one. With a2a tokens are exchanged for
        heads and back, and backward once more.
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
        """Return the bytes of all stages that one rank of TP and EP would hold."""
        return self._params_of_rank * (FP32 if self.dtype == "float32" else BF16)

    @property
    def _launches(self) -> float:
        """Kernels of a layer with its adapters, over those without."""
        return 1 + (ADAPTER_LAUNCHES if self.model.adapter_params else 0)

    @property
    def _params_of_rank(self) -> float:
        """Parameters of all stages that one rank of TP and EP would hold."""
        experts = self.model.num_params * self.model.experts_share
        return (self.model.num_params - experts) / self.layout.tp + experts / self.layout.expert_ranks

    def _experts(self, tokens: float, passes: float, rate: float) -> float:
        """Return the seconds of one layer's experts beyond those of the same dense FLOPs.

        Each token has one row for each of its experts. Rows are sent to the experts and back; before and after that
        they are permuted into the order of ranks and, with EP, of experts. Permuting, and the FLOPs of many small
        products, reach `expert_share` of the hardware's rates.
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

    def _key_exchange(self, tokens: float, passes: float, length: float) -> float:
        """Return the seconds of one layer's context-parallel traffic, assumed not to be hidden behind computation.

        Forward sends keys and values to every other rank, with p2p and a window those that it reads; backward sends
        them again, and float32 gradients back. length: tokens of a sequence.
        """
        layout, model = self.layout, self.model
        if layout.cp == 1:
            return 0.0
        pair = model.kv_bytes_per_token / model.num_layers / layout.tp
        if layout.cp_comm_type == "a2a":
            # Queries and outputs are exchanged as well, but each number only once.
            sent = (pair + 2 * model.q_size * BF16 / layout.tp) * (layout.cp - 1) / layout.cp
            sent *= passes if passes == 1 else passes - 1
        else:
            sent = pair * (layout.cp - 1) * (passes if passes == 1 else passes + 1)
            sent *= model.share_read(length, layout.cp) if layout.cp_comm_type == "p2p" else 1.0
        return tokens * sent / self._bandwidth(layout.tp * layout.cp > layout.gpus_per_node)

    def optimizer_step(self, overlaps_dp: bool) -> Busy:
        """Return the time of reduce-scattering float32 gradients, all-gathering parameters, and Adam's memory
        traffic. overlaps_dp: the exchange is hidden behind passes.
        """
        layout = self.layout
        mine = (self.model.adapter_params / layout.tp or self._params_of_rank) / layout.pp
        exchanged = mine * (FP32 + BF16) * (layout.dp - 1) / layout.dp / self._replica_bandwidth
        adam = 40 * self.model.trained_params / layout.num_gpus / (self.hardware.memory_bandwidth * MEMORY_EFFICIENCY)
        known = self.hardware.overheads
        own = known.optimizer_step + known.optimizer_layer * self.model.num_layers / layout.pp
        own += DP_COLLECTIVES * latency(self.hardware.collectives, layout.dp)
        own += ALL_COLLECTIVES * latency(self.hardware.collectives, layout.num_gpus)
        seconds = adam + own + (0.0 if overlaps_dp else exchanged)
        return Busy(seconds, seconds)

    @property
    def _replica_bandwidth(self) -> float:
        """Bytes/s of collectives among the copies of a rank. Copies on one node use all of its NICs together."""
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
        """Return the seconds until the last response of the last replica: prefill, then decoding with ever fewer
        sequences.
        """
        mine = math.ceil(load.num_samples / self.layout.replicas)
        together = min(mine, load.max_seqs)
        lengths = Lengths.with_mean(load.response, load.max_response)
        longest = lengths.quantile(load.num_samples / (load.num_samples + 1))
        known = self.hardware.overheads
        seconds = self._prefill(mine * load.prompt, load.prompt) + known.generation + mine * known.request
        # While samples wait, the running ones are each at a random point of their response.
        waiting_steps = (mine - together) * load.response / together
        seconds += waiting_steps * self._decode_step(load, together, load.prompt + load.response / 2)
        points = 200
        for i in range(points):
            done = (i + 0.5) / points * longest
            active = max(1.0, together * lengths.survival(done))
            seconds += longest / points * self._decode_step(load, active, load.prompt + done)
        return seconds * self._crowding

    def token_seconds(self, load: Load, sequences: float) -> float:
        """Return the seconds of one more token for each of `sequences` of mean length, with their share of the
        prefill.
        """
        started = sequences / load.response
        seconds = self._decode_step(load, sequences, load.prompt + load.response / 2)
        seconds += self._prefill(started * load.prompt, load.prompt) + started * self.hardware.overheads.request
        return seconds * self._crowding

    def _decode_step(self, load: Load, sequences: float, context: float) -> float:
        """Return the seconds of one token for each of `sequences`: the slower of memory and compute, traffic,
        overhead.
        """
        tp, dp, gpu = self.layout.rollout_tp, self.layout.rollout_dp, self.hardware
        cache = sequences * context * self.model.kv_bytes_per_token / min(tp, self.model.kv_ranks or tp)
        read = (self.model.read_bytes(sequences, dp) / tp + cache) / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)
        flops = sequences * self.model.forward_flops(context) / tp
        compute = flops / (gpu.flops(self.dtype) * gpu.matmul_efficiency)
        traffic = 0.0
        if tp > 1:
            message = sequences * self.model.hidden * BF16
            traffic = 2 * self.model.num_layers * self._all_reduce(message, tp) + self._step_latency(load)
        traffic += self._shared_experts(sequences)
        return max(read, compute) + traffic + self._step_overhead(load, sequences)

    def _shared_experts(self, tokens: float) -> float:
        """Return the seconds in which groups that share experts gather the tokens of all and scatter their sums."""
        dp = self.layout.rollout_dp
        return self.model.num_layers * self._all_reduce(dp * tokens * self.model.hidden * BF16, dp)

    def _step_latency(self, load: Load) -> float:
        """Return the latency of a decode step's collectives: two per layer, and where measured also two at the ends."""
        layers, known = self.model.num_layers, self.hardware.engine_collectives
        if not known:
            return 2 * layers * load.collective_latency
        return (2 * layers + 2) * latency(known, self.layout.rollout_tp)

    def _step_overhead(self, load: Load, sequences: float) -> float:
        """Return the seconds of the engine in a decode step, in addition to the GPU's work."""
        known = self.hardware.overheads
        if known.engine_step is None:
            return load.decode_overhead
        return known.engine_step + self.model.num_layers * known.engine_layer + sequences * known.engine_sequence

    def _prefill(self, tokens: float, length: float) -> float:
        tp, gpu = self.layout.rollout_tp, self.hardware
        compute = tokens * self.model.forward_flops(length) / tp / (gpu.flops(self.dtype) * gpu.matmul_efficiency)
        summed = 2 * self.model.num_layers * self._all_reduce(tokens * self.model.hidden * BF16, tp)
        return compute + summed + self._shared_experts(tokens)
