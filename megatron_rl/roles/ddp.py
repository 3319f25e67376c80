"""A rank's model chunks in Megatron's DDP: flat buffers, buckets, and what of their traffic runs beside computing."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel

from megatron_rl.config.megatron import OverrideDDPConfig


def in_flat_buffers(models: list[GPTModel], override: OverrideDDPConfig) -> list[DistributedDataParallel]:
    """The chunks in Megatron's DDP, which moves their parameters into its `param_data` and zeroes its `grad_data`.

    As in Megatron's own training only the first chunk of a stage has several buckets. All ranks must call.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=override.overlap_grad_reduce,
        overlap_param_gather=override.overlap_param_gather,
        bucket_size=override.bucket_size,
    )
    return [
        DistributedDataParallel(model.config, ddp_config, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]


class ParameterSync:
    """Brings the parts of parameters that other data-parallel ranks have updated: at once, or in the next forward pass.

    In the latter case what reads parameters otherwise than by a forward pass has to `finish` first.
    """

    def __init__(self, chunks: list[DistributedDataParallel], config: Any) -> None:
        """config: the chunks' TransformerConfig, from which Megatron's schedules take when gradients are reduced."""
        self._chunks = chunks
        ddp_config = chunks[0].ddp_config
        self._overlaps = bool(ddp_config.overlap_param_gather)
        self._is_pending = self._overlaps
        if ddp_config.overlap_grad_reduce:
            contexts = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]

    def stepped(self) -> None:
        """The optimizer has updated this rank's part."""
        self._is_pending = self._overlaps

    def finish(self) -> None:
        """Wait for all parameters; nothing happens where none is missing. All data-parallel ranks must call."""
        if self._is_pending:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
            self._is_pending = False
