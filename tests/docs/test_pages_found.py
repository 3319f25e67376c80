"""Pages are found by the field's words, and stay short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reference_pages import MADE

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
MOST_WORDS = 46_500
README_WORDS = 1_100
MADE_PART = re.compile(r"<!-- (begin of|table by) .*?<!-- end of [^\n]*-->", re.S)
"""A part of a page that a script makes."""
TERMS = {
    "train/agents.md": ("multi-turn", "agent", "tool calling", "environment"),
    "train/algorithms.md": ("PPO", "GRPO", "KL penalty"),
    "train/data.md": ("verifiable reward", "reward function", "chat template"),
    "train/distillation.md": ("on-policy distillation", "teacher"),
    "train/evaluation.md": ("pass@k", "evaluat"),
    "train/images.md": ("vision-language", "VLM", "image"),
    "train/judges.md": ("judge", "generative reward model", "rubric"),
    "train/lora.md": ("LoRA", "PEFT"),
    "train/own_loop.md": ("training loop",),
    "train/serve.md": ("training as a service", "Tinker", "server"),
    "train/sft_reward_dpo.md": ("supervised fine-tuning", "reward model", "DPO"),
    "scale/async_training.md": ("asynchronous", "off-policy", "staleness"),
    "scale/batching.md": ("sequence packing", "dynamic batching", "prefix sharing", "micro-batch"),
    "scale/checkpoints.md": ("checkpoint", "resume"),
    "scale/experts.md": ("mixture of experts", "expert parallel", "router replay"),
    "scale/fault_tolerance.md": ("fault tolerance", "elastic", "preemption"),
    "scale/fp8_rollouts.md": ("FP8", "rollout"),
    "scale/gpu.md": ("GPU",),
    "scale/launching.md": ("Ray", "SLURM", "Kubernetes"),
    "scale/long_context.md": ("long context", "context parallel"),
    "scale/models.md": ("Hugging Face",),
    "scale/parallelism.md": ("tensor parallel", "pipeline parallel", "data parallel"),
    "scale/security.md": ("security",),
    "scale/speculative_decoding.md": ("speculative decoding", "draft tokens"),
    "plan/planning.md": ("memory estimator", "throughput"),
    "plan/layout_search.md": ("layout search", "auto-parallel"),
    "plan/dry_run.md": ("dry run", "without a GPU"),
    "plan/run_viewer.md": ("run viewer", "dashboard", "Prometheus", "TensorBoard", "W&B"),
    "plan/ablations.md": ("ablation", "sweep", "hyperparameter grid"),
    "plan/nightly.md": ("nightly", "golden", "regression test"),
    "start/tutorial.md": ("tutorial",),
    "start/quickstart.md": ("quickstart",),
    "start/faq.md": ("FAQ", "troubleshooting"),
    "start/coming_from_verl.md": ("verl",),
    "start/coming_from_trl.md": ("TRL",),
    "internals/hybrid_engine.md": ("hybrid engine", "reshard"),
}
"""Page -> words with which somebody searches for its subject."""


def opening(text: str) -> str:
    """Return a page's title and its first paragraph, in small letters, on one line."""
    title, _, rest = text.partition("\n")
    paragraphs = (part for part in rest.split("\n\n") if part.strip() and not part.strip().startswith(("<!--", "![")))
    return " ".join(f"{title} {next(paragraphs, '')}".split()).lower()


def prose(text: str) -> str:
    """Return a page's text without code blocks, tables and comments."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("|"))


@pytest.mark.parametrize("page", TERMS)
def test_a_page_begins_with_the_words_of_its_subject(page):
    """In its title or first paragraph. Would not catch a definition that is wrong."""
    text = opening((DOCS / page).read_text())
    assert not [term for term in TERMS[page] if term.lower() not in text], text


def test_every_term_is_of_one_table():
    """Forty or more terms, and every page of the first four groups that is written by hand has some."""
    assert sum(map(len, TERMS.values())) >= 40
    by_hand = {page.relative_to(DOCS).as_posix() for page in users_pages() if page.parent.name in ("train", "scale")}
    assert by_hand <= TERMS.keys()


def users_pages() -> list[Path]:
    """Return the pages for users that are written by hand: not those of internals, not those that are made."""
    pages = [page for page in sorted(DOCS.glob("*/*.md")) if page.parent.name != "internals"]
    return [page for page in pages if MADE not in page.read_text()]


def test_pages_are_short():
    """README outside of tables and code; all words of the pages for users but those that scripts
    write. Would not catch text that says little."""
    assert len(prose((REPOSITORY / "README.md").read_text()).split()) <= README_WORDS
    words = {page.name: len(MADE_PART.sub("", page.read_text()).split()) for page in users_pages()}
    assert sum(words.values()) <= MOST_WORDS, words


def test_prose_and_opening_by_hand():
    """Tables, code and comments are no prose; a picture is no first paragraph."""
    text = "# A title\n\n![b](c.png)\n\nFirst words\nhere.\n\n| d |\n|---|\n\n```bash\ne\n```\n<!-- f -->\nlast\n"
    assert opening(text) == "# a title first words here."
    assert prose(text).split() == ["#", "A", "title", "![b](c.png)", "First", "words", "here.", "last"]
