"""Which engines of a fleet are created and drained, without a cluster."""

from __future__ import annotations

import random

import pytest

from sgl_ext.integrations.ray.plan import Engine, Room, Steps, is_settled, next_steps, too_small

NOTHING = Steps((), ())


def ready(number: int, generation: int = 0) -> Engine:
    return Engine(number, generation, ready=True)


def starting(number: int, generation: int | None = 0) -> Engine:
    return Engine(number, generation, ready=False)


def draining(number: int, generation: int = 0) -> Engine:
    return Engine(number, generation, ready=True, draining=True)


@pytest.mark.parametrize(
    ("instances", "generation", "engines", "steps"),
    [
        pytest.param(2, 0, [], Steps((0, 1), ()), id="a new fleet is created"),
        pytest.param(2, 0, [ready(0), ready(1)], NOTHING, id="what is wanted stays"),
        pytest.param(3, 0, [ready(0), ready(2)], Steps((1,), ()), id="a gap is filled"),
        pytest.param(1, 0, [ready(0), ready(1)], Steps((), (1,)), id="the highest leave"),
        pytest.param(0, 0, [ready(0), starting(1)], Steps((), (0, 1)), id="all may leave"),
        pytest.param(2, 0, [ready(0), draining(1)], Steps((), (1,)), id="an order to drain stays"),
        pytest.param(2, 1, [ready(0), ready(1)], Steps((), (0,)), id="one is replaced first"),
        pytest.param(
            2, 1, [draining(0), ready(1)], Steps((), (0,)), id="while it drains, no other"
        ),
        pytest.param(2, 1, [ready(1)], Steps((0,), ()), id="nor while it is missing"),
        pytest.param(2, 1, [starting(0, 1), ready(1)], NOTHING, id="nor until it serves"),
        pytest.param(2, 1, [starting(0, None), ready(1)], NOTHING, id="nor before it has spoken"),
        pytest.param(2, 1, [ready(0, 1), ready(1)], Steps((), (1,)), id="then the next"),
        pytest.param(2, 1, [ready(0), starting(1)], Steps((), (1,)), id="a dead one goes first"),
        pytest.param(1, 1, [ready(0)], Steps((), (0,)), id="a single one is replaced, too"),
    ],
)
def test_next_steps(instances: int, generation: int, engines: list[Engine], steps: Steps) -> None:
    assert next_steps(instances, generation, engines) == steps


def test_every_change_ends_with_the_wanted_fleet_and_never_replaces_two_that_serve() -> None:
    """An engine becomes ready, or has drained, at some later step; orders come in between."""
    chance = random.Random(17)
    engines: dict[int, Engine] = {}
    instances, generation = 4, 0
    for turn in range(4_000):
        if turn % 40 == 0:
            instances, generation = chance.randrange(1, 7), generation + chance.randrange(2)
        steps = next_steps(instances, generation, [*engines.values()])
        for number in steps.create:
            engines[number] = starting(number, generation)
        serving = [n for n, e in engines.items() if e.ready and not e.draining]
        assert len([n for n in steps.drain if n in serving and n < instances]) <= 1
        for number in steps.drain:
            engines[number] = engines[number]._replace(draining=True)
        if engines:
            number = chance.choice([*engines])
            if engines[number].draining:
                del engines[number]
            else:
                engines[number] = engines[number]._replace(ready=True)
        if turn % 40 == 39 and is_settled(instances, generation, [*engines.values()]):
            assert next_steps(instances, generation, [*engines.values()]) == NOTHING


def test_a_fleet_settles_after_any_order() -> None:
    engines = {number: ready(number) for number in range(3)}
    for _ in range(50):
        steps = next_steps(5, 1, [*engines.values()])
        engines = {n: e._replace(ready=True) for n, e in engines.items() if n not in steps.drain}
        engines |= {number: starting(number, 1) for number in steps.create}
    assert is_settled(5, 1, [*engines.values()])


def test_a_fleet_that_lacks_or_drains_an_engine_is_not_settled() -> None:
    assert is_settled(2, 0, [ready(0), ready(1)])
    assert not is_settled(2, 0, [ready(0)])
    assert not is_settled(2, 0, [ready(0), ready(1), draining(2)])
    assert not is_settled(2, 0, [ready(0), draining(1)])
    assert not is_settled(2, 1, [ready(0, 1), ready(1)])


def test_engines_must_fit_on_single_nodes() -> None:
    rooms = [Room("10.0.0.1", 3, 8), Room("10.0.0.2", 3, 4), Room("10.0.0.3", 0, 0)]
    assert too_small(2, 2, "GPU", rooms) == ""
    assert too_small(3, 2, "GPU", rooms) == (
        "3 more engines need 2 GPUs on one node each, 6 GPUs in all, and there is room for 2: "
        "10.0.0.1 has 3 of 8 free, 10.0.0.2 has 3 of 4 free"
    )
    assert "no node of the cluster has a GPU" in too_small(1, 1, "GPU", rooms[2:])
