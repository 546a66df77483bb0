"""The drafter: whose tokens a request drafts from, which requests do, and how its log follows."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from radix.draft_rewriting import Rewriter
from sgl_ext.engine.drafts import algorithm, drafter
from sgl_ext.engine.drafts.drafter import PLACES, Drafter, may_draft
from sgl_ext.engine.scheduler.state import RequestState
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.hints import Hints

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture(autouse=True)
def entry_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "is_entry_rank", lambda: False)


def request(
    prompt: list[int],
    *written: int,
    owner: str = "one",
    session: str = "session",
    salt: str | None = None,
    **changed: Any,
) -> Any:
    hints = Hints(
        (), (), (), owner, session, 0.0, True, False, True, drafts=changed.pop("drafts", True)
    )
    sampling = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": 1_000,
        "custom_params": None,
    }
    sampling = {name: changed.pop(name, value) for name, value in sampling.items()}
    made = {
        "origin_input_ids_unpadded": array("q", prompt),
        "output_ids": array("q", written),
        "sampling_params": SimpleNamespace(**sampling),
        "return_sampling_mask": False,
        "input_embeds": None,
        "custom_logit_processor": None,
        "extra_key": None,
        "cache_salt": salt,
        "lora_id": None,
        "is_retracted": False,
        "ended": False,
    }
    req = SimpleNamespace(**(made | changed))
    req.finished = lambda: req.ended
    req.sgl_ext = RequestState(hints)
    return req


def ready(scope: str = "session", most: int = 8, rewriter: Rewriter | None = None) -> Drafter:
    """A drafter that knows that wide steps cost nothing."""
    made = Drafter(scope, (1, most), rewriter)
    for batch in (1, 2, 3):
        made.lengths.took(batch, 1, 0.01)
        made.lengths.took(batch, most, 0.01)
    return made


def drafted(made: Drafter, req: Any, *pending: int) -> list[int]:
    made.began([req])
    return made.plan([req], [list(pending)]).tokens[0][1:]


def end(made: Drafter, req: Any) -> None:
    made.began([req])
    req.ended = True
    made.began([])


def test_an_answer_is_drafted_from_its_own_prompt() -> None:
    assert drafted(ready(), request(PROMPT, 1, 2, 3))[:5] == [4, 5, 6, 7, 8]


def test_an_answer_is_drafted_from_its_prompt_as_it_would_be_written() -> None:
    texts = ["a", "b", "\n", "\\n", "c", "d"]

    def encode(text: str) -> list[int]:
        return [texts.index(text)] if text in texts else []

    rewriter = Rewriter(texts, encode, escapes=True)
    prompt = [0, 1, 2, 4, 5, 2, 0]
    assert drafted(ready(rewriter=rewriter), request(prompt, 1, 3, 4))[:3] == [5, 3, 0]
    assert drafted(ready(), request(prompt, 1, 3, 4))[:3] == [5, 2, 0]


def test_tokens_that_are_not_in_the_output_yet_count() -> None:
    made, req = ready(), request(PROMPT, 1)
    plan = made.plan([req], [[2, 3]])
    assert plan.tokens[0][:4] == [3, 4, 5, 6]
    req.output_ids.extend([2, 3])
    assert made.plan([req], [[4]]).tokens[0][:3] == [4, 5, 6]
    assert req.sgl_ext.drafting.log.tokens.tolist() == [*PROMPT, 1, 2, 3, 4]


def test_a_log_that_has_other_tokens_than_the_request_is_made_again() -> None:
    made, req = ready(), request(PROMPT, 1)
    made.plan([req], [[2, 3, 4]])  # of which a grammar kept none
    req.output_ids.append(5)
    assert made.plan([req], [[]]).tokens[0][:3] == [5, 6, 7]


@pytest.mark.parametrize(
    ("scope", "finds"),
    [
        ("request", []),
        ("session", ["same"]),
        ("group", ["same", "other session", "other owner"]),
    ],
)
def test_what_is_left_is_found_within_its_scope_alone(scope: str, finds: list[str]) -> None:
    left = request([40, 41, 42, 43, 44, 45], salt="group")
    for name, seeker in {
        "same": request([9, 41, 42], 43, salt="group"),
        "other session": request([9, 41, 42], 43, salt="group", session="other"),
        "other owner": request([9, 41, 42], 43, salt="group", owner="two"),
        "other group": request([9, 41, 42], 43, salt="another"),
        "no group": request([9, 41, 42], 43),
    }.items():
        made = ready(scope)
        end(made, left)
        left.ended = False
        assert drafted(made, seeker)[:2] == ([44, 45] if name in finds else []), name


def test_without_a_session_nothing_is_left() -> None:
    made = ready()
    end(made, request(PROMPT, session=""))
    assert not len(made.memory)


def test_a_retracted_request_leaves_nothing_until_it_ends() -> None:
    made, req = ready(), request(PROMPT, 1)
    made.began([req])
    req.is_retracted = True
    made.began([])
    assert not len(made.memory)


@pytest.mark.parametrize(
    "changed",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 3},
        {"return_sampling_mask": True},
        {"input_embeds": [[0.0]]},
        {"custom_logit_processor": "code"},
        {"drafts": False},
    ],
    ids=str,
)
def test_a_request_is_not_drafted_where_it_may_not_be(changed: dict[str, Any]) -> None:
    assert drafted(ready(), request(PROMPT, 1, 2, 3, **changed)) == []


def test_a_processor_that_knows_of_drafts_is_drafted() -> None:
    assert may_draft(request(PROMPT, custom_logit_processor="code", custom_params={PLACES: True}))


def test_a_request_that_wants_no_drafts_leaves_nothing() -> None:
    made = ready()
    end(made, request(PROMPT, drafts=False))
    assert not len(made.memory)


@pytest.mark.parametrize(("allowed", "length"), [(4, 0), (5, 1), (7, 3)])
def test_no_more_is_drafted_than_may_be_written(allowed: int, length: int) -> None:
    assert len(drafted(ready(), request(PROMPT, 1, 2, 3, max_new_tokens=allowed))) == length


def test_one_request_of_a_batch_has_a_draft_and_the_other_none() -> None:
    made = ready()
    plan = made.plan([request(PROMPT, 1, 2, 3), request([50, 51], 99)], [[], []])
    assert (plan.lengths, plan.tokens[1]) == ([7, 0], [99])


def test_where_drafts_are_wrong_they_end() -> None:
    made, req = ready(), request(PROMPT, 1, 2, 3)
    for _ in range(100):
        plan = made.plan([req], [[]])
        made.verified([req], plan.lengths, [0])
        made.lengths.took(1, plan.width, 0.01 * plan.width)
    assert made.plan([req], [[]]).width == 1


def test_the_flags_select_the_algorithm_and_keep_what_is_given() -> None:
    on = EngineSettings(draft_from_context="session")
    assert algorithm.draft_flags([], EngineSettings()) == ()
    assert algorithm.draft_flags([], on)[:2] == ("--speculative-algorithm", algorithm.ALGORITHM)
    assert len(algorithm.draft_flags(["--speculative-num-draft-tokens=4"], on)) == 2
    with pytest.raises(ValueError, match="draft-from-context"):
        algorithm.draft_flags(["--speculative-algorithm", "EAGLE"], on)
