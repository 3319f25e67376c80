"""From kernels and collectives to the hardware's own numbers, before any role has run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.ledger.planner.hardware import Hardware, Overheads
from megatron_rl.ledger.planner.time import LINK_EFFICIENCY, MEMORY_EFFICIENCY
from megatron_rl.profile.fit import half_rows, parallel_ranks, turns_share
from megatron_rl.profile.samples import (
    ALL_REDUCE,
    ATTENTION,
    COPY,
    HEAD_SIZE,
    HEADS,
    HOST_COPY,
    MATMUL,
    SMALL,
    WIDTH,
    MeasuredSample,
    World,
)

CONTEXT_BYTES = {"cpu": 0.7e9, "cuda": 2.0e9}


def base_hardware(
    alone: World, together: World | None, memory_bytes: float, dtype: str, num_ranks: int, num_cores: int
) -> Hardware:
    """What a machine can do without overheads. alone, together: kernels of one rank, and of all ranks at once, with
    their collectives; None: there is one rank. dtype: that roles have.
    """
    device, width = alone.task.device, WIDTH[alone.task.device]
    rates = {name: half_rows(alone.of(f"{MATMUL} {name}"), width) for name in ("float32", "bfloat16")}
    shared, turns = 0.0, 1.0
    if device == "cpu":
        everyone = (together or alone).of(SMALL)[0]
        shared = parallel_ranks(alone.of(SMALL)[0], everyone, num_ranks, num_cores)
        turns = turns_share(together or alone, shared)
    crowding = num_ranks / (shared * turns) if shared and num_ranks > shared else 1.0
    crowded = crowding if together is not None else 1.0
    copying = (together or alone).of(COPY)[0]
    link = _link_bandwidth(together.of(ALL_REDUCE), crowded) if together is not None else copying.size / copying.seconds
    host = alone.of(HOST_COPY)[0]
    peak = rates[dtype][0]
    return Hardware(
        "profiled",
        memory_bytes=memory_bytes,
        bfloat16_flops=rates["bfloat16"][0],
        float32_flops=rates["float32"][0],
        # A copy reads and writes; the clock takes a share of the data sheet's number.
        memory_bandwidth=2 * copying.size / copying.seconds * crowded / MEMORY_EFFICIENCY,
        link_bandwidth=link,
        network_bandwidth=link,
        matmul_efficiency=1.0,
        context_bytes=CONTEXT_BYTES[device],
        host_bandwidth=host.size / host.seconds,
        half_rows=rates[dtype][1],
        attention_share=_attention_share(alone.of(ATTENTION), peak),
        parallel_ranks=shared,
        turns_share=turns,
        overheads=Overheads(call=0.0, launch=0.0),
    )


def _link_bandwidth(samples: Sequence[MeasuredSample], crowding: float) -> float:
    """Bytes/s of one rank with a core of its own, of the largest message."""
    largest = max(samples, key=lambda sample: (sample.size, sample.group))
    sent = 2 * (largest.group - 1) / largest.group * largest.size
    return sent / (largest.seconds / crowding) / LINK_EFFICIENCY


def _attention_share(samples: Sequence[MeasuredSample], peak: float) -> float:
    """Of the rate of matrix products: causal attention computes half of the square, and counts as that."""
    longest = max(samples, key=lambda sample: sample.size)
    flops = 2 * HEADS * HEAD_SIZE * longest.size**2
    return min(1.0, flops / longest.seconds / peak)
