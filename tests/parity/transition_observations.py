"""From every kind of training layout to every kind of rollout layout, on real engines.

Why answers cannot depend on the layout: a rollout rank's shard is a set of elements of the whole tensors, each of which
some training rank holds; the exchange copies elements and computes none. So vLLM has the same weights to the bit from
any training layout, and TP in vLLM changes sums' order alone. A draw depends on its seed, sample and place, not on
ranks. Not exercised: near-ties, at which another order of sums could change a token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from ranks import run_ranks
from rollout_checks import (
    GREEDY,
    RANDOM,
    addresses,
    hugging_face_greedy,
    logprob_difference,
    round_trip,
    tokens,
    weights,
)
from scenarios import Runs, Scenario
from tiny_models import random_batch, run_config
from transition_cases import Case

from megatron_rl.columns import ACTOR_UPDATE

NUM_ROUNDS = 20
MAX_GROWTH_BYTES = 8 << 20


@dataclass(frozen=True)
class Transition:
    """Enter, generate, train, enter again, and go in and out many times.

    - Greedy tokens are those of transformers on every rank, before and after an update. Would not catch an error that
      keeps every argmax.
    - Every byte that was lacking arrived, and no other, counted where tensors are received. Would not catch padding
      inside of the collective library.
    - Rollout and trainer agree on samples within 5e-5, in fp32 at temperature 1. Would not catch an error that both
      share.
    - Weights are the bits of a run that never entered, and nothing grows. Would not catch leaks below 0.5 MB a round.
    - Weights and cache stay where they are, in train mode, too. Would not catch memory that moves between two looks and
      back.
    - A weight that has moved is named, and nothing is generated where graphs would read the old one. Would not catch a
      tensor inside of a kernel.
    - Samples are those of one process. Would not catch layouts that differ only at near-ties.
    - vLLM's own TP group has its ranks of a replica, which is every k-th rank of a block. Would not catch a group that
      vLLM makes and ignores.
    """

    case: Case
    name: str = "transition"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        case, path = self.case, runs.path(scenario)
        ranks = run_ranks(case.world_size, transition_rank, case.config(path), str(folder))
        before, after = hugging_face_greedy(path), hugging_face_greedy(str(folder))
        assert before != after, "the update changed too little to be noticed"
        alone = runs.once(("samples", path), partial(run_ranks, 1, samples_rank, run_config(path, 1, 1)))
        differences = [rank["difference"] for rank in ranks if rank["difference"] is not None]
        assert differences and max(differences) < 5e-5
        assert max(rank["growth"] for rank in ranks) < MAX_GROWTH_BYTES
        for number, rank in enumerate(ranks):
            assert rank["first"] == before and rank["second"] == rank["last"] == after
            assert rank["sampled"] == alone[0]
            assert rank["report"].bytes_received == rank["report"].lower_bound_bytes
            assert (rank["report"].bytes_received > 0) == case.lacks and rank["reports_agree"]
            assert rank["bit_equal"]
            self.check_places(rank)
            self.check_group(number, rank["tp_group"])

    @staticmethod
    def check_places(rank: dict) -> None:
        """Before the first round and in all others; what is said of a weight elsewhere."""
        first, *others = rank["addresses"]
        assert len(others) == NUM_ROUNDS + 1 and all(other == first for other in others)
        name = rank["first_parameter"]
        assert f"parameter {name} ({first[name]:#x} when the engine was built, " in rank["said_of_a_moved_weight"]

    def check_group(self, number: int, group: list[int]) -> None:
        """Of a rank."""
        size = max(self.case.rollout_tp, self.case.rollout_ep)
        block = max(self.case.tp, size)
        k = block // size
        replica = list(range(number // block * block + number % k, number // block * block + block, k))
        first = replica.index(number) // self.case.rollout_tp * self.case.rollout_tp
        assert group == replica[first : first + self.case.rollout_tp]


def resident_bytes() -> int:
    """What this process holds once the allocator has returned what it only keeps for later."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def train(worker, seed: int) -> None:
    rows = random_batch(8, seed)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["rollout_log_probs"])
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))


def said_of_a_moved_weight(worker) -> str:
    """Of the first parameter, put elsewhere with the same content; the rank is in train mode before and after."""
    from megatron_rl.rollout.addresses import MovedTensorError

    parameter = next(worker.roles["rollout"].generator.model.parameters())
    parameter.data = parameter.data.clone()
    try:
        worker.roles["rollout"].enter()
    except MovedTensorError as error:
        assert not worker.roles["rollout"].engine.in_rollout
        return str(error)
    return ""


def transition_rank(config, exported: str) -> dict:
    """What is looked at; two updates are made once without and once with generation around them."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    train(worker, 0)
    train(worker, 1)
    never_entered = weights(worker)
    worker.build("actor")
    worker.build("rollout")
    seen = [addresses(worker)]
    first, report = round_trip(worker, GREEDY)
    seen.append(addresses(worker))
    sampled, _ = round_trip(worker, RANDOM)
    difference = logprob_difference(worker, sampled)
    train(worker, 0)
    worker.roles["actor"].export_hf(Path(exported))
    second, second_report = round_trip(worker, GREEDY)
    memory = []
    for _ in range(NUM_ROUNDS):
        worker.roles["rollout"].enter()
        seen.append(addresses(worker))
        worker.roles["rollout"].exit()
        memory.append(resident_bytes())
    last, _ = round_trip(worker, GREEDY)
    train(worker, 1)
    return {
        "report": report,
        "reports_agree": report.bytes_received == second_report.bytes_received,
        "tp_group": list(worker.roles["rollout"].generator.groups.ranks),
        "first": tokens(first),
        "sampled": tokens(sampled),
        "difference": difference,
        "second": tokens(second),
        "last": tokens(last),
        "growth": memory[-1] - memory[2],
        "bit_equal": all(map(torch.equal, weights(worker), never_entered)),
        "addresses": seen,
        "first_parameter": next(iter(seen[0])),
        "said_of_a_moved_weight": said_of_a_moved_weight(worker),
    }


def samples_rank(config) -> list[list[int]]:
    """Of a model that has not been trained."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    return tokens(round_trip(worker, RANDOM)[0])
