"""What agents send and get, in each protocol: requests, replies, errors."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from agent_players import AGENTS, Player, agents_in, source, text

from megatron_rl.agents.anthropic_messages import AnthropicMessages
from megatron_rl.agents.endpoint import Endpoint, EndpointLimits, Session, largest_body
from megatron_rl.agents.environment_source import EnvironmentsHere
from megatron_rl.agents.observation import EpisodeFailure, InitialConversation, Observation, ToolCall, Turn, TurnOptions
from megatron_rl.agents.openai_chat import OpenAIChat
from megatron_rl.agents.openai_responses import OpenAIResponses
from megatron_rl.agents.request_fields import IGNORED, READ, REFUSED, num_unknown

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return agents_in(tmp_path)


def body(**more: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **more})


CALL = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": NaN}'}}]
DEEP = "[" * 100_000
BAD_BODIES = {
    "": "Expecting value",
    DEEP: "100 levels deep",
    body(user="\ud83d"): "half of a surrogate pair, U\\+D83D",
    body(top=float("nan")): "Out of range float values",
    body(tools=[{"type": "function", "function": {}}]): "tools\\[0\\] must be",
    body(tools=[{"type": "web", "function": {"name": "a"}}]): "tools\\[0\\] must be",
    body(tools=[{"function": {"name": "a", "parameters": "b"}}]): "tools\\[0\\] must be",
    body(messages=[{"role": "assistant", "tool_calls": CALL}]): "tool_calls cannot be read: .*Out of range",
    body(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": 1, "arguments": "{}"}}]}]): "a name",
    body(x="y" * 200_000): "may have 200000 bytes",
}


def test_what_is_no_request_is_400_and_counted():
    """Each body by HTTP, with the rule in the answer. Would not catch bodies that never end."""

    assert (largest_body(1024), largest_body(1 << 30)) == (2 << 20, 64 << 20)

    async def statuses() -> list[tuple[int, str]]:
        endpoint = Endpoint(EndpointLimits(max_bytes=200_000))
        session = await endpoint.open()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            url = f"{session.base_url}/chat/completions"
            answers = [await client.post(url, content=each.encode()) for each in BAD_BODIES]
        assert session.num_refused == len(BAD_BODIES)
        await endpoint.stop()
        return [(answer.status_code, answer.json()["error"]["message"]) for answer in answers]

    for (status, reason), rule in zip(asyncio.run(statuses()), BAD_BODIES.values(), strict=True):
        assert status == 400 and re.search(rule, reason), reason


BROKEN = (
    b"Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc",
    b"Content-Length: 5000\r\n\r\n{",
    b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
)


def test_clients_that_send_no_http_or_hang_up_print_nothing(capfd, caplog):
    """What is not packed as it says, a body that is cut, no number of bytes; the session answers others afterwards.
    Would not catch a client that never ends: its agent has a limit.
    """

    async def served() -> tuple[int, int]:
        endpoint = Endpoint()
        session = await endpoint.open()
        address = session.base_url.split("/")[2].split(":")
        for rest in BROKEN:
            reader, writer = await asyncio.open_connection(*address)
            head = f"POST /v1/reward HTTP/1.1\r\nHost: x\r\nx-api-key: {session.api_key}\r\n"
            writer.write(head.encode() + rest)
            await writer.drain()
            if rest is not BROKEN[1]:
                assert b"400" in await reader.readline()
            else:
                await asyncio.sleep(0.1)
            writer.close()
        async with httpx.AsyncClient(headers={"x-api-key": session.api_key}) as client:
            answer = await client.post(f"{session.base_url}/reward", json={"reward": 1})
        await endpoint.stop()
        return answer.status_code, session.num_refused

    assert asyncio.run(served())[0] == 200
    assert capfd.readouterr().err == "" and not any(record.exc_info for record in caplog.records)


def test_a_request_that_is_cancelled_in_its_queue_is_not_sampled():
    """By hand: two wait behind one that is sampled, the first of them has hung up. One that asks again after its turn
    has read it. Would not catch a client that the server takes for connected.
    """

    async def played() -> tuple[list[str], list[bool], int]:
        session = Session("http://here")
        asked = [OpenAIChat().read({"messages": [{"role": "user", "content": name}]}) for name in "abc"]
        tasks = [
            asyncio.ensure_future(session.ask(each, False, lambda is_there=is_there: is_there))
            for each, is_there in zip(asked, (True, False, True), strict=True)
        ]
        names, unread = [], []
        for _ in range(2):
            names.append((await session.next_request()).messages[0]["content"])
            session.answer(Turn("x"))
            unread.append(session.take_unread())
        late = [asyncio.ensure_future(session.ask(asked[1], False, lambda: len(names) < 3))]
        names.append((await session.next_request()).messages[0]["content"])
        session.answer(Turn("y"))
        assert (await session.ask(asked[1], True, lambda: True))[1] == Turn("y")
        unread.append(session.take_unread())
        await asyncio.gather(*tasks, *late, return_exceptions=True)
        return names, unread, session.num_cancelled

    assert asyncio.run(played()) == (["a", "c", "b"], [False, False, False], 1)


def test_connections_that_say_nothing_are_closed():
    """A thousand, and one whose body stops: a request has its response meanwhile, and a second later all are closed,
    the body refused. Would not catch more connections than the process may have.
    """

    async def served() -> tuple[int, float, list[bytes], bytes, int]:
        endpoint = Endpoint(EndpointLimits(max_bytes=1000, idle_s=1.0))
        session = await endpoint.open()
        address = session.base_url.split("/")[2].split(":")
        silent = [await asyncio.open_connection(*address) for _ in range(1000)]
        reader, writer = await asyncio.open_connection(*address)
        head = f"POST /v1/reward HTTP/1.1\r\nHost: x\r\nx-api-key: {session.api_key}\r\n"
        writer.write(f"{head}Content-Length: 50\r\n\r\n{{".encode())
        async with httpx.AsyncClient(headers={"x-api-key": session.api_key}) as client:
            answer = await client.post(f"{session.base_url}/reward", json={"reward": 0.5})
        async with asyncio.timeout(60):
            ends = [await each.read() for each, _ in silent]
            status = await reader.readline()
        for _, each in (*silent, (reader, writer)):
            each.close()
        await endpoint.stop()
        return answer.status_code, session.reward, ends, status, session.num_refused

    code, reward, ends, status, num_refused = asyncio.run(served())
    assert (code, reward, ends, num_refused) == (200, 0.5, [b""] * 1000, 1) and b" 400 " in status


def test_a_request_goes_on_with_what_was_said():
    """By hand: what an agent may add and what not. Would not catch contents that differ in white space alone."""
    turn = Turn("yes", (ToolCall("add", {"a": 1}),))
    read, answer = OpenAIChat().read, OpenAIChat().answer
    sent = answer(turn, 1)["choices"][0]["message"]
    counted = answer(Turn("yes", num_tokens=2, num_context=5), 1)["usage"]
    assert counted == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    before = read({"messages": [{"role": "user", "content": "?"}]})
    after = read({"messages": [*before.messages, sent, {"role": "tool", "content": "2"}]})
    assert after.messages[1] == turn.as_message()
    assert after.after(before, turn) == ({"role": "tool", "content": "2"},)
    for messages in (
        [*before.messages, sent],
        [{"role": "user", "content": "!"}, sent, {"role": "tool", "content": "2"}],
        [*before.messages, {"role": "assistant", "content": "no"}, {"role": "tool", "content": "2"}],
        [*before.messages, sent, {"role": "assistant", "content": "no"}],
        [*before.messages],
    ):
        assert read({"messages": messages}).after(before, turn) == ()
    other_tools = {"messages": after.messages, "tools": [{"function": {"name": "add"}}]}
    assert read(other_tools | {"messages": [*before.messages, sent]}).after(before, turn) == ()


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ([], "an object with a list of messages"),
        ({"messages": []}, "an object with a list of messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "must have a role of system, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls cannot be read"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, r"tools\[0\] must be"),
        ({"messages": [{"role": "user", "content": "x"}], "best_of": 2}, "best_of=2 is not supported"),
    ],
)
def test_unreadable_requests_have_a_rule(body, rule):
    """Would not catch a field that is read and means something else."""
    with pytest.raises(ValueError, match=rule):
        OpenAIChat().read(body)


ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}


def test_anthropics_messages_are_the_same_conversation():
    """By hand: a system text, a call with its result, blocks of text; what comes back goes on with it, whole or
    streamed. Would not catch a field that its client needs: docs/train/agents.md says when that was tried.
    """
    read, answer, stream = AnthropicMessages().read, AnthropicMessages().answer, AnthropicMessages().stream
    turn = Turn("sure", (ToolCall("add", {"a": 1}),), num_tokens=2, num_context=5)
    body = {"system": [{"type": "text", "text": "be brief"}], "messages": [{"role": "user", "content": "1+1?"}]}
    before, sent = read(body | {"tools": [ADD], "max_tokens": 9}), answer(turn, 3)
    assert [message["content"] for message in before.messages] == ["be brief", "1+1?"]
    assert before.tools[0]["function"] == {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert [block["type"] for block in sent["content"]] == ["text", "tool_use"] and sent["stop_reason"] == "tool_use"
    assert sent["usage"] == {"input_tokens": 5, "output_tokens": 2}
    result = {"type": "tool_result", "tool_use_id": "toolu_3_0", "content": [{"type": "text", "text": "2"}]}
    said = {"role": "assistant", "content": sent["content"]}
    further = [said, {"role": "user", "content": [result, {"type": "text", "text": "so?"}]}]
    after = read(body | {"tools": [ADD], "messages": [*body["messages"], *further]})
    new = after.after(before, turn)
    assert [(message["role"], message["content"]) for message in new] == [("tool", "2"), ("user", "so?")]
    assert answer(Turn(""), 1)["content"] == [{"type": "text", "text": ""}]
    events = [json.loads(event.partition("data: ")[2]) for event in stream(turn, 3, before)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert json.loads(events[5]["delta"]["partial_json"]) == {"a": 1} and events[1]["content_block"]["text"] == ""
    for wrong in ({"messages": [{"role": "system", "content": "x"}]}, body | {"stop_sequences": ["x"]}):
        with pytest.raises(ValueError):
            read(wrong)


def test_anthropics_agents_are_served(folder):
    """Over HTTP, with its header of the key, an error in its form. Would not catch its client's own checks."""
    (folder / "agents.py").write_text(AGENTS + ANTHROPIC)
    with EnvironmentsHere(source(folder, "by_anthropic").host()) as here:
        player = Player(here)
        assert player.opening == InitialConversation(text("1+1?"))
        assert player.say("2") == Observation(
            (), 1.0, is_done=True, counts={"agent_refused": 1.0, "agent_unauthorized": 1.0}
        )


