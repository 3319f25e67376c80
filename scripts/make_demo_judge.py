"""Make the demo's judge: the demo's model, taught with `megatron-rl sft` to judge answers, too.

    python scripts/make_demo_judge.py --output outputs/demo_judge

It answers sums as the demo's model does. What else it is asked is one of these. It works the sum out from the last
digit on, because of the carry, and writes beside each digit that of the answer and whether they agree (= or !). Then it
says the same of the length, and decides:

    07+35=032?       22=43!00==:n           y or n: is the answer right?
    07+35=042,032?   22=2=44=3!00=0===:a    a or b: which answer is the better one?
    07+35=032;u?     22=43!00==:y           y or n: is the last digit right? ;t? the digits before it? ;l? the length?

    outputs/demo_judge/model           Hugging Face folder
    outputs/demo_judge/*.parquet       the demo's questions, each with a rubric of these criteria
    outputs/demo_judge/verdicts.json   shares of wrong verdicts, by kind of answer

configs/stages/judge_cpu.yaml trains the demo's model with it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_demo_assets as demo

BATCH, STEPS = 128, 1200
REPLY = 12
"""Tokens of a verdict on an answer: three for each digit, of the length, a colon, and a letter."""
SETTINGS = {
    "data.train_batch_size": BATCH,
    "data.max_length": 48,
    "trainer.total_training_steps": STEPS,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": BATCH,
    "actor_rollout_ref.actor.optim.lr_wsd_decay_steps": STEPS // 3,
}
Case = tuple[str, str]


def some_answer(pair: demo.Pair, draw: random.Random) -> str:
    """An answer to a sum: right, or wrong in a way that a policy may be."""
    right = demo.answer(*pair)
    kind = draw.random()
    if kind < 0.35:
        return right
    if kind < 0.47:
        return demo.answer_without_carry(*pair)
    if kind < 0.65:
        place = draw.randrange(3)
        return right[:place] + draw.choice("0123456789") + right[place + 1 :]
    if kind < 0.75:
        return f"{max(0, sum(pair) + draw.choice((-100, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 100))):03d}"
    if kind < 0.8:
        return f"{draw.randrange(1000):03d}"
    if kind < 0.9:
        cut = draw.randrange(4)
        return right[:cut] + "".join(draw.choice("0123456789") for _ in range(draw.randint(0, 7 - cut)))
    cut = draw.choice((0, 3))
    return right[:cut] + "".join(draw.choice(demo.CHARACTERS) for _ in range(draw.randint(0, 7 - cut)))


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


def work(right: str, *answers: str) -> str:
    """The digits of the right answer from the last one on, beside each those of the answers; then their lengths."""
    text = ""
    for place in (2, 1, 0):
        digits = [said[place : place + 1] or "." for said in answers]
        text += right[place] + "".join(digit + ("=" if digit == right[place] else "!") for digit in digits)
    return text + "".join("=" if len(said) == 3 else "!" for said in answers) + ":"


def case(pair: demo.Pair, draw: random.Random) -> Case:
    """A question to the judge, and the right verdict; or a sum, and an answer of the noisy teacher."""
    sum_, right, said, kind = demo.question(*pair), demo.answer(*pair), some_answer(pair, draw), draw.random()
    if kind < 0.15:
        return sum_, demo.noisy_answer(*pair, draw)
    if kind < 0.5:
        return f"{sum_}{said}?", work(right, said) + ("y" if said == right else "n")
    if kind < 0.75:
        other = some_answer(pair, draw)
        if quality(said, right) == quality(other, right):
            said, other = (right, said) if said != right else (right, demo.answer_without_carry(pair[0], pair[1] ^ 1))
            said, other = (said, other) if draw.random() < 0.5 else (other, said)
        better = "a" if quality(said, right) > quality(other, right) else "b"
        return f"{sum_}{said},{other}?", work(right, said, other) + better
    name = draw.choice(list(CRITERIA))
    return f"{sum_}{said};{name}?", work(right, said) + ("y" if CRITERIA[name](said, right) else "n")


def rows(pairs: list[demo.Pair], num_rows: int, seed: int) -> list[dict]:
    """Lessons about drawn sums."""
    draw = random.Random(seed)
    cases = (case(draw.choice(pairs), draw) for _ in range(num_rows))
    return [{"prompt": asked, "response": verdict} for asked, verdict in cases]


def with_rubric(row: dict) -> dict:
    """A question with the criteria of a right answer."""
    rubric = [{"criterion": "u", "weight": 1.0}, {"criterion": "t", "weight": 1.0}, {"criterion": "l", "weight": 0.5}]
    return row | {"extra_info": row["extra_info"] | {"rubric": rubric}}


def wrong_answers(pair: demo.Pair, draw: random.Random) -> dict[str, str]:
    """A wrong answer of each kind to a sum, some of which a policy finds soon if a judge lets them pass."""
    right, place = demo.answer(*pair), draw.randrange(3)
    digit = str((int(right[place]) + draw.randint(1, 9)) % 10)
    near = f"{abs(sum(pair) + draw.choice((-10, -1, 1, 10))):03d}"
    answers = {
        "without the carry": demo.answer_without_carry(*pair),
        "one wrong digit": right[:place] + digit + right[place + 1 :],
        "near": near if near != right else "999",
        "longer": right + draw.choice("0123456789?:+="),  # , and ; would make it another question
        "shorter": right[: draw.randrange(3)],
    }
    return {kind: said for kind, said in answers.items() if said != right}


def wrong_verdicts(model_folder: Path, pairs: list[demo.Pair], seed: int, batch: int = 2048) -> dict[str, float]:
    """Share of greedy replies that are not the sum and the right verdict, of each kind of answer to all pairs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    draw, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(model_folder)
    model, asked = AutoModelForCausalLM.from_pretrained(model_folder), {}
    for pair in pairs:
        for kind, said in {"right": demo.answer(*pair), **wrong_answers(pair, draw)}.items():
            text = f"{demo.question(*pair)}{said}?{work(demo.answer(*pair), said)}{'y' if kind == 'right' else 'n'}"
            asked.setdefault((kind, len(said)), []).append(text)
    wrong, number = dict.fromkeys((kind for kind, _ in asked), 0), dict.fromkeys((kind for kind, _ in asked), 0)
    for (kind, _), texts in asked.items():  # texts of one length need no padding
        for first in range(0, len(texts), batch):
            ids = torch.tensor([tokenizer.encode(text) for text in texts[first : first + batch]])
            with torch.no_grad():
                likeliest = model(ids[:, :-1], logits_to_keep=REPLY).logits.argmax(-1)
            wrong[kind] += int((likeliest != ids[:, -REPLY:]).any(1).sum())
            number[kind] += len(ids)
    return {kind: wrong[kind] / number[kind] for kind in wrong}


