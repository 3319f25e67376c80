"""Run micro-batches through a pipeline of stages: forward only, or forward and backward.

Megatron's schedule passes tensors between stages; this module has the two ways in which roles use it. Every method must
be called by all TP and PP ranks of a data-parallel rank, with the same micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_rl.columns import ACTOR_SCORES
from megatron_rl.config.megatron import FP8_RECIPES
from megatron_rl.device import has_varlen_attention, in_one_copy, shares_prompts
from megatron_rl.experience.block_layout import round_up
from megatron_rl.experience.image_positions import ImageMarks
from megatron_rl.experience.micro_batches import (
    MicroBatch,
    MicroBatching,
    in_one_shape,
    in_row_order,
    lengths_in_blocks,
    micro_batches,
    widened,
)
from megatron_rl.experience.prefix_tree import Numbers, keys_of, nodes_of, other_bytes, tree_plan
from megatron_rl.losses.metrics import MetricParts, add_parts
from megatron_rl.model.context_segments import ALL_GATHER, ContextSegments, TrieSegments
from megatron_rl.model.eight_bits import round_again, token_multiple
from megatron_rl.model.segments import Segments, prefix_tokens_of
from megatron_rl.observe.liveness import counting, finished_one, made_progress
from megatron_rl.parallel.context_packs import plan_packs
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.parallel.zigzag import ContextShare, segment_multiple, zigzag_columns
from megatron_rl.records import Batch, conversations, prompt_numbers, row_lengths
from megatron_rl.roles.expert_routing import ExpertRouting
from megatron_rl.roles.image_passes import ImagePasses
from megatron_rl.roles.p2p_shapes import messages_of_known_shapes

PerToken = Callable[[Tensor, MicroBatch], Tensor]
"""(model output [b, S, ...], its micro-batch) -> numbers of each sampled token, [N, ...]."""

Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, MetricParts]]
"""(model output [b, S, ...], its micro-batch) -> (loss summed over its tokens, its parts of metrics by name)."""


class Pass(NamedTuple):
    """A block on the device, and its segments; None: a padded block that no other rank shares."""

    block: MicroBatch
    segments: Segments | None


class Pipeline:
    """One role's model chunks, in the order they run, together with the groups their schedule runs over."""

    def __init__(self, chunks: list[torch.nn.Module], groups: TrainGroups, device: torch.device) -> None:
        self.chunks: list[Any] = chunks  # Megatron's modules, which have a `config`
        self.groups = groups
        self.device = device
        self.routing: ExpertRouting | None = None  # for models with experts
        self.segments: Segments | None = None  # of the pass whose output a loss reads
        asking, whole, self._needs_whole = (
            any(getattr(module, name, False) for chunk in self.chunks for module in chunk.modules())
            for name in ("needs_slots", "needs_prefix_slots", "needs_whole")
        )
        config: Any = self.chunks[0].config
        self._num_parts = groups.grid.tp_size if config.sequence_parallel else 1
        # The tokens of a rank's part are a multiple of it.
        self.images = ImagePasses.of(self.chunks, groups, self._num_parts)
        self._token_multiple = FP8_RECIPES[config.fp8_recipe] if config.fp8 else token_multiple(self.chunks)
        example = torch.empty(0, dtype=config.params_dtype, device=device)
        self._needs_slots = asking or not has_varlen_attention(example)
        self._with_pieces = not whole and shares_prompts(device)

    def micro_batches(self, batch: Batch, cut: MicroBatching, sizes: Sequence[int] | None = None) -> list[MicroBatch]:
        """Cut a batch into blocks that this pipeline can run; all ranks must call.

        Under sequence parallelism the columns spread evenly over TP ranks, and under context parallelism every segment
        over twice as many chunks as there are ranks. Where data-parallel ranks hold different experts they need each
        other's results in every block, so all get as many as the one that has most; dynamic blocks are cut to the
        same number everywhere, so that no rank waits for another's. Packed rows share prompts where attention can.
        sizes: of neighbouring rows that must be in one block.

        Where passes choose how many ranks share them, these are the blocks of this rank, of the same batch as all
        others', and rows lie anywhere.
        """
        grid = self.groups.grid
        if grid.most_sharing is not None:
            return self._own_packs(batch, cut, sizes)
        per_segment = segment_multiple(grid.cp_size)
        lengths = lengths_in_blocks(batch, per_segment)
        prompts = self._prompts(batch) if cut.remove_padding and self._shares_prompts and not cut.as_tree else None
        with_tokens = self.routing is not None
        nodes = self._nodes(batch) if cut.as_tree and cut.is_dynamic and sizes is None else None

        def planned(num_blocks: int) -> list[list[int]]:
            if sizes is not None:
                return cut.plan_units(lengths, sizes, num_blocks, self._round_size)
            if nodes is not None:
                return tree_plan(*nodes, cut.max_tokens or 0, num_blocks, self._round_size)
            return cut.plan(lengths, num_blocks, self._round_size, prompts)

        def blocks_of(plan: list[list[int]]) -> list[MicroBatch]:
            columns = self._columns_multiple(grid.cp_size, [1] if cut.remove_padding else map(len, plan))
            options = (columns, prompts, per_segment, with_tokens, cut.as_tree, *self._image_options)
            return micro_batches(batch, plan, cut.remove_padding, *options)

        plan = planned(1)
        if not (cut.is_dynamic or grid.experts_join_dp_ranks):
            return blocks_of(plan)
        agreed = 0
        # A rank that needs more blocks than were agreed on, which is rare, makes all of them try once more.
        while (most := self._most_blocks(plan)) != agreed:
            agreed = most
            if len(plan) != agreed:
                plan = planned(agreed)
        blocks = blocks_of(plan)
        return [*blocks, *[blocks[0].neutral()] * (agreed - len(blocks))]

    def _columns_multiple(self, num_sharing: int, num_rows: Iterable[int]) -> int:
        """What the columns of blocks must be a multiple of. num_sharing: context-parallel ranks that share a block;
        num_rows: of each block.
        """
        tokens = self._token_multiple // math.gcd(self._token_multiple, *num_rows)
        return math.lcm(segment_multiple(num_sharing), num_sharing * self._num_parts * tokens)

    def _own_packs(self, batch: Batch, cut: MicroBatching, sizes: Sequence[int] | None) -> list[MicroBatch]:
        """This rank's part of the plan that all ranks of its context-parallel group make.

        A trie is cut as one sequence is: rows that share tokens count as one sequence, of as many tokens as nodes.
        """
        grid = self.groups.grid
        lengths = lengths_in_blocks(batch, segment_multiple(grid.cp_size) if "conversation_starts" in batch else 1)
        assert cut.max_tokens is not None and grid.most_sharing is not None  # preflight asks for both
        work, bundles = cut.work(lengths), [[row] for row in range(len(lengths))]
        if cut.as_tree and sizes is None:
            nodes, order = self._nodes(batch)
            bundles = tree_plan(nodes, order, cut.max_tokens, grid.cp_size)
            work = [sum(work[row] for row in rows) for rows in bundles]
            lengths = [len(np.unique(np.concatenate([nodes[row] for row in rows]))) for rows in bundles]
        plan = plan_packs(lengths, work, cut.max_tokens, grid.cp_size, grid.most_sharing, sizes)
        alone = math.lcm(2, self._columns_multiple(1, [1]))
        with_tokens, mine, blocks = self.routing is not None, plan.of_rank(self.groups.cp_rank), []
        for size, packs in groupby(mine, key=lambda one: one.size):
            # Any row does for what an idle pass is made of.
            parts = [[row for number in one.rows or (0,) for row in bundles[number]] for one in packs]
            columns = self._columns_multiple(size, [1])
            options = (columns, None, segment_multiple(size), with_tokens, cut.as_tree, *self._image_options)
            blocks += micro_batches(batch, parts, True, *options)
        blocks = [
            replace(block, num_sharing=one.size, is_reported=one.first == self.groups.cp_rank)
            if one.rows
            else block.idle(alone)
            for one, block in zip(mine, blocks, strict=True)
        ]
        if len(self.chunks) == 1:
            return blocks
        width = round_up(plan.most_tokens(lengths), alone)
        blocks = [widened(block, width * (block.num_sharing or 1)) for block in blocks]
        return [*blocks, *[blocks[0].idle(width)] * (-len(blocks) % self._round_size)]

    @property
    def _image_options(self) -> tuple[ImageMarks | None, bool]:
        """(Marks of image tokens, whether layers of this rank read features of them.)"""
        return None if self.images is None else self.images.marks, self.groups.is_first_stage

    def _prompts(self, batch: Batch) -> list[int] | None:
        """A prompt is computed once for rows whose tokens go to the same experts; not where rows are several
        conversations.
        """
        if "conversation_starts" in batch:
            return None
        replays = self.routing is not None and self.routing.replays
        return prompt_numbers(batch, batch.get("routed_experts") if replays else None)

    @staticmethod
    def _nodes(batch: Batch) -> tuple[list[Numbers], list[int]]:
        """(row -> its nodes in a tree of all rows, rows in the order of their first conversations' tokens)."""
        num_parts, parts = conversations(batch)
        rows = range(len(num_parts))
        keys = keys_of(batch.flat("input_ids"), other_bytes(batch, rows))
        nodes, order, _ = nodes_of(keys, parts.numpy())
        first, rank = (num_parts.cumsum(0) - num_parts).numpy(), order.argsort()
        ends = row_lengths(batch["input_ids"]).cumsum(0)[:-1].tolist()
        return np.split(nodes, ends), sorted(rows, key=lambda row: int(rank[first[row]]))

    @property
    def _shares_prompts(self) -> bool:
        """Not under context parallelism: a chunk attends to its own segment alone, and a response that is cut without
        its prompt would be uneven work.
        """
        return shares_prompts(self.device) and self.groups.grid.cp_size == 1

    @property
    def _round_size(self) -> int:
        """The interleaved schedule takes micro-batches in rounds of pp_size."""
        return self.groups.grid.pp_size if len(self.chunks) > 1 else 1

    def _most_blocks(self, plan: list[list[int]]) -> int:
        """The largest number of blocks in all data-parallel ranks' plans, in full rounds."""
        most = torch.tensor(round_up(len(plan), self._round_size))  # of the host, which need not wait for the device
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.groups.dp_group)
        return int(most)

    def parameters(self) -> list[Tensor]:
        """All parameters of this rank's part of the model."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    @torch.no_grad()
    def forward(self, batch: Batch, cut: MicroBatching, per_token: PerToken) -> Tensor | None:
        """`per_token` of every sampled token, row by row of the batch, on the CPU: [all tokens, ...].

        On the last stage; None before. All ranks must call.
        """
        blocks = self.micro_batches(batch, cut)

        def step(iterator: Iterator[Pass], model: torch.nn.Module) -> Any:
            one = next(iterator)
            # The schedule calls this with non_loss_data=True and collects what it returns.
            return self._run(model, one), lambda output, non_loss_data: per_token(output, one.block)

        outputs = self._schedule(step, self._scheduled(blocks), forward_only=True, collect_non_loss_data=True)
        return self.in_row_order(outputs, blocks, batch) if self.groups.is_last_stage else None

    def in_row_order(self, parts: Sequence[Tensor], blocks: Sequence[MicroBatch], batch: Batch) -> Tensor:
        """Values [sampled tokens, ...] of each block, on the device -> of the batch, row after row, on the CPU.

        Where ranks have blocks of their own all context-parallel ranks of the stage must call.
        """
        on_host = torch.cat(list(parts)).cpu().split([len(part) for part in parts])
        with_parts = zip(blocks, on_host, strict=False)  # the schedule may have added blocks without rows
        whole = in_row_order(with_parts, batch.num_sampled, on_host[0])
        if self.groups.grid.most_sharing is None:
            return whole
        whole = whole.to(self.device)
        dist.all_reduce(whole, group=self.groups.cp_group)
        return whole.cpu()

    def score(self, column: str, batch: Batch, cut: MicroBatching, per_token: PerToken) -> Batch | None:
        """Compute `per_token` of every sampled token, as a column of this name; on the last stage, None before."""
        flat = self.forward(batch.read_by(ACTOR_SCORES), cut, per_token)
        return None if flat is None else Batch(**{column: batch.per_sampled_token(flat)})

    def forward_backward(self, blocks: list[MicroBatch], loss: Loss) -> dict[str, Tensor] | None:
        """Accumulate gradients of the sum of all blocks' losses over all data-parallel ranks.

        The loss must already be divided by whatever it is a mean of. Returns the metrics of the blocks that this rank
        reports, added up, on the last stage; None before.
        """
        blocks = self._scheduled(blocks)
        # Megatron divides by the number of micro-batches and averages over data-parallel ranks; the sum is wanted. Over
        # context-parallel ranks, each of which has the whole loss and its own tokens' gradients, it adds up.
        scale = len(blocks) * self.groups.grid.dp_size
        if self.routing is not None:
            self.routing.loss_factor = scale

        def step(iterator: Iterator[Pass], model: torch.nn.Module) -> Any:
            one = next(iterator)
            block = one.block

            def scaled(output: Tensor) -> tuple[Tensor, MetricParts]:
                value, parts = loss(output, block)
                return value * scale, {name: part * block.is_reported for name, part in parts.items()}

            return self._run(model, one), scaled

        parts = self._schedule(step, blocks, forward_only=False)
        return add_parts(parts) if self.groups.is_last_stage else None

    def _scheduled(self, blocks: list[MicroBatch]) -> list[MicroBatch]:
        if len(self.chunks) == 1:
            return blocks
        if self.groups.grid.most_sharing is not None:
            # The blocks of one batch have one width on all ranks, and those of further examples another.
            width = max(block.input_ids.shape[1] // (block.num_sharing or 1) for block in blocks)
            return [widened(block, width * (block.num_sharing or 1)) for block in blocks]
        # Two stages of the interleaved schedule tell each other shapes forwards and backwards at once, in an order in
        # which the two cannot be distinguished.
        blocks = in_one_shape(blocks)
        return [*blocks, *[blocks[0].neutral()] * (-len(blocks) % self._round_size)]

    def _passes(self, blocks: Sequence[MicroBatch]) -> list[Pass]:
        """All blocks on this device, in one copy, with their segments."""
        blocks = [self._read_by_this_rank(block) for block in blocks]
        segments = [self._segments_of(block) for block in blocks]
        if self.images is not None:
            segments = [self.images.segments(*both) for both in zip(blocks, segments, strict=True)]
        parts = [block.tensors() for block in blocks] + [one.tensors() for one in segments if one is not None]
        moved = in_one_copy(parts, self.device)
        of_segments = iter(moved[len(blocks) :])
        return [
            Pass(block.with_tensors(mine), None if one is None else one.with_tensors(next(of_segments)))
            for block, mine, one in zip(blocks, moved, segments, strict=False)
        ]

    def _read_by_this_rank(self, block: MicroBatch) -> MicroBatch:
        """The block with this rank's share of it, where context-parallel ranks have one each."""
        group = self.groups.cp_group
        num_sharing = group.size() if block.num_sharing is None else block.num_sharing
        if num_sharing == 1:
            return block
        group = self.groups.pack_groups.get(num_sharing, group)
        if block.tree is not None:  # its columns are cut as one sequence
            columns = zigzag_columns((block.input_ids.shape[1],), group.size(), group.rank())
            share = ContextShare.of_places(columns, block.tree.places, group)
        else:
            columns = zigzag_columns(self._segments(block), group.size(), group.rank())
            share = ContextShare.of(columns, block.predicts_sampled, group)
        return replace(block, share=share, images=None if block.images is None else block.images.part(columns))

    def _segments_of(self, block: MicroBatch) -> Segments | None:
        """What Megatron passes to every layer: the segments of the block, on the CPU; None: a padded block, whole."""
        share, tree = block.share, block.tree
        how = None if self._needs_whole else self.chunks[0].config.cp_comm_type
        if tree is not None and (share is not None or not self._needs_slots or not shares_prompts(self.device)):
            prefixes = (tree.prefix_sizes, tree.prefix_columns)
            slots = (self._needs_slots, self._with_pieces)
            if share is None:
                how = None if self._needs_whole else ALL_GATHER
                return TrieSegments.share_of(self._segments(block), prefixes, 0, 1, None, how, *slots)
            where = (share.group.rank(), share.group.size(), share.group)
            return TrieSegments.share_of(self._segments(block), prefixes, *where, how, *slots)
        if share is not None:
            lengths, size = self._segments(block), share.group.size()
            num_rows = len(block.input_ids)
            return ContextSegments.cut(lengths, num_rows, share.columns, size, share.group, how, self._needs_slots)
        if block.segments is None:
            return None
        prefixes = prefix_tokens_of(block.prefixes) if tree is None else (tree.prefix_sizes, tree.prefix_columns)
        return Segments.on_host(block.segments, prefixes, self._needs_slots, self._with_pieces)

    @staticmethod
    def _segments(block: MicroBatch) -> tuple[int, ...]:
        """Lengths of the segments of one row, which is one where rows are padded."""
        return (block.input_ids.shape[1],) if block.segments is None else block.segments

    def _run(self, model: torch.nn.Module, one: Pass) -> Tensor:
        made_progress()
        block = one.block
        input_ids = block.input_ids if block.share is None else block.input_ids[:, block.share.columns]
        # Layers keep what they derive from them; another chunk's pass begins again.
        self.segments = segments = None if one.segments is None else one.segments.with_tensors(one.segments.tensors())
        # Megatron wants positions and does not use them: rotary embeddings go by segments.
        positions = torch.arange(input_ids.shape[1], device=self.device).expand_as(input_ids)
        routing = nullcontext() if self.routing is None else self.routing.forward_pass(self.chunks.index(model), block)
        embedded: Tensor | None = None
        embeds = self.groups.is_first_stage and model is self.chunks[0]
        if embeds and self.images is not None:
            tokens = None
            if block.images is not None and segments is not None:
                tokens = segments.images = self.images.tokens(block.images, self.device)
            embedded = self.images.embedded(model, input_ids, positions, tokens)
        with routing:
            output: Tensor = model(input_ids, positions, None, decoder_input=embedded, packed_seq_params=segments)
        if model is self.chunks[-1]:
            finished_one()
        return output

    def _schedule(self, step: Callable[..., Any], blocks: list[MicroBatch], **options: Any) -> list[Any]:
        cp_size = self.groups.grid.cp_size
        # Shapes of the parts that ranks read, which are passed from stage to stage.
        shapes = [
            (len(block.input_ids), block.input_ids.shape[1] // (block.num_sharing or cp_size)) for block in blocks
        ]
        config, is_uneven = self.chunks[0].config, len(set(shapes)) > 1
        config.variable_seq_lengths = is_uneven
        num_rows, num_columns = shapes[0]
        passes = self._passes(blocks)
        if is_uneven and self.groups.grid.pp_size > 1:
            parts = self.groups.grid.tp_size if config.sequence_parallel else 1
            sent = [(columns // parts, rows, config.hidden_size) for rows, columns in shapes]
            options |= messages_of_known_shapes(self.groups.pp_group, config, sent)
        round_again(self.chunks)
        with counting("micro-batches", len(blocks)):
            outputs: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(passes) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(blocks),
                seq_length=num_columns * cp_size,  # Megatron takes the part of one of them
                micro_batch_size=num_rows,
                **options,
            )
        # Megatron's blocks hold what the stage before sent, and its gradient, until the next pass.
        for chunk in self.chunks:
            get_attr_wrapped_model(chunk, "set_input_tensor")(None)
        return outputs
