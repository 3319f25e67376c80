"""Make the demo's judge: the demo's tiny model, taught with `megatron-rl sft` to answer sums and to judge answers.

    python scripts/make_demo_judge.py --output outputs/demo_judge

It answers sums as the demo's model does, and what else it is asked is one of

    07+35=042?       y or n: is the answer right?
    07+35=042,032?   a or b: which answer is the better one?
    07+35=042;u?     y or n: is the last digit right? With ;t? the digits before it, with ;l? is the length right?

docs/train/judges.md says how a run asks it; its prompt there is {question}{response}? with verdicts: {y: 1, n: 0}.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_demo_assets as demo

BATCH, STEPS = 256, 2000
SETTINGS = {
    "data.train_batch_size": BATCH,
    "data.max_length": 32,
    "trainer.total_training_steps": STEPS,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": BATCH,
    "actor_rollout_ref.actor.optim.lr_wsd_decay_steps": STEPS // 3,
}
Case = tuple[str, str]


def some_answer(pair: demo.Pair, draw: random.Random) -> str:
    """An answer to a sum: right, or wrong in a way that a policy may be."""
    right = demo.answer(*pair)
    kind = draw.random()
    if kind < 0.4:
        return right
    if kind < 0.65:
        return demo.answer_without_carry(*pair)
    if kind < 0.85:
        place = draw.randrange(3)
        return right[:place] + draw.choice("0123456789") + right[place + 1 :]
    if kind < 0.95:
        return "".join(draw.choice("0123456789") for _ in range(draw.randint(0, 7)))
    return "".join(draw.choice(demo.CHARACTERS) for _ in range(draw.randint(0, 7)))


def units(said: str, right: str) -> bool:
    """Whether the last digit is right."""
    return said[-1:] == right[-1:]


def tens(said: str, right: str) -> bool:
    """Whether the digits before the last one are right."""
    return said[:-1] == right[:-1]


def length(said: str, right: str) -> bool:
    """Whether the answer has as many characters as the right one."""
    return len(said) == len(right)


CRITERIA: dict[str, Callable[[str, str], bool]] = {"u": units, "t": tens, "l": length}


def quality(said: str, right: str) -> float:
    """How good an answer is: right, else by its digits."""
    return 4.0 * (said == right) + units(said, right) + tens(said, right) + 0.5 * length(said, right)


def case(pair: demo.Pair, draw: random.Random) -> Case:
    """A question to the judge, and the right verdict; or a sum, and an answer of the noisy teacher."""
    sum_, right, said, kind = demo.question(*pair), demo.answer(*pair), some_answer(pair, draw), draw.random()
    if kind < 0.15:
        return sum_, demo.noisy_answer(*pair, draw)
    if kind < 0.5:
        return f"{sum_}{said}?", "y" if said == right else "n"
    if kind < 0.75:
        other = some_answer(pair, draw)
        if quality(said, right) == quality(other, right):
            said, other = (right, said) if said != right else (right, demo.answer_without_carry(pair[0], pair[1] ^ 1))
            said, other = (said, other) if draw.random() < 0.5 else (other, said)
        return f"{sum_}{said},{other}?", "a" if quality(said, right) > quality(other, right) else "b"
    name = draw.choice(list(CRITERIA))
    return f"{sum_}{said};{name}?", "y" if CRITERIA[name](said, right) else "n"


def rows(pairs: list[demo.Pair], num_rows: int, seed: int) -> list[dict]:
    """Lessons about drawn sums."""
    draw = random.Random(seed)
    cases = (case(draw.choice(pairs), draw) for _ in range(num_rows))
    return [{"prompt": asked, "response": verdict} for asked, verdict in cases]


def make(output: Path, seed: int, steps: int) -> None:
    """Teach the model and write its folder. Raises subprocess.CalledProcessError where the stage fails."""
    train, held_out = demo.split_questions(0)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="judge-") as work:
        folder = Path(work)
        demo.save_untrained(folder / "untrained", seed)
        demo.write_parquet(rows(train, BATCH * steps, seed), folder / "lessons.parquet")
        demo.write_parquet(rows(held_out, 2048, seed + 1), folder / "held_out.parquet")
        paths = {
            "data.train_files": folder / "lessons.parquet",
            "data.val_files": folder / "held_out.parquet",
            "actor_rollout_ref.model.path": folder / "untrained",
            "trainer.default_local_dir": folder / "stage",
        }
        overrides = SETTINGS | {"trainer.total_training_steps": steps} | paths
        overrides["actor_rollout_ref.actor.optim.lr_wsd_decay_steps"] = steps // 3
        command = [sys.executable, "-m", "megatron_rl", "sft", "--local", "--config", str(demo.STAGE)]
        subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=True)
        (folder / "stage" / "hf_model").rename(output)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the demo's judge of sums.")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo_judge"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of its lessons")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists: name another --output")
    make(args.output, args.seed, args.steps)


if __name__ == "__main__":
    main()
