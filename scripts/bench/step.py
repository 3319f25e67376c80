"""A GRPO step beside one of TRL's GRPOTrainer, or of another checkout: same model, prompts, sampling, update, threads.

    python scripts/bench/step.py [--trl-python PYTHON] [--sizes small tiny] [--rounds 7] [--arms local ray trl]
    python scripts/bench/step.py --against CHECKOUT [--sizes tiny] [--arms local ray]
    python scripts/bench/step.py --arms parts [--sizes tiny] [--threads 1]
    python scripts/bench/step.py --against . --arms local --other-keys actor_rollout_ref.model.lora.rank=32

PYTHON belongs to an environment of its own, with TRL in it; nothing of this package needs it. Without one the commands
that make it are printed. CHECKOUT is a folder with another commit of this repository (`git worktree add`): the names of
its arms end in "_other". Every arm is a process that keeps its trainer in memory and takes a step when it is told to,
so that rounds interleave and only one arm works at a time. Model and weights are random, so answers end at random:
every token ends one with a probability of about 1/64.

Seconds are medians over the rounds, with the lowest and the highest; ratios are medians of the ratios of each round.
CPU seconds, of all threads of a process, stay comparable where the machine has other work, best with --threads 1; of
the arm `ray`, whose rank has a thread for each core, they are not seen. The arm `ranks` has as many ranks as --threads,
which split every batch and have a thread for each core over their number; it is for a --threads of the cores. The arm
`parts` is `local` with a table of where the time goes; what watches costs some of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from step_parts import print_parts

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TRL = ("torch==2.13.0", "transformers==5.16.1", "trl==1.16.0")
LR, WEIGHT_DECAY, KL_COEF = 1e-6, 0.01, 0.001
OTHER = "_other"
"""Behind the names of the arms that run another checkout's code."""
PARTS, RANKS = "parts", "ranks"
UPDATE = "timing_s/update_actor"
TRL_SETTINGS = {"bf16": False, "gradient_checkpointing": False}
"""Both are on by default, and both make it slower on these cores."""


@dataclass(frozen=True)
class Size:
    """A model and what it is asked for. trl_passes: forward and backward passes of TRL, of which this is the fastest
    number; max_tokens: the same of this package, of packed samples."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    response: int
    trl_passes: int
    max_tokens: int
    prompts: int = 16
    n: int = 8


SIZES = {
    size.name: size
    for size in (
        Size("small", 512, 1408, 8, 8, 4, response=256, trl_passes=8, max_tokens=2048),
        Size("tiny", 128, 256, 4, 4, 4, response=32, trl_passes=1, max_tokens=8192),
    )
}


def make_model(size: Size, folder: Path) -> int:
    """A random Qwen2 with 64 characters for tokens; its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sys.path.insert(0, str(HERE.parent))
    from make_demo_assets import BOS, EOS, PAD, make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.005,  # so small that all tokens are about equally likely
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def questions(number: int) -> list[str]:
    """Sums of 6 two-digit numbers, 18 tokens each."""
    draw = random.Random(0)
    return ["+".join(f"{draw.randrange(100):02d}" for _ in range(6)) + "=" for _ in range(number)]


def write_prompts(asked: Sequence[str], path: Path) -> None:
    """In verl's row schema."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "bench/sums",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(asked)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def our_config(size: Size, folder: Path, steps: int) -> dict:
    """The configuration that `megatron-rl train` would read."""
    return {
        "data": {
            "train_files": str(folder / "prompts.parquet"),
            "val_files": str(folder / "prompts.parquet"),
            "train_batch_size": size.prompts,
            "max_prompt_length": 32,
            "max_response_length": size.response,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {
                "ppo_mini_batch_size": size.prompts,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": size.max_tokens,
                "use_kl_loss": True,
                "kl_loss_coef": KL_COEF,
                "optim": {"lr": LR, "weight_decay": WEIGHT_DECAY},
            },
            "rollout": {
                "n": size.n,
                "max_num_seqs": size.prompts * size.n,
                "kv_cache_memory_bytes": 640 << 20 if size.name == "small" else 64 << 20,
            },
        },
        "algorithm": {"adv_estimator": "grpo"},
        "custom_reward_function": {"path": str(HERE / "step_reward.py")},
        "trainer": {
            "device": "cpu",
            "n_gpus_per_node": 1,
            "total_training_steps": steps,
            "test_freq": 0,
            "val_before_train": False,
            "logger": ["jsonl"],
            "export_hf": False,
        },
    }


class Arm:
    """One process that takes steps. Raises RuntimeError when it has ended, with the end of what it said."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, num_threads: int, repository: Path) -> None:
        self.name, self.log = name, folder / f"{name}.txt"
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        # TRL's own interpreter must not find this environment's packages.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if command[0] == sys.executable:
            inherited["PYTHONPATH"] = str(repository)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=-1, stdout=-1, stderr=log, text=True, cwd=folder, env=inherited | threads
            )
        self._read()  # that it is ready

    def step(self) -> dict:
        """What a step came to."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it: it finds no further line."""
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)


def repository_of(arm: str, options) -> Path:
    """The checkout whose code an arm runs."""
    return options.against if arm.endswith(OTHER) else REPOSITORY


