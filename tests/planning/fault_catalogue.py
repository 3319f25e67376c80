"""A catalogue of single faults to break a good configuration with, each with all that preflight must say about it.

Faults whose areas are disjoint do not touch each other's rules, so that what they break together is what each breaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from random import Random
from typing import get_args

import ahead_faults  # noqa: F401 - puts its faults into the catalogue
import model_faults  # noqa: F401 - as well
import pool_faults  # noqa: F401 - as well
import teacher_faults  # noqa: F401 - as well
from fault import (
    ACTOR,
    CATALOGUE,
    CORRECTION,
    CP,
    EP,
    ETP,
    FIRST,
    GPUS,
    GRANULARITY,
    LAST,
    MEGATRON,
    METHOD,
    MODULES,
    NUMBER,
    PP,
    ROLLOUT,
    ROLLOUT_DP,
    ROLLOUT_EP,
    ROLLOUT_TP,
    TP,
    VPP,
    Case,
    Fault,
    Said,
    fault,
    values,
)
from model_folders import REWARD, write_prompts

from megatron_rl.config.keys import LEAVES, REF, follows
from megatron_rl.config.megatron import LAYOUT_KEYS

# Layout: 6 ranks TP2 x PP3, 12 heads, 6 key/value heads, 192 columns, 128 rows, 6 layers
values("ranks", "layout", {GPUS: 7}, (TP, "must divide the 7 ranks"), experts=False)
values("two nodes", "layout", {GPUS: 5, "trainer.nnodes": 2}, (TP, "must divide the 10 ranks"), experts=False)
values("kv heads", "layout", {TP: 4, GPUS: 12}, (TP, "num_key_value_heads(6)"), experts=False)
values("vocabulary", "layout", {TP: 3, GPUS: 9}, (ROLLOUT_TP, "padded_vocab_size(128)"), experts=False)
CUTS = [(TP, f"must divide {name}") for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
SUMS = (ROLLOUT_TP, "must be one of 1, 2, 3, 4, 8 on trainer.device=cpu")
ROWS = (ROLLOUT_TP, "padded_vocab_size(128)")
values("all cuts", "layout", {TP: 5, GPUS: 15}, *CUTS, ROWS, SUMS, experts=False)
values("rollout tp 6", "layout", {ROLLOUT_TP: 6}, ROWS, SUMS, experts=False)
values("layers", "layout", {PP: 4, GPUS: 8}, (PP, "num_hidden_layers(6)"), experts=False)
values("chunks", "layout", {VPP: 4}, (PP, "pp(3) * vpp(4)"), experts=False)
values("chunks of one stage", "layout", {VPP: 2, PP: 1, GPUS: 4}, (PP, "vpp(2) needs pp(1)"), experts=False)
values("first stage", "layout", {FIRST: 3}, (PP, "first(3)"), experts=False)
values("both ends", "layout", {FIRST: 2, LAST: 3, PP: 2, GPUS: 4}, (PP, "must add up"), experts=False)
values("layers of a run", "layout", {GRANULARITY: "full", METHOD: "uniform", NUMBER: 4}, (NUMBER, "divide the layers"))
values("parts", "layout", {GRANULARITY: "selective", MODULES: ["layernorm"]}, (MODULES, "may name only"))
values("layers of parts", "layout", {GRANULARITY: "selective", METHOD: "block"}, (METHOD, "they count whole layers"))
values("no tp", "layout", {TP: 0}, (TP, "must be >= 1"))
values("negative pp", "layout", {PP: -3}, (PP, "must be >= 1"))
values("no chunks", "layout", {VPP: 0}, (VPP, "must be >= 1"))
values("no first layers", "layout", {FIRST: 0}, (FIRST, "must be >= 1"))
values("no ep", "layout", {EP: 0}, (EP, "must be >= 1"))
values("no etp", "layout", {ETP: 0}, (ETP, "must be null"))
values("no nodes", "layout", {"trainer.nnodes": 0}, ("trainer.nnodes", "must be >= 1"))
values(
    "critic tp",
    "layout critic",
    {"critic.megatron.tensor_model_parallel_size": 1},
    ("critic.megatron.tensor_model_parallel_size", "must equal"),
)
values(
    "reference pp",
    "layout",
    {"actor_rollout_ref.ref.megatron.pipeline_model_parallel_size": 1},
    ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size", "must equal"),
)
values(
    "critic dtype",
    "layout critic dtype",
    {"critic.megatron.dtype": "bfloat16"},
    ("critic.megatron.dtype", "must equal"),
)
values(
    "rollout tp 4",
    "layout",
    {ROLLOUT_TP: 4},
    (ROLLOUT_TP, "the 6 ranks"),
    (ROLLOUT_TP, "be a multiple of"),
    experts=False,
)
values("rollout tp 3", "layout", {ROLLOUT_TP: 3}, (ROLLOUT_TP, "padded_vocab_size(128)"), experts=False)
values(
    "dropped weights",
    "layout",
    {ROLLOUT_TP: 6, f"{ROLLOUT}.drop_train_weights": True},
    ROWS,
    SUMS,
    (ROLLOUT_TP, "training tp(2)"),
    experts=False,
)
values("experts of a dense model", "layout", {EP: 2, GPUS: 12}, (EP, "needs a model with experts"), experts=False)
# 12 ranks, so 4 a stage; 8 experts of 20 columns
values("ep 4", "layout", {EP: 4}, (EP, "must divide the 4 ranks of a stage"), experts=True)
values("etp 8", "layout", {ETP: 8}, (EP, "must divide the 4 ranks"), (ETP, "moe_intermediate_size(20)"), experts=True)
values("ep 3", "layout", {EP: 3, GPUS: 36}, (EP, "must divide num_experts(8)"), experts=True)
values(
    "no sequence parallelism",
    "layout",
    {f"{MEGATRON}.sequence_parallel": False},
    (f"{MEGATRON}.sequence_parallel", "must be true"),
    experts=True,
)
OF_DENSE = (ROLLOUT_EP, "needs a model with experts")
values("generation with experts of a dense model", "layout", {ROLLOUT_EP: 2}, OF_DENSE, experts=False)
TP_OR_1 = (ROLLOUT_EP, f"must be 1 or {ROLLOUT_TP}(2)")
values("rollout ep beyond rollout tp", "layout", {ROLLOUT_EP: 4}, TP_OR_1, experts=True)
values("rollout ep beyond the ranks", "layout", {ROLLOUT_EP: 64}, TP_OR_1, experts=True)
BOTH = (ROLLOUT_EP, f"must be 1 or {ROLLOUT_TP}(2) * {ROLLOUT_DP}(2)")
values("attention dp beyond rollout ep", "layout", {ROLLOUT_DP: 2, ROLLOUT_EP: 2}, BOTH, experts=True)
MANY = (ROLLOUT_DP, "tp(2) * dp(4)")
values("attention dp beyond the ranks", "layout", {ROLLOUT_DP: 4, ROLLOUT_EP: 8}, MANY, experts=True)
values(
    "rollout ep 3",
    "layout",
    {ROLLOUT_EP: 3, ROLLOUT_TP: 3},
    (ROLLOUT_TP, "padded_vocab_size(128)"),
    (ROLLOUT_EP, "must divide num_experts(8)"),
    experts=True,
)
values(
    "dropped columns of experts",
    "layout",
    {ROLLOUT_EP: 2, f"{ROLLOUT}.drop_train_weights": True},
    (ROLLOUT_EP, "training shard (ep(1), etp(2)) are among those"),
    experts=True,
)

# Lengths and the cache: 16 + 48 of 64 positions
values(
    "positions", "length", {"data.max_response_length": 49}, ("data.max_prompt_length", "max_position_embeddings(64)")
)
values(
    "long prompts", "length", {"data.max_prompt_length": 500}, ("data.max_prompt_length", "max_position_embeddings(64)")
)
values(
    "short passes",
    "length tokens algorithm",
    {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 63},
    (f"{ACTOR}.ppo_max_token_len_per_gpu", "must be >= data.max_prompt_length + data.max_response_length = 64"),
)
values(
    "short log-prob passes",
    "length tokens",
    {f"{ROLLOUT}.log_prob_use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 8},
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "must be >= data.max_prompt_length"),
)
values("no prompt", "length", {"data.max_prompt_length": 0}, ("data.max_prompt_length", "must be >= 1"))
values(
    "small cache",
    "length layout",
    {f"{ROLLOUT}.kv_cache_memory_bytes": 4096},
    (f"{ROLLOUT}.kv_cache_memory_bytes", "so that 64 tokens"),
)
values(
    "overlong buffer",
    "length algorithm",
    {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 49},
    ("reward_model.overlong_buffer.len", "<= data.max_response_length=48"),
)
values(
    "step of the engine",
    "tokens",
    {f"{ROLLOUT}.max_num_batched_tokens": 100},
    (f"{ROLLOUT}.max_num_batched_tokens", "must be >= max_num_seqs=256"),
)

# Batches: 64 prompts, mini-batches of 32
values("no batch", "batch", {"data.train_batch_size": 0}, ("data.train_batch_size", "must be >= 1"))
values(
    "gen batch", "batch", {"data.gen_batch_size": 128}, ("data.gen_batch_size", "must equal data.train_batch_size=64")
)
values("single samples", "batch", {"algorithm.filter_groups.enable": True}, (f"{ROLLOUT}.n", "must be >= 2"))
FILTERED = {"algorithm.filter_groups.enable": True, f"{ROLLOUT}.n": 2, "data.gen_batch_size": 6}
values("too few batches", "batch", FILTERED, ("algorithm.filter_groups.max_num_gen_batches", "must give at least"))
values("no samples", "batch", {f"{ROLLOUT}.n": 0}, (f"{ROLLOUT}.n", "must be >= 1"))
values("greedy answers", "val", {f"{ROLLOUT}.val_kwargs.n": 4}, (f"{ROLLOUT}.val_kwargs.n", "one greedy response"))

# Algorithms
values(
    "estimator", "algorithm critic", {"algorithm.adv_estimator": "groo"}, ("algorithm.adv_estimator", "must be one of")
)
PASS_K = {"algorithm.adv_estimator": "grpo_passk"}
values("groups of one", "algorithm critic batch", PASS_K, (f"{ROLLOUT}.n", "must be >= 2"))
LOSS = f"{ACTOR}.policy_loss"
values("loss", "loss", {f"{LOSS}.loss_mode": "vanila"}, (f"{LOSS}.loss_mode", "must be one of"))
values("dro", "loss", {f"{LOSS}.loss_mode": "dro"}, (f"{LOSS}.dro_beta", "must be set with loss_mode=dro"))
values(
    "empty band",
    "loss",
    {f"{LOSS}.loss_mode": "clip_cov", f"{LOSS}.clip_cov_lb": 5.0},
    (f"{LOSS}.clip_cov_lb", "must be below clip_cov_ub=5"),
)
values(
    "components",
    "algorithm critic batch",
    {"algorithm.adv_estimator": "gdpo", f"{ROLLOUT}.n": 2, "algorithm.use_kl_in_reward": False},
    ("algorithm.gdpo_reward_keys", "must name at least one number"),
)
values(
    "weights of components",
    "algorithm critic batch",
    {
        "algorithm.adv_estimator": "gdpo",
        f"{ROLLOUT}.n": 2,
        "algorithm.gdpo_reward_keys": ["acc", "form"],
        "algorithm.gdpo_reward_weights": [1.0],
        "algorithm.use_kl_in_reward": False,
    },
    ("algorithm.gdpo_reward_weights", "must be one number for each"),
)
values(
    "criteria",
    "correction",
    {f"{CORRECTION}.rollout_rs": "token_k1,seq_max_k5", f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0,1.0"},
    (f"{CORRECTION}.rollout_rs", "must be one or more"),
)
values(
    "number of thresholds",
    "correction",
    {f"{CORRECTION}.rollout_rs": "token_k1,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0,1.0,3.0"},
    (f"{CORRECTION}.rollout_rs_threshold", "one for each of 2 criteria"),
)
values(
    "a lower end of no use",
    "correction",
    {
        f"{CORRECTION}.rollout_rs": "token_k2",
        f"{CORRECTION}.rollout_rs_threshold": 1.0,
        f"{CORRECTION}.rollout_rs_threshold_lower": 0.5,
    },
    (f"{CORRECTION}.rollout_rs_threshold_lower", "is of no use"),
)
values(
    "icepop",
    "correction",
    {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "2.0_0.5"},
    (f"{CORRECTION}.rollout_is_threshold", "the lower one first"),
)
values(
    "no file of losses",
    "loss",
    {f"{LOSS}.custom.path": "/none/loss.py"},
    (f"{LOSS}.custom.path", "it does not exist"),
    offer=False,
)
values(
    "thresholds",
    "correction",
    {f"{CORRECTION}.rollout_rs": "token", f"{CORRECTION}.rollout_is_threshold": 0.5},
    (f"{CORRECTION}.rollout_rs_threshold", "must be > 1"),
)
values(
    "crossed thresholds",
    "correction",
    {
        f"{CORRECTION}.rollout_rs": "token",
        f"{CORRECTION}.rollout_rs_threshold": 1.5,
        f"{CORRECTION}.rollout_rs_threshold_lower": 0.5,
        f"{CORRECTION}.rollout_is": "answer",
    },
    (f"{CORRECTION}.rollout_is", "must be one of"),
)
Q, BLOCKS = (
    {f"{ROLLOUT}.quantization": "fp8", f"{CORRECTION}.rollout_is": "token"},
    f"{ROLLOUT}.quantization_block_size",
)
values("codes", "layout correction", Q, (BLOCKS, "must divide"), experts=False)


# Values between keys
values("learning rates", "critic.lr", {"critic.optim.min_lr": 1.0}, ("critic.optim.min_lr", "must be <= lr"))
values("betas", "betas", {f"{ACTOR}.optim.betas": (0.9, 1.0)}, (f"{ACTOR}.optim.betas", "must both be"))
values("loggers", "loggers", {"trainer.logger": ["jsonl", "consol"]}, ("trainer.logger", "must be one of"))
values("top k", "topk", {f"{ROLLOUT}.top_k": 0}, (f"{ROLLOUT}.top_k", "must be -1"))
values("save freq", "save", {"trainer.save_freq": 0}, ("trainer.save_freq", "must be -1"))
TURNS = {f"{ROLLOUT}.multi_turn.enable": True}
values("turns", "turns", TURNS, (f"{ROLLOUT}.multi_turn.environment.path", "must be a Python file"))
WEIGHTS = "data.train_file_weights"
values("weights", "weights", {WEIGHTS: [1.0, -2.0]}, (WEIGHTS, "one number for each"), (WEIGHTS, "must be > 0"))
RM = "reward_model"
values("no reward model", RM, {f"{RM}.enable": True}, (f"{RM}.model.path", "must be a model folder"), offer=False)
values("no reward", RM, {f"{RM}.rule_weight": 0.0}, (f"{RM}.rule_weight", "must not be 0"))
values("weight", RM, {f"{RM}.weight": float("inf")}, (f"{RM}.weight", "finite"))
values("entropy", "entropy", {f"{ACTOR}.entropy_coeff": float("inf")}, (f"{ACTOR}.entropy_coeff", "finite"))
values("score", "score", {"reward_model.failed_score": float("nan")}, ("reward_model.failed_score", "finite"))
values(
    "no file", "train weights columns", {"data.train_files": []}, ("data.train_files", "a path or a list"), offer=False
)
values("no checkpoint", "resume", {"trainer.resume_mode": "resume_path"}, ("trainer.resume_from_path", "go together"))
values("a path for nothing", "resume", {"trainer.resume_from_path": "/x"}, ("trainer.resume_from_path", "go together"))
values(
    "absent checkpoint",
    "resume",
    {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/none/global_step_3"},
    ("trainer.resume_from_path", "must be a checkpoint folder"),
)


# Data
@fault("train", experts=None)
def no_train_file(case: Case, rng: Random) -> list[Said]:
    case.set({"data.train_files": str(case.folder / "trane.parquet")})
    return [("data.train_files", "it does not exist")]


@fault("train weights", experts=None)
def one_of_three_files(case: Case, rng: Random) -> list[Said]:
    good = [str(case.folder / "train.parquet"), write_prompts(case.folder / "more.jsonl")]
    case.set({"data.train_files": [*good, str(case.folder / "mor.jsonl")]})
    return [("data.train_files", "it does not exist")]


@fault("train", offer=False, experts=None)
def no_ground_truth(case: Case, rng: Random) -> list[Said]:
    write_prompts(case.folder / "train.parquet", reward_model=None)
    return [("data.ground_truth_key", "must be a column with the expected answer")]


@fault("val", offer=False, experts=None)
def damaged_file(case: Case, rng: Random) -> list[Said]:
    (case.folder / "test.parquet").write_bytes(b"PAR1 and nothing else")
    return [("data.val_files", "not a readable parquet file")]


@fault("train", experts=None)
def folder_of_prompts(case: Case, rng: Random) -> list[Said]:
    folder = case.folder / "shards.parquet"
    folder.mkdir()
    write_prompts(folder / "0.parquet")
    case.set({"data.train_files": str(folder)})
    return [("data.train_files", "it is a folder")]


@fault("val", offer=False, experts=None)
def half_a_character(case: Case, rng: Random) -> list[Said]:
    (case.folder / "test.jsonl").write_text('{"prompt": "\\uD800"}\n')
    case.set({"data.val_files": str(case.folder / "test.jsonl")})
    return [("data.val_files", "must not hold half of a surrogate pair")]


@fault("val", offer=False, experts=None)
def table_of_another_kind(case: Case, rng: Random) -> list[Said]:
    (case.folder / "test.csv").touch()
    case.set({"data.val_files": str(case.folder / "test.csv")})
    return [("data.val_files", "by its name")]


values("prompt column", "columns", {"data.prompt_key": "promt"}, ("data.prompt_key", "must be a column of text"))
values(
    "source column",
    "columns",
    {"data.reward_fn_key": "reward_model"},
    ("data.reward_fn_key", "must be a column of text"),
)


# The reward function
@fault("reward", experts=None)
def no_reward_file(case: Case, rng: Random) -> list[Said]:
    case.set({"custom_reward_function.path": str(case.folder / "rewards.py")})
    return [("custom_reward_function.path", "it does not exist")]


def reward_fault(name: str, text: str, key: str, rule: str, offer: bool = False) -> None:
    """A fault of the user's file."""

    def breaks(case: Case, rng: Random) -> list[Said]:
        (case.folder / "reward.py").write_text(text)
        return [(f"custom_reward_function.{key}", rule)]

    CATALOGUE.append(Fault(name, frozenset({"reward"}), breaks, offer))


