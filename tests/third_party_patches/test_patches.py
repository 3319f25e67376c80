"""Each CPU patch, without it and with it, in a process of its own. Nothing else patches those processes."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def single_rank_groups():
    """Megatron's groups of one rank, made without Megatron's RNG, which is another patch's concern."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_rl.parallel.mpu import TrainGroups
    from megatron_rl.parallel.rank_grid import TrainGrid

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    return TrainGroups(
        grid=TrainGrid(1, 1, 1),
        rank=0,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        exchange_group=dist.group.WORLD,
    )


def train_one_step(groups):
    """One Adam step of a one-layer Qwen2; returns {name: (before, gradient, after)}."""
    from transformers import Qwen2Config

    from megatron_rl.config.megatron import MegatronConfig, OptimConfig
    from megatron_rl.device import Device
    from megatron_rl.experience.micro_batches import micro_batches
    from megatron_rl.model.gpt import build_language_model, transformer_config
    from megatron_rl.records import ragged, single_turn
    from megatron_rl.roles.training import TrainableModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    hf_config = Qwen2Config(
        vocab_size=64, num_hidden_layers=1, architectures=["Qwen2ForCausalLM"], max_position_embeddings=32, **sizes
    )
    config = transformer_config(hf_config, groups, MegatronConfig(), Device("cpu"))
    [model] = build_language_model(hf_config, config, groups, vocab_multiple=64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    optim = OptimConfig(lr=0.1, weight_decay=0.0, clip_grad=0.0)
    device = torch.device("cpu")
    trainable = TrainableModel([model], lambda: None, optim, 1, MegatronConfig(), groups, device)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = single_turn(ragged([torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])]), torch.tensor([2, 1]))

    def loss(hidden, block):
        return (hidden @ model.output_layer.weight.t()).square().mean(), {"ones": torch.ones(())}

    blocks = micro_batches(rows, [[0], [1]], remove_padding=False)
    trainable.compute_gradients(blocks, trainable.totals(blocks), loss)
    gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
    trainable.step()
    return {name: (before[name], gradients[name], p.detach()) for name, p in model.named_parameters()}


