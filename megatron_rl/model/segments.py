"""Packed rows: sequences end to end in one row, and how attention keeps them apart.

Legend: T tokens of the row, n segments, W slots: the tokens of all segments, each padded to the longest of its bucket.
Without a kernel for segments of any length, segments of similar length form a bucket and are computed together. They
are padded on the right, where the causal mask hides the filler from every real position.

A segment may have a prefix: tokens elsewhere in the row that come before it. A prompt of several responses is so stored
once. A segment's slots begin with its prefix, so a token may be in the slots of several segments. Its output is read
from the slots of the segment that stores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl.model.cascade_plan import SharedPiece, SlotPlan, cut_prefixes
from megatron_rl.model.image_tokens import ImageTokens

SHORTEST_SHARE = 0.75
"""A segment joins a bucket if its length is at least this share of the longest one,"""
FEW_TOKENS = 16
"""or at most that many tokens shorter."""


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments of similar length, the longest first; every segment is in one group."""
    groups: list[list[int]] = []
    for segment in sorted(range(len(lengths)), key=lambda segment: -lengths[segment]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[segment] >= min(SHORTEST_SHARE * longest, longest - FEW_TOKENS):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


@dataclass
class Segments(PackedSeqParams):
    """The segments of a packed row, which Megatron passes to every layer.

    cu_seqlens_q, cu_seqlens_kv: int32 [n + 1]; positions: int64 [T], each token's in its segment, prefix included.
    shapes: (segments, slots of each) of every bucket. token_of_slot: int64 [W]; slot_of_token: int64 [T].
    prefix_slots, prefix_tokens: int64, the slots of prefixes and their tokens; None if no slots have a prefix. pieces:
    parts of prefixes that are in no slots, as all their segments see them at once. turns: see `turns_of`.
    Where rows have images: image_positions: int64 [3, b, T], of the tokens in time, height and width, which rotary
    angles go by in place of `positions`; axes: int64 [D / 2], by which of the three each angle goes; images: features
    of image tokens, None where no layer of the pass reads any.

    `qkv_format` stays unset; with it Megatron would apply rotary embeddings segment by segment in every layer.
    """

    positions: Tensor | None = None
    shapes: tuple[tuple[int, int], ...] = ()
    token_of_slot: Tensor | None = None
    slot_of_token: Tensor | None = None
    prefix_slots: Tensor | None = None
    prefix_tokens: Tensor | None = None
    pieces: tuple[SharedPiece, ...] = ()
    turns: tuple[Tensor, Tensor] | None = None
    image_positions: Tensor | None = None
    axes: Tensor | None = None
    images: ImageTokens | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, prefixes: Sequence[tuple[int, int]] = ()) -> Segments:
        """Segments of these lengths, end to end. prefixes: of the first segments, (first token in the row, number of
        tokens), where 0 tokens is no prefix. Only slots have prefixes; `cu_seqlens` does not.
        """
        segments = cls.on_host(lengths, prefix_tokens_of(prefixes))
        return segments.with_tensors({name: tensor.to(device) for name, tensor in segments.tensors().items()})

    @classmethod
    def on_host(
        cls,
        lengths: Sequence[int],
        prefixes: tuple[Tensor, Tensor] | None = None,
        with_slots: bool = True,
        with_pieces: bool = False,
    ) -> Segments:
        """Make segments on the CPU, for `with_tensors` to move. with_slots: no kernel takes segments of any length.

        prefixes: of the first segments, (int64: tokens of each prefix, int64: these tokens, end to end). with_pieces:
        attention can meet shared pieces once; else slots hold all of a prefix.
        """
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        counts, before = prefix_tokens_of(()) if prefixes is None else prefixes
        borrowed = torch.nn.functional.pad(counts, (0, len(lengths) - len(counts)))
        longest, num_tokens = int((sizes + borrowed).max()), int(ends[-1])
        positions = torch.arange(num_tokens) - (ends - sizes - borrowed).repeat_interleave(sizes)
        cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).to(dtype=torch.int32)
        whole = cls(cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest, positions=positions)
        if not with_slots:
            return whole
        plan = SlotPlan(lengths, borrowed, before)
        pieces, plan = cut_prefixes(plan) if with_pieces else ((), plan)
        return replace(whole, pieces=pieces, **slots_of(plan))

    def tensors(self) -> dict[str, Tensor]:
        """Return what a pass reads on the device, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cu_seqlens_kv"}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def with_tensors(self, moved: Mapping[str, Tensor]) -> Self:
        """Return the segments of one pass, with these tensors in place of those that `tensors` has."""
        changed: dict[str, Any] = {**moved, "cu_seqlens_kv": moved.get("cu_seqlens_q"), "turns": None}
        return replace(self, **changed)


@dataclass
class PaddedRows(Segments):
    """Rows that are padded, each of them whole, where some have images: attention treats them as without segments."""


def slots_of(plan: SlotPlan) -> dict[str, Any]:
    """The slots of segments, as fields of `Segments`."""
    sizes, (borrowed, before) = torch.tensor(plan.lengths), plan[1:]
    starts, begins = sizes.cumsum(0) - sizes, borrowed.cumsum(0) - borrowed
    totals = (sizes + borrowed).tolist()
    tokens, shapes, slot_of_token = [], [], torch.empty(int(sizes.sum()), dtype=torch.int64)
    prefix_slots = []
    num_slots = 0
    for bucket in buckets(totals):
        width = totals[bucket[0]]
        column = torch.arange(width)[None]
        num_before, total = borrowed[bucket][:, None], (sizes + borrowed)[bucket][:, None]
        own = torch.minimum(column, total - 1) - num_before + starts[bucket][:, None]
        rows = own
        if len(before):
            place = begins[bucket][:, None] + torch.minimum(column, num_before - 1).clamp(min=0)
            rows = torch.where(column < num_before, before[place.clamp(max=len(before) - 1)], own)
        slots = num_slots + torch.arange(rows.numel()).view_as(rows)
        real = (column >= num_before) & (column < total)
        slot_of_token[rows[real]] = slots[real]
        prefix_slots.append(slots[column < num_before])
        num_slots += rows.numel()
        tokens.append(rows.flatten())
        shapes.append((len(bucket), width))
    token_of_slot, of_prefixes = torch.cat(tokens), torch.cat(prefix_slots)
    return {
        "shapes": tuple(shapes),
        "token_of_slot": token_of_slot,
        "slot_of_token": slot_of_token,
        "prefix_slots": of_prefixes if len(of_prefixes) else None,
        "prefix_tokens": token_of_slot[of_prefixes] if len(of_prefixes) else None,
    }


def prefix_tokens_of(prefixes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """(first token, number of tokens) of each prefix -> (int64: tokens of each prefix, int64: these tokens)."""
    first, counts = torch.tensor([*prefixes, (0, 0)], dtype=torch.int64)[:-1].T
    starts = first - (counts.cumsum(0) - counts)
    return counts, torch.arange(int(counts.sum())) + starts.repeat_interleave(counts)


def turns_of(angles: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles, [T, 1, 1, D / 2] each; for a packed row made once for all layers. Padded
    rows with images have angles of their own: [T, b, 1, D / 2].

    angles [longest, 1, 1, D]: of every position, both halves the same. segments: None: tokens are at positions 0, 1, ..
    """
    half = angles[..., : angles.shape[-1] // 2]
    if segments is None:
        return half.cos(), half.sin()
    if segments.turns is None:
        mine = half[segments.positions] if segments.image_positions is None else image_angles(half, segments)
        segments.turns = (mine.cos(), mine.sin())
    return segments.turns


def image_angles(half: Tensor, segments: Segments) -> Tensor:
    """half [longest, 1, 1, D / 2] -> every token's angles [T, b, 1, D / 2], each by the position on its own axis."""
    assert segments.image_positions is not None and segments.axes is not None
    time, height, width = (half[axis][:, :, 0, 0] for axis in segments.image_positions)
    mine = torch.where(segments.axes == 1, height, torch.where(segments.axes == 2, width, time))
    return mine.transpose(0, 1)[:, :, None]


class ToSlots(torch.autograd.Function):
    """x [T, ...] -> [W, ...]. Filler repeats a real token and must get no gradient, so backward gathers too, and adds
    the gradients from the slots of prefixes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        assert segments.token_of_slot is not None  # only Megatron's own class has none
        return x.index_select(0, segments.token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        segments = ctx.segments
        tokens = grad.index_select(0, segments.slot_of_token)
        if segments.prefix_slots is not None:
            tokens.index_add_(0, segments.prefix_tokens, grad.index_select(0, segments.prefix_slots))
        return tokens, None


class ToTokens(torch.autograd.Function):
    """x [W, ...] -> [T, ...]: the slots of real tokens; a prefix is read from the segment that stores it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments, ctx.num_slots = segments, len(x)
        assert segments.slot_of_token is not None
        return x.index_select(0, segments.slot_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slots = grad.new_zeros(ctx.num_slots, *grad.shape[1:])
        return slots.index_copy_(0, ctx.segments.slot_of_token, grad), None


def to_slots(x: Tensor, segments: Segments) -> list[Tensor]:
    """x [T, ...] -> one [segments, slots of each, ...] for every bucket."""
    slots: Tensor = ToSlots.apply(x, segments)
    return by_bucket(slots, segments)


def by_bucket(slots: Tensor, segments: Segments) -> list[Tensor]:
    """slots [W, ...] -> one [segments, slots of each, ...] for every bucket."""
    parts = slots.split([count * width for count, width in segments.shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, segments.shapes, strict=True)]


def to_tokens(buckets: Sequence[Tensor], segments: Segments) -> Tensor:
    """One [segments, slots of each, ...] for every bucket -> [T, ...]."""
    tokens: Tensor = ToTokens.apply(torch.cat([bucket.flatten(0, 1) for bucket in buckets]), segments)
    return tokens
