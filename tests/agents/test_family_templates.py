"""Chat templates of every supported family: what is appended, thoughts, calls in their formats, and what is learned."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

import family_templates as templates
import pytest
from family_templates import family_tokenizer
from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.anthropic_messages import AnthropicMessages
from megatron_rl.agents.as_json import answer_from_json
from megatron_rl.agents.chat_request import ChatRequest
from megatron_rl.agents.episode import Episode, EpisodeLimits, turn_room
from megatron_rl.agents.episodes import LiveEpisodes
from megatron_rl.agents.observation import InitialConversation, Message, ToolCall, Turn, TurnOptions
from megatron_rl.agents.openai_chat import OpenAIChat
from megatron_rl.agents.thoughts import Channels
from megatron_rl.agents.tool_parser import ToolParser
from megatron_rl.agents.turn_reader import TurnReader
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.config.multi_turn import MultiTurnConfig
from megatron_rl.controller.open_episodes import unread_calls
from megatron_rl.data.chat_template import ChatTemplate
from megatron_rl.data.example_rows import Chat
from megatron_rl.data.template_process import TemplateRefusal, form_of
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.chat_format import APPEND, CHAT_FORMATS, OWN
from megatron_rl.records import Sampling

REFUSE = "refuse"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
THOUGHT = "I may say"
CALL = ToolCall("add", {"key": "one"})


@dataclass(frozen=True)
class Case:
    """A family's template. user, tool: what it does with their messages. unwritten: of an answer that thinks and calls.

    reads: the field of thoughts. as_text, ids: the form of calls. learned: what counts of an answer that thinks and
    calls, but for the end of the turn. families: whose table this is.
    """

    template: str
    ends: str
    user: str
    tool: str
    learned: str
    families: tuple[str, ...] = ()
    reads: str = ""
    as_text: bool = False
    ids: str = "any"
    unwritten: tuple[str, ...] = ()
    formats: tuple[str, ...] = field(default=())


HERMES = '<tool_call>\n{"name": "add", "arguments": {"key": "one"}}\n</tool_call>'
THINKING = "<think>\nI may say\n</think>\n\n"
XML = "<tool_call>\n<function=add>\n<parameter=key>\none\n</parameter>\n</function>\n</tool_call>"
NO_CALLS = ("reasoning", "tool_calls")
QWEN2 = Case(templates.QWEN2, "qwen", APPEND, APPEND, HERMES, unwritten=("reasoning",), formats=("hermes",))
CASES = {
    "qwen2": QWEN2,
    "qwen3": Case(
        *(templates.QWEN3, "qwen", OWN, APPEND, THINKING + HERMES),
        ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        "reasoning_content",
        formats=("hermes",),
    ),
    "qwen3_5": Case(
        *(templates.QWEN35, "qwen", OWN, APPEND, "I may say\n</think>\n\n" + XML),
        tuple(f"Qwen3_5{size}{kind}" for size in ("", "Moe") for kind in ("ForCausalLM", "ForConditionalGeneration")),
        "reasoning_content",
        formats=("qwen3_xml", "qwen3_coder"),
    ),
    "minimax": Case(
        templates.MINIMAX,
        *("minimax", OWN, APPEND, 'I may say\n</think>\n\n<minimax:tool_call>\n<invoke name="add">\n'),
        ("MiniMaxM2ForCausalLM",),
        "reasoning_content",
        formats=("minimax_m2",),
    ),
    "glm": Case(
        *(templates.GLM, "glm", OWN, APPEND, "\n<think>I may say</think><tool_call>add\n<arg_key>key</arg_key>\n"),
        ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
        "reasoning_content",
        formats=("glm47", "glm45"),
    ),
    "llama3": Case(
        *(templates.LLAMA3, "llama3", APPEND, APPEND, '{"name": "add", "parameters": {"key": "one"}}'),
        ("LlamaForCausalLM",),
        unwritten=("reasoning",),
        formats=("llama3_json",),
    ),
    "mistral": Case(
        *(templates.MISTRAL, "mistral", APPEND, APPEND, '[TOOL_CALLS] [{"name": "add", "arguments": {"key": "one"}'),
        ("MistralForCausalLM", "MixtralForCausalLM"),
        ids="nine",
        unwritten=("reasoning",),
        formats=("mistral",),
    ),
    "gemma": Case(
        *(templates.GEMMA, "gemma", APPEND, REFUSE, "<end_of_turn>"),
        ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        unwritten=NO_CALLS,
    ),
    "gemma4": Case(
        *(templates.GEMMA4, "gemma4", OWN, APPEND),
        '<|channel>thought\nI may say\n<channel|><|tool_call>call:add{key:<|"|>one<|"|>}<tool_call|>',
        ("Gemma4ForCausalLM",),
        "reasoning_content",
        formats=("gemma4",),
    ),
    "deepseek2": Case(
        *(templates.DEEPSEEK2, "deepseek", APPEND, REFUSE, "</s>"), ("DeepseekV2ForCausalLM",), unwritten=NO_CALLS
    ),
    "deepseek3": Case(
        *(templates.DEEPSEEK3, "deepseek", OWN, OWN),
        "I may say\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>add\n```json\n{"key": "one"}\n```',
        ("DeepseekV3ForCausalLM",),
        "content",
        as_text=True,
        formats=("deepseek_v3",),
    ),
    "kimi": Case(
        *(templates.KIMI, "qwen", APPEND, APPEND),
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"key": "one"}',
        ids="named",
        unwritten=("reasoning",),
        formats=("kimi_k2",),
    ),
    "gpt_oss": Case(
        *(templates.GPT_OSS, "gpt_oss", OWN, APPEND),
        "<|channel|>analysis<|message|>I may say<|end|><|start|>assistant to=functions.add"
        '<|channel|>commentary json<|message|>{"key": "one"}<|call|>',
        ("GptOssForCausalLM",),
        "thinking",
        formats=("openai",),
    ),
    "phi3": Case(templates.PHI3, "phi3", APPEND, REFUSE, "<|end|>", unwritten=NO_CALLS),
    "chatml": Case(
        *(templates.CHATML, "qwen", APPEND, APPEND, "<|im_end|>"),
        ("MiMoForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
        unwritten=NO_CALLS,
    ),
}
CASES["qwen2"] = Case(
    **{
        **vars(QWEN2),
        "families": (
            "Qwen2ForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
        ),
    }
)
REASONING = {
    "qwen3": "qwen3",
    "qwen3_5": "qwen3",
    "glm": "glm45",
    "minimax": "minimax_m2",
    "deepseek3": "deepseek_r1",
    "gemma4": "gemma4",
}
UNREAD = [
    ("glm", "glm47", None),
    ("glm", "hermes", "format=hermes does not read a call as the template writes it: '"),
    ("gpt_oss", "openai", None),
    ("gpt_oss", "hermes", "an agent that sends tools would end the run: format=hermes does not go"),
    ("phi3", "hermes", None),
]
WITH_CALLS = [name for name, case in CASES.items() if case.formats]


def opened(name: str, **kwargs) -> tuple[Case, PreTrainedTokenizerBase, list[int], TurnRenderer]:
    case = CASES[name]
    tokenizer, eos = family_tokenizer(case.template, case.ends)
    return case, tokenizer, eos, TurnRenderer(tokenizer, eos, kwargs)


def row(reasoning: str = "reasoning") -> list[Message]:
    """A conversation as OpenAI's wire form has it: arguments are text, ids are free."""
    function = {"name": "add", "arguments": json.dumps(CALL.arguments)}
    call = {"id": "call_abc", "type": "function", "function": function}
    return [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "", reasoning: THOUGHT, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_abc", "content": "two"},
    ]