reward_fault("no Python", "def compute_score(:\n", "path", "must be a Python file")
reward_fault("no such module", f"import nowhere_to_be_found.at_all\n{REWARD}", "path", "imports nowhere_to_be_found")
reward_fault("other name", REWARD.replace("compute_score", "compute_scores"), "name", "must be a function", offer=True)
reward_fault("no extra_info", "def compute_score(data_source, solution_str, ground_truth): ...\n", "name", "must take")
reward_fault("one more", REWARD.replace("extra_info=None", "extra_info, weight"), "name", "must take the keywords")
values(
    "built-in",
    "reward",
    {"custom_reward_function.path": None, "custom_reward_function.name": "maths"},
    ("custom_reward_function.name", "without a path"),
)


# Folders
@fault("folders", experts=None)
def folder_is_a_file(case: Case, rng: Random) -> list[Said]:
    case.set({"trainer.validation_data_dir": str(case.folder / "reward.py")})
    return [("trainer.validation_data_dir", "it is a file")]


@fault("folders resume", experts=None)
def folder_below_a_file(case: Case, rng: Random) -> list[Said]:
    case.set({"trainer.default_local_dir": str(case.folder / "reward.py" / "run")})
    return [("trainer.default_local_dir", "is a file")]


RULED_ELSEWHERE = {
    TP,
    PP,
    EP,
    VPP,
    FIRST,
    LAST,
    ROLLOUT_TP,
    GPUS,
    "trainer.nnodes",
    "trainer.device",
    "trainer.resume_mode",
    "reward_model.overlong_buffer.len",
    "algorithm.filter_groups.max_num_gen_batches",
    f"{MEGATRON}.make_vocab_size_divisible_by",
    *(f"{MEGATRON}.dtype", CP, "trainer.logger"),
    f"{ACTOR}.loss_agg_mode",
    *(
        f"{ROLLOUT}.{name}"
        for name in "n val_kwargs.n max_num_seqs max_num_batched_tokens kv_cache_memory_bytes".split()
    ),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    *(f"data.{name}" for name in "train_batch_size gen_batch_size max_prompt_length max_response_length".split()),
    *(key for key in LEAVES if key.startswith("critic.megatron")),
    *(f"{role}.megatron.{name}" for role in (REF, "reward_model") for name in LAYOUT_KEYS),
    *(f"{role}.optim.{name}" for role in (ACTOR, "critic") for name in ("lr", "min_lr")),
}
"""Keys of which other rules make use, so that they have entries of their own."""


