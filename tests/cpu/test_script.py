"""The script: what it may say, which answer is next, and that an engine says exactly that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sgl_ext_cpu.script import Answer, Call, Script, ScriptError, read_grammar, read_script
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.cpu.conftest import FLAGS, Engine, running_engine
from tests.waiting import until

if TYPE_CHECKING:
    from sgl_ext_cpu.nursery import Nursery

SETTINGS = {"path": 'a "b".py', "lines": [1, 2.5, None, True], "naïve": {"漢": "\n"}}
ANSWER = Answer("Look first.", "I look.", (Call("read", SETTINGS), Call("list", {})))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def given(answer: Answer) -> dict[str, Any]:
    """An answer as it comes back in the next turn."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    message = {"role": "assistant", "content": answer.text, "tool_calls": calls}
    return {**message, "reasoning_content": answer.thinking}


RESULT = {"role": "tool", "content": "ok"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any
) -> str:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, **options
    )
    assert isinstance(text, str)
    return text


def test_an_answer_has_the_form_that_its_grammar_allows() -> None:
    begin = '<tool_call>\n{"name":"read", "arguments":'
    tag = {"structures": [{"begin": begin, "schema": {}, "end": "}\n</tool_call>"}]}
    text = ANSWER.written("", read_grammar({"structural_tag": json.dumps(tag)}))
    assert f"{begin}{json.dumps(SETTINGS, ensure_ascii=False)}}}\n</tool_call>" in text
    assert '<tool_call>\n{"name": "list", "arguments": {}}' in text
    usual = {"begin": '<tool_call>\n{"name": "read", "arguments": '}
    for tags in ([usual, *tag["structures"]], [*tag["structures"], usual]):
        told = json.dumps({"format": {"tags": tags, "at_least_one": False}})
        assert ANSWER.written("", read_grammar({"structural_tag": told})) == ANSWER.written("")
    for sampling in ({"json_schema": "{}"}, {"structural_tag": '{"at_least_one": true}'}):
        assert "</think>I look." in ANSWER.written("", read_grammar(sampling))
    assert ANSWER.written("", read_grammar({})) == ANSWER.written("")


@pytest.fixture(scope="module")
def script() -> Script:
    one, two = [Answer(text="one"), Answer(text="two"), Answer(text="three")], [Answer(text="new")]
    return Script({"Mend it": one, "Mend it all": two, "And why?": [Answer(text="why")]})


def test_answers_follow_each_other(tokenizer: PreTrainedTokenizerBase, script: Script) -> None:
    messages = [user("Hello. Mend it, please.")]
    for text in ("one", "two", "three"):
        answer = script.next(render(tokenizer, messages))
        assert answer is not None
        assert answer.text == text
        messages += [given(Answer(text=text, tool_calls=(Call("read", {}),))), RESULT, RESULT]
    assert script.next(render(tokenizer, messages)) is None


def test_the_newest_prompt_counts(tokenizer: PreTrainedTokenizerBase, script: Script) -> None:
    messages = [user("Mend it"), given(Answer(text="one")), user("And why?")]
    assert script.next(render(tokenizer, messages)) == Answer(text="why")


def test_the_longer_of_two_prompts_counts(
    tokenizer: PreTrainedTokenizerBase, script: Script
) -> None:
    assert script.next(render(tokenizer, [user("Mend it all")])) == Answer(text="new")


def test_an_answer_may_come_back_in_pieces(
    tokenizer: PreTrainedTokenizerBase, script: Script
) -> None:
    pieces = [given(Answer(text="one")), given(Answer(tool_calls=(Call("read", {}),)))]
    messages = [user("Mend it"), *pieces, RESULT]
    assert script.next(render(tokenizer, messages)) == Answer(text="two")


def test_repeating_the_prompt_changes_nothing(
    tokenizer: PreTrainedTokenizerBase, script: Script
) -> None:
    said = given(Answer(text="Mend it: one", tool_calls=(Call("read", {}),)))
    messages = [user("Mend it"), said, {"role": "tool", "content": "Mend it"}]
    assert script.next(render(tokenizer, messages)) == Answer(text="two")


def test_other_prompts_have_no_answer(tokenizer: PreTrainedTokenizerBase, script: Script) -> None:
    assert script.next(render(tokenizer, [user("Hello.")])) is None
    assert script.next("Mend it") is None
    cut = render(tokenizer, [user("Mend it")]).removesuffix("assistant\n")
    assert script.next(cut) is None


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not thinking"])
def test_an_answer_comes_back_as_it_was_generated(
    tokenizer: PreTrainedTokenizerBase, thinking: bool
) -> None:
    """So the next turn finds it in the cache."""
    messages = [user("Read")]
    prompt = render(tokenizer, messages, enable_thinking=thinking)
    written = ANSWER.written(prompt)
    assert written.startswith("<think>\nLook first.") == thinking
    answer = given(ANSWER if thinking else Answer("", ANSWER.text, ANSWER.tool_calls))
    after = render(tokenizer, [*messages, answer, RESULT], enable_thinking=thinking)
    opening = "" if thinking else "<think>\n\n</think>\n\n"
    assert after.startswith(prompt.removesuffix(opening) + written)


