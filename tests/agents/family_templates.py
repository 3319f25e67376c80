"""Small chat templates that behave as those of the supported families: what they keep, drop, refuse, and how they write
thoughts, calls and results. No text of theirs is here but the marks.
"""

from __future__ import annotations

from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

LAST_USER = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
"""The number of the last question: templates keep thoughts behind it, in loops of calls."""
SPLIT = """{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}\
{% if not thought and '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}\
{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"""
"""Thoughts are a field, or between marks in the content."""
TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
JSON_CALLS = """{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\n</tool_call>\
{% endfor %}"""
XML_CALLS = """{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n\
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n\
</tool_call>{% endfor %}"""
RESULTS = """{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}"""
CHATML_REST = """{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
%s{%% endif %%}"""


def chatml(assistant: str, opened: str = "") -> str:
    """ChatML with results of tools as Qwen writes them. assistant: its turn. opened: after the generation prompt."""
    turn = "{% elif m.role == 'assistant' %}<|im_start|>assistant\n" + assistant + "<|im_end|>\n"
    return (
        TOOLS
        + LAST_USER
        + "{% for m in messages %}"
        + RESULTS
        + turn
        + CHATML_REST.replace("%s", opened).replace("%%", "%")
    )


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Results of tools are messages as all others; tools and calls are not written."""
QWEN2 = chatml(
    "{{ m.content }}" + JSON_CALLS.replace("c.function.arguments if c.function.arguments is string else ", "")
)
"""Arguments are always written as JSON, so that JSON text comes out twice-encoded. No thoughts."""
QWEN3 = chatml(
    SPLIT
    + """{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n\
{% endif %}{{ text }}"""
    + JSON_CALLS
)
QWEN35 = chatml(
    SPLIT
    + """{% if loop.index0 > ns.last %}<think>\n{{ thought | trim }}\n</think>\n\n{% endif %}{{ text | trim }}\
{% if m.tool_calls and text | trim %}\n\n{% endif %}"""
    + XML_CALLS,
    "<think>\n",
)
MINIMAX = (
    LAST_USER
    + """]~b]system\n{{ tools | tojson if tools else '' }}[e~[\n{% for m in messages %}{% if m.role == 'assistant' %}\
]~b]ai\n"""
    + SPLIT
    + """{% if thought and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}\
{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n\
{% for k, v in c.function.arguments | items %}<parameter name="{{ k }}">\
{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}\
[e~[\n{% elif m.role == 'tool' %}{% if loop.previtem.role == 'user' %}{{ raise_exception('a result needs a call') }}\
{% endif %}{% if loop.previtem.role != 'tool' %}]~b]tool{% endif %}\n<response>{{ m.content }}</response>\
{% if loop.last or loop.nextitem.role != 'tool' %}[e~[\n{% endif %}{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n\
{% endif %}{% endfor %}{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"""
)
GLM = (
    LAST_USER
    + """[gMASK]<sop>{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'assistant' %}\
<|assistant|>\n"""
    + SPLIT
    + """<think>{{ thought.strip() if loop.index0 > ns.last else '' }}</think>{% if text.strip() %}\n{{ text.strip() }}\
{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n\
{% for k, v in c.function.arguments.items() %}\
<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>\
{% endfor %}{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}
<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
)
"""Nothing ends a turn but the next one. Arguments must be an object."""
LLAMA3 = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>\
{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}\
{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}\
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}\
{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"""
"""A message with a call has no other content."""
MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}\
{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}\
{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}\
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]\
{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}\
{{ raise_exception('ids have nine characters') }}{% endif %}{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}\
{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>\
{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"""
GEMMA4 = (
    LAST_USER
    + """{{ bos_token }}{% if tools %}<|turn>system\n{{ tools | tojson }}<turn|>\n{% endif %}{% for m in messages %}\
{% if m.role == 'assistant' %}{% if loop.previtem.role != 'tool' %}<|turn>model\n{% endif %}\
{% set thought = m.reasoning or m.reasoning_content %}{% if thought and m.tool_calls and loop.index0 > ns.last %}\
<|channel>thought\n{{ thought }}\n<channel|>{% endif %}{% for c in m.tool_calls or [] %}\
<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | items %}{{ k }}:\
{{ '<|"|>' + v + '<|"|>' if v is string else v }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}\
{% if m.tool_calls and loop.nextitem is defined and loop.nextitem.role == 'tool' %}{% else %}\
{{ m.content.split('<channel|>')[-1] | trim }}{{ '<|tool_response>' if m.tool_calls else '<turn|>\n' }}{% endif %}\
{% elif m.role == 'tool' %}<|tool_response>response:{{ m.name }}{{ '{' }}value:<|"|>{{ m.content }}<|"|>{{ '}' }}\
<tool_response|>{% else %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>\n{% endif %}{% endfor %}\
{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"""
)
"""A thought is written before a call alone. Results of tools go on with the turn of the policy."""
DEEPSEEK2 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n\
{% elif m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\
{% elif m.role == 'system' %}{{ m.content }}\n\n\
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
"""It leaves results of tools out."""
DEEPSEEK3 = """{% set ns = namespace(called=false) %}{{ bos_token }}\
{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}\
{% elif m.role == 'assistant' and m.tool_calls %}{% if not ns.called %}<｜Assistant｜>{{ m.content or '' }}\
<｜tool▁calls▁begin｜>{% endif %}{% set ns.called = true %}\
{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + \
c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>\
{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>\
{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>\
{% else %}{{ m.content }}{% endif %}\
{% endfor %}{% if messages[-1].role == 'tool' %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}\
<｜Assistant｜><think>\n{% endif %}"""
"""Arguments must be text. Thoughts of answers are dropped at once, and tools are not written. The end of results is
written at the end of a text alone.
"""
KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}\
{% for m in messages %}<|im_{{ {'tool': 'system'}.get(m.role, m.role) }}|>{{ m.role }}<|im_middle|>\
{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}{% if m.tool_calls %}\
<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>\
{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|tool_call_end|>\
{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
"""The id of a call carries the name of its tool, which stands nowhere else."""
GPT_OSS = """{% set ns = namespace(name='', final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and \
not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}{% endfor %}<|start|>developer<|message|>\
{{ tools | tojson if tools else '' }}<|end|>{% for m in messages %}{% if m.role == 'assistant' %}\
{% if '<|channel|>analysis' in (m.content or '') %}{{ raise_exception('channels are fields') }}{% endif %}\
{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif %}\
{% if m.thinking and loop.index0 > ns.final %}\
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}\
<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>\
{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% set ns.name = m.tool_calls[0].function.name %}\
{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}\
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}\
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}\
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set ns.name = '' %}{% endif %}\
{% elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('no call before the result') }}{% endif %}\
<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>\
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
PHI3 = """{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}<|{{ m.role }}|>
{{ m.content }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}\
{% endif %}"""

ENDS = {
    "qwen": ("<|im_end|>",),
    "minimax": ("[e~[",),
    "glm": ("<|user|>", "<|observation|>"),
    "llama3": ("<|eot_id|>",),
    "mistral": (),
    "gemma": ("<end_of_turn>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "gpt_oss": ("<|return|>", "<|call|>"),
    "phi3": ("<|end|>",),
}
"""Tokens that end a turn, beside the end token."""
OTHERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<minimax:tool_call>", "</minimax:tool_call>", "<|channel>", "<channel|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<tool_response|>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>"),
    *(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|python_tag|>",
    ),
)
"""Tokens that are not special, which parsers of calls look for."""


def family_tokenizer(template: str, ends: str) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Return bytes with the tokens of the families, and the tokens that end a turn."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_tokens([*OTHERS], special_tokens=False)
    tokenizer.add_tokens([*ENDS[ends]], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer, [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ENDS[ends]))]
