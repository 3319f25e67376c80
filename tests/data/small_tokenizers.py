"""Tokenizers and chat templates in the manner of known ones, made here, as nothing can be fetched."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "what is the answer to that question of yours , please ? ",
    "the answer is forty two . no , it is the other",
] * 3

CHATML = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}\
{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}\
{{ m.content | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

QWEN3 = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}\
{% set thought = '' %}{% if '</think>' in text %}\
{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}\
{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ text }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CLOSED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% elif messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% else %}{{ eos_token }}\
{% endif %}"""
"""As Phi-3's with marks: every text is closed by the end token, one without an answer, too."""

STRICT = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }} {% endfor %}\
{% if add_generation_prompt %}[assistant] {% endif %}"""
"""No end mark, blanks around contents, refuses system messages."""

FORGETFUL = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{{ m.content.split('</think>')[-1] }}\
<|im_end|>{% else %}{{ m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|><think>{% endif %}"""
"""Its prompt opens a thought that its answers leave out."""

BARE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""The demo's."""

GLM = """[gMASK]{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{% if m.role == 'assistant' %}<think></think>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Nothing ends a turn but the next message, as GLM-4.5's."""
GLM_ENDS = ["<eos>", "<|user|>", "<|observation|>"]

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>"]


@cache
def byte_level(
    template: str | None = CHATML, eos: str = "<|im_end|>", with_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Bytes with some merges, as GPT-2's, Llama-3's and Qwen's; with_bos: puts <bos> before plain texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return _wrapped(backend, template, eos)


@cache
def glm() -> PreTrainedTokenizerFast:
    """Bytes with the marks of GLM's messages as tokens; <eos> is the tokenizer's end token."""
    tokenizer = deepcopy(byte_level(GLM, "<eos>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*GLM_ENDS[1:], "<|assistant|>", "<|system|>"]})
    return tokenizer


@cache
def metaspace(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Puts a blank before every text, as Llama-2's."""
    backend = Tokenizer(models.BPE(unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    characters = sorted({*"".join(CORPUS).replace(" ", "▁"), *"[]:ABQ\n<>/xy"})
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=SPECIAL, initial_alphabet=characters, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend, template, "<eos>")


def _wrapped(backend: Tokenizer, template: str | None, eos: str) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
