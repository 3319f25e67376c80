"""The rollout: vLLM, on the actor's memory where they share a pool, or on weights that come by a weight transfer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.device import release_cached
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.hybrid_engine.adapter_slots import AdapterSlots
from megatron_rl.hybrid_engine.allgather_pp import FOREIGN_POOL, AllGatherPPModel, FlatParameters
from megatron_rl.hybrid_engine.composed_weights import ComposedPart, ComposedWeights
from megatron_rl.hybrid_engine.hybrid_engine import HybridEngine, TransitionReport
from megatron_rl.hybrid_engine.offload import Offloadable, offloaded
from megatron_rl.hybrid_engine.rng import swap
from megatron_rl.model.families import (
    VOCAB_PADDING,
    mtp_constants_of,
    mtp_specs,
    placed_settings,
    rollout_settings,
    routed_layers,
    tensors_of,
)
from megatron_rl.model.families.adapter_params import held_rank
from megatron_rl.parallel.rank_grid import RolloutGrid, rollout_grid
from megatron_rl.parallel.scale_blocks import SCALES
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.received_weights import Arrival, Arrivals, ReceivedWeights, received_weights
from megatron_rl.roles.role import Role
from megatron_rl.roles.transfer_address import TransferAddress, TransferSettings
from megatron_rl.rollout.slices import Slice, SliceReport

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.roles.actor import Actor
    from megatron_rl.roles.model_source import ModelSource
    from megatron_rl.rollout.engine import EngineAdapters
    from megatron_rl.rollout.shared_weights import MTPModel

ADAPTER_POOL = "megatron_rl received adapters"
"""The tag of received adapters in vLLM's CUDA allocator."""


