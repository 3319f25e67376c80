"""What one role holds and needs on the ranks of its layout, by pipeline stage: the arithmetic of `plan` and `map`.

Permanent bytes are counted to the element, those of passes from the parts of a layer (`activations.py`). What a pool
adds for generation, resharding and saving is in `memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_rl.config.megatron import FP8_RECIPES, MUON
from megatron_rl.config.roles import PassSpec, Placement, RoleSpec, followed_policies
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import REWARD
from megatron_rl.model.chunks import chunk_tokens
from megatron_rl.model.families import Model, is_emulated, is_in_eight_bits
from megatron_rl.model.parts import FP32, Cut, LayerBlock
from megatron_rl.parallel.muon_runs import is_muon_matrix
from megatron_rl.parallel.rank_grid import train_grid
from megatron_rl.parallel.sharding import padded_vocab_size, vocab_multiple
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.activations import CHUNKS_BACKWARD, CHUNKS_FORWARD, MeanLayer, Recompute, in_flight
from megatron_rl.planning.adapter_costs import AdapterCosts
from megatron_rl.planning.image_costs import ImageCosts
from megatron_rl.planning.role_params import RoleParams
from megatron_rl.planning.teaching_costs import COLUMNS, COPIES_AT_END, NO_TEACHING, TeachingCosts
from megatron_rl.planning.weights import ELEMENT_BYTES, FlatBuffer, TrainedWeights, bucket_numel

SCORE, UPDATE = "score", "update"
"""Kinds of passes, as `RoleSpec` names them."""
IN_EIGHT_BITS, TOWER = "FP8 weights", "vision tower"
Held = dict[str, int]
"""Name of what is held -> bytes."""


@dataclass(frozen=True)
class Passes:
    """A role's pass in micro-batches: the largest one, and how many a rank runs for one optimizer step."""

    block: LayerBlock
    num_blocks: int


@dataclass(frozen=True)
class StageHeld:
    """Bytes that a role holds all the time on a rank of one stage."""

    parameters: int
    gradients: int = 0
    moments: int = 0
    masters: int = 0
    in_eight_bits: int = 0
    """Weights as products of `fp8` take them, which are kept next to the weights from the first pass on."""
    heads: int = 0
    """Teachers' heads, which `RoleLedger.teacher_heads` names."""
    tower: int = 0
    """A vision tower, on ranks of the last stage."""

    @cached_property
    def total(self) -> int:
        """All of them together."""
        optimizer = self.gradients + self.moments + self.masters
        return self.parameters + optimizer + self.in_eight_bits + self.heads + self.tower

    def named(self, role: RoleSpec) -> Held:
        """Return name -> bytes."""
        kinds = ["parameters"]
        if role.is_trained:
            kinds += ["gradients", "moments", *(["masters"] if self.masters else [])]
        named = {f"{role.name} {kind}": getattr(self, kind) for kind in kinds}
        named |= {f"{role.name} {IN_EIGHT_BITS}": self.in_eight_bits} if self.in_eight_bits else {}
        return named | ({f"{role.name} {TOWER}": self.tower} if self.tower else {})


