"""A rank with actor and rollout, as a run builds them: trainer and vLLM on one memory, and rounds between them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import step_outcome
import torch
from models import random_rows, save

from megatron_rl.columns import SCORING

NEEDED = ("vllm", "omegaconf", "psutil")
LENGTHS = (3, 9, 17, 100)
LONGEST_ANSWER = 24


def require_libraries() -> None:
    """Raises NotRun with the first library that is missing."""
    for name in NEEDED:
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            raise step_outcome.NotRun(f"{name} is not installed: {error}") from None


def build(kind: str, folder: Path, dtype: str, figures: dict[str, Any], eager: bool = True) -> Any:
    """The host of one rank with both roles. Patches whose range leaves a version out are applied, and named.

    eager: no captured graphs.
    """
    from omegaconf import OmegaConf

    import third_party_patches
    from megatron_rl.config.schema import RunConfig
    from megatron_rl.roles.host import RankHost
    from third_party_patches.guard import PatchError, require_version

    refused: list[str] = []

    def note(patch: Any) -> None:
        try:
            require_version(patch)
        except PatchError as error:
            refused.append(str(error).split(". ")[0])

    third_party_patches.require_version = note
    settings = {
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.actor.megatron.dtype": dtype,
        "actor_rollout_ref.rollout.kv_cache_memory_bytes": 64 << 20,
        "actor_rollout_ref.rollout.enforce_eager": eager,
        "actor_rollout_ref.rollout.max_num_seqs": 16,
        "actor_rollout_ref.rollout.max_num_batched_tokens": 1024,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "data.train_files": "unused",
        "data.val_files": "unused",
        "data.max_prompt_length": 128,
        "data.max_response_length": LONGEST_ANSWER,
        "custom_reward_function.path": "unused",
        "trainer.device": kind,
        "trainer.total_training_steps": 10,
    }
    config = OmegaConf.structured(RunConfig)
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    host = RankHost(OmegaConf.to_object(config))
    figures["patches for other versions"] = refused
    host.build("actor")
    figures["stream before"] = stream(kind)
    host.build("rollout")
    figures["stream after"] = stream(kind)
    return host


def stream(kind: str) -> str:
    """The thread's current stream."""
    return str(torch.cuda.current_stream()) if kind == "cuda" else "none"


def questions() -> Any:
    """One prompt of each length."""
    from megatron_rl.records import Batch, ragged

    count = len(LENGTHS)
    return Batch(
        index=torch.arange(count),
        sample=torch.zeros(count, dtype=torch.int64),
        input_ids=ragged(random_rows(list(LENGTHS), "cpu")),
        data_source=["check"] * count,
        ground_truth=[""] * count,
        extra_info=[{}] * count,
        uid=torch.arange(count),
    )


def generate(host: Any, temperature: float, salt: int) -> Any:
    """One stay in rollout mode."""
    from megatron_rl.records import Sampling
    from megatron_rl.rollout.seeds import request_seed
    from megatron_rl.rollout.slices import Slice
    from megatron_rl.sampling.unscheduled_requests import UnscheduledRequests

    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=LONGEST_ANSWER, salt=salt)
    rollout = host.roles["rollout"]
    rollout.enter()
    asked = UnscheduledRequests(questions(), sampling, partial(request_seed, 0), None)
    (share,) = asked.shares(1)
    asked.note([rollout.advance({0: Slice(0, None, share)})])
    rollout.exit()
    return asked.rows()


def differences(host: Any, answers: list[Any]) -> dict[str, float]:
    """Differences between vLLM's log-probs and the trainer's: mean, 99% and largest."""
    from megatron_rl.observe.batch_metrics import parity_metrics

    scores = [host.roles["actor"].log_probs(one.read_by(SCORING)).flat("old_log_probs") for one in answers]
    metrics = parity_metrics(torch.cat([one.flat("rollout_log_probs") for one in answers]), torch.cat(scores).cpu())
    return {name: metrics[f"training/rollout_logprob_diff_{name}"] for name in ("mean", "p99", "max")}


def addresses(host: Any) -> dict[str, int]:
    """Where vLLM's parameters and its KV cache lie."""
    from megatron_rl.rollout.addresses import places

    generator = host.roles["rollout"].generator
    return places(generator.model, generator.kv_cache.tensors)


def rounds(kind: str, small: bool, dtype: str, figures: dict[str, Any], eager: bool = True) -> None:
    """Rounds of entering and leaving with new weights in each; greedy tokens are compared with transformers'.

    With graphs, which have noted addresses, old weights would show in the log-probs of every round but the first.
    """
    require_libraries()
    folder = save("Llama")
    host = build(kind, folder, dtype, figures, eager)
    noted = addresses(host)
    figures["addresses kept"] = len(noted)
    greedy = [row.tolist() for row in generate(host, 0.0, 0).sampled_ids.unbind()]
    expected = transformers_greedy(folder, kind, dtype)
    figures["greedy tokens as transformers'"] = sum(map(equal_tokens, greedy, expected)) / sum(map(len, expected))
    found = []
    for number in range(2 if small else 10):
        found.append(differences(host, [generate(host, 1.0, number)]))
        assert addresses(host) == noted, "weights or KV cache have moved"
        for parameter in host.roles["actor"].trainable.pipeline.parameters():
            parameter.data.mul_(1.01)
    figures["log-prob differences"] = {name: max(one[name] for one in found) for name in found[0]}
    from megatron_rl.config.load import DIFF_BOUNDS

    for name, key in (("p99", "logprob_diff_bound"), ("mean", "logprob_diff_mean_bound")):
        bound = DIFF_BOUNDS[f"actor_rollout_ref.rollout.{key}"][dtype]
        assert figures["log-prob differences"][name] <= bound, f"{name} is beyond {key}={bound}"
    assert dtype != "float32" or figures["greedy tokens as transformers'"] == 1.0, "other tokens than transformers"


def equal_tokens(ours: list[int], theirs: list[int]) -> int:
    """Tokens up to the first difference."""
    pairs = list(zip(ours, theirs, strict=False))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


def transformers_greedy(folder: Path, kind: str, dtype: str) -> list[list[int]]:
    """The likeliest tokens, one at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(kind)
    answers = []
    for row in random_rows(list(LENGTHS), kind):
        ids = row
        while len(ids) < len(row) + LONGEST_ANSWER and (len(ids) == len(row) or ids[-1] != 1):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
        answers.append(ids[len(row) :].tolist())
    return answers
