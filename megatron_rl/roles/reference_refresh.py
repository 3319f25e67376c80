"""A reference that follows its policy: now and then it becomes a * policy + (1 - a) * reference.

TR-DPO: Gorbatovski et al., arXiv:2404.09656. A rank needs the same elements of both. In the policy's pool it has them:
nothing is sent, and the moved reference is written in the runs of the policy's checkpoint, so that every element is
written once. To another pool the policy's come by a weight transfer (`policy_followers.py`), and the reference writes
itself (`role_checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.checkpoint.saved_tensors import REFERENCE_WEIGHT, WEIGHT, checkpoint_key
from megatron_rl.checkpoint.sharded_state import FlatRun
from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.mtp_params import MTP
from megatron_rl.model.families.vision import TOWER
from megatron_rl.roles.expert_bias import ExpertBias


class ReferenceRefresh:
    """The parameters of a reference and of its policy on one rank, both by global Megatron names.

    biases: by which their experts are chosen, the reference's and the policy's; None: the reference has none of its
    own. has_moved: the reference is no longer the model of its folder. Raises ValueError if the two have other
    parameters.
    """

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        policy: Mapping[str, Tensor],
        alpha: float,
        biases: tuple[ExpertBias, ExpertBias] | None = None,
    ) -> None:
        shapes = [{name: tensor.shape for name, tensor in model.items()} for model in (reference, policy)]
        if shapes[0] != shapes[1]:
            others = sorted(shapes[0].items() ^ shapes[1].items())
            raise ValueError(f"reference and policy are cut or built in other ways, as {others[0][0]} is")
        self.reference, self._policy, self.alpha = reference, policy, alpha
        self._biases = biases
        self.has_moved = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Move the reference, in place."""
        self.has_moved = True
        for name, tensor in self.reference.items():
            tensor.lerp_(self._policy[name].to(tensor.dtype), self.alpha)
        if self._biases is not None:
            own, leader = self._biases
            own.follow(leader, self.alpha)

    # In the policy's checkpoint

    @property
    def bias(self) -> ExpertBias | None:
        """The reference's biases; None if it has none of its own."""
        return None if self._biases is None else self._biases[0]

    def runs_like(self, runs: Iterable[FlatRun]) -> Iterator[FlatRun]:
        """The reference's elements where these runs have the policy's weights."""
        for run in runs:
            if run.kind == WEIGHT and run.name in self.reference:
                elements = self.reference[run.name].detach().view(-1)[run.start : run.start + len(run.data)]
                yield FlatRun(run.name, REFERENCE_WEIGHT, run.start, elements)

    def is_in(self, names: Collection[str], specs: Mapping[str, ParamSpec]) -> bool:
        """Whether a checkpoint with tensors of these names holds a moved reference. specs: of all the policy's
        parameters, also of a multi-token prediction layer and a trained tower, which a reference does not have.
        """
        there, own = set(names), [spec for name, spec in specs.items() if not name.startswith((MTP, TOWER))]
        return all(checkpoint_key(spec, 0, REFERENCE_WEIGHT) in there for spec in own)
