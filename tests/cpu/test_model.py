"""The model maker: idempotent, the same for the same seed, and a template as Qwen3's."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sgl_ext_cpu import model
from sgl_ext_cpu.model import MARKER, make_model
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "read_file", "arguments": {"path": "a.py"}}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def render(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any], **options: Any) -> str:
    options.setdefault("add_generation_prompt", True)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    assert isinstance(text, str)
    return text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_second_call_changes_nothing(tiny_model: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in tiny_model.iterdir()}
    assert make_model(tiny_model, "tiny") == tiny_model
    assert {file: file.stat().st_mtime_ns for file in tiny_model.iterdir()} == before


@pytest.mark.long
def test_the_seed_decides_the_weights_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    again = contents(make_model(tmp_path / "again", "tiny"))
    assert again == contents(tiny_model)
    other = contents(make_model(tmp_path / "other", "tiny", seed=1))
    assert {name for name in other if other[name] != again[name]} == {MARKER, "model.safetensors"}


def test_another_model_is_not_overwritten(tiny_model: Path) -> None:
    with pytest.raises(FileExistsError, match="'seed': 5"):
        make_model(tiny_model, "tiny", seed=5)


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files"):
        make_model(tmp_path, "tiny")
    assert (tmp_path / "notes").read_text() == "mine"


def test_an_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match="size: 'huge' is not one of tiny, bench, long, 8b-config"):
        make_model(Path("nowhere"), "huge")


def test_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing there and both write; one model appears, and no draft stays."""
    both_write = threading.Barrier(2)

    def write(directory: Path, *_: Any) -> None:
        (directory / "config.json").write_text("{}")
        both_write.wait()

    monkeypatch.setattr(model, "_write", write)
    target = tmp_path / "model"
    threads = [threading.Thread(target=make_model, args=(target, "tiny")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name for path in target.iterdir()} == {"config.json", MARKER}


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(directory: Path, *_: Any) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "_write", write)
    with pytest.raises(OSError, match="disk full"):
        make_model(tmp_path / "model", "tiny")
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_of_8b_has_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    from tokenizers import Tokenizer

    trained = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    monkeypatch.setattr(model.text, "train", lambda vocabulary: trained)
    made = make_model(tmp_path / "8b", "8b-config")
    config = AutoConfig.from_pretrained(made)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 36, 151_936)
    assert not list(made.glob("*.safetensors"))


def test_long_prompts_fit(tiny_model: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.max_position_embeddings >= 262_144


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ["def f(x):\n\treturn x  # 1234\r\n", "naïve 漢字 🙂", "  two  spaces\n\n\n"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_code_is_compressed(tokenizer: PreTrainedTokenizerBase) -> None:
    text = Path(json.__file__).read_text() + Path(pytest.__file__).read_text()
    assert len(text) / len(tokenizer(text).input_ids) > 3


@pytest.mark.parametrize("text", [*model.text.CONTROL, *model.text.MARKUP])
def test_special_tokens_are_one_token(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    (number,) = tokenizer(text).input_ids
    shown = tokenizer.decode([number], skip_special_tokens=True)
    assert shown == ("" if text in model.text.CONTROL else text)


def test_only_words_are_spoken(tiny_model: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Their text is split into the same tokens again, and no end of turn is among them."""
    rows = load_file(tiny_model / "model.safetensors")["lm_head.weight"].abs().sum(dim=1)
    spoken = rows.nonzero().flatten().tolist()
    assert len(spoken) > 1000
    assert tokenizer.eos_token_id not in spoken
    assert tokenizer(tokenizer.decode(spoken)).input_ids == spoken


def test_a_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    text = render(
        tokenizer,
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        assistant("Hello"),
        user("Bye"),
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_in_the_system_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    text = render(tokenizer, {"role": "system", "content": "Be brief."}, user("Hi"), tools=[TOOL])
    system, rest = text.split("<|im_end|>", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    listed = system.split("<tools>\n")[-1].split("\n</tools>")[0]
    assert json.loads(listed) == TOOL
    assert "<tool_call>" in system
    assert "# Tools" not in rest
    assert render(tokenizer, user("Hi"), tools=[TOOL]).startswith("<|im_start|>system\n# Tools")


@pytest.mark.parametrize("arguments", [{"path": "a.py"}, '{"path": "a.py"}'], ids=type)
def test_a_tool_call(tokenizer: PreTrainedTokenizerBase, arguments: object) -> None:
    call = {"type": "function", "function": {"name": "read_file", "arguments": arguments}}
    text = render(tokenizer, user("Read"), assistant("Sure.", tool_calls=[call, call]), tool("ok"))
    one = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
    assert f"Sure.\n{one}\n{one}<|im_end|>" in text


def test_neighbouring_tool_results_are_one_user_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    text = render(
        tokenizer, user("Read"), assistant("", tool_calls=[CALL, CALL]), tool("one"), tool("two")
    )
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


THOUGHTS = {
    "in the text": lambda thought, text, **more: assistant(
        f"<think>\n{thought}\n</think>\n\n{text}", **more
    ),
    "in a field": lambda thought, text, **more: assistant(text, reasoning_content=thought, **more),
}


@pytest.mark.parametrize("think", THOUGHTS.values(), ids=THOUGHTS.keys())
def test_thinking_lasts_as_long_as_the_tool_loop(tokenizer, think) -> None:
    loop = [
        user("First"),
        think("old thought", "Done."),
        user("Read"),
        think("new thought", "Reading.", tool_calls=[CALL]),
        tool("text"),
        think("newer thought", "More.", tool_calls=[CALL]),
        tool("text"),
    ]
    running = render(tokenizer, *loop)
    assert "old thought" not in running
    assert "<|im_start|>assistant\nDone.<|im_end|>" in running
    assert (
        "<|im_start|>assistant\n<think>\nnew thought\n</think>\n\nReading.\n<tool_call>" in running
    )
    assert "<think>\nnewer thought\n</think>\n\nMore." in running
    after = render(tokenizer, *loop, assistant("Read it."), user("Thanks"))
    assert "thought" not in after


def test_thinking_can_be_switched_off(tokenizer: PreTrainedTokenizerBase) -> None:
    end = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(tokenizer, user("Hi"), enable_thinking=False).endswith(end)
    assert not render(tokenizer, user("Hi"), enable_thinking=True).endswith(end)


def test_a_running_loop_extends_the_last_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    """What was sent stays a prefix of what is sent next, so the next turn hits the cache."""
    sent = [user("Read")]
    answer = assistant("", reasoning_content="hm", tool_calls=[CALL])
    first = render(tokenizer, *sent)
    second = render(tokenizer, *sent, answer, tool("text"))
    assert second.startswith(first + "<think>\nhm\n</think>\n\n<tool_call>")


def test_a_developer_instructs_as_the_system_does(tokenizer: Any) -> None:
    as_developer = render(tokenizer, {"role": "developer", "content": "Be brief."}, user("Hi"))
    assert as_developer == render(tokenizer, {"role": "system", "content": "Be brief."}, user("Hi"))
