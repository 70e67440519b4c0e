"""Random bodies under random policies: equal bits, or (rarely, and only for in-place code) an error of ours."""

from __future__ import annotations

import collections
import random

import pytest
from helpers.bodies import FEATURES, check_program, write_program
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

MODES = ("together", "one by one", "grad", "double")
PURE = frozenset(FEATURES) - {"inplace", "region_inplace"}


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


def run(rng: random.Random, features: frozenset[str], counts: collections.Counter[str]) -> None:
    """Draw one body and check it under two policies."""
    chosen = frozenset(feature for feature in sorted(features) if rng.random() < 0.5)
    program = write_program(rng, features=chosen)
    policies = [{name: rng.random() < 0.4 for name in program.regions} for _ in range(2)]
    mode = rng.choice(MODES)
    try:
        outcomes = check_program(program, policies, mode=mode, seed=rng.randrange(1000))
    except AssertionError as error:
        error.add_note(f"mode {mode}, features {sorted(chosen)}\n{program.source}")
        raise
    counts.update(outcome.kind for outcome in outcomes)
    if not chosen & {"inplace", "region_inplace"}:
        refused = [outcome.error for outcome in outcomes if outcome.kind == "refused"]
        assert not refused, f"refused without any in-place operation: {refused[0]}\n{program.source}"


@pytest.mark.parametrize("part", range(4))
def test_property_bodies_without_in_place_code_always_work(part: int) -> None:
    counts: collections.Counter[str] = collections.Counter()

    @bodies(60)
    @given(st.randoms(use_true_random=False), st.just(part))
    def check(rng: random.Random, part: int) -> None:
        run(random.Random(rng.getrandbits(40) * 4 + part), PURE, counts)

    check()
    assert counts["refused"] == 0
    assert counts["equal"] > 0.9 * sum(counts.values())


@pytest.mark.parametrize("part", range(2))
def test_property_bodies_with_in_place_code_work_or_are_refused(part: int) -> None:
    counts: collections.Counter[str] = collections.Counter()

    @bodies(60)
    @given(st.randoms(use_true_random=False), st.just(part))
    def check(rng: random.Random, part: int) -> None:
        run(random.Random(rng.getrandbits(40) * 2 + part), PURE | {"inplace", "region_inplace"}, counts)

    check()
    valid = counts["equal"] + counts["refused"]
    assert counts["equal"] > 0.5 * sum(counts.values())
    assert counts["refused"] < 0.15 * valid
