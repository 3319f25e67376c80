"""A trainable model: Megatron's DDP, distributed optimizer and learning-rate schedule around a rank's model chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config.megatron import MegatronConfig, OptimConfig, OverrideDDPConfig
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.hybrid_engine.offload import HostCopy, Offloadable, Zeros
from megatron_rl.losses.aggregate import BatchTotals, counted
from megatron_rl.losses.metrics import MetricParts, numbers_over_ranks
from megatron_rl.model.decoder import Chunk
from megatron_rl.observe.memory_ledger import storage_bytes
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.roles.adam import AdamState, optimizer_config, use_fused_kernels
from megatron_rl.roles.pipeline import Loss, Pipeline

if TYPE_CHECKING:
    from megatron_rl.roles.expert_balance import ExpertBalance

OWN_LOSS = "loss of this rank"
"""Name under which the loss itself is added up over a rank's micro-batches."""


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step; the same on all ranks.

    grad_norm: global, before clipping; for a skipped step the sum of all buffers' norms. lr: the learning rate, used or
    not. skipped: gradient or loss were not finite. empty: no token counted. In both cases weights, moments and schedule
    are unchanged. loss_scale: factor of the loss in this step; 0: none.
    """

    grad_norm: float
    lr: float
    skipped: bool = False
    empty: bool = False
    loss_scale: int = 0

    def metrics(self, role: str) -> dict[str, float]:
        """Metrics of the step, with names that begin with `role`."""
        scaled = {f"{role}/loss_scale": float(self.loss_scale)} if self.loss_scale else {}
        return scaled | {
            f"{role}/grad_norm": self.grad_norm,
            f"{role}/lr": self.lr,
            f"{role}/skipped_updates": float(self.skipped),
            f"{role}/empty_updates": float(self.empty),
        }


class LossScaling:
    """Megatron's dynamic scale of a float16 loss (Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740).

    It is doubled after 1000 good steps and halved at a step that overflows. Other dtypes have none.
    """

    def __init__(self, optimizer: Any) -> None:
        """`optimizer`: Megatron's, of which dense layers and experts have one scaler each, with the same numbers."""
        scalers = [getattr(each, "grad_scaler", None) for each in optimizer.chained_optimizers]
        self._scalers: list[Any] = [scaler for scaler in scalers if scaler is not None]

    @property
    def scale(self) -> int:
        """Factor of the next loss; 0 without loss scaling."""
        return int(self._scalers[0].scale) if self._scalers else 0

    @property
    def good_steps(self) -> int:
        """Steps since the scale last changed."""
        return int(self._scalers[0]._growth_tracker) if self._scalers else 0

    def reduce(self) -> None:
        """Halve the scale, to at least 1."""
        for scaler in self._scalers:
            scaler.update(found_inf=True)

    def set(self, scale: int, good_steps: int) -> None:
        """Continue with the scale of a checkpoint; with scale 0 the initial scale stays."""
        for scaler in self._scalers:
            if scale:
                scaler._scale = torch.full_like(scaler.scale, scale)
                scaler._growth_tracker = good_steps


def in_flat_buffers(models: list[Chunk], override: OverrideDDPConfig) -> list[DistributedDataParallel]:
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
    """Gathers the parts of parameters that other data-parallel ranks updated: at once, or in the next forward pass.

    In the latter case code that reads parameters without a forward pass must call `finish` first.
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
        """Note that the optimizer has updated this rank's part."""
        self._is_pending = self._overlaps

    def finish(self) -> None:
        """Wait for all parameters, if any is missing. All data-parallel ranks must call."""
        if self._is_pending:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
            self._is_pending = False


