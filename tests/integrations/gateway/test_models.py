"""Several models behind a gateway: the picker chooses among the engines of the model that is named,
and changes what the gateway sends as the balancer changes what it sends itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from sgl_ext.key_file import hash_of
from sgl_ext.settings.schema import Alias, ServedModel
from tests.balancer.conftest import Engine
from tests.integrations.gateway.conftest import Ask, Pick
from tests.integrations.gateway.gateway import CHAT, MESSAGES

RESPONSES = "/v1/responses"
ALIASES = (Alias("claude-haiku-*", "small"), Alias("*", "large"))
TWO = (ServedModel("large", fallback="small"), ServedModel("small"))


def hello(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hello"}]}


def address(engine: Engine) -> str:
    return engine.url.removeprefix("http://")


async def test_the_model_decides_among_the_engines_of_a_pool(pick: Pick, ask: Ask) -> None:
    engines = [Engine("a", model="large"), Engine("b", model="small"), Engine("c", model="small")]
    picker = await pick(*engines, aliases=ALIASES)
    small = {address(engine) for engine in engines[1:]}
    for path in (MESSAGES, CHAT):
        for model, addresses in (
            *(("large", {address(engines[0])}), ("gpt-5", {address(engines[0])})),
            *(("small", small), ("claude-haiku-4-5", small)),
        ):
            asked = ask(picker)
            destination, sent = await asked.request(hello(model), path=path)
            assert {*destination.split(",")} == addresses, model  # the spare ones, too
            assert orjson.loads(sent) == hello(model)
            await asked.complete()
    # The one protocol in which SGLang takes no other name than the model's.
    asked = ask(picker)
    body = {"model": "claude-haiku-4-5", "input": "Hello"}
    _, sent = await asked.request(body, path=RESPONSES)
    assert orjson.loads(sent)["model"] == "small"
    await asked.complete()


async def test_a_name_of_no_model_is_404_in_the_words_of_the_protocol(pick: Pick, ask: Ask) -> None:
    picker = await pick(Engine("a", model="large"), Engine("b", model="small"), served=TWO)
    for path, kind in ((MESSAGES, "not_found_error"), (CHAT, "invalid_request_error")):
        asked = ask(picker)
        await asked.head(path)
        await asked.body(orjson.dumps(hello("gpt-5")))
        status, _, error = await asked.answered()
        assert (status, error["error"]["type"]) == (404, kind)


async def test_a_fallback_answers_for_a_model_without_an_engine(pick: Pick, ask: Ask) -> None:
    engine = Engine("b", model="small")
    picker = await pick(engine, served=TWO)
    asked = ask(picker)
    destination, _ = await asked.request(hello("large"))
    assert destination == address(engine)
    await asked.answer_head()
    await asked.answer_body(b"{}")
    changed = (await asked.told()).response_headers.response.header_mutation.set_headers
    headers = {option.header.key: option.header.raw_value.decode() for option in changed}
    assert headers["x-sgl-ext-model"] == "small"
    await asked.whole("response_body")
    assert picker.metric("model_fallbacks", "large", "small") == 1


async def test_a_tenants_limit_of_one_model_leaves_the_other(
    pick: Pick, ask: Ask, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    key = "sgl-0123456789abcdef"
    keys.write_text(
        "[tenants.a.models.small]\nrequests-per-minute = 1\n"
        f'[keys.0a1b2c3d]\ntenant = "a"\nsha256 = "{hash_of(key.encode())}"\n'
    )
    engines = Engine("a", model="large"), Engine("b", model="small")
    picker = await pick(*engines, keys=str(keys))
    for model in ("small", "large", "large"):
        await (asked := ask(picker)).request(hello(model), x_api_key=key)
        await asked.complete()
    asked = ask(picker)
    await asked.head(MESSAGES, x_api_key=key)
    await asked.body(orjson.dumps(hello("small")))
    assert (await asked.answered())[0] == 429
