"""The vision tower next to the model that a run trains: its pass over images comes before all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.dispatch import Dispatch, remote_method
from megatron_rl.hybrid_engine.offload import HostCopy, Offloadable
from megatron_rl.observe.memory_ledger import storage_bytes
from megatron_rl.records import Batch, ragged_from_lengths
from megatron_rl.roles.role import Role

if TYPE_CHECKING:
    from megatron_rl.model.tower import VisionTower
    from megatron_rl.roles.model_source import ModelSource
    from megatron_rl.roles.rank import Rank
    from megatron_rl.roles.training import TrainableModel


class RoleWithTower(Role):
    """A role that may have the tower of its folder, on ranks whose results count. tower: None on others, and before
    `take_tower`. tower_stays: it is not offloaded.
    """

    tower: VisionTower | None = None
    tower_stays = False
    trainable: TrainableModel

    def take_tower(self, rank: Rank, source: ModelSource) -> None:
        """Read the tower if this is the role whose tower reads the run's images."""
        reads_frozen = rank.reads_images and (not source.trains_tower or rank.placement.scores_beside_policy)
        if reads_frozen and rank.groups.is_dp_collector and self.spec.name == rank.placement.leader.name:
            self.tower = source.vision_tower()
            self.tower_stays = rank.config.has_turns

    def memory(self) -> dict[str, int]:
        """Bytes of the role's model, and of the tower."""
        tower = {} if self.tower is None else {f"{self.spec.name} vision tower": storage_bytes(self.tower.parameters)}
        return super().memory() | tower

    def offloadable(self) -> list[Offloadable]:
        """Tensors that the offload keys select, and the tower as they say of parameters; it stays where turns may show
        images, which it reads during generation.
        """
        is_moved = self.tower is not None and self.spec.megatron.param_offload and not self.tower_stays
        return super().offloadable() + ([HostCopy(self._tower_parameters)] if is_moved else [])

    def _tower_parameters(self) -> list[Tensor]:
        return [] if self.tower is None else self.tower.parameters

    @remote_method(Dispatch.DP, phase="images")
    def image_features(self, batch: Batch) -> Batch | None:
        """`image_features` of the images in `image_grids` and `image_patches`, one in each row; None on ranks whose
        result does not count.

        This tower is that of the folder, so the features of an image stay the same for the whole run.
        """
        if self.tower is None:
            return None
        images = zip(batch["image_patches"].unbind(), batch["image_grids"].unbind(), strict=True)
        rows = [self.tower.features(patches, grid[0]).cpu() for patches, grid in images]
        return Batch(image_features=ragged_from_lengths(torch.cat(rows), torch.tensor([len(row) for row in rows])))

    @remote_method(Dispatch.DP, phase="images")
    def policy_features(self, batch: Batch, *, with_patches: bool = False) -> Batch | None:
        """`policy_features` of the images in `image_grids` and `image_patches`, one in each row, by the tower that is
        trained, as it is now; None on ranks whose result does not count. All ranks must call.

        with_patches: return `image_patches`, too, so that they stay with the ranks.
        """
        from megatron_rl.roles.tower_pass import trained_tower_pass

        self.trainable.sync.finish()
        return trained_tower_pass(self.trainable.pipeline, batch, with_patches=with_patches)
