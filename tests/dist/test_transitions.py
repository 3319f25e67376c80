"""From every kind of training layout to every kind of rollout layout, on real engines.

One case is one layout and one model. Each enters, generates, trains, enters again, and goes in and out many times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, hugging_face_greedy, logprob_difference, round_trip, tokens, weights
from tiny_models import random_experience, run_config, save_llama, save_qwen2, save_qwen3, save_qwen3_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LR = 1e-2
NUM_ROUNDS = 20
MAX_GROWTH_BYTES = 8 << 20


@dataclass(frozen=True)
class Case:
    """A training layout, a rollout TP size, and a model; `options` are configuration keys with `__` for dots.

    lacks: whether ranks lack anything of their rollout shards.
    """

    name: str
    tp: int
    pp: int
    rollout_tp: int
    dp: int = 1
    save: Callable = save_qwen2
    model: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    lacks: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def config(self, path: str):
        rollout = {"actor_rollout_ref__rollout__tensor_model_parallel_size": self.rollout_tp}
        return run_config(path, self.tp, self.pp, actor_rollout_ref__actor__optim__lr=LR, **rollout, **self.options)


MEGATRON = "actor_rollout_ref__actor__megatron__"
ROLLOUT = "actor_rollout_ref__rollout__"
# The vocabulary of 70 has 192 rows at TP3, of which the last rank has padding only, and 128 in vLLM.
THREES = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
FOUR_KV_HEADS = {"num_key_value_heads": 4}
SP = {f"{MEGATRON}sequence_parallel": True}
EP2, ETP1 = {f"{MEGATRON}expert_model_parallel_size": 2}, {f"{MEGATRON}expert_tensor_parallel_size": 1}
CASES = [
    Case("TP2PP2-TP2", 2, 2, 2),
    Case("TP4-TP2", 4, 1, 2, model=FOUR_KV_HEADS),
    Case("TP4-TP1", 4, 1, 1, model=FOUR_KV_HEADS),
    Case("TP2PP2-TP1", 2, 2, 1),
    Case("TP2PP2DP2-TP1", 2, 2, 1, dp=2),
    Case("PP4-TP1", 1, 4, 1),
    Case("TP2PP2VPP2-TP1", 2, 2, 1, options={f"{MEGATRON}virtual_pipeline_model_parallel_size": 2}),
    Case("PP2-uneven-TP1", 1, 2, 1, options={f"{MEGATRON}num_layers_in_first_pipeline_stage": 1}),
    Case("PP2-TP2", 1, 2, 2, save=save_llama),
    Case("PP2-TP2-one-kv-head", 1, 2, 2, model={"num_key_value_heads": 1}),
    Case("TP3-TP1-other-padding", 3, 1, 1, model=THREES),
    Case("TP2PP2-TP1-dropping", 2, 2, 1, save=save_llama, options={f"{ROLLOUT}drop_train_weights": True}),
    Case("TP2PP2SP-TP1-qwen3", 2, 2, 1, save=save_qwen3, options=SP),
    Case("DP2EP2-TP1", 1, 1, 1, dp=2, save=save_qwen3_moe, options=EP2),
    Case("TP2ETP2-TP2", 2, 1, 2, save=save_qwen3_moe, options=SP, lacks=False),
    Case("TP2EP2ETP1-TP2", 2, 1, 2, save=save_qwen3_moe, options=SP | EP2 | ETP1),
    Case("TP2PP2ETP2-TP1", 2, 2, 1, save=save_qwen3_moe, options=SP),
    Case("TP2DP2EP2ETP2-TP1", 2, 1, 1, dp=2, save=save_qwen3_moe, options=SP | EP2),
]


def resident_bytes() -> int:
    """What this process holds once the allocator has returned what it only keeps for later."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def train(worker, seed: int) -> None:
    rows = random_experience(8, seed)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.old_log_probs = rows.rollout_log_probs
    worker.update_actor(rows.actor_batch())