def command_of(arm: str, size: Size, folder: Path, steps: int, asked: list[str], options) -> list[str]:
    """How an arm is started; its files are in `folder`."""
    if arm != "trl":
        config = folder / f"{arm}.yaml"
        config.write_text(yaml.safe_dump(our_config(size, folder, steps)))
        own = options.other_keys if arm.endswith(OTHER) else []
        in_ranks = arm.removesuffix(OTHER) == RANKS
        several = ["trainer.launcher=local", f"trainer.n_gpus_per_node={options.threads}"] if in_ranks else []
        overrides = [f"trainer.default_local_dir={folder / arm}", *several, *options.ours, *own]
        script = repository_of(arm, options) / "scripts/bench/step_ours.py"
        return [sys.executable, str(script), str(config), arm.removesuffix(OTHER), *overrides]
    job = {
        "model": str(folder / "model"),
        "folder": str(folder / "trl"),
        "questions": asked,
        "threads": options.threads,
        "steps": steps,
        "kl_coef": KL_COEF,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "passes": options.trl_passes or size.trl_passes,
        "settings": TRL_SETTINGS | json.loads(options.trl_settings),
    }
    (folder / "trl.json").write_text(json.dumps(asdict(size) | job))
    return [str(options.trl_python), str(HERE / "step_trl.py"), str(folder / "trl.json")]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def report(size: Size, taken: Mapping[str, list[dict]]) -> dict:
    """Print what the rounds came to; the same for a file."""
    said: dict[str, dict] = {}
    for arm, steps in taken.items():
        seconds, cpu = [step["seconds"] for step in steps], [step["cpu_seconds"] for step in steps]
        per_token, cpu_per_token = (
            [1000 * step[kind] / step["tokens"] for step in steps] for kind in ("seconds", "cpu_seconds")
        )
        phases = {name: statistics.median(step["phases"].get(name, 0.0) for step in steps) for name in phases_of(steps)}
        tokens = statistics.mean(step["tokens"] for step in steps) / (size.prompts * size.n)
        said[arm] = {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "per_1000_tokens": per_token,
            "cpu_per_1000_tokens": cpu_per_token,
            "mean_tokens": tokens,
            "phases": phases,
        }
        print(f"  {arm:6} {spread(seconds)} s; CPU {spread(cpu)} s")
        print(f"         {spread(per_token)} s for 1,000 tokens, answers of {tokens:.1f} tokens")
        print("         " + ", ".join(f"{name} {value:.3f}" for name, value in phases.items()))
        if arm.startswith(PARTS):
            print_parts([step["parts"] for step in steps])
    ours = [arm for arm in taken if arm != "trl" and not arm.endswith(OTHER)]
    pairs = [("trl", arm) for arm in ours if "trl" in taken] + [
        (arm, arm + OTHER) for arm in ours if arm + OTHER in taken
    ]
    for above, below in pairs:
        is_seen = "ray" not in (above, below)
        for name in ("seconds", *(["cpu_seconds", "cpu_per_1000_tokens"] if is_seen else []), "per_1000_tokens"):
            ratios = [one / other for one, other in zip(said[above][name], said[below][name], strict=True)]
            said[below][f"ratio of {name}"] = ratios
            print(f"  {above} / {below}, {name.replace('_', ' ')}: {spread(ratios)}")
        print(f"  {above} / {below}, {UPDATE}: {spread(ratios_of_phase(taken[above], taken[below], UPDATE))}")
    return said


def ratios_of_phase(steps: Sequence[dict], others: Sequence[dict], phase: str) -> list[float]:
    """Ratios of the seconds of one phase, round by round; rounds without the phase are left out."""
    pairs = [(one["phases"].get(phase), other["phases"].get(phase)) for one, other in zip(steps, others, strict=True)]
    return [one / other for one, other in pairs if one and other] or [float("nan")]


def phases_of(steps: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step["phases"]))


def measure(size: Size, options) -> dict:
    """Interleaved rounds of all arms, each round in the other order than the one before."""
    rounds = options.rounds + options.warm_up
    with tempfile.TemporaryDirectory() as place, ExitStack() as opened:
        folder = Path(place)
        num_params = make_model(size, folder / "model")
        asked = questions(size.prompts * (rounds + 1))  # the last step of a run, which would validate, is not taken
        write_prompts(asked, folder / "prompts.parquet")
        print(f"{size.name}: {num_params / 1e6:.1f}M parameters, answers of up to {size.response} tokens", flush=True)
        arms = []
        for name in options.arms:
            command = command_of(name, size, folder, rounds + 1, asked, options)
            arm = Arm(name, command, folder, options.threads, repository_of(name, options))
            opened.callback(arm.close)
            arms.append(arm)
        taken: dict[str, list[dict]] = {arm.name: [] for arm in arms}
        for number in range(rounds):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                step = arm.step()
                if number >= options.warm_up:
                    taken[arm.name].append(step)
        return report(size, taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="the interpreter of TRL's environment")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--arms", nargs="+", choices=["local", PARTS, RANKS, "ray", "trl"])
    parser.add_argument("--against", type=Path, help="another checkout of this repository, instead of TRL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those")
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--ours", nargs="*", default=[], help="dotted overrides of this package's configuration")
    parser.add_argument("--other-keys", nargs="*", default=[], help="the same, of the arms of --against alone")
    parser.add_argument("--trl-passes", type=int, help="forward and backward passes of a step of TRL's")
    parser.add_argument("--trl-settings", default="{}", help="JSON: further fields of its GRPOConfig")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if options.arms is None:
        options.arms = ["local", "ray", "trl"] if options.against is None else ["local", "ray"]
    if options.against is not None:
        options.against = options.against.resolve()
        if not (options.against / "scripts/bench/step_ours.py").is_file():
            parser.error(f"--against {options.against} must be a checkout of this repository")
        options.arms += [arm + OTHER for arm in options.arms if arm != "trl"]
    if "trl" in options.arms and options.trl_python is None:
        folder = Path(tempfile.gettempdir()) / "trl_venv"
        python = folder / "bin" / "python"
        parser.exit(2, f"{sys.executable} -m venv {folder} && {python} -m pip install {' '.join(TRL)}\n")
    found = {name: measure(SIZES[name], options) for name in options.sizes}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
