"""Random bodies under random policies: equal bits, or (rarely, and only where the reason is known) an error of ours."""

from __future__ import annotations

import collections
import random

import pytest
from helpers.bodies import FEATURES, check_program, write_program
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

MODES = ("together", "one by one", "grad", "double")
IN_PLACE = frozenset({"inplace", "region_inplace"})
PURE = frozenset(FEATURES) - IN_PLACE  # "declare" is not among them


def bodies(count: int) -> settings:
    """Derandomised: every run of the suite sees the same bodies; ``scripts/fuzz.py`` is for new ones."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def run(seed: int, features: frozenset[str], counts: collections.Counter[str], *, rounds: int = 2) -> None:
    """Draw one body and check it, ``rounds`` times with a policy (and, where it has switches, a way through it)."""
    rng = random.Random(seed)
    always = features & {"morph"}
    chosen = always | frozenset(feature for feature in sorted(features) if rng.random() < 0.45)
    program = write_program(rng, features=chosen)
    assert "recompute_needs_tensor" not in program.source
    policies = [{name: rng.random() < 0.4 for name in program.regions} for _ in range(2)]
    mode = rng.choice(MODES)
    try:
        outcomes = check_program(program, [rng.choice(policies) for _ in range(rounds)], mode=mode, seed=seed % 1000)
        if not chosen & (IN_PLACE | {"morph"}):
            refused = [outcome.error for outcome in outcomes if outcome.kind == "refused"]
            assert not refused, f"refused without any in-place operation: {refused[0]}"
    except AssertionError as error:
        error.add_note(f"mode {mode}, features {sorted(chosen)}\n{program.source}")
        raise
    counts.update(outcome.kind for outcome in outcomes)


def check_many(
    count: int, part: int, parts: int, features: frozenset[str], rounds: int = 2
) -> collections.Counter[str]:
    """Check ``count`` bodies; ``part`` of ``parts`` tests share the work and see different ones."""
    counts: collections.Counter[str] = collections.Counter()

    @bodies(count)
    @given(st.integers(0, 2**32 - 1))
    def check(number: int) -> None:
        run(number * parts + part, features, counts, rounds=rounds)

    check()
    return counts


@pytest.mark.parametrize("part", range(4))
def test_property_bodies_without_in_place_code_always_work(part: int) -> None:
    counts = check_many(60, part, 4, PURE)
    assert counts["refused"] == 0
    assert counts["equal"] > 0.9 * sum(counts.values())


@pytest.mark.parametrize("part", range(2))
def test_property_bodies_with_in_place_code_work_or_are_refused(part: int) -> None:
    counts = check_many(60, part, 2, PURE | IN_PLACE)
    valid = counts["equal"] + counts["refused"]
    assert counts["equal"] > 0.7 * sum(counts.values())
    assert counts["refused"] < 0.05 * valid


def test_property_bodies_that_take_other_ways_from_call_to_call() -> None:
    """Global switches change operands, operations and region bodies: what was learned of the body may be stale.

    A call that reads what no earlier call of the same path read is an error of ours, at worst; never another number.
    """
    counts = check_many(60, 0, 1, PURE | {"morph"}, rounds=5)
    valid = counts["equal"] + counts["refused"]
    assert counts["equal"] > 0.9 * sum(counts.values())
    assert counts["refused"] < 0.02 * valid