def test_a_script_is_read_line_by_line(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"name": "read", "arguments": "not an object"}
    lines = [
        {"after": "Read", "thinking": "Hm.", "tool_calls": [call]},
        {"after": "Other", "text": "Other."},
        {"after": "Read", "text": "Done."},
    ]
    script = read_script(written_to(tmp_path, *map(json.dumps, lines), "", " "))
    prompt = render(tokenizer, [user("Read")])
    first = script.next(prompt)
    assert first == Answer("Hm.", "", (Call("read", "not an object"),))
    messages = [user("Read"), given(first), RESULT]
    assert script.next(render(tokenizer, messages)) == Answer(text="Done.")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "3: column 2: Expecting property name"),
        ("[]", "3: must be an object"),
        ('{"text": "a"}', "3: after: must not be empty"),
        ('{"after": 1, "text": "a"}', "3: after: must be a string"),
        ('{"after": "b"}', "3: text: an answer needs thinking, text or tool_calls"),
        ('{"after": "b", "txet": "a"}', "3: txet: is unknown"),
        ('{"after": "b", "tool_calls": {}}', "3: tool_calls: must be a list"),
        ('{"after": "b", "tool_calls": [{"name": "c"}]}', r"3: tool_calls\[0\].arguments: is miss"),
        ('{"after": "b", "tool_calls": [{"arguments": {}}]}', r"3: tool_calls\[0\].name: must be"),
        ('{"after": "b", "tool_calls": [{"id": 1}]}', r"3: tool_calls\[0\].id: is unknown"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = written_to(tmp_path, '{"after": "a", "text": "b"}', "", line)
    with pytest.raises(ScriptError, match=f"^{path}:{complaint}"):
        read_script(path)


def test_an_empty_or_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"script.jsonl: it holds no answer"):
        read_script(written_to(tmp_path, ""))
    with pytest.raises(ScriptError, match=r"nowhere: .*No such file"):
        read_script(tmp_path / "nowhere")


def written_to(folder: Path, *lines: str) -> Path:
    path = folder / "script.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# The engine: eight requests at once in a pool that holds four, their prompts in chunks that are
# mixed with decoding.
REQUESTS = 8
LINES = [
    json.dumps({"after": f"Request {n}.", "text": f"Number {n} says: " + "word by word " * 40})
    for n in range(REQUESTS)
]
CROWDED = (
    *("--max-total-tokens", "1200", "--schedule-conservativeness", "0.01"),
    *("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
)


@pytest.fixture(scope="module")
def crowded(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("scripted")
    environment = {"SGLEXT_CPU_SCRIPT": str(written_to(folder, *LINES))}
    with running_engine(nursery, tiny_model, folder, CROWDED, environment) as engine:
        yield engine


def test_an_engine_says_exactly_what_is_written(
    crowded: Engine, tokenizer: PreTrainedTokenizerBase
) -> None:
    def ask(number: int) -> str:
        prompt = render(tokenizer, [user(f"Request {number}. " + "Take your time. " * 40)])
        sampling = {"max_new_tokens": 150, "temperature": 1.0, "top_p": 0.9, "top_k": 20}
        answer = crowded.post("/generate", {"text": prompt, "sampling_params": sampling})
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        return str(answer["text"])

    with ThreadPoolExecutor(REQUESTS) as threads:
        answers = list(threads.map(ask, range(REQUESTS)))
    texts = [json.loads(line)["text"] for line in LINES]
    assert answers == [f"<think>\n\n</think>\n\n{text}" for text in texts]
    assert "Retract requests" in crowded.log.read_text()

    ids = tokenizer(render(tokenizer, [user("Who else?")])).input_ids
    (other,) = crowded.generate([ids], 8)
    assert len(other["output_ids"]) == 8
    assert "Number" not in other["text"]


def test_no_client_brings_code(crowded: Engine) -> None:
    with pytest.raises(AssertionError, match=r"400 .*custom_logit_processor"):
        crowded.post("/generate", {"text": "Hello", "custom_logit_processor": "code"})


def test_a_bad_script_stops_the_start(nursery: Nursery, tiny_model: Path, tmp_path: Path) -> None:
    script = written_to(tmp_path, '{"after": "a", "text": 1}')
    log = tmp_path / "log"
    environment = {"SGLANG_PLUGINS": "none", "SGLEXT_CPU_SCRIPT": str(script)}
    server = nursery.start(
        ["--model-path", str(tiny_model), *FLAGS], log=log, environment=environment
    )
    try:
        until(lambda: not server.running())
    finally:
        server.stop()
    assert f"{script}:1: text: must be a string" in log.read_text()