def test_every_family_has_a_template_that_does_what_the_table_says():
    """Turns, thoughts and formats of `megatron-rl families`. Would not catch a published template of another kind."""
    of = {family: case for case in CASES.values() for family in case.families}
    assert of.keys() == FAMILIES.keys() == CHAT_FORMATS.keys()
    for name, case in of.items():
        chat = CHAT_FORMATS[name]
        assert (chat.turns, bool(chat.thoughts)) == (case.user, bool(case.reads)), name
        assert set(case.formats) <= set(chat.tools) and bool(case.formats) == bool(chat.tools), name
        assert chat.thoughts in case.template


@pytest.mark.parametrize("name", CASES)
def test_what_a_template_does_with_turns_and_forms(name):
    """Messages of the user and of tools, behind an answer that thinks and one that calls; the form that it takes. Would
    not catch a template that changes with the number of turns.
    """
    case, _, _, renderer = opened(name)

    def behaviour(role: str) -> str:
        try:
            return APPEND if renderer.append_problem(role) is None else OWN
        except TemplateRefusal:
            return REFUSE

    assert (behaviour("user"), behaviour("tool")) == (case.user, case.tool)
    form = form_of(case.template, {"bos_token": "<s>", "eos_token": "</s>"})
    assert (form.thoughts, form.as_text, form.ids) == (case.reads, case.as_text, case.ids)


