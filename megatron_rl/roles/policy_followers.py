"""Roles of other pools that take the policy's weights: the policy's ends of all weight transfers, and its followers'.

For generation the policy sends what that reads; the other end is in `received_weights.py`. To a role that follows it
sends its trained weights, without a multi-token prediction layer; with adapters, these alone. Such a role has a
training layout of its own. Weights arrive in memory that is allocated for a transfer alone, are compared with those
that were sent, and only then mixed in: a broken transfer leaves the role as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megatron_rl.config.roles import Following, RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.hybrid_engine.delta_sizes import SENT_LAST
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.roles.image_tower import RoleWithTower
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.read_model import ReadModel, ScoringRole
from megatron_rl.roles.role import Role, TrainedRole
from megatron_rl.roles.transfer_address import TransferAddress, TransferStore, join_transfer

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
    from megatron_rl.hybrid_engine.composed_weights import OwnMemory
    from megatron_rl.hybrid_engine.streams import Constants
    from megatron_rl.hybrid_engine.weight_transfer import ReceiveReport, SendAttempt, SendReport, WeightSender
    from megatron_rl.parallel.sharding import LogicalTensor
    from megatron_rl.roles.model_source import ModelSource, UnloadedModel
    from megatron_rl.roles.role_checkpoint import ReferenceCheckpoint

Value = TypeVar("Value")


@dataclass
class SendingEnd:
    """The policy's end of the transfers to one role of another pool, on one rank.

    store: where both pools meet, on rank 0. constants: the biases of experts, as they are sent.
    """

    store: TransferStore | None = None
    sender: WeightSender | None = None
    constants: Constants | None = None


class FollowedPolicy(RoleWithTower, TrainedRole):
    """A trained language model whose weights roles of other pools may take."""

    def __init__(self, spec: RoleSpec, rank: Rank, source: ModelSource, model: UnloadedModel) -> None:
        super().__init__(spec, rank, source, model)
        self.take_tower(rank, source)
        self.rank = rank
        self.followers: dict[str, SendingEnd] = {}

    def connect(
        self,
        end: SendingEnd,
        address: TransferAddress,
        flat: FlatParameters,
        tensors: Mapping[str, LogicalTensor],
        *,
        deltas: bool = False,
    ) -> None:
        """Build an end that sends `flat`, this rank's shards of `tensors`; collective over both pools. Raises
        BrokenTransferError if a rank is lost meanwhile.
        """
        from megatron_rl.hybrid_engine.streams import Constants
        from megatron_rl.hybrid_engine.weight_transfer import WeightSender

        rank, rollout = self.rank, self.rank.config.actor_rollout_ref.rollout
        if self.checkpoint.bias is not None:
            end.constants = Constants(self.checkpoint.bias.described, rank.device.torch_device)
        end.sender = WeightSender(
            flat,
            tensors,
            join_transfer(address, rank.groups.rank, rank.device, rank.timeout),
            bucket_bytes=rollout.update_weights_bucket_megabytes << 20,
            verify_every=rollout.verify_weights_every,
            deltas=deltas,
            constants=end.constants,
        )

    def send_over(self, end: SendingEnd, version: int) -> SendReport:
        """Send the weights after step `version`, and the biases of experts once these have moved; collective over both
        pools. Raises RuntimeError before `connect`, BrokenTransferError if a rank is lost.
        """
        bias = self.checkpoint.bias
        if end.sender is None:
            raise RuntimeError("no weight transfer is connected: both pools join it first")
        has_moved = bias is not None and bias.has_moved
        if bias is not None and end.constants is not None and has_moved:
            end.constants.fill(bias.whole())
        return end.sender.send(version, has_moved)

    @remote_method(Dispatch.RANK_ZERO)
    def offer_to(self, follower: str, num_receivers: int) -> TransferAddress:
        """Serve a store through which this pool and that of `follower`, a role, connect; returns its address."""
        end = self.followers.setdefault(follower, SendingEnd())
        end.store = TransferStore(self.rank, num_receivers)
        return end.store.address

    @remote_method(Dispatch.ONE_TO_ALL)
    def join_follower(self, follower: str, address: TransferAddress) -> None:
        """Build this pool's end, together with the role's `join_policy`. Raises BrokenTransferError if a rank is lost
        meanwhile.
        """
        from megatron_rl.model.families import tensors_of
        from megatron_rl.roles.flat_parameters import flat_parameters

        view = replace(
            self.trained,
            parameters=of_scoring_roles(self.trained.parameters),
            specs=of_scoring_roles(self.trained.specs),
        )
        flat = flat_parameters(view, self.rank.groups, self.source.place, None, self.rank.node)
        self.connect(self.followers.setdefault(follower, SendingEnd()), address, flat, tensors_of(view.specs))

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard", stop=Stop.NEVER_AFTER)
    def send_to(self, follower: str, version: int) -> SendReport:
        """Send the weights after step `version`, together with the role's `take_weights`. Raises BrokenTransferError
        if a rank is lost.
        """
        return self.send_over(self.followers[follower], version)


class SampledPolicy(FollowedPolicy):
    """A trained language model whose weights generation reads, also in other pools than its own."""

    def __init__(self, spec: RoleSpec, rank: Rank, source: ModelSource, model: UnloadedModel) -> None:
        super().__init__(spec, rank, source, model)
        # On rank 0: the weight transfer's store, and older ones that ranks may still use.
        self.transfer_stores: list[TransferStore] = []
        self.sending = SendingEnd()
        self.made: Sequence[OwnMemory] = ()  # what is sent that is made of the weights

    def memory(self) -> dict[str, int]:
        """Bytes of what is trained, and of the weights that were sent last where only changes are sent."""
        sender = self.sending.sender
        sent = {} if sender is None or not sender.kept_bytes else {SENT_LAST: sender.kept_bytes}
        return super().memory() | sent

    @remote_method(Dispatch.RANK_ZERO)
    def offer_transfer(self, num_receivers: int) -> TransferAddress:
        """Serve a store through which both sides connect, a new one after ranks were lost; returns its address.

        Ranks that listen at an older store stop.
        """
        for left in self.transfer_stores:
            left.close()
        self.transfer_stores.append(TransferStore(self.rank, num_receivers))
        return self.transfer_stores[-1].address

    @remote_method(Dispatch.ONE_TO_ALL)
    def join_transfer(self, address: TransferAddress) -> str:
        """Build this pool's end of the weight transfer in place of an older one; returns "", or the reason if a rank
        was lost.

        Collective over both sides, with the rollout's `join_transfer`. All training ranks return the same.
        """
        from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError

        if self.sending.sender is not None:
            self.sending.sender.close()
        broken = ""
        try:
            self._join(address)
        except BrokenTransferError as error:
            broken = str(error)
        return self._agreed(broken)

    def _join(self, address: TransferAddress) -> None:
        from megatron_rl.model.families import tensors_of
        from megatron_rl.roles.eight_bit_views import EightBitShards
        from megatron_rl.roles.flat_parameters import flat_parameters
        from megatron_rl.roles.merged_shards import MergedShards

        rollout, source = self.rank.config.actor_rollout_ref.rollout, self.source
        view = self.trained if source.lora.crosses_alone else self.base
        tensors = tensors_of(view.specs)
        if rollout.quantization is not None and view is self.base:
            shards = EightBitShards.of(self, self.rank, source.lora, rollout.quantization_block_size, None)
            self.made, (flat, tensors) = shards.made, shards.as_bytes()
        elif source.lora.is_merged:
            merged = MergedShards(self)
            self.made, flat = [merged], merged.flat(source.place, None, self.rank.node)
        else:
            flat = flat_parameters(view, self.rank.groups, source.place, None, self.rank.node)
        for made in self.made:
            made.release()
        self.connect(self.sending, address, flat, tensors, deltas=rollout.weight_deltas)
        del self.transfer_stores[:-1]

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def send_weights(self, version: int) -> SendReport:
        """Send the current weights, those after step `version`, together with the rollout's `receive_weights`."""
        return self._send(version)

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def try_send_weights(self, version: int, holding: dict[int, int] | None = None) -> SendAttempt:
        """Send the current weights; a lost rollout rank is reported, not raised, and equally on all training ranks.

        After a loss all ranks must join a new weight transfer before the next transfer.
        holding: replica -> the version that its generation must hold before; calls the ranks that listen, those with a
        second buffer, and returns when the weights have arrived on all of them. None: `try_receive_weights` calls them.
        """
        from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError, SendAttempt

        report, broken, concluded = None, "", list[Any]()
        if holding is not None and self.transfer_stores:
            self.transfer_stores[-1].call(holding)
        try:
            report = self._send(version)
            if holding is not None and self.sending.sender is not None:
                concluded = self.sending.sender.conclude()
        except BrokenTransferError as error:
            broken = str(error)
        if broken := self._agreed(broken):
            return SendAttempt(version, broken)
        return SendAttempt(version, "", report, concluded if dist.get_rank() == 0 else ())

    def _agreed(self, broken: str) -> str:
        """Join the reasons of all training ranks; with any, all leave the weight transfer, because others may wait for
        them."""
        gathered = [""] * dist.get_world_size()
        dist.all_gather_object(gathered, broken)
        reasons = [f"training rank {number}: {reason}" for number, reason in enumerate(gathered) if reason]
        if reasons and self.sending.sender is not None:
            self.sending.sender.close()
        return "; ".join(reasons)

    def _send(self, version: int) -> SendReport:
        try:
            for made in self.made:
                made.renew()
            return self.send_over(self.sending, version)
        finally:
            for made in self.made:
                made.release()