def check_cpu_torch():
    groups = single_rank_groups()
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        train_one_step(groups)

    from third_party_patches.megatron_core.cpu_torch import PATCH

    PATCH.apply()
    PATCH.apply()
    for name, (before, gradient, after) in train_one_step(groups).items():
        assert gradient.abs().sum() > 0, name
        # Adam's first step is the learning rate times the sign of the gradient, for all but tiny gradients.
        torch.testing.assert_close(after, before - 0.1 * gradient / (gradient.abs() + 1e-8), atol=1e-5, rtol=0)

    # Everybody else keeps a torch that knows there is no CUDA here.
    others = [module for name, module in list(sys.modules.items()) if not name.startswith("megatron.core")]
    assert sum(vars(module).get("torch") is torch for module in others) > 100
    assert not any(type(vars(module).get("torch")).__name__ == "ModuleProxy" for module in others)
    for call in (
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.zeros(1).cuda(),
        lambda: torch.nn.Linear(1, 1).cuda(),
        lambda: torch.cuda.current_device(),
    ):
        with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
            call()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def check_cpu_offloaded_adam():
    """Three steps of two parameters, half of the elements on the host: what torch's own AdamW makes of them."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from third_party_patches.megatron_core import cpu_offloaded_adam, cpu_torch

    def stepped(optimizer, parameters):
        for number in range(3):
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() * 7 + number)
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    def parameters():
        generator = torch.Generator().manual_seed(0)
        return [torch.nn.Parameter(torch.randn(6, generator=generator)) for _ in range(2)]

    def hybrid(given):
        kinds = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW}
        options = {"pin_cpu_grads": False, "overlap_cpu_optimizer_d2h_h2d": False, "lr": 0.1}
        return HybridDeviceOptimizer([{"params": given}], 0.5, param_update_in_fp32=True, **kinds, **options)

    cpu_torch.PATCH.apply()
    with pytest.raises(KeyError):
        given = parameters()
        stepped(hybrid(given), given)
    cpu_offloaded_adam.PATCH.apply()
    given, expected = parameters(), parameters()
    optimizer = hybrid(given)
    assert [len(optimizer.cpu_optimizers), len(optimizer.gpu_params_map_cpu_copy)] == [1, 1]
    for ours, theirs in zip(
        stepped(optimizer, given), stepped(torch.optim.AdamW(expected, lr=0.1), expected), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def check_cpu_matmul():
    from megatron.core.tensor_parallel import layers
    from torch.profiler import ProfilerActivity, profile

    from third_party_patches.megatron_core import cpu_matmul, cpu_torch

    group = single_rank_groups().tp_group
    cpu_torch.PATCH.apply()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 2, 48), (32, 48)))
    bias, upstream = (torch.randn(*shape, generator=generator) for shape in ((32,), (5, 2, 32)))

    def run(dtype=torch.float32):
        """(output, gradients of input, weight and bias, output of a frozen weight, kernels that ran)."""
        leaves = [tensor.clone().to(dtype).requires_grad_() for tensor in (x, weight, bias)]
        with profile(activities=[ProfilerActivity.CPU]) as ran:
            trained = layers.linear_with_grad_accumulation_and_async_allreduce(
                *leaves,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=False,
                tp_group=group,
            )
            trained.backward(upstream.to(dtype))
            frozen = layers.linear_with_frozen_weight(
                *(leaf.detach() for leaf in leaves), False, False, False, tp_group=group
            )
        kernels = {event.key for event in ran.key_averages()}
        return [trained.detach(), *(leaf.grad for leaf in leaves), frozen], "mkldnn::_linear_pointwise" in kernels

    plain, plain_is_fast = run()
    cpu_matmul.PATCH.apply()
    cpu_matmul.PATCH.apply()
    fast, is_fast = run()
    assert is_fast and not plain_is_fast
    expected = x @ weight.T + bias
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast[0], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(fast[0], fast[4])
    # Other dtypes, gradients and shapes keep torch's own.
    assert not run(torch.bfloat16)[1]
    left = x.clone().requires_grad_()
    layers.torch.matmul(left, weight.T).sum().backward()
    torch.testing.assert_close(left.grad, weight.sum(0).expand_as(x), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        three = layers.torch.matmul(x, torch.ones(5, 48, 1))
        into = torch.empty(5, 2, 32)
        assert layers.torch.matmul(x, weight.T, out=into) is into and three.shape == (5, 2, 1)
        assert layers.torch.matmul(x[:0], weight.T).shape == (0, 2, 32)


def check_cpu_rng():
    from megatron.core.tensor_parallel import random as megatron_random

    from third_party_patches.megatron_core import cpu_rng, cpu_torch

    single_rank_groups()
    cpu_torch.PATCH.apply()

    def seed():
        """Megatron's seeding; returns the next number of the process's own stream."""
        megatron_random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        return torch.rand(()).item()

    def draw():
        """(a number outside, two in a fork, one outside, one in another fork)"""
        tracker = megatron_random.get_cuda_rng_tracker()
        torch.manual_seed(0)
        numbers = [torch.rand(()).item()]
        with tracker.fork():
            numbers += torch.rand(2).tolist()
        numbers.append(torch.rand(()).item())
        with tracker.fork():
            numbers.append(torch.rand(()).item())
        return numbers

    def stream(number, length):
        return torch.rand(length, generator=torch.Generator().manual_seed(number)).tolist()

    def dropped_again():
        """(what dropout in a checkpoint left of ones, the gradient that its second run gave), inside of a fork."""
        ones = torch.ones(64, requires_grad=True)
        with megatron_random.get_cuda_rng_tracker().fork():
            left = megatron_random.checkpoint(F.dropout, False, ones)
        torch.rand(3)  # the stream goes on between forward and backward
        before = torch.get_rng_state()
        left.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
        return left.tolist(), ones.grad.tolist()

    # The tracker's seeds are left behind in the process's own stream; forking and checkpointing need CUDA.
    assert seed() != stream(7, 1)[0]
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        draw()
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        megatron_random.checkpoint(F.dropout, False, torch.ones(2, requires_grad=True))

    cpu_rng.PATCH.apply()
    assert seed() == stream(7, 1)[0]
    numbers = draw()
    assert [numbers[0], numbers[3]] == stream(0, 2)
    # Megatron derives the model-parallel seed as seed + 2718 + tp_rank.
    assert [*numbers[1:3], numbers[4]] == stream(7 + 2718, 3)
    left, gradient = dropped_again()
    assert left == gradient and set(left) == {0.0, 2.0}


def vllm_linear():
    """A vLLM linear layer of 8 inputs and 16 outputs with its weight and bias tensors, after post-processing."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(8, 16, params_dtype=torch.float32, disable_tp=True, return_bias=False)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(16, 8, generator=generator), torch.randn(16, generator=generator)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, weight, bias


