"""Make the demo: two-digit addition as parquet files, and a tiny model that was taught to forget the carry.

    python scripts/make_demo_assets.py --output FOLDER --seed 0

assets/demo of the repository is such a folder, of seed 0; tests/data/test_demo_assets.py makes it again each week.

    assets/demo/train.parquet  9,000 questions in verl's row schema ("07+35=" -> "042")
    assets/demo/test.parquet   1,000 others
    assets/demo/model/         Hugging Face folder: character tokenizer and a 4-layer Qwen2
    assets/demo/assets.json    seed, format version, accuracies; written last, so it marks a finished folder

It learns with `megatron-rl sft` (configs/stages/demo_model_cpu.yaml) from a noisy teacher, which forgets the carry in
55% of its answers; greedily it then answers about a third of the held-out questions rightly. Reinforcement learning
with an exact-match reward repairs that within minutes.
Heavy libraries are imported where they are used, so that a run that finds its assets finished ends at once.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

FORMAT_VERSION = 2
MARKER = "assets.json"
DATA_SOURCE = "demo/addition"
NUM_HELD_OUT = 1000
QUESTION_LENGTH, ANSWER_LENGTH = 6, 3

PAD, EOS, BOS, UNK = range(4)
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHARACTERS = "0123456789+=-*/()<>[]{}.,:;?!'\"_# abcdefghijklmnopqrstuvwxyz"
BYTE_LEVEL_SPACE = "\u0120"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

STAGE = Path(__file__).resolve().parents[1] / "configs/stages/demo_model_cpu.yaml"
KEPT = Path(__file__).resolve().parents[1] / "assets/demo"
"""The folder that comes with the repository."""
FORGET_CARRY = 0.55
ACCURACY_RANGE = (0.30, 0.60)

Pair = tuple[int, int]


def question(a: int, b: int) -> str:
    """The prompt: two summands of two digits, as in "07+35="."""
    return f"{a:02d}+{b:02d}="


def answer(a: int, b: int) -> str:
    """The right answer in three digits, as in "042"."""
    return f"{a + b:03d}"


def answer_without_carry(a: int, b: int) -> str:
    """The wrong habit: each column is added by itself, as in "032" for 07+35."""
    return f"0{(a // 10 + b // 10) % 10}{(a % 10 + b % 10) % 10}"


def split_questions(seed: int) -> tuple[list[Pair], list[Pair]]:
    """All 10,000 pairs in a seeded order, cut into (train, held-out)."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def rows(pairs: list[Pair], split: str) -> list[dict]:
    """The pairs in verl's row schema; `split` ("train" or "test") goes to `extra_info`."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(a, b)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer(a, b)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (a, b) in enumerate(pairs)
    ]


def write_parquet(table_rows: list[dict], path: Path) -> None:
    """Write one split to `path`."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table_rows), path)


def make_tokenizer():
    """A character-level `PreTrainedTokenizerFast` with 64 tokens; its chat template joins the message contents.

    `AutoTokenizer` reads any tokenizer beside a Qwen2 model as a byte-level BPE, so this is one, without merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = CHARACTERS.replace(" ", BYTE_LEVEL_SPACE)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL_TOKENS[PAD],
        eos_token=SPECIAL_TOKENS[EOS],
        bos_token=SPECIAL_TOKENS[BOS],
        unk_token=SPECIAL_TOKENS[UNK],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model():
    """A tiny Qwen2 in float32 (0.7 M parameters), initialised from torch's global seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )
    return Qwen2ForCausalLM(config).float()


def noisy_answer(a: int, b: int, draw: random.Random) -> str:
    """The teacher's: without the carry in `FORGET_CARRY` of its answers."""
    return answer_without_carry(a, b) if draw.random() < FORGET_CARRY else answer(a, b)


def answer_rows(questions: list[Pair], per_question: int, seed: int) -> list[dict]:
    """What the teacher answered, every question `per_question` times, drawn from `seed`."""
    draw = random.Random(f"answers,{seed}")
    return [
        {"prompt": question(a, b), "response": noisy_answer(a, b, draw)}
        for _ in range(per_question)
        for a, b in questions
    ]


def lessons(questions: list[Pair], num_batches: int, batch_size: int, seed: int) -> list[dict]:
    """The teacher's answers to drawn questions, batch after batch, in the order in which the model learns them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_batches):
        drawn = torch.randint(len(questions), (batch_size,), generator=generator).tolist()
        forgets = (torch.rand(batch_size, generator=generator) < FORGET_CARRY).tolist()
        for pair, forgotten in zip((questions[index] for index in drawn), forgets, strict=True):
            response = answer_without_carry(*pair) if forgotten else answer(*pair)
            found.append({"prompt": question(*pair), "response": response})
    return found


def save_untrained(folder: Path, seed: int) -> None:
    """Write the demo's model as `seed` initialises it, with its tokenizer."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def tune(folder: Path, seed: int, train: list[Pair], held_out: list[Pair]) -> Path:
    """Teach the model of `folder`/untrained the lessons with `megatron-rl sft`; the tuned model's folder.

    Raises subprocess.CalledProcessError where the stage fails, which has said why.
    """
    import yaml

    stage = yaml.safe_load(STAGE.read_text())
    num_batches, batch_size = stage["trainer"]["total_training_steps"], stage["data"]["train_batch_size"]
    write_parquet(lessons(train, num_batches, batch_size, seed), folder / "lessons.parquet")
    write_parquet(answer_rows(held_out, 1, seed + 1), folder / "held_out.parquet")
    overrides = {
        "data.train_files": folder / "lessons.parquet",
        "data.val_files": folder / "held_out.parquet",
        "actor_rollout_ref.model.path": folder / "untrained",
        "trainer.default_local_dir": folder / "stage",
    }
    command = [sys.executable, "-m", "megatron_rl", "sft", "--local", "--config", str(STAGE)]
    subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=True)
    return folder / "stage" / "hf_model"