class FollowingScorer(ScoringRole):
    """A language model that only scores, and that may take the weights of a policy in another pool.

    kept: a reference that may have moved so, as checkpoints keep it; None: they keep nothing.
    """

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        super().__init__(spec, rank, neighbours)
        self.kept: ReferenceCheckpoint | None = None
        self.arriving: ArrivingWeights | None = None
        if spec.follows is not None:
            from megatron_rl.roles.role_checkpoint import ReferenceCheckpoint

            self.arriving = ArrivingWeights(self.model, spec.follows, rank)
            if spec.follows.is_kept:
                self.kept = ReferenceCheckpoint(self.arriving.refresh, self.model.specs, self.model.source)

    @remote_method(Dispatch.ONE_TO_ALL)
    def join_policy(self, address: TransferAddress) -> None:
        """Connect to the policy's pool, together with its `join_follower`. Raises as that."""
        self._arriving.join(address)

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard", stop=Stop.NEVER_AFTER)
    def take_weights(self, version: int) -> ReceiveReport:
        """Receive the weights that the policy sends with `send_to`, and mix them in; the same `version` there.

        Raises BrokenTransferError if a rank is lost, and WeightMismatchError if weights arrive wrong; this role's
        weights stay then.
        """
        return self._arriving.take(version)

    @property
    def _arriving(self) -> ArrivingWeights:
        if self.arriving is None:
            raise RuntimeError(f"{self.spec.name} follows no policy of another pool")
        return self.arriving


