"""What operations do under the dispatch mode, one check a function; run by test_dispatch_mode.py in one process of its
own: `python mode_checks.py LIBRARY` prints one JSON object, name -> traceback or null.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from third_party_patches.torch import fake_cuda


def check_autograd_takes_tensors_on_cuda(mode, torch):
    weight = torch.nn.Parameter(torch.empty(4, 3, device="cuda"))
    (torch.empty(2, 4, device="cuda") @ weight).sum().backward()
    assert weight.grad.shape == (4, 3) and weight.grad.device == torch.device("cuda", 0)


def check_tensors_on_the_cpu_are_real(mode, torch):
    assert torch.arange(3).cumsum(0).tolist() == [0, 1, 3]
    assert not mode.operations and not mode.waits


def check_large_tensors_on_the_cpu_take_no_memory(mode, torch):
    """Adam's state on the host: 4 GB of masters and moments, of which a pinned copy, a step and a copy back."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numel = 1 << 28
    weight = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    master = torch.nn.Parameter(weight.float().cpu().pin_memory())
    adam = torch.optim.AdamW([master], foreach=False)
    master.grad = torch.empty(numel, device="cpu")
    master.grad.copy_(torch.empty(numel, device="cuda"))
    adam.step()
    weight.copy_(master)
    assert master.shape == (numel,) and master.device.type == "cpu"
    assert adam.state[master]["exp_avg"].shape == (numel,) and int(adam.state[master]["step"]) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert mode.values.of(weight) is None
    part = torch.zeros(1 << 20)
    assert part.add_(1).sum() == 1 << 20  # below the limit values count


def check_numbers_of_ranks_count_over_all_pools(mode, torch):
    import torch.distributed as dist

    from megatron_rl.rehearse.rehearsed_transfer import fake_joint_group

    mode.first_number = 10
    dist.all_reduce(torch.ones(2, device="cuda"))
    group = fake_joint_group(1, 3)
    mode.joint = group, (3, 11, 12)
    group.send([torch.ones(2, device="cuda")], 2, 0)
    mode.note_objects("gather_object", None, 0)
    first, second, third = mode.calls
    assert first.group == (10, 11, 12, 13) == third.group and third.sizes == () and third.root == 0
    assert second.group == (3, 11, 12) and second.peer == 12


def check_memory_is_counted_by_storage(mode, torch):
    mode.begin("one")
    kept = torch.empty(1000, device="cuda")  # 4000 bytes, rounded up to 4096
    view = kept[:10].view(2, 5)
    assert mode.memory.now == 4096
    other = torch.empty(100, device="cuda")
    assert mode.memory.now == 4096 + 512 and mode.memory.peak == 4608
    del other
    assert mode.memory.now == 4096 and mode.memory.peak == 4608
    del kept
    assert mode.memory.now == 4096
    del view
    assert mode.memory.now == 0
    mode.begin("two")
    assert mode.memory.peak == 0 and sum(mode.at_peak["one"].values()) == 4608


def check_memory_follows_resizes(mode, torch):
    tensor = torch.empty(1000, device="cuda")
    tensor.untyped_storage().resize_(0)
    assert mode.memory.now == 0
    tensor.untyped_storage().resize_(4000)
    assert mode.memory.now == 4096


def check_torch_cuda_says_what_is_allocated(mode, torch):
    tensor = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() == 4096 == torch.cuda.max_memory_allocated()
    del tensor
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def check_small_values_are_known(mode, torch):
    lengths = torch.tensor([3, 1, 2], device="cuda")
    assert (lengths.cumsum(0) * 2).tolist() == [6, 8, 12]
    assert lengths[1:].max().item() == 2
    assert not mode.invented
    # The copy there, the list in one copy, and one number.
    kinds = {text.split(" at ")[0]: count for text, count in mode.waits["start"].items()}
    assert kinds == {"copy to device": 1, "copy to host": 1, "aten._local_scalar_dense.default": 1}, kinds


def check_unknown_values_are_made_up_and_named(mode, torch):
    product = torch.empty(8, 8, device="cuda").bernoulli().sum()
    assert product.item() == 1.0 and len(mode.invented) == 1


def check_writing_the_unknown_forgets_values(mode, torch):
    known = torch.zeros(4, device="cuda")
    part = known[:2]
    assert part.tolist() == [0.0, 0.0] and not mode.invented
    part.copy_(torch.empty(2, device="cuda").bernoulli())
    known.tolist()
    assert mode.invented


