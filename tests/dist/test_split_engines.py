"""A trained actor in one world, vLLM in another, weights transferred between them: real engines, placements at random.

The placements are drawn once, with a seed, over models, layouts and rollout TP; all of them are valid by preflight.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, ask, hugging_face_greedy, hugging_face_log_probs, prompts, tokens
from rounded_folders import BLOCK, num_bytes, rounded_folder
from safetensors.torch import load_file
from sweeps import WEEKLY
from tiny_gemma4 import save_gemma4, save_gemma4_with_keys_for_values
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import random_batch, run_config, save_glm4_moe, save_llama, save_qwen2, save_qwen3, save_qwen3_moe
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.transition import TransitionPlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

MEGATRON, ROLLOUT = "actor_rollout_ref__actor__megatron__", "actor_rollout_ref__rollout__"
NUM_ROWS = 8
BIAS = "e_score_correction_bias"


class Placed(NamedTuple):
    """Training on TP x PP x DP ranks, `more` keys of its layout; `replicas` of rollout TP `tp`."""

    save: Callable[[Path], str]
    train: tuple[int, int, int]
    more: dict
    tp: int
    replicas: int
    keys: dict = {}
    """More keys of the run."""

    @property
    def num_train(self) -> int:
        return self.train[0] * self.train[1] * self.train[2]

    @property
    def name(self) -> str:
        tp, pp, dp = self.train
        extra = "".join(f"-{key.split('_')[0]}{value}" for key, value in self.more.items() if value is not True)
        extra += "-whole" * (f"{ROLLOUT}expert_parallel_size" in self.keys)
        extra += "-DP" * (self.dp > 1)
        extra += "-FP8" * self.in_eight_bits + "-LoRA" * (f"{ADAPTERS}rank" in self.keys)
        return f"{self.save.__name__[5:]}-TP{tp}PP{pp}DP{dp}{extra}-to-{self.replicas}xTP{self.tp}"

    @property
    def dp(self) -> int:
        """Attention DP: TP groups of a replica."""
        return self.keys.get(f"{ROLLOUT}data_parallel_size", 1)

    @property
    def num_rollout(self) -> int:
        return self.replicas * self.tp * self.dp

    @property
    def sends_adapters(self) -> bool:
        """Whether adapters alone are sent, next to a base that each rollout rank reads."""
        return not self.keys.get(f"{ADAPTERS}merge", True)

    @property
    def in_eight_bits(self) -> bool:
        return f"{ROLLOUT}quantization" in self.keys


VPP2 = {"virtual_pipeline_model_parallel_size": 2}
UNEVEN = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
ROUTER = "override_transformer_config__moe_router_"
BIASED = {f"{ROUTER}enable_expert_bias": True, f"{ROUTER}bias_update_rate": 0.3}
PLAIN = {}
FP8 = {f"{ROLLOUT}quantization": "fp8", f"{ROLLOUT}quantization_block_size": BLOCK}
WHOLE_EXPERTS = {f"{ROLLOUT}expert_parallel_size": 2}
ATTENTION_DP = WHOLE_EXPERTS | {f"{ROLLOUT}data_parallel_size": 2}
ADAPTERS = "actor_rollout_ref__model__lora__"
LORA = {f"{ADAPTERS}rank": 8, f"{ADAPTERS}merge": True}


def drawn(number: int, seed: int) -> list[Placed]:
    """Valid placements of at most 6 ranks."""
    choose, found = random.Random(seed), []
    while len(found) < number:
        save = choose.choice((save_qwen2, save_llama, save_qwen3, save_qwen3_moe))
        tp, pp, dp = choose.choice(((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)))
        more = choose.choice((VPP2, UNEVEN, PLAIN)) if pp > 1 else PLAIN
        if save is save_qwen3_moe:
            more = more | ({"sequence_parallel": True} if tp > 1 else {})
            more = more | (EP2 if tp * dp % 2 == 0 and choose.random() < 0.7 else {})
        rollout_tp, replicas = choose.choice(((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (4, 1)))
        placed = Placed(save, (tp, pp, dp), more, rollout_tp, replicas)
        if placed.num_train + rollout_tp * replicas <= 6 and placed not in found:
            found.append(placed)
    return found


def save_wide_experts(folder: Path) -> str:
    """Experts whose columns and heads are whole blocks on two ranks."""
    return save_qwen3_moe(folder, head_dim=64, moe_intermediate_size=64)


FIRST = [
    Placed(save_qwen3_moe, (1, 1, 2), EP2, 2, 1),  # experts, t_g above t
    Placed(save_qwen2, (2, 2, 1), UNEVEN, 1, 2),  # tied embeddings, t_g below t
]
"""`make test` has the first."""
MORE = [
    *drawn(6, seed=7),
    Placed(save_gpt_oss, (1, 1, 2), EP2, 2, 1),
    Placed(save_glm4_moe, (1, 2, 1), BIASED, 1, 2),
    Placed(save_llama, (2, 2, 1), PLAIN, 1, 2, FP8),
    Placed(save_wide_experts, (1, 1, 2), EP2, 2, 1, FP8 | {f"{ROLLOUT}weight_deltas": True}),
    Placed(save_llama, (1, 2, 1), PLAIN, 2, 1, FP8 | LORA),
    Placed(save_qwen3_moe, (1, 2, 1), PLAIN, 2, 1, WHOLE_EXPERTS),
    Placed(save_llama, (2, 1, 1), PLAIN, 1, 1, FP8 | LORA | {f"{ADAPTERS}merge": False}),
]
FURTHER = [
    Placed(save_qwen3_moe, (1, 2, 1), PLAIN, 1, 1, ATTENTION_DP),
    Placed(save_wide_experts, (1, 1, 2), EP2, 2, 1, FP8 | WHOLE_EXPERTS | {f"{ROLLOUT}weight_deltas": True}),
    Placed(save_gpt_oss, (2, 1, 1), {"sequence_parallel": True}, 1, 2),
    Placed(save_minimax, (2, 2, 1), {"sequence_parallel": True}, 1, 2),
    Placed(save_minimax, (1, 2, 1), PLAIN, 2, 1),
    Placed(save_qwen3_5, (1, 2, 1), PLAIN, 2, 1),
    Placed(save_qwen3_5_moe, (2, 1, 1), {"sequence_parallel": True}, 1, 2),
    Placed(save_gemma4, (1, 2, 1), PLAIN, 2, 1),
    Placed(save_gemma4_with_keys_for_values, (2, 1, 1), PLAIN, 1, 2),
]
"""What runs once a week: the newer families in layouts that others have above."""


def pool_of(rank: int, num_train: int, num_rollout: int) -> str:
    """Make this process a rank of one of the two pools; the pool."""
    is_rollout = rank >= num_train
    place = {"RANK": rank - num_train * is_rollout, "LOCAL_RANK": rank}
    place["MASTER_STORE"] = f"{os.environ['MASTER_STORE']}_{is_rollout:d}"
    place["WORLD_SIZE"] = num_rollout if is_rollout else num_train
    os.environ |= {name: str(value) for name, value in place.items()}
    return "rollout" if is_rollout else "global_pool"


def meet_at(file: Path, offer: Callable[[], object] | None) -> object:
    """What rank 0 of training has to say to all."""
    if offer is not None:
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(offer()))
        unfinished.replace(file)
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pickle.loads(file.read_bytes())


def train_and_send(config, exported: Path, meeting: Path, flips: bool) -> dict:
    """Of a training rank: what it sent each time, before and after an update; the updated model is exported."""
    from megatron_rl.hybrid_engine.verify import WeightMismatchError
    from megatron_rl.roles.host import RankHost

    host = RankHost(config)
    host.build("actor")
    actor = host.roles["actor"]
    num_rollout = host.rank.placement.pools["rollout_pool"].world_size
    address = meet_at(meeting, (lambda: actor.offer_transfer(num_rollout)) if host.groups.rank == 0 else None)
    assert actor.join_transfer(address) == ""
    if flips:
        with pytest.raises(WeightMismatchError):
            actor.send_weights(version=0)
        return {"sent": []}
    sent = [actor.send_weights(version=0)]
    experience = random_batch(NUM_ROWS)
    experience.add(old_log_probs=experience["advantages"])
    mine = experience[torch.arange(NUM_ROWS).tensor_split(host.groups.grid.dp_size)[host.groups.dp_rank]]
    actor.update(mine.read_by(ACTOR_UPDATE))
    sent.append(actor.send_weights(version=1))
    actor.export_hf(exported)
    return {"sent": sent}


def flipping(run: Callable) -> Callable:
    """An exchange after which one bit of what arrived first is another."""

    def flipped(self) -> None:
        run(self)
        step = next(step for step in self._steps if step.receive is not None)
        copies = step.unpack.args[0]  # none where the message arrives in its place
        target = copies[0][0] if copies else step.receive[0]
        words = target.view(-1)[:1].view(torch.int32)
        words ^= 1 << 3

    return flipped


def receive_and_generate(config, meeting: Path, flips: bool) -> dict:
    """Of a rollout rank: what it received, and greedy answers with their log-probs, for each version of the weights."""
    from megatron_rl.hybrid_engine.exchange import Exchange
    from megatron_rl.hybrid_engine.verify import WeightMismatchError
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.transfer_address import TransferSettings

    host = RankHost(config, pool="rollout_pool")
    address = meet_at(meeting, None)
    if flips and host.groups.rank == 0:
        Exchange.run = flipping(Exchange.run)  # this process ends with the test
    host.build("rollout", TransferSettings())
    rollout = host.roles["rollout"]
    assert rollout.join_transfer(address) == ""
    if flips:
        with pytest.raises(WeightMismatchError):
            rollout.receive_weights()
        return {"received": []}
    received, answers = [], []
    for _ in range(2):
        received.append(rollout.receive_weights())
        rollout.enter()
        answered = ask(rollout, prompts(), GREEDY)
        answers.append((tokens(answered), answered.flat("rollout_log_probs").clone()))
        rollout.exit()
    constants = {name: tensor.clone() for name, tensor in rollout._constants.items()}
    return {"received": received, "answers": answers, "memory": host.owned_memory(), "constants": constants}


def one_rank(config, num_train: int, num_rollout: int, exported: Path, meeting: Path, flips: bool) -> dict:
    pool = pool_of(int(os.environ["RANK"]), num_train, num_rollout)
    if pool == "rollout":
        return receive_and_generate(config, meeting, flips)
    return train_and_send(config, exported, meeting, flips)


def run_placed(placed: Placed, folder: Path, flips: bool = False) -> tuple[RunConfig, list[dict], list[dict]]:
    """The configuration, and what the ranks of training and of the rollout say."""
    path = placed.save(folder / "model")
    num_rollout = placed.num_rollout
    keys = {f"{MEGATRON}{key}": value for key, value in placed.more.items()}
    keys |= {"actor_rollout_ref__rollout__tensor_model_parallel_size": placed.tp}
    keys |= {"trainer__n_gpus_per_node": placed.num_train, "actor_rollout_ref__hybrid_engine": False}
    keys |= {"actor_rollout_ref__rollout__nnodes": 1, "actor_rollout_ref__rollout__n_gpus_per_node": num_rollout}
    keys |= {"algorithm__use_kl_in_reward": False, "critic__enable": False} | placed.keys
    config = run_config(path, placed.train[0], placed.train[1], **keys)
    found = run_ranks(
        placed.num_train + num_rollout,
        one_rank,
        *(config, placed.num_train, num_rollout, folder / "exported", folder / "meeting", flips),
    )
    return config, found[: placed.num_train], found[placed.num_train :]


@pytest.mark.parametrize(
    "placed",
    [
        pytest.param(FIRST[0], id=FIRST[0].name),
        *(pytest.param(placed, id=placed.name, marks=pytest.mark.exhaustive) for placed in [*FIRST[1:], *MORE]),
        *(pytest.param(placed, id=placed.name, marks=WEEKLY) for placed in FURTHER),
    ],
)
def test_a_rollout_elsewhere_generates_from_the_actors_weights(placed: Placed, tmp_path: Path) -> None:
    """Bytes at their bounds and as planned, and transformers' greedy tokens before and after an update, on every
    replica, with its log-probs within 5e-5.

    Would not catch a wrong weight that changes no greedy token; the checksums, which are on, would.
    """
    config, training, rollout = run_placed(placed, tmp_path)
    path, plan = config.actor_rollout_ref.model.path, TransitionPlan.of(RunModels(config))
    for number, folder in enumerate((path, str(tmp_path / "exported"))):
        if placed.in_eight_bits:
            base = path if placed.sends_adapters else folder
            folder = rounded_folder(folder, str(tmp_path / f"rounded {number}"), base)
        expected = hugging_face_greedy(folder)
        log_probs = hugging_face_log_probs(folder, expected)
        for rank in rollout:
            answers, found = rank["answers"][number]
            assert answers == expected and (found - log_probs).abs().max() < 5e-5
        sent, received = [rank["sent"][number] for rank in training], [rank["received"][number] for rank in rollout]
        beside = num_biases(path) if number and placed.more is BIASED else 0
        leaving = model_bytes(path, placed.in_eight_bits) + 4 * beside
        leaving = sum(plan.sent) if placed.sends_adapters else leaving
        assert sum(report.bytes_sent for report in sent) == sent[0].leaving_bytes
        assert [report.bytes_received for report in received] == [report.lower_bound_bytes for report in received]
        assert min(report.bytes_received for report in received) > 0 and sent[0].version == number
        if number and f"{ROLLOUT}weight_deltas" in placed.keys:
            assert sent[0].leaving_bytes < leaving / 4
            continue
        assert sent[0].leaving_bytes == leaving
        whole = [report.bytes_received for report in received], sent[0].leaving_bytes
    assert whole == (list(plan.network) * placed.replicas, sum(plan.sent))
    assert all(rank["memory"]["KV cache"] == 0 for rank in rollout)
    trained = load_file(tmp_path / "exported" / "model.safetensors")
    for rank in rollout:
        assert all(torch.equal(tensor, trained[name]) for name, tensor in rank["constants"].items())


def num_biases(path: str) -> int:
    """Elements of the biases of experts in a model folder; there are some."""
    tensors = load_file(Path(path) / "model.safetensors")
    biases = [tensor.numel() for name, tensor in tensors.items() if name.endswith(BIAS)]
    assert biases
    return sum(biases)


def model_bytes(path: str, in_eight_bits: bool) -> int:
    """Bytes of a model folder in generation, a tied matrix once and without what no update changes."""
    tied = json.loads((Path(path) / "config.json").read_text())["tie_word_embeddings"]
    tensors = load_file(Path(path) / "model.safetensors")
    left = (BIAS, "layer_scalar", *(["lm_head.weight"] if tied else []))
    moved = {name: tensor for name, tensor in tensors.items() if not name.endswith(left)}
    sizes = {
        name: num_bytes(name, tensor, 4) if in_eight_bits else 4 * tensor.numel() for name, tensor in moved.items()
    }
    return sum(sizes.values())


def test_a_flipped_bit_stops_both_pools(tmp_path: Path) -> None:
    """On one rollout rank, after everything has arrived. Would not catch a bit that flips after the comparison."""
    run_placed(FIRST[0], tmp_path, flips=True)