class RoleLedger:
    """The bytes of one role on `world_size` ranks, in the layout that its `megatron` group sets.

    The configuration must have passed preflight.
    base: the parameters of its model. weights: those that it trains, which without adapters are all of them.
    """

    def __init__(
        self,
        config: RunConfig,
        role: RoleSpec,
        model: Model,
        params: RoleParams,
        world_size: int,
        teaching: TeachingCosts = NO_TEACHING,
    ) -> None:
        self.config, self.role, self.model, self.teaching = config, role, model, teaching
        megatron = role.megatron
        self.element = ELEMENT_BYTES[megatron.dtype]
        self.grid = train_grid(world_size, megatron)
        self.stages = StagePlan.from_config(model.shape.num_layers, megatron)
        self.vocab_multiple = vocab_multiple(megatron.make_vocab_size_divisible_by, self.grid.tp_size)
        buckets = bucket_numel(megatron.override_ddp_config, self.grid.num_replicas) if role.is_trained else None
        cut = (self.stages, self.grid, self.vocab_multiple)
        self.adapters = None
        if params.trained is not None:
            self.adapters = AdapterCosts.of(params.trained.specs, self.stages, model.shape.experts_per_token)
        bucketed = None if self.adapters else buckets
        self.base = TrainedWeights(params.base, *cut, bucketed, self.adapters is not None, params.still)
        self.weights = self.base if params.trained is None else TrainedWeights(params.trained, *cut, buckets)
        if params.with_tower is not None:
            self.weights = TrainedWeights(params.with_tower, *cut, buckets, still=params.still)

    @cached_property
    def layer(self) -> MeanLayer:
        """Costs of one layer on a rank."""
        grid = self.grid
        cut = Cut(grid.tp_size, grid.expert_tp_size, self.role.megatron.sequence_parallel, self.element, grid.ep_size)
        return MeanLayer(tuple(self.model.kinds.items()), cut)

    def recomputed_share(self, recompute: Recompute | None = None) -> float:
        """Return the share of the model's forward pass that runs twice. recompute: None: the configured one."""
        recompute = Recompute.of(self.role.megatron) if recompute is None else recompute
        sizes = [size for stage in self.stages.chunk_sizes for size in stage]
        return recompute.share(sizes) + self.layer.share_again(recompute.parts)

    # Permanent tensors

    def held(self, pp_rank: int) -> StageHeld:
        """Return what a rank of a stage holds all the time, without what Adam keeps on the host.

        Frozen: parameters without padding; where the model is another role's, its adapters alone. Trained: buffers of
        parameters in the model's dtype and of gradients in float32, and the rank's share of moments and of masters of
        bfloat16 weights, which data-parallel ranks shard (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054). With
        adapters all of that is theirs, and the model's parameters are in a buffer of their own.
        """
        element, in_eight_bits = self.element, self._in_eight_bits(pp_rank)
        if not self.role.is_trained:
            return StageHeld(self.num_params(pp_rank) * element, in_eight_bits=in_eight_bits)
        numel, share = self.weights.numel(pp_rank), self.weights.optimizer_share(pp_rank)
        moments, masters = share * 2 * FP32 - self.spared(pp_rank), 0 if element == FP32 else share * FP32
        offloaded = offloaded_share(self.role)
        if self.config.trainer.device == "cpu":
            # The host is the device: Adam's host copies of gradients, and of weights without masters, count as well.
            moments += int(offloaded * share * FP32)
            masters = masters or int(offloaded * share * FP32)
        else:
            moments, masters = (int(size * (1 - offloaded)) for size in (moments, masters))
        parameters, heads = numel * element + self.frozen(pp_rank), sum(self.teacher_heads(pp_rank).values())
        gradients = self.weights.moving_numel(pp_rank) * FP32
        tower = self._tower_params * self.element if self._is_last(pp_rank) else 0
        return StageHeld(parameters, gradients, moments, masters, in_eight_bits, heads, tower)

    @cached_property
    def _tower_params(self) -> int:
        """Parameters of the frozen vision tower that the leader has next to its model; 0 where the run reads no images,
        and where all that read them read those of a trained one.
        """
        form = self.model.images
        is_leader = self.role.kind.is_sampled or self.config.trainer.stage == REWARD
        is_read = is_leader and self.config.data.image_key is not None
        is_read = is_read and (not self.role.trains_tower or Placement.of(self.config).scores_beside_policy)
        return form.num_params if form is not None and is_read else 0

    def spared(self, pp_rank: int) -> int:
        """Return the bytes of second moments that Muon does not keep, on the rank of a stage that spares least."""
        return self.weights.fewest_of_muon(pp_rank) * FP32 if self.with_muon else 0

    @property
    def with_muon(self) -> bool:
        """Whether Muon updates matrices of the role."""
        return bool(self.role.is_trained and self.role.settings.optim.optimizer == MUON)

    def _of_muon(self, buffer: FlatBuffer) -> int:
        """Return the elements of a buffer that Muon updates, on all ranks that share it."""
        size = self.weights.shares[buffer.is_expert]
        return sum(buffer.muon_numels(self.weights.params.specs, size)) if self.with_muon else 0

    def teacher_heads(self, pp_rank: int, *, resting: bool = False) -> Held:
        """Return what a rank of a stage holds of teachers' heads next to its own: name -> bytes.

        resting: of those alone that are offloaded while the rank generates, as their teachers' parameters are.
        """
        if not self._is_last(pp_rank):
            return {}
        heads = [head for head in self.teaching.heads if head.megatron.param_offload or not resting]
        return {head.name: self._head_rows * head.hidden * head.element for head in heads}

    def num_params(self, pp_rank: int) -> int:
        """Return the parameters of a rank, without padding of buffers and without what is another role's."""
        base = self.base.num_params(pp_rank) if self.role.model_of is None else 0
        return base + (self.weights.num_params(pp_rank) if self.adapters else 0)

    def frozen(self, pp_rank: int) -> int:
        """Return the bytes of the parameters that are not trained next to adapters; 0 without adapters."""
        return self.base.numel(pp_rank) * self.element if self.adapters else 0

    def _in_eight_bits(self, pp_rank: int) -> int:
        """Return the bytes of the weights of `fp8`. transformer-engine keeps them by rows, and for the backward pass by
        columns; the emulation on CPUs keeps them rounded, in the model's dtype. With adapters they are the base's.
        """
        if self.role.megatron.override_transformer_config.fp8 is None or self.role.model_of is not None:
            return 0
        numels, on_cpu = self.base.shard_numels(pp_rank), self.config.trainer.device == "cpu"
        is_rounded = is_emulated if on_cpu else is_in_eight_bits
        num_elements = sum(numel for name, numel in numels.items() if is_rounded(name))
        on_gpu = 2 if self.role.is_trained else 1
        return num_elements * (self.element if on_cpu else on_gpu)

    def while_built(self, pp_rank: int) -> list[Held]:
        """Return moments of the construction of a trained role, which hold more than is left: weights are moved from
        modules into DDP's buffers, and the last of the masters is made from a copy of the weight. None: of others.
        """
        if not self.role.is_trained:
            return []
        held, frozen, name = self.held(pp_rank), self.frozen(pp_rank), self.role.name
        moved = {f"{name} parameters": held.parameters, f"{name} gradients": held.gradients}
        in_layers, others = self.weights.largest(pp_rank)
        last = min(max(in_layers, others) if pp_rank == 0 else in_layers, self.weights.optimizer_share(pp_rank))
        copied = {f"{name} masters": held.masters, "weight copied": last * self.element} if held.masters else {}
        into_frozen = [{f"{name} parameters": frozen, "weights in modules": held.parameters}] if frozen else []
        return [*into_frozen, moved | {"weights in modules": held.parameters - frozen}, moved | copied]

    def checkpoint_copy(self, pp_rank: int) -> int:
        """Return the bytes of the copies that a save keeps until they are written.

        From a GPU they go to host memory, which does not count. On a CPU megatron-core copies slices of larger
        tensors: all weights, and, of several segments, moments and what a reference has that follows. An asynchronous
        save copies those of one segment as well.
        """
        if self.config.trainer.device != "cpu":
            return 0
        if self.role.follows is not None and self.role.follows.is_kept:
            return (self.weights if self.adapters else self.base).num_params(pp_rank) * self.element
        if not self.role.is_trained:
            return 0
        copied, is_async, specs = 0, self.role.settings.checkpoint.async_save, self.weights.params.specs
        masters = FP32 if is_async and self.element != FP32 else 0
        reference = self.element if self.role.name in followed_policies(self.config) else 0
        for buffer in self.weights.moving_buffers(pp_rank):
            copies = {
                name: numel for name, numel in buffer.numels.items() if is_async or len(specs[name].tensor.segments) > 1
            }
            moments = sum(copies.values()) * (2 * FP32 + reference)
            if self.with_muon:
                updated = (numel for name, numel in copies.items() if is_muon_matrix(name, specs[name].tensor))
                moments -= sum(updated) * FP32
            copied += (buffer.num_params * (self.element + masters) + moments) // self.weights.shares[buffer.is_expert]
        return copied

    def saved_bytes(self, pp_rank: int) -> int:
        """Return the bytes that a rank of a trained role writes to a checkpoint, or to a copy for repairs."""
        masters = 0 if self.element == FP32 else FP32
        saved = self.element + 2 * FP32 + masters
        shares = self.weights.shares
        return sum(
            (buffer.num_params * saved - self._of_muon(buffer) * FP32) // shares[buffer.is_expert]
            for buffer in self.weights.moving_buffers(pp_rank)
        )

    # Passes through the trainer

    def gathered_bytes(self) -> int:
        """Return the memory into which Megatron gathers a micro-batch's hidden states from TP ranks, and which it keeps
        for the next pass; 0 without sequence parallelism.

        Frozen linears gather again, so that a model with adapters keeps nothing.
        """
        is_frozen = self.adapters is not None or self.role.model_of is not None
        if not self.role.megatron.sequence_parallel or self.grid.tp_size == 1 or is_frozen:
            return 0
        kinds = [kind for kind in (SCORE, UPDATE) if getattr(self.role, kind) is not None]
        return max((self.passes(kind).block.tokens for kind in kinds), default=0) * self.layer.hidden * self.element

    def passes(self, kind: str, cut: PassSpec | None = None) -> Passes:
        """Return the micro-batches of a pass; with dynamic CP the largest over all sizes of a group.

        kind: `SCORE` or `UPDATE`, which the role has. cut: the pass with other micro-batches than the configured ones.
        """
        grid, role, pass_spec = self.grid, self.role, cut or getattr(self.role, kind)
        options = role.megatron.override_transformer_config
        multiple = grid.tp_size if role.megatron.sequence_parallel else 1
        tokens = FP8_RECIPES[options.fp8_recipe] if options.fp8 else 1
        multiple *= tokens if pass_spec.remove_padding else tokens // math.gcd(tokens, pass_spec.num_rows)
        sizes = {size: grid.num_replicas // size for size in grid.pack_sizes} or {grid.cp_size: grid.dp_size}
        return largest_of(
            [passes_of(self.config, role, kind, pass_spec, dp_size, multiple, cp) for cp, dp_size in sizes.items()]
        )

    def _of_adapters(self, block: LayerBlock, *, backward: bool) -> float:
        """Return the bytes that a running layer's adapters hold for a moment."""
        return 0.0 if self.adapters is None else self.adapters.running_bytes(block, self.layer.cut, backward=backward)

    def _head(self, pp_rank: int, block: LayerBlock, num_chunks: int) -> Held:
        """Return the logits of `num_chunks` chunks that exist at the same time, and the scored hidden states."""
        if not self._is_last(pp_rank) or self.role.has_value_head:
            return {}
        shape, rows = self.model.shape, self._head_rows
        scored = block.response_tokens * shape.hidden_size * self.element
        logits = min(chunk_tokens(shape.hidden_size, rows), block.response_tokens) * rows * FP32
        return {"logits chunk": num_chunks * logits + scored}

    def _mtp_bytes(self, block: LayerBlock) -> int:
        """Return what the multi-token prediction layer keeps between its forward and backward, which follow the last
        stage's forward: a layer's own, and hidden states and embeddings, of both their norms and joined. The embedding
        comes from the first stage.
        """
        if self.role.mtp != MTPUse.TRAINED:
            return 0
        inside = self.model.layers[-1].kept_bytes(block, self.layer.cut)
        joined = 7 * block.tokens * self.layer.hidden * self.element
        copied = self._head_rows * self.layer.hidden * self.element if self.grid.pp_size > 1 else 0
        return int(inside + joined + copied)

    def _of_trained_tower(self, block: LayerBlock) -> int:
        """Return the bytes of the backward pass of a tower that is trained, behind that of a micro-batch's layers."""
        folder = Path(self.role.model_path)
        images = ImageCosts.of(self.config, self.model, self.element, None, folder) if self.role.trains_tower else None
        share = 0.0 if images is None else images.most_tokens / self.config.longest_sequence
        return 0 if images is None else images.backward_bytes(share * block.tokens)

    @property
    def _head_rows(self) -> int:
        """Rows of the vocabulary on a rank, with padding."""
        return padded_vocab_size(self.model.shape.vocab_size, self.vocab_multiple) // self.grid.tp_size

    def _is_last(self, pp_rank: int) -> bool:
        return pp_rank == self.grid.pp_size - 1

    def _teaching_score(self, pp_rank: int, passes: Passes) -> int:
        """Return the bytes of what a score makes for teaching, of one micro-batch; on a CPU, of all."""
        if not self._is_last(pp_rank):
            return 0
        tokens = passes.block.response_tokens * self.grid.cp_size
        gathered = tokens * self.teaching.found_bytes(self.grid.tp_size)
        return gathered + tokens * self.teaching.made * (passes.num_blocks if self._on_cpu else 1)

    @property
    def _on_cpu(self) -> bool:
        return self.config.trainer.device == "cpu"

    def forward(self, pp_rank: int, passes: Passes) -> Held:
        """Return what a score holds: hidden states, and one layer at a time or the head."""
        layer, block = self.layer, passes.block
        head = self._head(pp_rank, block, CHUNKS_FORWARD if self.teaching.makes_logits else 0)
        hidden = 2 * block.tokens * layer.hidden * layer.element
        way = self.role.megatron.override_transformer_config.cp_comm_type
        running = layer.transient_bytes(block, backward=False, way=way) + self._of_adapters(block, backward=False)
        # The schedule keeps what the head was given until the next micro-batch has passed it.
        previous = hidden // 2 if head and passes.num_blocks > 1 else 0
        held = {"activations": int(max(hidden + running - sum(head.values()), hidden)) + previous, **head}
        if made := self._teaching_score(pp_rank, passes):
            held[COLUMNS] = max(made, COPIES_AT_END * made * self._on_cpu - sum(held.values()))
        return held

    def update(self, pp_rank: int, passes: Passes, recompute: Recompute | None = None) -> Held:
        """Return what an update holds at the worst moment: the backward of a layer, of the head, of a trained tower, or
        Adam's step. recompute: None: the configured one.
        """
        layer, block, element = self.layer, passes.block, self.element
        recompute = Recompute.of(self.role.megatron) if recompute is None else recompute
        chunks = self.stages.chunk_sizes[pp_rank]
        alive = in_flight(self.grid.pp_size, pp_rank, len(chunks), passes.num_blocks)
        in_layers, others = (size * element for size in self.weights.largest(pp_rank))
        parts = recompute.part_bytes(layer, block)
        hidden, saved = layer.input_bytes(block), layer.saved_bytes(block) - sum(parts)
        saved += self.adapters.kept_bytes(block, layer.cut) if self.adapters else 0.0
        kept = alive * (recompute.kept_bytes(max(chunks), hidden, saved) + 2 * hidden)
        made = recompute.made_bytes(max(chunks), saved) + max(parts, default=0.0)
        way, layers = self.role.megatron.override_transformer_config.cp_comm_type, self.model.layers
        in_chunks = [layers[numbers.start : numbers.stop] for numbers in self.stages.layers(pp_rank)]
        running = made + max(layer.backward_bytes(block, way, chunk, recompute) for chunk in in_chunks)
        running += self._of_adapters(block, backward=True)
        read = block.response_tokens * self.grid.cp_size * self.teaching.read
        # The columns of all micro-batches are cut from the batch at once, on the host.
        columns = {COLUMNS: read * passes.num_blocks} if read and self._on_cpu else {}
        moments = [{"activations": int(kept + running), "weight gradient": in_layers, **columns}]
        head = self._head(pp_rank, block, CHUNKS_BACKWARD)
        if head:
            at_head = others
            if element < FP32:  # products in the model's dtype accumulate in float32
                at_head += at_head // element * FP32
            if self.teaching.compares:  # the gradients of two uses of the head are added up
                at_head += others
                again = block.response_tokens * (layer.hidden * element + self.teaching.compared_bytes)
                columns = {COLUMNS: max(read, columns.get(COLUMNS, 0)) + again}
            mtp = self._mtp_bytes(block)
            moments[0]["activations"] += mtp
            moments.append({"activations": int(kept) + mtp, "weight gradient": at_head, **head, **columns})
        if pp_rank == 0 and (made := self._of_trained_tower(block)):
            moments.append({"activations": int(kept * (alive - 1) / alive), "tower's backward": made})
        share, device = self.weights.optimizer_share(pp_rank), self.config.trainer.device
        largest = max(in_layers, others) // element
        made_by_step = optimizer_temporaries(share, largest, device)
        if self.with_muon:
            made_by_step = max(made_by_step, muon_temporaries(in_layers // element, self.grid.tp_size))
        moments.append({"optimizer step": made_by_step})
        return max(moments, key=lambda held: sum(held.values()))


def most_scored(length: int, response: int, cp_size: int) -> int:
    """Return how many of a sequence's response tokens, its last ones, the rank with most of them scores."""
    chunk = length // (2 * cp_size)
    return min(chunk, response) + min(chunk, max(0, response - length // 2)) if cp_size > 1 else response


def passes_of(
    config: RunConfig, role: RoleSpec, kind: str, pass_spec: PassSpec, dp_size: int, multiple: int, cp_size: int = 1
) -> Passes:
    """Return the micro-batches of a pass over a rank's share of the samples of a step, or of a mini-batch.

    Every sequence has the longest length, or the token limit of a pass over cp_size ranks. Examples that an update
    mixes in count as well. multiple: to which the tokens of a rank's part are padded.
    """
    sizes = config.batch_sizes
    num_samples = sizes.mini_batch_samples(role.settings) if kind == UPDATE else sizes.num_samples
    own = blocks_of(config, pass_spec, num_samples, dp_size, multiple, cp_size)
    if kind != UPDATE or role.mixed is None:
        return own
    longer = replace(pass_spec, longest=role.mixed.longest, scored=role.mixed.longest - 1)
    mixed = blocks_of(config, longer, role.mixed.num_examples, dp_size, multiple, cp_size)
    return replace(largest_of([own, mixed]), num_blocks=own.num_blocks + mixed.num_blocks)


def blocks_of(
    config: RunConfig, pass_spec: PassSpec, num_samples: int, dp_size: int, multiple: int, cp_size: int
) -> Passes:
    """Return the micro-batches of a pass over `num_samples` rows."""
    longest = config.longest_sequence if pass_spec.longest is None else pass_spec.longest
    length = longest + pass_spec.extra_tokens
    if pass_spec.max_tokens is not None:
        length = min(length, pass_spec.max_tokens * cp_size)
    share = max(1, -(-num_samples // dp_size))
    if cp_size > 1:
        length = -(-length // (2 * cp_size)) * 2 * cp_size
    rows = pass_spec.num_rows if pass_spec.max_tokens is None else max(1, pass_spec.max_tokens * cp_size // length)
    rows = min(rows, share)
    response = config.longest_response if pass_spec.scored is None else pass_spec.scored
    tokens = -(-rows * length // cp_size // multiple) * multiple
    # With CP the chunks of a rank are gathered as they are, without padding.
    is_packed = pass_spec.remove_padding and cp_size == 1
    scored = most_scored(length, min(length, response), cp_size)
    return Passes(LayerBlock(tokens, tokens, rows * scored, is_packed, length, cp_size), -(-share // rows))


def largest_of(passes: Sequence[Passes]) -> Passes:
    """Return a bound in every number of passes that may be any of these."""
    if len(passes) == 1:
        return passes[0]
    blocks = [each.block for each in passes]
    largest = LayerBlock(
        max(block.tokens for block in blocks),
        max(block.slots for block in blocks),
        max(block.response_tokens for block in blocks),
        any(block.is_packed for block in blocks),
        max(block.longest for block in blocks),
        max(block.num_sharing for block in blocks),
    )
    return Passes(largest, max(each.num_blocks for each in passes))


def optimizer_temporaries(share: int, largest: int, device: str) -> int:
    """Return the bytes of Adam's temporaries. share: elements of the rank's shard. largest: of its largest parameter.

    On a GPU a fused kernel has none. On a CPU the loop over parameters makes two, of one parameter: the second moment's
    root and its quotient. That the quotient of the parameter before is still there is not counted.
    """
    if device == "cuda":
        return 0
    return 2 * FP32 * min(share, largest)


def muon_temporaries(largest: int, tp_size: int) -> int:
    """Return the bytes of Muon's temporaries. largest: elements of the rank's largest matrix.

    Four copies of the rank's part: sent and received, there and back. Six of the whole matrix: gathered from TP ranks,
    joined, its products, and the update.
    """
    whole = largest * tp_size
    return FP32 * (4 * largest + 6 * whole)


def offloaded_share(role: RoleSpec) -> float:
    """Return the share of a trained role's parameters whose optimizer state is on the host."""
    override = role.settings.optim.override_optimizer_config
    return override.optimizer_offload_fraction if override.optimizer_cpu_offload else 0.0
