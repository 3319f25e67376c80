"""Replay and record the expert choices of the actor's routers on one rank.

    begin -> [forward_pass(chunk, block)] of every chunk and block -> finish -> recorded choices

Each rank handles the layers of its own chunks. Under context parallelism a rank's routers see its share of every
block's columns, and under sequence parallelism a part of these, which its TP ranks put together again, and then its CP
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.megatron import OverrideTransformerConfig
from megatron_rl.device import in_one_copy
from megatron_rl.experience.micro_batches import MicroBatch, in_row_order
from megatron_rl.experience.recorded_experts import num_others
from megatron_rl.experience.router_token_index import (
    known_tokens,
    num_rows_at,
    places,
    places_of_rows,
    recorded_experts,
)
from megatron_rl.model.experts import has_experts
from megatron_rl.model.router_balance import Balance
from megatron_rl.model.router_replay import ChunkRouters, RoutingPlan
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.records import Batch, conversations, row_lengths


class ExpertRouting:
    """Taps in the routers of all chunks; all ranks must build it and call `others` and `gathered`.

    replays: of the pass under way, tokens go where its record says, as far as it does. records: the routers' own
    choices are kept, for `finish`. routed: numbers of the layers of the whole model that have experts; where experts
    are spoken of here, and in records, these are the layers. loss_factor: what `Pipeline` multiplies the loss of every
    block with.
    """

    def __init__(
        self, models: list[Any], groups: TrainGroups, device: torch.device, options: OverrideTransformerConfig
    ) -> None:
        """options: which losses balance the routers."""
        config = models[0].config
        self.num_experts = config.num_moe_experts
        self.routed = [layer for layer in range(config.num_layers) if has_experts(config, layer)]
        self.chunks = [ChunkRouters(model, self.num_experts, self.routed) for model in models]
        self.groups, self.device = groups, device
        self.replays = self.records = self._of_routed = False
        self._is_cut = config.sequence_parallel
        self._coefficients = (options.moe_aux_loss_coeff, options.moe_z_loss_coeff or 0.0)
        self._totals = (1, 1)  # rows and tokens of the mini-batch, on all ranks
        self.loss_factor = 1.0
        self._kept: list[list[tuple[MicroBatch, Tensor]]] = [[] for _ in self.chunks]
        self._layers_of_stages: list[list[int]] = [[] for _ in range(groups.grid.pp_size)]
        dist.all_gather_object(self._layers_of_stages, self.layers, group=groups.pp_group)

    @property
    def layers(self) -> list[int]:
        """Places of this rank's layers among all that have experts, chunk after chunk."""
        return [layer for chunk in self.chunks for layer in chunk.layers]

    def begin(self, *, replays: bool, records: bool, of_routed: bool = False) -> None:
        """Set the mode of the next pass and reset its counts. of_routed: record only blocks with experts, not those of
        other batches that train in the same pass."""
        self.replays, self.records, self._of_routed = replays, records, of_routed
        for chunk in self.chunks:
            chunk.begin()
        for kept in self._kept:
            kept.clear()

    @property
    def is_balanced(self) -> bool:
        """Whether routers have balancing losses."""
        return any(self._coefficients)

    def count_rows(self, blocks: Sequence[MicroBatch]) -> None:
        """Count rows and tokens of all ranks' blocks, over which balancing losses are means. All ranks must call."""
        lengths = [places_of_rows(block)[2] for block in blocks if block.is_reported]
        totals = torch.tensor([sum(map(len, lengths)), sum(int(of_rows.sum()) for of_rows in lengths)])
        totals = totals.to(self.device)
        dist.all_reduce(totals, group=self.groups.row_group)
        num_rows, num_tokens = totals.tolist()
        self._totals = (max(num_rows, 1), max(num_tokens, 1))

    def _balance(self, block: MicroBatch) -> Balance | None:
        """The rows of a block as the routers of this rank see them; None without balancing losses."""
        if not self.is_balanced or not torch.is_grad_enabled():
            return None
        found, rows, lengths = places_of_rows(block)
        here = self._part(torch.arange(block.input_ids.numel()), block)
        token_at = torch.full((block.input_ids.numel(),), -1)
        token_at[here] = torch.arange(len(here))
        is_here = token_at[found] >= 0
        groups = [self.groups.tp_group] if self._is_cut else []
        if block.share is not None:
            groups.append(block.share.group)
        aux, z = (c * self.loss_factor / total for c, total in zip(self._coefficients, self._totals, strict=True))
        there = {"tokens": token_at[found][is_here], "rows": rows[is_here], "lengths": lengths.float()}
        return Balance(**in_one_copy([there], self.device)[0], groups=groups, aux_weight=aux, z_weight=z)

    @contextmanager
    def forward_pass(self, chunk: int, block: MicroBatch) -> Iterator[None]:
        """Wrap the forward pass of a block through a chunk; blocks of each chunk come in their order."""
        routers = self.chunks[chunk]
        recorded = recorded_experts(block, routers.layers) if self.replays else None
        experts, known = (None, None) if recorded is None else (self._here(part, block) for part in recorded)
        records = self.records and not (self._of_routed and known_tokens(block).experts is None)
        plan = RoutingPlan(
            self._here(num_rows_at(block), block),
            torch.is_grad_enabled(),
            records,
            experts,
            known,
            self._balance(block),
        )
        with routers.using(plan):
            yield
        if records:
            self._kept[chunk].append((block, routers.take_choices()))

    def _here(self, places_of_block: Tensor, block: MicroBatch) -> Tensor:
        """Return `_part` on this rank's device."""
        return in_one_copy([{"places": self._part(places_of_block, block)}], self.device)[0]["places"]

    def _part(self, places_of_block: Tensor, block: MicroBatch) -> Tensor:
        """[S * b, ...] -> this rank's part of it. All on the CPU."""
        if block.share is not None:
            columns = places_of_block.view(-1, len(block.input_ids), *places_of_block.shape[1:])
            places_of_block = columns[block.share.host_columns].flatten(0, 1)
        if self._is_cut:
            places_of_block = places_of_block.chunk(self.groups.grid.tp_size)[self.groups.tp_rank]
        return places_of_block

    def finish(self, lengths: Tensor) -> Tensor | None:
        """End the pass: [N, this rank's layers, K] of all tokens of the record, row after row, where they are recorded.

        lengths: int64, tokens of every row of the record. All TP and context-parallel ranks must call. Raises
        RuntimeError where a pass was not run again that should have been.
        """
        for chunk in self.chunks:
            chunk.must_be_done()
        if not self.records:
            return None
        return torch.cat([self._rows(kept, lengths) for kept in self._kept], 1)

    def _rows(self, kept: list[tuple[MicroBatch, Tensor]], lengths: Tensor) -> Tensor:
        parts = [self._whole(own, block)[places(block)] for block, own in kept]
        blocks = (block for block, _ in kept)
        whole = in_row_order(zip(blocks, parts, strict=True), lengths, parts[0])
        if self.groups.grid.most_sharing is None:
            return whole
        summed = whole.to(self.device, torch.int32)
        dist.all_reduce(summed, group=self.groups.cp_group)
        return summed.cpu().to(whole.dtype)

    def _whole(self, own: Tensor, block: MicroBatch) -> Tensor:
        """This rank's part of [S * b, ...] -> all of it, on the CPU."""
        if self._is_cut:
            own = torch.cat(self._of_all(own, self.groups.tp_group))
        if block.share is None:
            return own
        width, columns = block.input_ids.shape[1], block.share.columns
        whole = own.new_empty(width, len(block.input_ids), *own.shape[1:])
        shares = zip(self._of_all(columns, block.share.group), self._of_all(own, block.share.group), strict=True)
        for where, part in shares:
            whole[where] = part.view(len(where), *whole.shape[1:])
        return whole.flatten(0, 1)

    def _of_all(self, own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """Gather the tensors of all ranks of the group, all of one shape; on the CPU."""
        mine = as_bytes(own).to(self.device)
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        return [part.cpu().view(own.dtype) for part in parts]

    def others(self, own: Tensor, batch: Batch) -> Tensor:
        """int64 [B]: how many of the `routed_experts` of each row, over all layers, the routers would not have chosen.

        own: what `finish` gave.
        """
        experts, (_, sequences) = batch["routed_experts"], conversations(batch)
        theirs, num_known = experts.values()[:, self.layers], row_lengths(experts)
        counts = num_others(theirs, num_known, own, row_lengths(batch["input_ids"]), sequences).to(self.device)
        dist.all_reduce(counts, group=self.groups.pp_group)
        return counts.cpu()

    def gathered(self, own: Tensor) -> Tensor | None:
        """`finish`'s result of all stages: [N, L, K] on the last stage's rank that speaks for it; None elsewhere."""
        if self.groups.tp_rank != 0 or self.groups.cp_rank != 0:
            return None
        ranks, width = dist.get_process_group_ranks(self.groups.pp_group), own.element_size()
        if not self.groups.is_last_stage:
            if self.layers:
                dist.send(as_bytes(own).to(self.device), ranks[-1], group=self.groups.pp_group)
            return None
        whole = own.new_empty(len(own), len(self.routed), own.shape[-1])
        whole[:, self.layers] = own
        for rank, layers in zip(ranks[:-1], self._layers_of_stages[:-1], strict=True):
            if not layers:
                continue
            shape = (len(own), len(layers), own.shape[-1] * width)
            part = torch.empty(shape, dtype=torch.uint8, device=self.device)
            dist.recv(part, rank, group=self.groups.pp_group)
            whole[:, layers] = part.cpu().view(own.dtype)
        return whole

    def load(self) -> Tensor:
        """int64 [L, E] of the pass: tokens of all ranks that each expert was sent. All ranks must call."""
        counts = torch.zeros(len(self.routed), self.num_experts, dtype=torch.int64, device=self.device)
        for chunk in self.chunks:
            of_chunk = chunk.counts()
            if of_chunk is not None:
                counts[chunk.layers] += of_chunk
        dist.all_reduce(counts)
        return counts.cpu() if self._is_cut else counts.cpu() // self.groups.grid.tp_size

    def losses(self) -> Tensor:
        """float64 [L, 2] of the pass: the aux loss of every layer, and its z loss, over all ranks. All must call."""
        sums = torch.zeros(len(self.routed), 2, dtype=torch.float64, device=self.device)
        for chunk in self.chunks:
            of_chunk = chunk.losses()
            if of_chunk is not None:
                sums[chunk.layers] += of_chunk
        dist.all_reduce(sums)
        copies = 1 if self._is_cut else self.groups.grid.tp_size
        return sums.cpu() / copies / torch.tensor(self._totals)


def as_bytes(choices: Tensor) -> Tensor:
    """Reinterpret as uint8, which every backend sends; the last dim gets longer."""
    return choices.contiguous().view(torch.uint8)