class Rollout(Role):
    """Generation. The constructor ends in train mode: memory that is not shared with training is released."""

    def __init__(
        self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role], transfer: TransferSettings | None = None
    ) -> None:
        """neighbours: the other roles of this rank. transfer: for an actor in another pool, which this one must
        join then; None: the actor is one of the neighbours.
        """
        from megatron_rl.checkpoint.constants import read_constants
        from megatron_rl.rollout.engine import RolloutEngine

        super().__init__(spec)
        source = rank.source(spec)
        settings = source.hf_config.to_dict()
        self._held: int | None = None  # the version that this stay in rollout mode reads in the actor's memory
        grid = rollout_grid(rank.groups.grid, spec.settings)
        self._actor = None if transfer is not None else cast("Actor", neighbours[ACTOR])
        self._constants = read_constants(source.model.constants.values(), source.path, rank.device.torch_device)
        self.weights: AllGatherPPModel | ComposedWeights | ReceivedWeights
        self.replica = grid.replica(rank.groups.rank) + (0 if transfer is None else transfer.first_replica)
        offloadable = all_offloadable(neighbours)
        # vLLM reseeds the process's generators while it starts.
        train_rng = swap(None)
        # vLLM compiles and measures with as much memory as generation will have, not next to all of training's.
        with offloaded(offloadable):
            release_cached(rank.device.torch_device)
            if transfer is None:
                self.weights = shared_weights(cast("Actor", neighbours[ACTOR]), spec, rank, source, grid)
                self.weights.gather()
            else:
                self.weights = received_weights(transfer, spec, rank, source, grid)
                self._constants |= self.weights.fill_constants(self._constants)
            of_model, mtp = parted(self.weights.tensors, source, rank)
            placeholders = rank.unsampled
            self.generator = RolloutEngine(
                model_path=spec.model_path,
                architecture=source.hf_config.architectures[0],
                eos_token_ids=source.folder.end_tokens.ids,
                num_tokens=source.folder.num_sampled_tokens(rank.config),
                config=spec.settings,
                max_model_len=rank.config.longest_sequence,
                dtype=spec.megatron.dtype,
                grid=grid,
                tensors=of_model | self._constants,
                mtp=mtp,
                adapters=adapters_of(self.weights, spec.lora),
                seed=rank.config.trainer.seed,
                hf_overrides=engine_settings(source, rank.config),
                text_only=source.model.family.inside is not None and not placeholders,
                placeholders=placeholders,
                device=rank.device,
                routed_layers=routed_layers(source.model.family, settings) if rank.config.returns_experts else None,
                attention=source.model.attention,
                bitwise_frequencies=source.frequencies if spec.settings.bitwise else None,
            )
            rank.ledger.note("init", self.memory())  # this role is not among the host's yet
            self.generator.sleep()
            self.weights.release()
        swap(train_rng)
        self.engine = HybridEngine(
            self.weights, self.generator, rank.device, offloadable, spec.settings.verify_weights_every
        )

    def memory(self) -> dict[str, int]:
        """Bytes of weights that are not training's own, and of the KV cache."""
        return self.weights.memory() | {"KV cache": self.generator.kv_cache.num_bytes}

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard", stop=Stop.BEFORE)
    def enter(self) -> TransitionReport:
        """Train mode -> rollout mode: the current weights of all stages and the KV cache are present."""
        self._held = None
        bias = None if self._actor is None else self._actor.checkpoint.bias
        if bias is not None and bias.has_moved:
            for name, row in bias.whole().items():
                self._constants[name].copy_(row)
        return self.engine.enter()

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def exit(self) -> None:
        """Rollout mode -> train mode. Raises RuntimeError, and stays in rollout mode, while requests are unfinished."""
        self.generator.must_be_idle()
        self.engine.exit()

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def receive_weights(self) -> TransitionReport:
        """Receive the weights that the actor sends with `send_weights`; between two slices or calls.

        Unfinished requests of slices continue with the keys and values that they have.
        """
        return self._received.receive()

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def try_receive_weights(self) -> Arrival:
        """`receive_weights`; a lost rank is reported, not raised. Without a second buffer the weights are torn then,
        and no slice runs before others have arrived.
        """
        return self._received.try_receive()

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def join_transfer(self, address: TransferAddress) -> str:
        """Connect to the actor's ranks; collective over both sides, with the actor's `join_transfer`; returns the same.

        address: with this pool's own `first_receiver`. Weights that generation reads stay, and requests continue.
        """
        from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError

        try:
            self._across.join(address)
        except BrokenTransferError as error:
            return str(error)
        return ""

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def fill_slot(self, slot: int, copy: str, folder: str) -> int:
        """Have the adapters of a copy in a slot; returns the bytes received. Nothing of training moves.

        folder: with the files of the actor's ranks; "" for a copy in their host memory.
        """
        from megatron_rl.roles.served_policy import adapter_shards

        assert isinstance(self.weights, ComposedWeights) and self.weights.slots is not None and self._actor is not None
        return self.weights.slots.fill(slot, adapter_shards(self._actor, copy, folder)).total

    @remote_method(Dispatch.REPLICAS, phase="gen")
    def advance(self, slices: dict[int, Slice]) -> SliceReport:
        """One slice of each replica that has an entry under its number in the run; rollout mode only.

        A replica without one does nothing. Raises RuntimeError when the weights that a slice names are not here, and
        when the ranks of a replica sampled different tokens; ValueError for starts and drops that do not fit, and for
        starts that name a slot without an adapter.
        """
        start = time.time()
        if self.replica not in slices:
            return SliceReport(self.replica, self._version, 0, start=start, stop=start)
        if not self.engine.in_rollout:
            raise RuntimeError("a slice in train mode: enter() comes first")
        work = slices[self.replica]
        self._check_slots(work)
        broken = self._take(work.version)
        swapped = time.time()
        if broken:
            return SliceReport(self.replica, self._version, 0, {}, start, swapped, swapped - start, broken)
        drawn, num_steps = self.generator.advance(work)
        usage = self.generator.cache_peak.take()
        times = (start, time.time(), swapped - start)
        return SliceReport(self.replica, work.version, num_steps, drawn, *times, cache_usage=usage)

    def _check_slots(self, work: Slice) -> None:
        slots = self.weights.slots if isinstance(self.weights, ComposedWeights) else None
        if slots and (wrong := sorted({start.slot for start in work.starts}.intersection(slots.empty))):
            raise ValueError(f"requests name slot {wrong[0]}, which has no adapter: fill_slot comes first")

    @property
    def _version(self) -> int:
        held = self.weights.version if isinstance(self.weights, ReceivedWeights) else self._held
        return -1 if held is None else held

    @property
    def _across(self) -> ReceivedWeights:
        if not isinstance(self.weights, ReceivedWeights):
            raise RuntimeError("this rollout reads the actor's memory: there is no weight transfer")
        return self.weights

    @property
    def _received(self) -> Arrivals:
        return self._across.arrivals

    def _take(self, version: int) -> str:
        """Switch to the weights of a version, on all ranks of the replica or on none; returns "" or the reason.

        The actor's own memory cannot change before the next `exit`.
        """
        from megatron_rl.rollout.in_flight_requests import of_replica

        if isinstance(self.weights, ReceivedWeights):
            reasons = [reason for reason in of_replica(self._received.lacks(version)) if reason]
            if reasons:
                return reasons[0]
            self._received.take(version)
        elif self._held not in (None, version):
            raise RuntimeError(f"a slice with version {version} where generation reads version {self._held} in place")
        self._held = version
        return ""


class PassScratch:
    """What Megatron keeps of one pass for the next, and makes when it is missing: memory into which the parts of a
    sequence are gathered from TP ranks, and tables of rotary angles of every position.
    """

    def offload(self) -> None:
        """Free the memory."""
        parallel_state.get_global_memory_buffer().buffer.clear()
        RotaryEmbedding.forward.cache_clear()

    def reload(self) -> None:
        """Do nothing: the next pass makes it."""


