"""scripts/make_demo_preferences.py: a noisy teacher's answers, and pairs that the demo's rule labelled."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path

import pytest

from megatron_rl.data.reading import read_examples, read_rankings
from megatron_rl.data.reading_options import ReadingOptions

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("make_demo_preferences")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def tokenizer(script):
    return importlib.import_module("make_demo_assets").make_tokenizer()


def test_answers_are_drawn_apart_and_from_the_seed(script):
    """The same for a seed, others for another, and not all alike for one question. Would not catch a short period."""
    rows = script.answer_rows([(95, 17)], 50, seed=3)
    assert rows == script.answer_rows([(95, 17)], 50, seed=3) != script.answer_rows([(95, 17)], 50, seed=4)
    assert {row["prompt"] for row in rows} == {"95+17="} and len({row["response"] for row in rows}) == 2


def test_pairs_are_in_the_order_of_the_rule(script):
    """Chosen is right and rejected wrong where the rule says so, and the reverse where it says the reverse.

    Would not catch a rule that prefers by other things than these answers.
    """
    asked = []

    def rule(source, text, truth):
        asked.append((source, truth))
        return -float(text == truth)

    for pairs, right in (
        (script.pair_rows([(7, 35)], 40, 0, script.compute_score), "chosen"),
        (script.pair_rows([(7, 35)], 40, 0, rule), "rejected"),
    ):
        wrong = {"chosen": "rejected", "rejected": "chosen"}[right]
        assert len(pairs) == 40 and all(row[right] == "042" != row[wrong] for row in pairs)
        assert all(row["prompt"] == [{"role": "user", "content": "07+35="}] for row in pairs)
    assert set(asked) == {("demo/addition", "042")}


def test_mistakes_are_of_every_kind_and_can_be_spelled(script, tokenizer):
    """Each kind is wrong most of the time, in digits that the tokenizer has. Would not catch a kind that is rare."""
    draw = random.Random(1)
    for name, mistake in script.MISTAKES.items():
        texts = [mistake(a, b, draw) for a in range(5, 100, 7) for b in range(5, 100, 7)]
        truths = [script.answer(a, b) for a in range(5, 100, 7) for b in range(5, 100, 7)]
        wrong = sum(text != truth for text, truth in zip(texts, truths, strict=True)) / len(texts)
        assert wrong > 0.6 and all(text and text.isdigit() and len(text) <= 6 for text in texts), name
        assert tokenizer.unk_token_id not in tokenizer("".join(texts))["input_ids"]


def test_the_files_are_read_by_the_stages(script, tokenizer, tmp_path, monkeypatch, capsys):
    """Made once, found the second time; held-out questions are in no training file; tokens end with the end token.

    Would not catch pairs that are too easy.
    """
    few = {seed: tuple(part[:60] for part in script.split_questions(seed)) for seed in (0,)}
    monkeypatch.setattr(script, "split_questions", few.__getitem__)
    output = tmp_path / "stages"
    script.main(["--output", str(output)])
    assert "480 + 60 answers of a noisy teacher, 240 + 60 pairs, seed 0" in capsys.readouterr().out
    before = (output / "stages.json").stat().st_mtime_ns
    script.main(["--output", str(output)])
    assert (output / "stages.json").stat().st_mtime_ns == before
    assert json.loads((output / "stages.json").read_text())["pairs_train"] == 240
    examples, _ = read_examples([str(output / "answers_train.parquet")], tokenizer, ReadingOptions())
    assert len(examples) == 480 and all(one.tokens[-1] == tokenizer.eos_token_id for one in examples)
    assert all((one.prompt_length, one.num_counted) == (6, 4) for one in examples)
    questions = {}
    for kind in ("train", "test"):
        rankings, report = read_rankings([str(output / f"pairs_{kind}.parquet")], tokenizer, ReadingOptions())
        questions[kind] = {tokenizer.decode(one.answers[0].tokens[:6]) for one in rankings}
        assert all(one.tokens[-1] == tokenizer.eos_token_id for ranking in rankings for one in ranking.answers)
    assert len(questions["train"]) == 60 and not questions["train"] & questions["test"]
    (output / "stages.json").unlink()
    with pytest.raises(SystemExit):
        script.main(["--output", str(output)])