def transition_rank(config, exported: str) -> dict:
    """What the tests look at; two updates are made once without and once with generation around them."""
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    train(worker, 0)
    train(worker, 1)
    never_entered = weights(worker)
    worker.build_actor()
    worker.build_rollout()
    first, report = round_trip(worker, GREEDY)
    sampled, _ = round_trip(worker, RANDOM)
    difference = logprob_difference(worker, sampled)
    train(worker, 0)
    worker.export_hf(Path(exported))
    second, second_report = round_trip(worker, GREEDY)
    memory = []
    for _ in range(NUM_ROUNDS):
        worker.enter_rollout()
        worker.exit_rollout()
        memory.append(resident_bytes())
    last, _ = round_trip(worker, GREEDY)
    train(worker, 1)
    return {
        "report": report,
        "reports_agree": report.bytes_received == second_report.bytes_received,
        "tp_group": list(worker.rollout.groups.ranks),
        "first": tokens(first),
        "sampled": tokens(sampled),
        "difference": difference,
        "second": tokens(second),
        "last": tokens(last),
        "growth": memory[-1] - memory[2],
        "bit_equal": all(map(torch.equal, weights(worker), never_entered)),
    }


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def transition(request, tmp_path_factory):
    case = request.param
    folder = tmp_path_factory.mktemp("transition")
    path = case.save(folder / "model", **case.model)
    exported = str(folder / "exported")
    return case, path, exported, run_ranks(case.world_size, transition_rank, case.config(path), exported)


def test_greedy_tokens_equal_hugging_face(transition) -> None:
    """Token for token on every rank, before and after an update; would not catch an error that keeps every argmax."""
    _, path, exported, ranks = transition
    before, after = hugging_face_greedy(path), hugging_face_greedy(exported)
    assert before != after, "the update changed too little to be noticed"
    for rank in ranks:
        assert rank["first"] == before
        assert rank["second"] == rank["last"] == after


def test_every_byte_that_was_lacking_arrived_and_no_other(transition) -> None:
    """Counted where tensors are received; would not catch padding inside the collective library."""
    case, _, _, ranks = transition
    assert all(rank["report"].bytes_received == rank["report"].lower_bound_bytes for rank in ranks)
    assert all((rank["report"].bytes_received > 0) == case.lacks and rank["reports_agree"] for rank in ranks)


def test_rollout_and_trainer_agree_on_samples(transition) -> None:
    """fp32 5e-5, at temperature 1; would not catch an error both engines share."""
    _, _, _, ranks = transition
    differences = [rank["difference"] for rank in ranks if rank["difference"] is not None]
    assert differences and max(differences) < 5e-5


def test_many_rounds_leave_training_untouched(transition) -> None:
    """Weights bit-equal to a run that never entered, and no growth; would not catch leaks below 0.5 MB a round."""
    _, _, _, ranks = transition
    assert all(rank["bit_equal"] for rank in ranks)
    assert max(rank["growth"] for rank in ranks) < MAX_GROWTH_BYTES


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Samples of the same model in one process, by the model's recipe."""
    known: dict[tuple, list[list[int]]] = {}

    def samples(case: Case) -> list[list[int]]:
        key = (case.save, tuple(case.model.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            path = case.save(folder / "model", **case.model)
            known[key] = run_ranks(1, transition_rank, run_config(path, 1, 1), str(folder / "exported"))[0]["sampled"]
        return known[key]

    return samples


def test_samples_do_not_depend_on_the_layout(transition, one_process) -> None:
    """Same seeds, same tokens in fp32; would not catch layouts that differ only at near-ties."""
    case, _, _, ranks = transition
    assert all(rank["sampled"] == one_process(case) for rank in ranks)


def test_rollout_groups_are_strided(transition) -> None:
    """vLLM's own group holds every k-th rank of a block; would not catch a group that vLLM makes and ignores."""
    case, _, _, ranks = transition
    block = max(case.tp, case.rollout_tp)
    k = block // case.rollout_tp
    for number, rank in enumerate(ranks):
        first = number // block * block + number % k
        assert rank["tp_group"] == list(range(first, first + block, k))