def adapters_of(
    weights: AllGatherPPModel | ComposedWeights | ReceivedWeights, lora: LoraConfig
) -> EngineAdapters | None:
    """The adapters that generation reads; None if it reads whole weights alone."""
    from megatron_rl.rollout.engine import EngineAdapters

    if not lora.crosses_alone or not isinstance(weights, ComposedWeights | ReceivedWeights):
        return None
    return EngineAdapters(weights.adapter_tensors, held_rank(lora.rank), lora.scale)


def parted(tensors: dict[str, Tensor], source: ModelSource, rank: Rank) -> tuple[dict[str, Tensor], MTPModel | None]:
    """(tensors of the model, its multi-token prediction layer); None: generation reads none."""
    from megatron_rl.checkpoint.constants import read_constants
    from megatron_rl.model.families.mtp_params import engine_name, mtp_form
    from megatron_rl.rollout.shared_weights import MTPModel

    model = source.model
    if not model.has_mtp:
        return tensors, None
    form = mtp_form(model.family)
    constants = mtp_constants_of(model).values()
    read = read_constants(constants, source.path, rank.device.torch_device)
    names = tensors_of(mtp_specs(model)).keys()
    own = {name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALES) in names}
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    own |= {engine_name(each): read[each.name] for each in constants}
    return rest, MTPModel(form.architecture, own, form.head.format(layer=model.shape.num_layers))


def all_offloadable(neighbours: Mapping[str, Role]) -> list[Offloadable]:
    """Return what leaves the device while the rank of these roles generates."""
    memories = [memory for role in neighbours.values() for memory in role.offloadable()]
    return [*memories, *([PassScratch()] if neighbours else [])]


def engine_settings(source: ModelSource, config: RunConfig) -> dict[str, Any]:
    """Return the settings that vLLM reads in place of those of the folder's config.json.

    Preflight lets a window pass that cuts nothing off; vLLM cannot build one in some layers only.
    """
    family = source.model.family
    settings = rollout_settings(family, source.hf_config.to_dict()) | overridden_settings(config)
    return placed_settings(family, settings)


def overridden_settings(config: RunConfig) -> dict[str, Any]:
    """Settings of config.json that the run's configuration replaces."""
    longest = config.actor_rollout_ref.model.override_config.max_position_embeddings
    return {} if longest is None else {"max_position_embeddings": longest}


def shared_weights(
    actor: Actor, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid
) -> AllGatherPPModel | ComposedWeights:
    """The rollout shard on the actor's own memory, or its FP8 weights; collective over each exchange group."""
    from megatron_rl.hybrid_engine.transport import Transport
    from megatron_rl.roles.eight_bit_views import quantized_weights
    from megatron_rl.roles.flat_parameters import WeightView, flat_parameters
    from megatron_rl.roles.merged_shards import MergedShards

    wanted = grid.place(rank.groups.rank, VOCAB_PADDING)

    def exchanged(
        view: WeightView, memory_pool: str = FOREIGN_POOL, own: FlatParameters | None = None
    ) -> AllGatherPPModel:
        return AllGatherPPModel(
            own or flat_parameters(view, rank.groups, source.place, wanted, rank.node),
            tensors_of(view.specs),
            Transport(rank.groups.exchange_group),
            bucket_bytes=spec.settings.update_weights_bucket_megabytes << 20,
            drop_train_weights=spec.settings.drop_train_weights and view is actor.base,
            memory_pool=memory_pool,
        )

    adapters, slots = list[ComposedPart](), None
    if spec.lora.crosses_alone and spec.settings.max_loras > 1:
        lies = flat_parameters(actor.trained, rank.groups, source.place, wanted, rank.node)
        staged = replace(lies, buffers=tuple(buffer.new_zeros(buffer.shape) for buffer in lies.buffers))
        of_copy = exchanged(actor.trained, ADAPTER_POOL, staged)
        slots = AdapterSlots(of_copy, spec.settings.max_loras, spec.settings.verify_weights_every)
    elif spec.lora.crosses_alone:
        adapters.append(ComposedPart(exchanged(actor.trained, ADAPTER_POOL), is_adapters=True))
    if spec.settings.quantization is not None:
        return quantized_weights(actor, spec, rank, grid, adapters, slots)
    if spec.lora.is_merged:
        merged = MergedShards(actor)
        own = merged.flat(source.place, wanted, rank.node)
        return ComposedWeights([ComposedPart(exchanged(actor.base, own=own))], [merged])
    base = exchanged(actor.base)
    if not spec.lora.crosses_alone:
        return base
    of_base = ComposedPart(base, spec.lora.base_stays, spec.lora.base_on_host)
    return ComposedWeights([of_base, *adapters], slots=slots)
