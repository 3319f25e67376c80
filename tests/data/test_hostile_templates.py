"""Templates that raise, never end or take all memory: a refusal that names the row, within limits, whoever reads."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import DataConfig
from megatron_rl.data import template_process
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.reading import read_examples
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.template_process import Renderer, RenderLimits, TemplateProcess, TemplateRefusal
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.scoring.text_reader import TextReader

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
OF_TWOS = "{% if '2' in messages[0].content %}" + ENDLESS + "{% endif %}" + PLAIN
QUICK = RenderLimits(cpu_s=0.2, memory_bytes=1 << 28)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"?": 0, "1": 1, "2": 2}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", eos_token="?", chat_template=template)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


#  template, what is said of it
HOSTILE = [
    ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
    ("{{ 'x'.encode('nothing') }}", "LookupError: unknown encoding: nothing"),
    ("{{ 'x' | nothing }}", "TemplateAssertionError: No filter named 'nothing'"),
    ("{% for i in range(10**12) %}{% endfor %}", "OverflowError: Range too big"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: "),
    ("{% if a %}" * 200 + "{% endif %}" * 200, "Error: "),
    ("{{ messages[0].content.no.thing }}", "UndefinedError: "),
    (ENDLESS, "does not end within 0.2 s of CPU time"),
    ("{{ 10 ** (10 ** 9) }}", "does not end within 0.2 s of CPU time"),
    ("{{ 'x' * 100000000000 }}", "takes more than 0.3 GB of memory"),
    ("{{ [0] * 100000000000 }}", "takes more than 0.3 GB of memory"),
    ("{{ '%100000000000d' % 1 }}", "takes more than 0.3 GB of memory"),
]


@pytest.mark.parametrize(("template", "said"), HOSTILE)
def test_hostile_templates_end_as_refusals(template, said):
    """Each with its reason, and no process left. Would not catch a limit that is too small for honest templates."""
    before = psutil.Process().children()
    renderer = Renderer(tokenizer(template), {}, QUICK)
    with pytest.raises(TemplateRefusal) as refusal:
        renderer.texts([user("1")])
    assert said in str(refusal.value) and refusal.value.number == 0
    renderer.close()
    assert psutil.Process().children() == before


def test_a_text_that_no_tokenizer_would_end_with_is_refused(monkeypatch):
    """One character too many. Would not catch many texts that are just short enough."""
    monkeypatch.setattr(template_process, "LONGEST_TEXT", 3)
    renderer = Renderer(tokenizer(PLAIN), {})
    assert renderer.texts([user("123")]) == ["123"]
    with pytest.raises(TemplateRefusal, match="makes 4 characters of one conversation, and may make 3"):
        renderer.texts([user("1234")])


def test_one_conversation_of_many_is_named_and_the_next_call_goes_on():
    """The 150th of 200 has no end; afterwards others are rendered. Would not catch the text of another conversation."""
    renderer, chats = Renderer(tokenizer(OF_TWOS), {}, QUICK), [user("1")] * 149 + [user("2")] + [user("1")] * 50
    with pytest.raises(TemplateRefusal, match="does not end") as refusal:
        renderer.texts(chats)
    assert refusal.value.number == 149
    assert renderer.texts([user("1"), user("11")]) == ["1", "11"]


def test_a_process_that_is_killed_is_no_hang():
    """As the kernel does where memory is short. Would not catch a kill between two calls."""
    with pytest.raises(TemplateRefusal, match="killed by SIGKILL"):
        TemplateProcess(lambda _: os.kill(os.getpid(), signal.SIGKILL)).map([1])


def test_a_process_that_stands_still_is_no_hang(monkeypatch):
    """It takes no CPU time, as one that was forked while a lock was held. Would not catch one that is only slow."""
    monkeypatch.setattr(template_process, "PATIENCE", 1)
    with pytest.raises(TemplateRefusal, match="there is no text after 0.2 s") as refusal:
        TemplateProcess(lambda items: time.sleep(60 * (2 in items)) or items, QUICK).map([1, 2, 3])
    assert refusal.value.number == 1


def test_every_reader_names_the_row(tmp_path, monkeypatch):
    """Prompts, examples and a reward model's own reader. Would not catch a reader that renders in its own process."""
    monkeypatch.setattr(template_process, "LIMITS", QUICK)
    hostile = tokenizer(OF_TWOS)
    rows = [{"data_source": "unit", "prompt": user(text), "reward_model": {"ground_truth": "1"}} for text in "121"]
    examples = [{"messages": [*user(text), {"role": "assistant", "content": "1"}]} for text in "121"]
    paths = {}
    for name, content in (("prompts", rows), ("examples", examples)):
        paths[name] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in content))
    with pytest.raises(ConfigError, match=r"prompts.jsonl: line 2.*it does not end within 0.2 s"):
        PromptDataset([paths["prompts"]], hostile, DataConfig())
    for policy in ("error", "skip"):
        with pytest.raises(ConfigError, match=r"examples.jsonl: line 2.*does not end within 0.2 s.*template_refuses"):
            read_examples(
                [paths["examples"]], hostile, ReadingOptions(bad_rows=policy, bad_rows_file=str(tmp_path / "bad"))
            )
    reader = TextReader("reward_model", hostile, hostile, 99, "reward_model.max_length")
    with pytest.raises(RewardError, match="refuses .*'2'.*does not end within 0.2 s"):
        reader.token_ids([user("1"), user("2")], [[1], [2]], [[1], [1]])