class ArrivingWeights:
    """A policy's weights on their way into the model of a role of another pool, on one rank."""

    def __init__(self, model: ReadModel, follows: Following, rank: Rank) -> None:
        from megatron_rl.checkpoint.saved_tensors import REFERENCE_BIAS
        from megatron_rl.hybrid_engine.stable_memory import adopt_alone
        from megatron_rl.hybrid_engine.streams import Constants
        from megatron_rl.hybrid_engine.weight_transfer import WeightReceiver
        from megatron_rl.model.families import tensors_of
        from megatron_rl.roles.expert_bias import ExpertBias, biases_of
        from megatron_rl.roles.model_source import named_buffers
        from megatron_rl.roles.received_weights import torch_dtype
        from megatron_rl.roles.reference_refresh import ReferenceRefresh

        config, source, specs, ours = rank.config.actor_rollout_ref, model.source, model.specs, model.following
        self._rank, self._place, device = rank, source.place, rank.device.torch_device
        self._names = tuple(dict.fromkeys(specs[name].tensor.name for name in ours))
        self._leader: ExpertBias | None = None
        constants, biases = None, None
        if described := biases_of(source.model.constants):
            own = ExpertBias(named_buffers(model.models), described, rank.groups, device, REFERENCE_BIAS)
            constants = Constants(own.described, device)
            constants.fill(own.whole())
            self._leader = own.of_copy({name: constants.tensors[described[name].name] for name in own.names}, "")
            biases = own, self._leader
        self._receiver = WeightReceiver(
            source.place,
            tensors_of(specs),
            torch_dtype(config.actor.megatron.dtype),
            device,
            bucket_bytes=config.rollout.update_weights_bucket_megabytes << 20,
            verify_every=config.rollout.verify_weights_every,
            constants=constants,
            names=self._names,
        )
        theirs = {name: self._receiver.tensors[specs[name].tensor.name] for name in ours}
        self.refresh = ReferenceRefresh(ours, theirs, follows.share, biases)
        self._memory = adopt_alone(self._receiver.flat)
        self._memory.release()

    def join(self, address: TransferAddress) -> None:
        """Connect to the policy's pool; collective over both."""
        rank, number = self._rank, self._rank.groups.rank
        self.transport = transport = join_transfer(address, address.receiver(number), rank.device, rank.timeout)
        member = Member(number, rank.node, rank.groups.tp_rank, wanted=self._place, names=self._names)
        self._memory.allocate()
        try:
            self._receiver.join(member, transport)
        finally:
            self._memory.release()

    def take(self, version: int) -> ReceiveReport:
        """Receive and mix in; collective over both pools."""
        self._memory.allocate()
        try:
            self._memory.clear()  # no transfer writes the rows that only pad a vocabulary
            report = self._receiver.receive()
            if report.version != version:
                raise RuntimeError(f"weights of version {report.version} arrived, and {version} was asked for")
            if self._leader is not None:
                self._leader.has_moved = report.leaving_bytes > report.model_bytes  # constants came, too
            self.refresh.refresh()
        finally:
            self._memory.release()
        return report


def of_scoring_roles(of_names: Mapping[str, Value]) -> dict[str, Value]:
    """Leave out a multi-token prediction layer and a trained tower, which roles that only score do not have."""
    from megatron_rl.model.families import without_tower
    from megatron_rl.model.families.mtp_params import MTP

    return {name: value for name, value in without_tower(of_names).items() if not name.startswith(MTP)}