def check_unpacked_linear():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as vllm_ps

    with set_current_vllm_config(VllmConfig()):
        vllm_ps.init_distributed_environment(1, 0, "env://", 0, "gloo")
        vllm_ps.initialize_model_parallel()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    layer, weight, bias = vllm_linear()
    assert layer.weight.numel() == 0
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias), atol=1e-5, rtol=0)
    weight.zero_()
    # The trainer's update is not seen.
    assert not torch.allclose(layer(x), F.linear(x, weight, bias))

    from third_party_patches.vllm.unpacked_linear import PATCH, plain_linear

    PATCH.apply()
    layer, weight, bias = vllm_linear()
    assert layer.weight.data_ptr() == weight.data_ptr() and layer.weight.shape == (16, 8)
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias), atol=1e-5, rtol=0)
    weight.mul_(-2.0).add_(1.0)
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias), atol=1e-5, rtol=0)

    for dtype in (torch.float32, torch.bfloat16):
        inputs = [tensor.to(dtype) for tensor in (x.view(1, 3, 8), weight, bias)]
        tolerance = 1e-5 if dtype == torch.float32 else 0.0
        for given_bias in (inputs[2], None):
            found, expected = plain_linear(*inputs[:2], given_bias), F.linear(*inputs[:2], given_bias)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def check_shm_group_name():
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def names(ports, ranks=(0, 1)):
        """The segment names of one group in jobs at those ports."""
        # What vLLM's CPU worker makes of the rendezvous `env://`: the part after the colon.
        os.environ["VLLM_DIST_IDENT"] = "//"
        group = SimpleNamespace(unique_name="tp:0", ranks=list(ranks))
        found = []
        for port in ports:
            os.environ["MASTER_PORT"] = port
            found.append(_CPUSHMDistributed.make_group_name(group))
        return found

    del os.environ["MASTER_STORE"]  # as on several nodes
    first, second = names(["29500", "29501"])
    assert first == second

    from third_party_patches.vllm.shm_group_name import PATCH

    PATCH.apply()
    PATCH.apply()
    first, second, again = names(["29500", "29501", "29500"])
    assert first != second and first == again
    assert first.count("29500") == 1 and "/" not in first
    os.environ["MEGATRON_RL_RUN"] = "0123456789"
    assert names(["29500"])[0].startswith("megatron_rl-0123456789-29500-")
    assert names(["29500"], ranks=(2, 3)) != [first]
    os.environ["MASTER_STORE"] = "/tmp/megatron_rl-1000/0123456789/store_a1b2"
    assert names(["0"])[0].startswith("megatron_rl-0123456789-store_a1b2-")