class TrainableModel:
    """One rank's part of a model that is trained; every method must be called by all ranks.

    Parameters are in the flat `param_data` buffers of `chunks`, one DDP for each chunk of the model, and stay at their
    addresses from construction on.
    """

    def __init__(
        self,
        models: list[Chunk],
        load_weights: Callable[[], None],
        optim: OptimConfig,
        num_run_steps: int,
        megatron: MegatronConfig,
        groups: TrainGroups,
        device: torch.device,
        frozen: Sequence[Any] = (),
    ) -> None:
        """`load_weights` fills the parameters of `models`; it is called once, when they are in DDP's buffers.

        `num_run_steps`: optimizer steps of the whole run, which a decay without a length of its own lasts. frozen:
        buffers of parameters without gradients, in their `param_data`.
        """
        self.frozen = frozen
        self.megatron = megatron
        self.groups = groups
        self.device = device
        # All chunks share one configuration object, which the schedule reads.
        self.config = models[0].config
        self.chunks = in_flat_buffers(models, megatron.override_ddp_config)
        self.sync = ParameterSync(self.chunks, self.config)
        # Before the optimizer, which clones masters of bfloat16 weights.
        load_weights()
        # Views of float32 weights are leaves then, and nothing else may be updated on the host.
        with torch.no_grad():
            self.optimizer = get_megatron_optimizer(
                optimizer_config(optim, self.config), self.chunks, use_gloo_process_groups=False
            )
        use_fused_kernels(self.optimizer)
        self.adam = AdamState(self.optimizer)
        self.loss_scaling = LossScaling(self.optimizer)
        self.scheduler = lr_scheduler(self.optimizer, optim, num_run_steps)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.pipeline = Pipeline(self.chunks, groups, device)
        self.balance: ExpertBalance | None = None
        self._loss, self._num_tokens = self.no_sums

    @property
    def no_sums(self) -> tuple[torch.Tensor, int]:
        """`sums` of no pass."""
        return torch.zeros((), device=self.device), 0

    @property
    def sums(self) -> tuple[torch.Tensor, int]:
        """(This rank's share of the loss, tokens of all ranks that count in it), of the gradients in the buffers."""
        return self._loss, self._num_tokens

    @sums.setter
    def sums(self, sums: tuple[torch.Tensor, int]) -> None:
        self._loss, self._num_tokens = sums

    @property
    def models(self) -> list[Chunk]:
        """The chunks themselves, without DDP."""
        return [chunk.module for chunk in self.chunks]

    @property
    def param_buffers(self) -> list[Any]:
        """DDP's flat buffers of all chunks; each has `param_data` and `grad_data`."""
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def memory(self) -> dict[str, int]:
        """Bytes of everything that is on this device now and stays between steps."""
        kept = {buffer.param_data.untyped_storage()._cdata for buffer in self.param_buffers}
        moments = [tensor for tensor in self.adam.since_first_step() if tensor.device.type == self.device.type]
        kept |= {tensor.untyped_storage()._cdata for tensor in moments}
        parameters = [buffer.param_data for buffer in (*self.param_buffers, *self.frozen)]
        others = [tensor for tensor in self.optimizer_state() if tensor.untyped_storage()._cdata not in kept]
        return {
            "parameters": storage_bytes(parameters),
            "gradients": storage_bytes([buffer.grad_data for buffer in self.param_buffers]),
            "moments": storage_bytes(moments),
            "masters": storage_bytes(others),
        }

    def optimizer_state(self) -> list[torch.Tensor]:
        """Every tensor on this device that belongs to the optimizer alone: moments and masters."""
        params = {buffer.param_data.untyped_storage()._cdata for buffer in self.param_buffers}
        return [
            tensor
            for tensor in self.adam.tensors()
            if tensor.device.type == self.device.type and tensor.untyped_storage()._cdata not in params
        ]

    def continue_from(self, num_updates: int, adam_step: int) -> None:
        """Set schedule and Adam to where they stood after `num_updates` optimizer steps; weights and moments must be
        there."""
        self.scheduler.num_steps = num_updates
        # Learning rate and weight decay follow from the number of steps.
        self.scheduler.step(increment=0)
        self.adam.set_step(adam_step)
        self.adam.take_weights()

    def offloadable(self) -> list[Offloadable]:
        """Memory of this model that is offloaded during generation, as the offload keys say."""
        megatron = self.megatron
        memory: list[Offloadable] = []
        if megatron.grad_offload:
            memory.append(Zeros(buffer.grad_data for buffer in self.param_buffers))
        if megatron.optimizer_offload:
            memory.append(HostCopy(self.optimizer_state))
        if megatron.param_offload:
            memory.append(HostCopy(lambda: [buffer.param_data for buffer in (*self.param_buffers, *self.frozen)]))
        return memory

    def totals(self, blocks: list[MicroBatch]) -> BatchTotals:
        """Rows and tokens that count in one optimizer step, over all ranks' blocks; losses are divided by them."""
        counts_of_blocks = [counted(block.kept, block.num_sampled) * block.is_reported for block in blocks]
        counts = torch.stack(counts_of_blocks).sum(0).to(self.device)
        dist.all_reduce(counts, group=self.groups.row_group)
        return BatchTotals(*counts.tolist())

    def compute_gradients(self, blocks: list[MicroBatch], totals: BatchTotals, loss: Loss) -> dict[str, float] | None:
        """Gradients of `loss` summed over all blocks and ranks, in the DDP buffers; `totals` are those of the blocks.

        Returns the metrics of all ranks' blocks on the last stage, None before.
        """
        self.clear_gradients()
        return self.add_gradients(blocks, totals, loss)

    def add_gradients(self, blocks: list[MicroBatch], totals: BatchTotals, loss: Loss) -> dict[str, float] | None:
        """`compute_gradients`, added to those that are in the buffers."""
        if self.balance is not None:
            self.balance.begin(blocks)

        def with_own_loss(output: torch.Tensor, block: MicroBatch) -> tuple[torch.Tensor, MetricParts]:
            value, parts = loss(output, block)
            return value, {**parts, OWN_LOSS: value.detach()}

        parts = self.pipeline.forward_backward(blocks, with_own_loss)
        self._num_tokens += totals.tokens
        of_experts = {} if self.balance is None else self.balance.metrics()
        if parts is None:
            return None
        self._loss = self._loss + parts.pop(OWN_LOSS)
        return numbers_over_ranks(parts, self.groups.row_group) | of_experts

    def clear_gradients(self) -> None:
        """Zero all gradients."""
        self._loss, self._num_tokens = self.no_sums
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> Update:
        """Clip, update and advance the schedule; or skip all of it, on all ranks, if the gradients are unusable.

        A step is skipped when gradient or loss of any rank are not finite: weights, moments and schedule stay as they
        are, as in Megatron's training loop, the gradients are cleared, and a loss scale is halved. A step in which no
        token counts is skipped with the scale unchanged: Adam would move the weights by its moments.
        """
        self.sync.stepped()
        lr, scale = self.optimizer.param_groups[0]["lr"], self.loss_scaling.scale
        grad_norm, loss = self._sizes_over_all_ranks()
        skipped, empty = not (math.isfinite(grad_norm) and math.isfinite(loss)), self._num_tokens == 0
        if skipped or empty:
            self.clear_gradients()
            if skipped:
                self.loss_scaling.reduce()
            return Update(grad_norm / max(scale, 1), lr, skipped, empty and not skipped, scale)
        # Takes the scale out of the gradients, and counts towards a larger one.
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        if self.balance is not None:
            self.balance.stepped()
        return Update(float(grad_norm), lr, loss_scale=scale)

    def _sizes_over_all_ranks(self) -> tuple[float, float]:
        """Gradient norms of all buffers, and absolute losses, added up over all ranks: not finite where any is not."""
        norms = torch.stack([buffer.grad_data.norm() for buffer in self.param_buffers]).sum()
        # The loss has to be looked at, too: clamping to a range turns NaN's gradient into 0.
        sizes = torch.stack([norms, self._loss.abs()])
        dist.all_reduce(sizes)
        return tuple(sizes.tolist())


def lr_scheduler(optimizer: Any, optim: OptimConfig, num_run_steps: int) -> OptimizerParamScheduler:
    """Warm-up then `lr_decay_style`, counted in optimizer steps; weight decay stays constant.

    As in Megatron the warm-up starts from 0, so with one the very first update changes nothing.
    """
    lr_decay_steps = optim.lr_decay_steps or num_run_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=max(lr_decay_steps, optim.lr_warmup_steps + 1),
        lr_decay_style=optim.lr_decay_style,
        lr_wsd_decay_style=optim.lr_wsd_decay_style,
        wsd_decay_steps=optim.lr_wsd_decay_steps,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