def check_filling_makes_values_known(mode, torch):
    unknown = torch.empty(3, device="cuda").bernoulli()
    assert torch.ones_like(unknown).tolist() == [1.0, 1.0, 1.0] and not mode.invented


def check_masks_select_what_is_known(mode, torch):
    mask = torch.tensor([[True, False, True], [False, False, True]], device="cuda")
    rows = torch.empty(2, 3, 5, device="cuda").bernoulli()
    assert rows[mask].shape == (3, 5)
    assert mask.nonzero().tolist() == [[0, 0], [0, 2], [1, 2]]
    assert torch.masked_select(rows[..., 0], mask).shape == (3,)
    assert torch.repeat_interleave(torch.tensor([2, 1], device="cuda")).tolist() == [0, 0, 1]
    found = " ".join(mode.waits["start"])
    for operation in ("index.Tensor", "nonzero", "masked_select", "repeat_interleave"):
        assert f"aten.{operation}" in found


def check_a_mask_nobody_knows_is_refused(mode, torch):
    from megatron_rl.rehearse.dispatch_mode import UnknownValueError

    rows = torch.empty(4, device="cuda").bernoulli()
    try:
        rows[rows > 0]
    except UnknownValueError as error:
        assert "index.Tensor" in str(error)
    else:
        raise AssertionError("a shape was made up")


def check_routers_send_tokens_evenly(mode, torch):
    _, experts = torch.topk(torch.empty(6, 4, device="cuda").bernoulli(), 2)
    assert torch.bincount(experts.flatten(), minlength=4).tolist() == [3, 3, 3, 3]


def check_tokens_of_each_expert_are_known_for_many_experts(mode, torch):
    """8,192 tokens and 256 experts, as of Qwen3.5-35B-A3B: 8 x 8192 / 256 go to each, counted as Megatron does."""
    logits = torch.empty(8192, 256, device="cuda").bernoulli()
    _, experts = torch.topk(logits, 8)
    chosen = torch.zeros_like(logits).int().scatter(1, experts, 1).bool()
    assert chosen.sum(dim=0).long().tolist() == [256] * 256


def check_waits_of_copies(mode, torch):
    device = torch.empty(4, device="cuda")
    device.copy_(torch.zeros(4), non_blocking=True)
    assert not mode.waits
    device.copy_(torch.zeros(4))
    assert device.cpu().tolist() == [0.0] * 4
    torch.cuda.synchronize()
    waits = mode.waits["start"]
    assert [text.split(" at ")[0] for text in waits] == ["copy to device", "copy to host", "device.synchronize"]


def check_modules_keep_marks_when_they_move(mode, torch):
    layer = torch.nn.Linear(2, 2)
    layer.weight.tensor_model_parallel = True
    moved = layer.to("cuda")
    assert moved.weight.is_cuda and moved.weight.tensor_model_parallel


def check_foreach_adam_makes_one_copy(mode, torch):
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.zeros(1 << 20, device="cuda")
    optimizer.step()
    size = 4 << 20
    assert 4 * size <= mode.memory.now < 4.01 * size  # with gradient and both moments
    mode.begin("step")
    optimizer.step()
    assert 5 * size <= mode.memory.peak < 5.01 * size


def check_norms_keep_their_input_and_a_number_a_row(mode, torch):
    x = torch.zeros(256, 512, device="cuda", requires_grad=True)
    before = mode.memory.now
    y = torch.nn.functional.rms_norm(x, (512,), torch.ones(512, device="cuda", requires_grad=True))
    assert mode.memory.now - before == 256 * 512 * 4 + 256 * 4 + 512 * 4
    y.sum().backward()
    assert x.grad.shape == x.shape


def check_lists_of_device_numbers_are_read(mode, torch):
    numbers = [torch.ones((), device="cuda"), torch.zeros((), device="cuda")]
    assert torch.tensor([numbers]).tolist() == [[1.0, 0.0]]
    assert sum(mode.waits["start"].values()) == 2


def check_collectives_are_recorded(mode, torch):
    import torch.distributed as dist

    group = dist.new_group([1, 3])
    total = torch.empty(6, device="cuda")
    dist.all_reduce(total)
    dist.all_gather_into_tensor(torch.empty(8, device="cuda"), torch.empty(4, device="cuda"), group=group)
    dist.broadcast(torch.zeros(2, dtype=torch.int64), 1, group=group)
    reduce, gather, broadcast = mode.calls
    assert (reduce.name, reduce.group, [str(size) for size in reduce.sizes]) == (
        "allreduce",
        (0, 1, 2, 3),
        ["6 float32 on cuda"],
    )
    assert gather.group == (1, 3) and [size.numel for size in gather.sizes] == [8, 4]
    assert (broadcast.root, str(broadcast.sizes[0])) == (0, "2 int64 on cpu")


