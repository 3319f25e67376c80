"""A dispatch mode under which tensors on "cuda" have shapes and no memory, tensors on the CPU are real, and memory,
collectives, host waits and operations are noted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron_rl.rehearse.group_calls import RECEIVE, SEND, GroupCall, Size
from megatron_rl.rehearse.known_values import KnownValues
from megatron_rl.rehearse.memory_tracker import MemoryTracker
from megatron_rl.rehearse.nccl_rules import broken_rules
from megatron_rl.rehearse.stream_order import StreamOrder

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
"""Operations that give the host a value of the device."""
SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
"""Operations whose result has a shape that only the values tell: on a GPU the host waits for it."""
INDEXES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
LARGE_ON_HOST = 1 << 22
"""Elements from which on a floating-point tensor on the CPU has no values that count: the state of an offloaded Adam,
whose memory a rehearsing machine need not have.
"""
MOST_AT_PEAK = 20
"""Places of a phase's memory that a report names."""


class UnknownValueError(RuntimeError):
    """A shape depends on values that a rehearsal does not have."""


def current_line() -> str:
    """Return file and number of the innermost line of this project that runs now, else of Megatron, else "autograd"."""
    frame: Any = sys._getframe(1)
    of_megatron = None
    while frame is not None:
        name = frame.f_code.co_filename
        if "/megatron_rl/" in name and "/megatron_rl/rehearse/" not in name:
            return f"{name.split('/megatron_rl/')[-1]}:{frame.f_lineno}"
        if of_megatron is None and "/megatron/core/" in name:
            of_megatron = f"megatron/{name.split('/megatron/core/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return of_megatron or "autograd"