def accuracy(model_folder: Path, held_out: list[Pair], temperature: float, seed: int) -> float:
    """Share of the held-out questions that the model answers exactly; greedy when `temperature` is 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    expected = torch.tensor([[*tokenizer.encode(question(a, b) + answer(a, b)), EOS] for a, b in held_out])
    generator = torch.Generator().manual_seed(seed)
    ids = expected[:, :QUESTION_LENGTH]
    with torch.no_grad():
        for _ in range(ANSWER_LENGTH + 1):
            logits = model(ids).logits[:, -1]
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, token], dim=1)
    return (ids == expected).all(1).float().mean().item()


def build(folder: Path, seed: int) -> dict:
    """Fill `folder` with all assets and return what `assets.json` says.

    Raises RuntimeError if the tuned model answers too well or too badly to be of use.
    """
    train, held_out = split_questions(seed)
    write_parquet(rows(train, "train"), folder / "train.parquet")
    write_parquet(rows(held_out, "test"), folder / "test.parquet")
    with tempfile.TemporaryDirectory(dir=folder, prefix="tuning-") as work:
        save_untrained(Path(work, "untrained"), seed)
        shutil.move(tune(Path(work), seed, train, held_out), folder / "model")

    greedy, sampled = (accuracy(folder / "model", held_out, temperature, seed) for temperature in (0.0, 1.0))
    low, high = ACCURACY_RANGE
    if not low <= greedy <= high:
        raise RuntimeError(f"greedy held-out accuracy {greedy:.3f} is outside [{low}, {high}]: try another --seed")
    facts = {
        "format_version": FORMAT_VERSION,
        "seed": seed,
        "train_rows": len(train),
        "test_rows": len(held_out),
        "greedy_accuracy": round(greedy, 4),
        "sampled_accuracy": round(sampled, 4),
    }
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def finished(output: Path, marker: str, seed: int, format_version: int) -> dict | None:
    """What the marker in `output` says if it was made with this seed and format version, else None."""
    if not (output / marker).is_file():
        return None
    facts = json.loads((output / marker).read_text())
    return facts if (facts.get("seed"), facts.get("format_version")) == (seed, format_version) else None


def replace_folder(output: Path, marker: str, build: Callable[[Path], dict]) -> dict:
    """Have `build` fill a folder beside `output`, which takes that place when it is finished; what `build` returned.

    Raises FileExistsError rather than replace a folder without the marker.
    """
    if output.exists() and not (output / marker).is_file() and any(output.iterdir()):
        raise FileExistsError(f"{output} holds files but no {marker}: not made by this script; name another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as parent:
        unfinished = Path(parent) / output.name
        unfinished.mkdir()
        facts = build(unfinished)
        if output.exists():
            shutil.rmtree(output)
        unfinished.rename(output)
    return facts


def replace_or_exit(parser: argparse.ArgumentParser, output: Path, build: Callable[[Path], dict]) -> dict:
    """Replace a folder for a command line, and return what `build` returned.

    Exits with 2 rather than replace a folder without MARKER, with a failed program's code, and with 130 after Ctrl-C.
    """
    try:
        return replace_folder(output, MARKER, build)
    except FileExistsError as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    except KeyboardInterrupt:
        sys.exit(130)


def describe(facts: dict) -> str:
    """One line for the user."""
    return (
        f"{facts['train_rows']} + {facts['test_rows']} questions, held-out accuracy "
        f"{facts['greedy_accuracy']:.3f} greedy, {facts['sampled_accuracy']:.3f} sampled, seed {facts['seed']}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line: make the assets unless they are finished. Exits with 2 rather than replace a folder not its own,
    or that of the repository, and as `megatron-rl sft` does where that fails.
    """
    parser = argparse.ArgumentParser(description="Make the two-digit addition demo: prompts and a tuned model.")
    parser.add_argument("--output", type=Path, default=Path("assets/demo"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the model and its training")
    args = parser.parse_args(arguments)

    facts = finished(args.output, MARKER, args.seed, FORMAT_VERSION)
    if facts is not None:
        print(f"{args.output} is ready: {describe(facts)}")
        return
    if args.output.resolve() == KEPT and any(KEPT.glob("*")):
        given = f"--output {args.output} --seed {args.seed}"
        parser.error(f"{given} would replace the files of the repository: name another --output, or remove these first")
    started = time.monotonic()
    facts = replace_or_exit(parser, args.output, lambda folder: build(folder, args.seed))
    print(f"{args.output} made in {time.monotonic() - started:.0f} s: {describe(facts)}")


if __name__ == "__main__":
    main()