@pytest.mark.parametrize("name", [name for name in WITH_CALLS if CASES[name].tool == APPEND])
def test_a_path_of_calls_is_the_whole_conversation(name):
    """Three turns that think and call, with results of tools between them: the path that grows turn by turn has the ids
    of the conversation rendered at once. Would not catch results in another order than their calls.
    """
    case, tokenizer, eos, renderer = opened(name, tools=[ADD])
    messages: list[Message] = [{"role": "user", "content": "What is it?"}]
    path = renderer.beginning(InitialConversation(tuple(messages)))
    for number in range(3):
        turn = Turn("", (CALL,), reasoning_content=THOUGHT if case.reads else "")
        messages.append(turn.as_message())
        result = {"role": "tool", "name": "add", "content": f"two {number}"}
        whole = renderer.beginning(InitialConversation((*messages, result)))
        assert whole[: len(path)] == path
        drawn = whole[len(path) :]
        end = next(place for place, token in enumerate(drawn) if token in eos)  # here the policy stops
        path += drawn[: end + 1]
        path += renderer.following([result], drawn[end], turn, num_calls=number)
        messages.append(result)
        assert path == whole


@pytest.mark.parametrize(("name", "form"), [(name, form) for name in WITH_CALLS for form in CASES[name].formats])
def test_calls_are_read_behind_thoughts_alone(name, form):
    """The call that the template writes is read with the family's format, twice; one inside of a thought is not. Would
    not catch arguments of other types.
    """
    case, tokenizer, eos, renderer = opened(name)
    parser = ToolParser(form, "key", tokenizer, [ADD], eos, renderer.thoughts)
    written = renderer.written_call("add")
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    for _ in range(2):
        turn = parser.turn(ids)
        assert [call.name for call in turn.calls] == ["add"] and not turn.problem and "add" not in turn.text
    if isinstance(renderer.thoughts, Channels):
        thought = f"<|channel|>analysis<|message|>{written}<|end|>"
        text = "<|channel|>analysis<|message|>add(one)<|end|><|start|>assistant<|channel|>final<|message|>No call."
    else:
        marks = renderer.thoughts
        thought = written.partition(marks.closing)[2] or written
        text = f"{'' if marks.is_open else marks.opening}{thought}{marks.closing}\n\nNo call."
    turn = parser.turn(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert turn.calls == () and turn.problem == "" and turn.text.endswith("No call.")
    assert bool(turn.reasoning_content) == bool(case.reads)


@pytest.mark.parametrize(("name", "parser"), REASONING.items())
def test_thoughts_are_those_of_vllms_server(name, parser):
    """By the reasoning parser of the family, but for blanks at the edges: with both marks, with the closing one alone,
    with a thought that does not end. Would not catch an answer without marks, where vLLM does not see the prompt.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    _, tokenizer, _, renderer = opened(name)
    marks, request = renderer.thoughts, ChatCompletionRequest(messages=[], model="")
    for text in (f"{marks.opening}\nhm\n{marks.closing}\n\nNo.", f"hm{marks.closing}No.", f"{marks.opening}\nhm"):
        expected = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer).extract_reasoning(text, request)
        said = marks.read(text)
        assert (said.thought, said.rest) == tuple((part or "").strip() for part in expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("thought", ["reasoning", "reasoning_content", "thinking"])
def test_what_is_learned_of_an_answer_that_thinks_and_calls(name, thought):
    """From a row of OpenAI's wire form: arguments are not encoded twice, the thought counts whatever its field, and
    what the template leaves out is named. Would not catch two calls in one message.
    """
    case, tokenizer, _, _ = opened(name)
    conversation = row(thought)[:2]
    (draft,) = ChatTemplate(tokenizer, {}).drafts(Chat(conversation, 0), "answers")
    counted = "".join(draft.text[start:end] for start, end in draft.spans)
    assert case.learned in counted and '\\"' not in counted
    expected = tuple(thought if name == "reasoning" else name for name in case.unwritten)
    assert draft.unwritten == expected


def test_arguments_that_are_no_object_are_refused_in_words():
    """In place of the template's TypeError. Would not catch an object in an object's text."""
    _, _, _, renderer = opened("qwen3_5")
    messages = row()[:2]
    messages[1]["tool_calls"][0]["function"]["arguments"] = "[1]"
    with pytest.raises(TemplateRefusal, match="the arguments of the call add must be a JSON object; they are"):
        renderer.beginning(InitialConversation(tuple(messages)))


def test_results_are_named_after_the_turns_calls():
    """Two calls of one turn whose results carry an agent's ids, behind an earlier call: gpt-oss's template takes one
    call, Kimi's ids count on. Would not catch results in another order.
    """
    calls = (ToolCall("add", {"key": "1"}), ToolCall("sub", {"key": "2"}))
    results = [{"role": "tool", "tool_call_id": f"call_0_{n}", "content": str(n)} for n in range(2)]
    _, tokenizer, _, renderer = opened("kimi")
    text = tokenizer.decode(renderer.following(results, -1, Turn("", calls), num_calls=3))
    assert "Return of functions.add:3\n0" in text and "Return of functions.sub:4\n1" in text
    _, tokenizer, _, renderer = opened("gpt_oss")
    unread = tokenizer.decode(renderer.following([{"role": "tool", "content": "Error"}], -1, Turn("", (), "unread")))
    assert '"Error"' in unread


def test_tools_that_a_template_leaves_out():
    """Told for those that write none. Would not catch a template that writes some of them."""
    assert not opened("qwen3")[3].unwritten_tools([ADD]) and opened("gemma")[3].unwritten_tools([ADD])
    _, tokenizer, _, _ = opened("gemma")
    (draft,) = ChatTemplate(tokenizer, {}).drafts(
        Chat(row()[:1] + [{"role": "assistant", "content": "a"}], 0, [ADD]), "last"
    )
    assert draft.unwritten == ("tools",)


def test_an_agents_tools_that_the_template_leaves_out_are_told_once():
    """Two episodes with the same tools, and a limit of their turns, which holds. Would not catch what comes later."""
    _, tokenizer, _, renderer = opened("gemma")
    asked = InitialConversation(({"role": "user", "content": "What is it?"},), (ADD,), TurnOptions(16, True))
    live = LiveEpisodes(Opens(asked), renderer, TurnReader(tokenizer), EpisodeLimits(2))
    episodes = {n: Episode((), {"prompt": ""}, Sampling(1.0, 1.0, -1, 99, 1)) for n in range(2)}
    live.begin(episodes)
    assert [episode.opening for episode in episodes.values()] == [asked, asked]
    (note,) = live.late_notes
    assert [turn_room(episode) for episode in episodes.values()] == [16, 16]
    assert "writes no tools: the policy cannot see the 1 tools of an agent (add)" in note
    assert answer_from_json(json.loads(json.dumps(asdict(asked)))) == asked
    old = {"messages": list(asked.messages), "tools": [ADD], "max_tokens": 16}  # earlier runs did not keep this limit
    assert answer_from_json(old) == replace(asked, options=TurnOptions())


@pytest.mark.parametrize(
    ("protocol", "sent", "limit"),
    [
        (OpenAIChat(), {"max_tokens": 16}, 16),
        (OpenAIChat(), {"max_tokens": 16, "max_completion_tokens": 9}, 9),
        (OpenAIChat(), {"max_tokens": None}, None),
        (AnthropicMessages(), {"max_tokens": 16}, 16),
    ],
)
def test_the_tokens_that_an_agent_asks_for_are_read(protocol, sent, limit):
    """By hand. Would not catch a limit under another name."""
    assert protocol.read({"messages": [{"role": "user", "content": "a"}], **sent}).opening.options.max_tokens == limit


@pytest.mark.parametrize("protocol", [OpenAIChat(), AnthropicMessages()], ids=["openai", "anthropic"])
def test_an_agent_gets_thoughts_apart_and_gives_them_back(protocol):
    """What goes out comes back as the same message, and the conversation goes on; one without its thought is another
    conversation. Results are named after the calls whose ids they have. Would not catch the parts of a stream.
    """
    turn, question = (
        Turn("So.", (CALL, ToolCall("sub", {})), reasoning_content=THOUGHT),
        {"role": "user", "content": "?"},
    )
    sent = protocol.answer(turn, 7)
    if isinstance(protocol, OpenAIChat):
        said = sent["choices"][0]["message"]
        assert (said["content"], said["reasoning_content"]) == ("So.", THOUGHT)
        results = [{"role": "tool", "tool_call_id": f"call_7_{n}", "content": str(n)} for n in (1, 0)]
        bare = {name: value for name, value in said.items() if name != "reasoning_content"}
        assert THOUGHT in protocol.stream(turn, 7, ChatRequest(()))[0]
    else:
        said = {"role": "assistant", "content": sent["content"]}
        assert sent["content"][0] == {"type": "thinking", "thinking": THOUGHT, "signature": ""}
        blocks = [{"type": "tool_result", "tool_use_id": f"toolu_7_{n}", "content": str(n)} for n in (1, 0)]
        results, bare = [{"role": "user", "content": blocks}], said | {"content": sent["content"][1:]}
        assert any('"thinking_delta"' in event for event in protocol.stream(turn, 7, ChatRequest(())))
    before = protocol.read({"messages": [question]})
    new = protocol.read({"messages": [question, said, *results]}).after(before, turn)
    assert [(message["name"], message["content"]) for message in new] == [("sub", "1"), ("add", "0")]
    assert protocol.read({"messages": [question, bare, *results]}).after(before, turn) == ()


class Opens:
    """Environments that begin every episode alike."""

    opens, hears_cuts = True, False

    def __init__(self, opening: InitialConversation):
        self.opening, self.open = opening, []

    def play(self, number, job):
        self.open.append(number)

    def take(self, waits):
        given, self.open = self.open, []
        return [(number, self.opening) for number in given]


@pytest.mark.parametrize(("name", "form", "problem"), UNREAD)
def test_a_format_that_does_not_read_the_templates_calls_is_told(name, form, problem):
    """At the start, for an agent, whose tools are not known. Would not catch a parser that reads this call alone."""
    case, tokenizer, eos, renderer = opened(name)

    def parser_of(tools):
        return ToolParser(form, "format", tokenizer, tools, eos, renderer.thoughts)

    found = unread_calls(MultiTurnConfig(format=form), renderer, parser_of, [])
    assert found is None if problem is None else problem in found


def test_a_format_whose_package_is_missing_names_it(monkeypatch):
    """Would not catch a package that is there and broken."""
    import sys

    _, tokenizer, eos, renderer = opened("glm")
    for module in [name for name in sys.modules if name.startswith(("mistral_common", "vllm.parser"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    from vllm.tool_parsers import ToolParserManager

    monkeypatch.setattr(ToolParserManager, "tool_parsers", {})
    monkeypatch.delitem(sys.modules, "vllm.tool_parsers.glm47_moe_tool_parser", raising=False)
    with pytest.raises(ConfigError, match=r"key=glm45 needs the package mistral_common.*pip install mistral_common"):
        ToolParser("glm45", "key", tokenizer, [ADD], eos, renderer.thoughts)