def _constrained_fault(key: str) -> None:
    """A value that is none of the key's choices, or below its bounds."""

    def breaks(case: Case, rng: Random) -> list[Said]:
        if LEAVES[key].choices is not None:
            case.set({key: rng.choice(["", "vlm", "nul"])})
        else:
            kind = type(attrgetter(key)(case.config))
            case.set({key: rng.choice([-1, -2, -1000]) if kind is int else rng.choice([-0.5, -7.0, float("nan")])})
        return [(key, "must be")]

    CATALOGUE.append(Fault(key, frozenset(_with_leaders(key)), breaks, True, None))


def _with_leaders(key: str) -> Iterator[str]:
    """The key and those that it follows: what is wrong with several of them is said once."""
    while key is not None:
        yield key
        key = follows().get(key)


for _key, _leaf in sorted(LEAVES.items()):
    _is_bounded = _leaf.bounds is not None and _leaf.bounds.low >= 0 and _leaf.other is None
    if (
        (_leaf.choices is not None or _is_bounded)
        and type(None) not in get_args(_leaf.kind)
        and _key not in RULED_ELSEWHERE
    ):
        _constrained_fault(_key)


OF_EACH_NUMBER = 92
"""Configurations of one fault, of two, of three and of four: together at least as many as there are faults."""


def draw(number: int) -> tuple[bool, list[Fault]]:
    """One to four faults that do not touch each other, and whether the model has experts. Fault `number` is one."""
    rng = Random(number)
    first = CATALOGUE[number % len(CATALOGUE)]
    experts = rng.random() < 0.4 if first.experts is None else first.experts
    chosen = [first]
    for other in rng.sample(CATALOGUE, len(CATALOGUE)):
        if len(chosen) == 1 + number // OF_EACH_NUMBER % 4:
            break
        if other.experts in (None, experts) and not any(other.areas & one.areas for one in chosen):
            chosen.append(other)
    return experts, chosen