def check_gathered_values_are_this_ranks_own(mode, torch):
    import torch.distributed as dist

    gathered = [torch.empty(2, dtype=torch.int64, device="cuda") for _ in range(4)]
    dist.all_gather(gathered, torch.tensor([5, 6], device="cuda"))
    assert [one.tolist() for one in gathered] == [[5, 6]] * 4 and not mode.invented


def check_one_copy_moves_many_tensors(mode, torch):
    from megatron_rl.device import in_one_copy

    parts = [{"a": torch.arange(3), "b": torch.tensor([True, False])}, {"a": torch.tensor([0.5])}]
    moved = in_one_copy(parts, torch.device("cuda"))
    assert not mode.waits and all(tensor.is_cuda for part in moved for tensor in part.values())
    values = [{name: tensor.tolist() for name, tensor in part.items()} for part in moved]
    assert values == [{"a": [0, 1, 2], "b": [True, False]}, {"a": [0.5]}]


def check_rows_of_a_known_number_of_tokens(mode, torch):
    from megatron_rl.losses.rows import spread, sum_rows

    lengths = torch.tensor([2, 1], device="cuda")
    mode.waits.clear()
    unknown = torch.empty(3, device="cuda").bernoulli()
    assert spread(sum_rows(unknown, lengths), lengths, 3).shape == (3,) and not mode.waits


def check_a_norm_of_gradients_reads_nothing(mode, torch):
    from megatron.core.utils import local_multi_tensor_l2_norm

    from third_party_patches.megatron_core.l2_norm import l2_norm

    gradients = [torch.empty(4, device="cuda") for _ in range(5)]
    assert l2_norm(1, None, [gradients], False)[0].shape == (1,) and not mode.waits
    local_multi_tensor_l2_norm(1, None, [gradients], False)
    assert sum(mode.waits["start"].values()) >= 5  # Megatron's own, which the patch replaces


def check_sorting_tokens_by_expert_reads_nothing(mode, torch):
    from megatron.core.transformer.moe.moe_utils import permute

    from third_party_patches.megatron_core.permute_without_waits import permuted

    routing = torch.tensor([[True, False], [True, True]], device="cuda")
    tokens, probs = torch.empty(2, 4, device="cuda"), torch.empty(2, 2, device="cuda")
    mode.waits.clear()
    out, weights, order = permuted(tokens, routing, probs, 3)
    assert (out.shape, weights.shape, order.shape) == ((3, 4), (3,), (3,)) and not mode.waits
    permute(tokens, routing, probs, 3)
    assert sum(mode.waits["start"].values()) == 2  # Megatron's own, which the patch replaces


def check_sends_are_recorded_with_their_peer(mode, torch):
    import torch.distributed as dist

    operations = [
        dist.P2POp(dist.isend, torch.empty(3, device="cuda"), 2),
        dist.P2POp(dist.irecv, torch.empty(5, device="cuda"), 0),
    ]
    with mode.one_batch():
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.send(torch.empty(1, device="cuda"), 2)
    assert [(call.name, call.peer, call.batch) for call in mode.calls] == [
        ("send", 2, 1),
        ("recv", 0, 1),
        ("send", 2, None),
    ]


def main(library: str) -> None:
    fake_cuda.load(Path(library))
    import torch
    import torch.distributed as dist

    from megatron_rl.rehearse.child import follow_resizes
    from megatron_rl.rehearse.dispatch_mode import RehearsalMode
    from megatron_rl.rehearse.memory_tracker import MemoryTracker
    from third_party_patches.torch import fake_parameters, fake_worlds

    for patch in (fake_cuda, fake_parameters, fake_worlds):
        patch.PATCH.apply()
    dist.init_process_group(rank=1, world_size=4)
    memory: list[MemoryTracker] = []
    follow_resizes(lambda storage: memory[-1].resized(storage))
    found = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            gpu = fake_cuda.GPU
            gpu.allocated = gpu.peak = 0
            memory.append(MemoryTracker(gpu.allocate))
            mode = RehearsalMode(torch.device("cuda", 0), memory[-1])
            gpu.on_wait = mode.wait
            try:
                with mode:
                    check(mode, torch)
                found[name] = None
            except BaseException:
                found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