ANTHROPIC = """
async def by_anthropic(task, endpoint):
    async with httpx.AsyncClient(base_url=endpoint.anthropic_base_url, timeout=60) as client:
        body, key = {"messages": [{"role": "user", "content": "1+1?"}]}, {"x-api-key": endpoint.api_key}
        refused = await client.post("/v1/messages", json={}, headers=key)
        assert refused.status_code == 400 and refused.json()["type"] == "error"
        unknown = await client.post("/v1/messages", json=body, headers={"x-api-key": "other"})
        assert unknown.status_code == 401 and unknown.json()["error"]["type"] == "authentication_error"
        streamed = await client.post("/v1/messages", json=body | {"stream": True}, headers=key)
        assert streamed.text.startswith("event: message_start") and '"text": "2"' in streamed.text
    return 1.0
"""


def test_openais_responses_are_the_same_conversation():
    """By hand: instructions, a thought with a text and calls, a result, whole or streamed, and a turn that was cut.
    Would not catch a field that its client needs: docs/train/agents.md has when that was tried.
    """
    read, answer, stream = OpenAIResponses().read, OpenAIResponses().answer, OpenAIResponses().stream
    turn = Turn("sure", (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})), reasoning_content="hm", num_tokens=2)
    tool = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
    body = {"instructions": "be brief", "tools": [tool], "max_output_tokens": 9}
    before, sent = read(body | {"input": "1+1?"}), answer(turn, 3)
    assert [message["content"] for message in before.messages] == ["be brief", "1+1?"]
    assert before.tools[0]["function"]["name"] == "add" and before.options == TurnOptions(9)
    assert [item["type"] for item in sent["output"]] == ["reasoning", "message", "function_call", "function_call"]
    results = [{"type": "function_call_output", "call_id": f"call_3_{n}", "output": "2"} for n in range(2)]
    items = [{"role": "user", "content": "1+1?"}, *sent["output"], *results, {"role": "user", "content": "so?"}]
    again = read(body | {"input": items, "include": ["message.output_text.logprobs"], "tool_choice": "none"})
    assert [message["role"] for message in again.after(before, turn)] == ["tool", "tool", "user"]
    assert again.options == TurnOptions(9, with_log_probs=True, is_text=True)
    two = [item for text in "ab" for item in answer(Turn(text), 1)["output"]]
    assert [message["content"] for message in read({"input": two}).messages] == ["a", "b"]
    events = [json.loads(event.partition("data: ")[2]) for event in stream(turn, 3, before)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed" and events[-1]["response"] == sent
    assert [json.loads(each["delta"]) for each in events if "arguments.delta" in each["type"]] == [{"a": 1}, {"a": 2}]
    cut = answer(Turn("a", is_cut=True, drawn=(("a", -0.5),)), 1)
    assert cut["status"] == "incomplete" and cut["output"][0]["content"][0]["logprobs"][0]["logprob"] == -0.5
    assert json.loads(stream(Turn("a", is_cut=True), 1, before)[-1].partition("data: ")[2])["type"].endswith(
        ".incomplete"
    )


@pytest.mark.parametrize(
    ("sent", "rule"),
    [
        ({}, "with an input"),
        ({"input": []}, "with an input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "send the whole conversation"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "not sampled by the policy"),
        ({"input": "a", "tool_choice": "required"}, "not sampled by the policy"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "add"}}, "not sampled by the policy"),
        ({"input": "a", "chat_template_kwargs": {"enable_thinking": False}}, "data.apply_chat_template_kwargs"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools\\[0\\] must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input\\[0\\] must be one of"),
        ({"input": [{"type": "function_call", "name": "add", "arguments": "[1]"}]}, "cannot be read"),
    ],
)
def test_responses_that_cannot_be_given_have_a_rule(sent, rule):
    """Would not catch an item that OpenAI adds."""
    with pytest.raises(ValueError, match=rule):
        OpenAIResponses().read(sent)


def test_no_field_is_dropped_in_silence():
    """Each field of a request is read, refused or ignored with a reason, and the three lists are apart; others are
    counted. Would not catch a reason that is wrong.
    """
    names = [set(READ), set(REFUSED), set(IGNORED)]
    assert sum(map(len, names)) == len(set.union(*names)) and all(IGNORED.values())
    assert num_unknown({"input": "a", "seed": 1, "stop": [], "new": 1}) == 1


def test_a_key_in_the_path_opens_its_session(folder):
    """Each protocol by the URL alone, an unknown key is refused; a failure has the key nowhere. Would not catch what
    an agent itself prints.
    """
    (folder / "agents.py").write_text(AGENTS + IN_PATH)
    with EnvironmentsHere(source(folder, "in_path").host()) as here:
        player = Player(here)
        assert [player.say("1").is_done for _ in range(2)] == [False, False]
        failed = player.say("1")
    assert isinstance(failed, EpisodeFailure) and "/sessions/KEY/v1" in failed.reason, failed


IN_PATH = """
async def in_path(task, endpoint):
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": "Bearer other"}) as client:
        said = {"messages": [{"role": "user", "content": "1"}], "input": "1"}
        for path in ("chat/completions", "responses", "messages"):
            answer = await client.post(f"{endpoint.session_url}/{path}", json=said)
            assert answer.status_code == 200, answer.text
        wrong = await client.post(endpoint.session_url.replace("/sessions/", "/sessions/x") + "/responses", json=said)
        assert wrong.status_code == 401 and endpoint.api_key not in wrong.text
    raise ValueError(endpoint.session_url)
"""