def make(output: Path, seed: int, steps: int) -> None:
    """Teach the model and write its folder. Raises subprocess.CalledProcessError where the stage fails."""
    train, held_out = demo.split_questions(0)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="judge-") as work:
        folder = Path(work)
        demo.write_parquet(rows(train, BATCH * steps, seed), folder / "lessons.parquet")
        demo.write_parquet(rows(held_out, 512, seed + 1), folder / "held_out.parquet")
        paths = {
            "data.train_files": folder / "lessons.parquet",
            "data.val_files": folder / "held_out.parquet",
            "actor_rollout_ref.model.path": demo.KEPT / "model",
            "trainer.default_local_dir": folder / "stage",
        }
        overrides = SETTINGS | {"trainer.total_training_steps": steps} | paths
        overrides["actor_rollout_ref.actor.optim.lr_wsd_decay_steps"] = steps // 3
        command = [sys.executable, "-m", "megatron_rl", "sft", "--local", "--config", str(demo.STAGE)]
        subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=True)
        made = folder / "made"
        made.mkdir()
        (folder / "stage" / "hf_model").rename(made / "model")
        for split, pairs in (("train", train), ("test", held_out)):
            demo.write_parquet([with_rubric(row) for row in demo.rows(pairs, split)], made / f"{split}.parquet")
        facts = wrong_verdicts(made / "model", [*train, *held_out], seed)
        (made / "verdicts.json").write_text(json.dumps(facts, indent=2) + "\n")
        made.rename(output)
    print("shares of wrong verdicts: " + ", ".join(f"{kind} {share:.4f}" for kind, share in facts.items()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the demo's judge of sums.")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo_judge"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lessons")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists: name another --output")
    make(args.output, args.seed, args.steps)


if __name__ == "__main__":
    main()
