"""A pass over images alone, by a vision tower that is trained in the first stage."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.model.tower import features_of
from megatron_rl.records import Batch, ragged_from_lengths
from megatron_rl.roles.pipeline import Pipeline


@torch.no_grad()
def trained_tower_pass(pipeline: Pipeline, batch: Batch, *, with_patches: bool) -> Batch | None:
    """Return `policy_features` of images, and their patches where asked for, on the collector of a data-parallel rank;
    None elsewhere. All ranks must call.

    The tower is on the first stage, which sends its rows to the last one. batch: `image_grids` and `image_patches`, one
    image in each row.
    """
    groups, images = pipeline.groups, pipeline.images
    if groups.tp_rank or groups.cp_rank or not (groups.is_first_stage or groups.is_last_stage):
        return None
    assert images is not None
    grids = batch.flat("image_grids")
    lengths = grids.prod(1) // images.form.merge**2
    stages = dist.get_process_group_ranks(groups.pp_group)
    if images.tower is not None:
        tower = images.tower
        rows = torch.cat([features_of(tower, *one) for one in zip(batch["image_patches"].unbind(), grids, strict=True)])
        if not groups.is_last_stage:
            dist.send(rows, dst=stages[-1])
            return None
    else:
        config, width = pipeline.chunks[0].config, images.hidden_size * (1 + images.form.levels)
        rows = torch.empty(int(lengths.sum()), width, dtype=config.params_dtype, device=pipeline.device)
        dist.recv(rows, src=stages[0])
    made = Batch(policy_features=ragged_from_lengths(rows.cpu(), lengths))
    if with_patches:
        made.add(image_patches=batch.stored("image_patches"))
    return made