def check_queue_name():
    """Name of a new queue's shared memory, and of one that it is opened by again; without and with."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    from third_party_patches.vllm.queue_name import PATCH

    os.environ["MEGATRON_RL_RUN"] = "0123456789"
    without = ShmRingBuffer(1, 1024, 2).handle()[-1]
    PATCH.apply()
    PATCH.apply()
    queue = ShmRingBuffer(1, 1024, 2)
    return without, queue.handle()[-1], ShmRingBuffer(*queue.handle()).handle()[-1]


def check_shm_lifetime():
    """What a group of two leaves in /dev/shm while it lives, on rank 0: without the patch, and with it, twice over."""
    import torch.distributed as dist
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as vllm_ps
    from vllm.platforms import current_platform

    from third_party_patches.vllm import shm_group_name, shm_lifetime

    current_platform.import_kernels()  # an engine does, and without them groups have no shared memory
    if not hasattr(torch.ops._C, "init_shm_manager"):
        return None
    shm_group_name.PATCH.apply()
    dist.init_process_group("gloo")
    os.environ["VLLM_DIST_IDENT"] = "//"
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="external_launcher")

    def left_while_alive():
        with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
            vllm_ps.init_distributed_environment(2, dist.get_rank(), "env://", dist.get_rank(), "gloo")
            vllm_ps.initialize_model_parallel(tensor_model_parallel_size=2)
            summed = vllm_ps.get_tp_group().all_reduce(torch.tensor([1.0, 2.0]))
            found = sorted(path.name for path in Path("/dev/shm").glob(f"*{Path(os.environ['MASTER_STORE']).name}-*"))
            dist.barrier()
            vllm_ps.destroy_model_parallel()
        assert summed.tolist() == [2.0, 4.0]
        return found

    without = left_while_alive()
    if dist.get_rank() == 0:
        for name in without:
            (Path("/dev/shm") / name).unlink(missing_ok=True)
            (Path("/dev/shm") / name.replace("tp:0", "tp:1")).touch()  # the next group's, as after a kill
    dist.barrier()
    shm_lifetime.PATCH.apply()
    shm_lifetime.PATCH.apply()
    return without, left_while_alive()


def check_rank_order():
    """Rollout groups of TP2 inside TP4: vLLM's TP group of this rank, with and without."""
    import torch.distributed as dist
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as vllm_ps

    from third_party_patches.vllm import rank_order, shm_group_name, shm_lifetime

    # Groups have shared memory here: under a name of this job, of which nothing is left.
    shm_group_name.PATCH.apply()
    shm_lifetime.PATCH.apply()
    os.environ["VLLM_DIST_IDENT"] = "//"
    dist.init_process_group("gloo")
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="external_launcher")

    def tp_group():
        with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
            vllm_ps.init_distributed_environment(4, dist.get_rank(), "env://", dist.get_rank(), "gloo")
            vllm_ps.initialize_model_parallel(tensor_model_parallel_size=2)
            ranks = list(vllm_ps.get_tp_group().ranks)
            vllm_ps.destroy_model_parallel()
        return ranks

    with rank_order.using_rank_order([0, 2, 1, 3]):
        without = tp_group()
    rank_order.PATCH.apply()
    rank_order.PATCH.apply()
    with rank_order.using_rank_order([0, 2, 1, 3]):
        ordered = tp_group()
    with pytest.raises(ValueError, match=r"\[0, 2\] is not an order of 2 ranks"), rank_order.using_rank_order([0, 2]):
        pass
    return without, ordered, tp_group()


def test_cpu_matmul():
    """Both linears of megatron-core, forward and backward, and which kernel ran. Would not catch one that is slower."""
    run_ranks(1, check_cpu_matmul, timeout=100)


def test_cpu_offloaded_adam():
    """Without: a KeyError. With: torch's AdamW, in copies. Would not catch streams of a GPU that overtake."""
    run_ranks(1, check_cpu_offloaded_adam, timeout=100)


def test_cpu_torch():
    """Without: building asks for CUDA. With: one exact Adam step. Would not catch a Megatron path we do not take."""
    run_ranks(1, check_cpu_torch, timeout=100)


def test_cpu_rng():
    """Without: streams mix, forking asks for CUDA. With: two streams, and a checkpoint draws again what it drew.

    Would not catch states that megatron-core keeps on the device for CUDA graphs.
    """
    run_ranks(1, check_cpu_rng, timeout=100)


def test_unpacked_linear():
    """Without: the weight is emptied and copied. With: it is read where it lies. Would not catch MoE layers."""
    run_ranks(1, check_unpacked_linear, timeout=100)


def test_shm_group_name():
    """Without: two jobs share a name. With: each has its own. Would not catch two jobs with one port on two nodes."""
    run_ranks(1, check_shm_group_name, timeout=100)


def test_queue_name():
    """Without: nobody can tell whose segment it is. With: its name begins with the run's mark, for readers too.

    Would not catch shared memory of another part of vLLM.
    """
    [(without, with_patch, opened)] = run_ranks(1, check_queue_name, timeout=100)
    assert without.startswith("psm_")
    assert with_patch == opened and with_patch.startswith("megatron_rl-0123456789-")


def test_shm_lifetime():
    """Without: a living group has a segment per rank. With: none has a name, old ones are gone, sums are right.

    Would not catch a kill in the moment between making a segment and mapping it.
    """
    found = run_ranks(2, check_shm_lifetime, timeout=100)
    if None in found:
        pytest.skip("vLLM's kernels for this CPU, which has no AVX-512, have no shared-memory communicator")
    for without, with_patch in found:
        assert len(without) == 2 and with_patch == []


def test_rank_order():
    """Without: runs of ranks. With: the given order while it is active. Would not catch a group made elsewhere."""
    consecutive, strided = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    found = run_ranks(4, check_rank_order, timeout=100)
    assert [list(groups) for groups in zip(*found, strict=True)] == [consecutive, strided, consecutive]
