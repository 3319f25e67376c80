"""From every kind of training layout to every kind of rollout layout, on real engines.

One case is one layout and one model; which of them `make test` has, transition_cases.py says. Each enters, generates,
trains, enters again, and goes in and out many times.

Why answers cannot depend on the layout: a rollout rank's shard is a set of elements of the whole tensors, each of which
some training rank holds; the exchange copies elements and computes none. So vLLM has the same weights to the bit from
any training layout, and TP in vLLM changes sums' order alone. A draw depends on its seed, sample and place, not on
ranks. Not exercised: near-ties, at which another order of sums could change a token.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import pytest
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
from tiny_models import random_batch, run_config
from transition_cases import CASES, Case, often

from megatron_rl.columns import ACTOR_UPDATE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROUNDS = 20
MAX_GROWTH_BYTES = 8 << 20


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
    """What the tests look at; two updates are made once without and once with generation around them."""
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


@pytest.fixture(scope="module", params=often(CASES))
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


def test_weights_and_cache_stay_where_they_are(transition) -> None:
    """Before the first round, in train mode, and in twenty rounds; the tokens change with the weights, above.

    Would not catch memory that moves between two looks and back.
    """
    _, _, _, ranks = transition
    for rank in ranks:
        first, *others = rank["addresses"]
        assert len(others) == NUM_ROUNDS + 1 and all(other == first for other in others)


def test_a_weight_that_has_moved_is_named(transition) -> None:
    """Nothing is generated where graphs would read the old one. Would not catch a tensor inside of a kernel."""
    _, _, _, ranks = transition
    for rank in ranks:
        place = rank["addresses"][0][rank["first_parameter"]]
        expected = f"parameter {rank['first_parameter']} ({place:#x} when the engine was built, "
        assert expected in rank["said_of_a_moved_weight"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Samples of the same model in one process, by the model's recipe."""
    known: dict[tuple, list[list[int]]] = {}

    def samples(case: Case) -> list[list[int]]:
        key = (case.save, tuple(case.model.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            path = case.save(folder / "model", **case.model)
            known[key] = run_ranks(1, samples_rank, run_config(path, 1, 1))[0]
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