class RehearsalMode(TorchDispatchMode):
    """See the module. Results of collectives are this rank's own values, as if all ranks had the same.

    waits, operations: phase -> what, and the line or the operator -> how often. num_blocks: phase -> micro-batches.
    invented: values that the program read and nobody knows, by the line that read them. joint: a group over ranks of
    several pools, and their numbers over all pools; None until there is one. faults: calls and accesses that
    a GPU would refuse or do wrong, and how often.
    """

    def __init__(self, device: torch.device, memory: MemoryTracker, first_number: int = 0) -> None:
        """first_number: of this rank's pool, over all pools."""
        super().__init__()
        self.first_number = first_number
        self.joint: tuple[Any, tuple[int, ...]] | None = None
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.device, self.memory, self.values = device, memory, KnownValues()
        self.phase = "start"
        self.waits: dict[str, Counter[str]] = {}
        self.operations: dict[str, Counter[str]] = {}
        self.num_blocks: Counter[str] = Counter()
        self.invented: Counter[str] = Counter()
        self.calls: list[GroupCall] = []
        self.faults: Counter[str] = Counter()
        self._reduction = ""
        self._open_works: dict[int, GroupCall] = {}
        self.order = StreamOrder(self._fault, current_line)
        self.at_peak: dict[str, Counter[str]] = {}
        self._batch: int | None = None
        self._num_batches = 0

    def begin(self, phase: str) -> None:
        """Begin a phase, with a peak of its own."""
        self.at_peak[self.phase] = self.memory.at_peak
        self.phase = phase
        self.memory.begin()

    def resized(self, storage: Any) -> None:
        """Note a new size of a storage."""
        self.memory.resized(storage)
        self.order.resized(storage)

    def _fault(self, sentence: str) -> None:
        self.faults[f"{self.phase}: {sentence}"] += 1

    def wait(self, what: str) -> None:
        """Note that the host waits for the device."""
        self.waits.setdefault(self.phase, Counter())[f"{what} at {current_line()}"] += 1

    def report(self) -> dict[str, Any]:
        """Return everything noted, as plain data; the largest first."""
        self.at_peak[self.phase] = self.memory.at_peak

        def by_phase(counts: dict[str, Counter[str]], most: int | None = None) -> dict[str, dict[str, int]]:
            return {phase: dict(count.most_common(most)) for phase, count in counts.items()}

        return {
            "at_peak": by_phase(self.at_peak, MOST_AT_PEAK),
            "waits": by_phase(self.waits),
            "operations": {phase: count.total() for phase, count in self.operations.items()},
            "num_blocks": dict(self.num_blocks),
            "invented": dict(self.invented.most_common()),
            "calls": [call.as_json() for call in self.calls],
            "faults": dict((self.faults + self._unwaited()).most_common()),
        }

    # Works: called by recorded_works

    def begin_call(self, reduction: str) -> None:
        """See `WorkNotes`."""
        self._reduction = reduction

    def begin_work(self) -> int:
        """See `WorkNotes`."""
        number = len(self.calls)
        if self.calls:
            self._open_works[number] = last = self.calls[-1]
            self.order.begin_work(number, (last.group, last.purpose))
        return number

    def wait_for_work(self, number: int) -> None:
        """See `WorkNotes`."""
        self._open_works.pop(number, None)
        self.order.wait_for_work(number)

    def _unwaited(self) -> Counter[str]:
        """Return works that the rank has ended without waiting for."""
        return Counter(f"{call} in {call.phase} is never waited for" for call in self._open_works.values())

    def unheld_bytes(self, num_bytes: int) -> Tensor:
        """Return bytes on the device that other tensors hold, for copies; values are unknown."""
        with _disable_current_modes(), self.fake:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Post sends and receives of the body at once."""
        self._num_batches += 1
        self._batch = self._num_batches
        try:
            yield
        finally:
            self._batch = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not on_device and (asked is None or asked.type != "cuda"):
            return self._on_host(func, args, kwargs)
        self.operations.setdefault(self.phase, Counter())[str(func)] += 1
        written = _written(func, args, kwargs)
        self.order.operation(func, on_device, written)
        if func in READS:
            return self._read(func, leaves, spec, on_device)
        to_host = asked is not None and asked.type == "cpu" and func is aten._to_copy.default
        if to_host or (written and not isinstance(written[0], FakeTensor)):
            return self._to_host(func, args, kwargs, args[0] if to_host else args[1], to_host)
        copies = len(on_device) < len(tensors) and func in (aten._to_copy.default, aten.copy_.default)
        if copies:
            self._from_host(tensors, _is_non_blocking(args, kwargs))
        out = self._on_device(func, args, kwargs)
        outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, FakeTensor)]
        if func is aten.topk.default and self._routed(leaves, outputs):
            return out
        self.values.follow(func, _on_cpu(leaves, spec), spec, outputs, written)
        self._note(func, [output for output in outputs if not any(output is tensor for tensor in written)])
        return out

    def _note(self, func: Any, outputs: list[FakeTensor]) -> None:
        for output in outputs:
            if output.device.type == "cuda":
                self.memory.note(output.untyped_storage(), lambda: f"{current_line()} {func.__name__}")
        self.order.made(outputs)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation on real tensors; there is nothing to pin them for."""
        self.order.on_host(func, args, kwargs, _written)
        out = self._real(func, args, kwargs)
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            self.order.pin(out)
        return out

    @staticmethod
    def _real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_on_large_ones(func, args, kwargs):
            return _without_values(func, args, kwargs)
        if func is aten._pin_memory.default:
            return args[0].clone()
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)

    def _on_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_mask = func in INDEXES and any(_is_mask(index) for index in args[1])
        if func in SHAPED_BY_VALUES or by_mask:
            is_filled = by_mask and func is not aten.index.Tensor and args[2].numel() == 1  # becomes masked_fill
            if not is_filled and kwargs.get("output_size") is None:
                self.wait(str(func))
            return self._shaped_by_values(func, args, kwargs)
        with self.fake:
            return func(*args, **kwargs)

    # Between device and host

    def _from_host(self, tensors: list[Tensor], is_non_blocking: bool) -> None:
        for tensor in tensors:
            if is_non_blocking and not isinstance(tensor, FakeTensor):
                self.order.copy_with_host(tensor, is_write=False)
        if not is_non_blocking:
            self.wait("copy to device")
            self.order.host_waits()

    def _read(self, func: Any, leaves: list[Any], spec: Any, on_device: list[FakeTensor]) -> Any:
        self.wait(str(func))
        self.order.host_waits()
        if self.values.are_known(leaves):
            args, kwargs = tree_unflatten([self.values.of(leaf) for leaf in leaves], spec)
            return func(*args, **kwargs)
        self._invent(func)
        dtype = on_device[0].dtype
        if dtype == torch.bool or func in (aten.equal.default, aten.is_nonzero.default):
            return True
        return 1.0 if dtype.is_floating_point else 1

    def _to_host(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, makes_copy: bool
    ) -> Any:
        """Copy into a real tensor, a new one or the first argument."""
        if not _is_non_blocking(args, kwargs):
            self.wait("copy to host")
            self.order.host_waits()
            return self._copied(func, args, kwargs, source, makes_copy)
        there = self._copied(func, args, kwargs, source, makes_copy)
        if makes_copy:
            self.order.pin(there)
        self.order.copy_with_host(there, is_write=True)
        return there

    def _copied(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, makes_copy: bool
    ) -> Any:
        values = self.values.of(source)
        if values is None:
            self._invent(func)
            if not makes_copy:
                return args[0]  # whatever it holds: large copies need not be made up
            if _is_large(source):
                return torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            values = torch.zeros(source.shape, dtype=source.dtype)
        if makes_copy:
            return func(values, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        return func(args[0], values, *args[2:], **kwargs)

    def _invent(self, func: Any) -> None:
        self.invented[f"{func} at {current_line()}"] += 1

    # Shapes that depend on values

    def _shaped_by_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.index.Tensor:
            return self._indexed(*args)
        if func in INDEXES:  # writes what a mask selects
            if func is aten.index_put_.default:
                return args[0]
            with self.fake:
                return aten.empty_like.default(args[0])
        size = kwargs.get("output_size")
        if size is not None and not self.values.are_known(tree_flatten((args, kwargs))[0]):
            with self.fake:
                return torch.empty(size, dtype=torch.int64, device=self.device)
        source, *others = args
        if func is aten.masked_select.default and self.values.of(source) is None:
            mask = self._known(func, others[0])
            count = int(mask.expand(torch.broadcast_shapes(source.shape, mask.shape)).sum())
            with self.fake:
                return torch.empty(count, dtype=source.dtype, device=self.device)
        real_args, real_kwargs = tree_map(
            lambda leaf: self._known(func, leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        answer = func(*real_args, **real_kwargs)
        return tree_map(lambda leaf: self._placed(leaf) if isinstance(leaf, Tensor) else leaf, answer)

    def _indexed(self, source: Tensor, indices: list[Tensor | None]) -> Any:
        places: list[Tensor | None] = []
        for index in indices:
            if index is None or not _is_mask(index):
                places.append(index)
            else:  # a mask of n dimensions is n lists of places
                places += [self._placed(place) for place in self._known(aten.index.Tensor, index).nonzero().unbind(1)]
        with self.fake:
            return aten.index.Tensor(source, places)

    def _known(self, func: Any, tensor: Tensor) -> Tensor:
        values: Tensor | None = self.values.of(tensor)
        if values is None:
            raise UnknownValueError(f"{func} at {current_line()} has a shape that depends on unknown values")
        return values

    def _placed(self, real: Tensor) -> Tensor:
        """Return a new tensor on the device with known values."""
        with self.fake:
            out = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=self.device)
        self.values.give(out, real)
        return out

    def _routed(self, leaves: list[Any], outputs: list[FakeTensor]) -> bool:
        """Let routers, whose logits nobody knows, send tokens evenly."""
        logits, num_chosen = leaves[0], leaves[1]
        if logits.dim() != 2 or self.values.of(logits) is not None:
            return False
        rows, width = logits.shape
        self.values.most = max(self.values.most, rows * width)
        even = (torch.arange(rows * num_chosen) % width).view(rows, num_chosen)
        self.values.give(outputs[1], even)
        self._invent(aten.topk.default)
        self._note(aten.topk.default, outputs)
        return True

    # Collectives

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a collective, and let torch's fake group do nothing."""
        name = func._schema.name.split("::")[1].strip("_")
        self._record(name, args, kwargs)
        out = self._done(func, args, kwargs)
        if name == "barrier":
            self.wait("barrier")
            self.order.host_waits()
        elif name == "allgather":
            for outputs, source in zip(args[0], args[1], strict=True):
                for output in outputs:
                    self.values.put(output, self.values.of(source))
        elif name == "allgather_base":
            values, parts = self.values.of(args[1]), args[0].numel() // max(1, args[1].numel())
            whole = None if values is None or args[0].numel() > self.values.most else values.reshape(-1).repeat(parts)
            self.values.put(args[0], whole)
        elif name == RECEIVE:
            for output in args[0]:
                self.values.put(output, None)
        return out

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree_flatten((args, kwargs))[0]
        groups = [
            leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        ]
        group = ProcessGroup.unbox(groups[0]) if groups else None
        ranks, purpose = (self._numbers_of(group), self._purpose_of(group)) if groups else ((), "")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = tuple(
            Size.of(leaf.shape, str(leaf.dtype)[6:], "cuda" if isinstance(leaf, FakeTensor) else "cpu")
            for leaf in tensors
        )
        numbers = [leaf for leaf in leaves if type(leaf) is int]
        is_message, line = name in (SEND, RECEIVE), current_line()
        peer, root = ranks[numbers[0]] if is_message else None, numbers[0] if name == "broadcast" else None
        batch = self._batch if is_message else None
        call = GroupCall(self.phase, name, ranks, sizes, line, root, peer, batch, self._reduction, purpose)
        self._reduction = ""
        self.calls.append(call)
        self._order_call(call, args, tensors, numbers)
        dense = [tensor.is_contiguous() for tensor in tensors]
        for rule in broken_rules(name, call.reduction, sizes, dense, len(ranks)):
            self.faults[f"{call} in {self.phase}: {rule}"] += 1

    def _order_call(self, call: GroupCall, args: tuple[Any, ...], tensors: list[Tensor], numbers: list[int]) -> None:
        """Note reads and writes of a collective on the device: it fills its first argument."""
        filled = [] if call.name in (SEND, "barrier") else tree_flatten(args[0])[0]
        if call.name == "broadcast" and call.group[numbers[0]] == self.first_number + torch.distributed.get_rank():
            filled = []
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        written = [tensor for tensor in on_device if any(tensor is one for one in filled)]
        read = [tensor for tensor in on_device if not any(tensor is one for one in written)]
        if on_device:
            self.order.collective((call.group, call.purpose), call.purpose, read, written)

    def note_objects(self, name: str, group: Any, root: int | None = None) -> None:
        """Note that ranks of a group exchange objects; None: all of the pool. root: its rank in the pool."""
        group = torch.distributed.group.WORLD if group is None else group
        self.calls.append(GroupCall(self.phase, name, self._numbers_of(group), (), current_line(), root))

    def _is_joint(self, group: Any) -> bool:
        return self.joint is not None and group is self.joint[0]

    def _purpose_of(self, group: Any) -> str:
        """Return the description of a group, "" where torch has none."""
        if self._is_joint(group):
            return "weight transfer"
        described = str(group.group_desc)
        return "" if described == "undefined" else described

    def _numbers_of(self, group: Any) -> tuple[int, ...]:
        """Return the numbers of a group's ranks over all pools."""
        if self._is_joint(group):
            return self.joint[1]  # type: ignore[index]  # there is one
        return tuple(self.first_number + rank for rank in torch.distributed.get_process_group_ranks(group))

    def _done(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)
        try:
            with self.fake:
                return func(*args, **kwargs)
        except UnsupportedOperatorException:  # no kernel for meta tensors; what is given back is only waited for
            args, kwargs = tree_map(
                lambda leaf: torch.empty(0, dtype=leaf.dtype) if isinstance(leaf, FakeTensor) else leaf, (args, kwargs)
            )
            return func(*args, **kwargs)


def _is_large(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= LARGE_ON_HOST


def _is_on_large_ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation computes with large tensors on the CPU, and not only looks at them otherwise."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    return any(map(_is_large, tensors)) and not func.is_view and func not in READS


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on large tensors but for their values: memory that nobody writes is not taken."""
    if func is aten._pin_memory.default:
        return args[0]
    if _written(func, args, kwargs):
        return args[0] if func._schema.returns else None
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    kwargs.pop("pin_memory", None)
    made = func(*args, **kwargs)
    return tree_map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, made)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation overwrites."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, Tensor)]


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a `copy_` or `_to_copy` does not wait."""
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _on_cpu(leaves: list[Any], spec: Any) -> list[Any]:
    """Return the flattened arguments of an operation for the CPU, in the same structure: nothing is pinned."""
    args, kwargs = tree_unflatten(leaves, spec)
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    flat: list[Any] = tree_flatten((args, kwargs))[0]
    return flat
