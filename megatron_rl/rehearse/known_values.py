"""Real values of small tensors on the fake device, so that masks, counts and lengths go on as on a GPU.

A small tensor carries a real twin on the CPU. An operation whose arguments all have twins is computed on them too; one
that writes a tensor with what nobody knows makes the values of its storage unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

aten = torch.ops.aten
MOST_ELEMENTS = 1 << 20
"""Elements of a tensor up to which its values are known, unless a router has more scores."""
FILLED = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operations that read no values of the tensor that they are given."""
CPU = torch.device("cpu")


class KnownValues:
    """The twins of one process.

    most: elements up to which tensors have one. Routers raise it: how many tokens go to each expert is counted in a
    mask of tokens x experts, and tells the sizes of what follows.
    """

    def __init__(self) -> None:
        self.most = MOST_ELEMENTS
        self._unknown: set[int] = set()  # storages of twins whose values nobody knows any more

    def of(self, value: Any) -> Any:
        """Return the real values of a tensor on the CPU, None if they are unknown; anything else as it is."""
        if not isinstance(value, FakeTensor):
            return value
        twin = _twin(value)
        return None if twin is None or _key(twin) in self._unknown else twin

    def are_known(self, values: Sequence[Any]) -> bool:
        """Return whether all tensors among the values are known."""
        return all(self.of(value) is not None for value in values if isinstance(value, Tensor))

    def give(self, tensor: Tensor, values: Tensor) -> None:
        """Let a new tensor on the device have these values, which nothing else has."""
        _set_twin(tensor, values)
        self._unknown.discard(_key(values))

    def put(self, tensor: Tensor, values: Tensor | None) -> None:
        """Overwrite a tensor, on the device or on the CPU, with these values; None: nobody knows them."""
        if not isinstance(tensor, FakeTensor):
            if values is not None:
                tensor.copy_(values.reshape(tensor.shape))
            return
        twin = _twin(tensor)
        if twin is None:
            if values is not None and tensor.numel() <= self.most:
                _set_twin(tensor, values.reshape(tensor.shape).clone())
        elif values is None:
            self._unknown.add(_key(twin))
        else:
            twin.copy_(values.reshape(twin.shape))
            self._unknown.discard(_key(twin))

    def follow(
        self, func: Any, leaves: list[Any], spec: TreeSpec, outputs: list[FakeTensor], written: list[Tensor]
    ) -> None:
        """Do an operation on the twins of its arguments, if they are known and small.

        leaves, spec: its arguments and keyword arguments, flattened. written: tensors among them that it overwrites.
        """
        if not self._followed(func, leaves, spec, outputs):
            for tensor in written:
                twin = _twin(tensor)
                if twin is not None:
                    self._unknown.add(_key(twin))

    def _followed(self, func: Any, leaves: list[Any], spec: TreeSpec, outputs: list[FakeTensor]) -> bool:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not outputs or is_random or any(output.numel() > self.most for output in outputs):
            return False
        twins = [self._argument(func, leaf) for leaf in leaves]
        tensors = [twin for twin, leaf in zip(twins, leaves, strict=True) if isinstance(leaf, Tensor)]
        if any(twin is None or twin.numel() > self.most for twin in tensors):
            return False
        args, kwargs = tree_unflatten(twins, spec)
        try:
            real = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # a kernel that only a GPU has
            return False
        known = {_key(twin) for twin in tensors}
        for output, values in zip(
            outputs, (one for one in tree_flatten(real)[0] if isinstance(one, Tensor)), strict=False
        ):
            if _twin(output) is None:
                _set_twin(output, values)
                if _key(values) not in known:  # a view of an unknown one stays unknown
                    self._unknown.discard(_key(values))
        return True

    def _argument(self, func: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return CPU
        if func in FILLED and isinstance(leaf, Tensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        return self.of(leaf)


def _twin(tensor: Tensor) -> Tensor | None:
    twin: Tensor | None = vars(tensor).get("rehearsed_twin")
    # An assignment to `data` is no operation, and leaves the twin of what was there before.
    return twin if twin is not None and twin.shape == tensor.shape else None


def _set_twin(tensor: Tensor, values: Tensor) -> None:
    vars(tensor)["rehearsed_twin"] = values


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
