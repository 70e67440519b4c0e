"""Do all ranks run the same policy? Told in the first step, on every rank, before a replay can hang.

Where one rank saves a region with a collective in it and another recomputes it, the second one issues a
collective in replay that the first never joins. So each rank publishes what it decides, and compares.

Rules:
 1. No collective. The ranks meet in the key-value store of the default process group.
 2. Only the first forward of each checkpoint name is looked at. The end of forwards is listened to from the first
    observing of a body until a thousand forwards brought no new name; backward only while something new is to be
    compared. After that nothing listens but to the observing of bodies.
 3. A rank publishes each name when the first forward under it ends: one or two operations for the decisions,
    two for its position, in this order. It never raises in forward: other ranks may be waiting for it in a collective.
 4. Equal region names under equal checkpoint names must have equal policies. A name that only some ranks have is no
    mismatch: pipeline ranks own different blocks, expert-parallel ranks different experts.
 5. Before backward enters the first block a rank waits for those that are behind it on its own track, that is, whose
    sequence of names is a proper prefix of its own. They run the same forward and need nothing more of this rank.
    Ranks on other tracks (other pipeline stages) and ranks with as many names are never waited for. For ranks
    that have published nothing, and those behind that have been in backward already, there is a short grace, until
    it was in vain once: they may have no further block at all.
 6. Who finds a mismatch raises a flag in the store. Every rank looks at it after its wait, adds itself to the
    side that it is on, and raises. Waits have deadlines, 25 seconds together, and end in "no objection".

``TORCH_REMAT_RANK_CHECK=0`` in the environment switches all of it off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

from torch_remat.errors import RankPolicyError, display_name
from torch_remat.runtime import events
from torch_remat.runtime.tape import Tape

__all__ = ["install"]

_log = logging.getLogger("torch_remat")

GRACE_SECONDS = 5.0
"""How long to wait, once, for ranks that have published nothing."""
BEHIND_SECONDS = 18.0
"""How long to wait for ranks behind on the same track."""
JOIN_SECONDS = 2.0
"""How long to collect who is on which side of a mismatch."""
LOOK_AGAIN_SECONDS = 30.0
"""For how long the flag is looked at after a wait that ended with ranks missing."""

IDLE_FORWARDS = 1000
"""After how many forwards without a new name listening ends."""

MOST_NAMES = 1024
"""After how many checkpoint names no further one is looked at: names that never repeat name no block."""

_NO_FLAG = "-"


class _Window:
    """What this rank has published, and where it stands, in one process group."""

    def __init__(self, group: Any, generation: int, rank: int, ranks: int) -> None:
        self.group = weakref.ref(group)
        self.generation = generation  # process groups of this process get new keys
        self.attempt = 0  # so does what runs after a mismatch
        self.rank = rank
        self.ranks = ranks
        self.listening = False  # to the end of forwards
        self.comparing = False  # listening to backward, too
        self._start()

    def _start(self) -> None:
        self.error: str | None = None
        self.decided: dict[str, dict[str, bool]] = {}  # checkpoint name -> region name -> recompute
        self.track: list[str] = []  # a digest of every prefix of the sequence of names
        self.standing = False  # in forward; settled otherwise
        self.patient = True  # has not yet waited in vain for ranks that do not come
        self.missing = False  # the last wait ended with ranks missing
        self.look_until = 0.0
        self.next_look = 0.0
        self.idle = 0  # forwards since the last new name

    def restart(self) -> None:
        """Begin anew after a mismatch: every rank has raised, so every rank does."""
        self.attempt += 1
        self._start()

    # --- Publishing (rules 3 and 4)

    def publish(self, name: str, decided: dict[str, bool]) -> None:
        """Publish the decisions of the first forward under ``name``, then move on to it."""
        store = _store()
        first = not self.track
        if first:
            store.compare_set(self._key("flag"), "", _NO_FLAG)
        self.decided[name] = decided
        conflict = self._compare(store, name, decided)
        if conflict is not None:
            store.compare_set(self._key("flag"), _NO_FLAG, json.dumps(conflict))
        left = self.track[-1:]
        self.track.append(_digest(left, name))
        store.add(self._at(self.track[-1], True), 1)
        store.add(self._at(self.track[-1], False), 0)
        for position in left:
            store.add(self._at(position, self.standing), -1)
        self.standing = True
        if first:
            store.add(self._key("started"), 1)

    def _compare(self, store: Any, name: str, decided: dict[str, bool]) -> dict[str, Any] | None:
        """Compare with what others have published under ``name``; returns the first conflict."""
        key, details = self._key("policy", name), self._key("details", name)
        digest = _digest(json.dumps(sorted(decided.items())))
        mine = f"{digest} {self.rank}"
        first = store.compare_set(key, "", mine).decode()
        known = {region: [recompute, self.rank] for region, recompute in decided.items()}
        if first == mine:
            store.set(details, json.dumps(known))
            return None
        if first.partition(" ")[0] == digest:
            return None
        store.wait([details], timedelta(seconds=GRACE_SECONDS))
        while True:
            before = store.get(details).decode()
            others = json.loads(before)
            for region, (recompute, rank) in others.items():
                if decided.get(region, recompute) is not recompute:
                    sides = {"recompute": [rank], "save": [self.rank]}
                    if not recompute:
                        sides = {"recompute": [self.rank], "save": [rank]}
                    return {"checkpoint": name, "region": region, **sides}
            merged = json.dumps({**known, **others})
            if len(others) == len(json.loads(merged)):
                return None
            if store.compare_set(details, before, merged).decode() == merged:
                return None

    # --- Waiting and judging (rules 5 and 6)

    def settle(self) -> None:
        """Backward is about to enter a block: wait for those behind; ``error`` says what was found."""
        store = _store()
        store.add(self._at(self.track[-1], True), -1)
        store.add(self._at(self.track[-1], False), 1)
        self.standing = False
        self.missing = self._wait(store)
        self.look_until = time.monotonic() + LOOK_AGAIN_SECONDS
        self.look(store)

    def _wait(self, store: Any) -> bool:
        """Wait as rule 5 says; whether some rank is still missing."""
        began = time.monotonic()
        pause = 0.001
        watched = [self._at(position, standing) for position in self.track[:-1] for standing in (True, False)]
        while True:
            started, *counts = _read(store, [self._key("started"), *watched])
            behind = any(int(count) > 0 for count in counts[::2])
            absent = int(started) < self.ranks or any(int(count) > 0 for count in counts)
            passed = time.monotonic() - began
            graced = absent and self.patient and passed < GRACE_SECONDS
            if not (graced or (behind and passed < BEHIND_SECONDS)):
                self.patient = self.patient and passed < GRACE_SECONDS
                return absent
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def look(self, store: Any) -> None:
        """Look at the flag; where it is raised, take a side and make the error."""
        self.next_look = time.monotonic() + 1.0
        (flag,) = _read(store, [self._key("flag")])
        if flag == _NO_FLAG:
            return
        self.error = _message(flag, self.rank)
        self._join(store, flag)
        until = time.monotonic() + JOIN_SECONDS
        steady = time.monotonic()
        while time.monotonic() < min(until, steady + 0.5):
            (now,) = _read(store, [self._key("flag")])
            if now != flag:
                flag, steady = now, time.monotonic()
                self.error = _message(flag, self.rank)
            time.sleep(0.05)

    def _join(self, store: Any, flag: str) -> None:
        while True:
            conflict = json.loads(flag)
            recompute = self.decided.get(conflict["checkpoint"], {}).get(conflict["region"])
            side = "recompute" if recompute else "save"
            if recompute is None or self.rank in conflict[side]:
                return
            conflict[side] = sorted([*conflict[side], self.rank])
            joined = json.dumps(conflict)
            answer = store.compare_set(self._key("flag"), flag, joined).decode()
            if answer == joined:
                return
            flag = answer

    # --- Keys

    def _key(self, *parts: str) -> str:
        return "/".join(("torch_remat", f"{self.generation}.{self.attempt}", *parts))

    def _at(self, position: str, standing: bool) -> str:
        """How many ranks are at this prefix of names, in forward or settled."""
        return self._key("at", position, "forward" if standing else "settled")


_lock = threading.RLock()
_window: _Window | None = None
_installed = False


def install() -> None:
    """Start to listen. Done when torch_remat is imported; costs nothing until a body is observed."""
    global _installed
    if not _installed:
        _installed = True
        events.body_learned.subscribe(_learned)


def _learned(tape: Tape, plan: Any) -> None:
    """A body was observed: where its name is new, a window opens (rule 2)."""
    global _window
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    with _lock:
        group = dist.group.WORLD
        if _window is None or _window.group() is not group:
            if not _wanted(dist):
                return
            generation = 0 if _window is None else _window.generation + 1
            _close()
            _window = _Window(group, generation, dist.get_rank(), dist.get_world_size())
        if not _window.listening and display_name(tape.name) not in _window.decided:
            _window.listening = True
            _window.idle = 0
            events.forward_ended.subscribe(_forward_ended)


def _wanted(dist: Any) -> bool:
    """Whether this process group is compared: its ranks are processes that really talk to each other."""
    if os.environ.get("TORCH_REMAT_RANK_CHECK", "1") == "0":
        return False
    backend = str(dist.get_backend())
    return dist.get_world_size() > 1 and "fake" not in backend and "threaded" not in backend


def _compare(window: _Window, wanted: bool) -> None:
    """Listen to backward, or do not any more."""
    if window.comparing is not wanted:
        window.comparing = wanted
        for event in (events.output_reached, events.backward_reached):
            (event.subscribe if wanted else event.unsubscribe)(_reached)


def _close() -> None:
    window = _window
    if window is not None:
        _compare(window, False)
        if window.listening:
            window.listening = False
            events.forward_ended.unsubscribe(_forward_ended)


def _forward_ended(tape: Tape) -> None:
    with _lock:
        window = _window
        if window is None or not window.listening:
            return
        if window.error is not None:
            window.restart()
        name = display_name(tape.name)
        if name in window.decided or len(window.decided) >= MOST_NAMES:
            window.idle += 1
            if window.idle > IDLE_FORWARDS and not window.comparing:
                _close()
            return
        window.idle = 0
        try:
            window.publish(name, {record.name: record.recompute for record in tape.order})
        except (RuntimeError, ValueError) as error:
            _give_up(error)
            return
        _compare(window, True)


def _reached(*details: Any) -> None:
    """Backward is about to enter a block."""
    with _lock:
        window = _window
        if window is None or not window.comparing:
            return
        try:
            if window.error is not None:
                pass  # a retry of the backward that has failed
            elif window.standing:
                window.settle()
            elif time.monotonic() >= window.next_look:
                window.look(_store())
        except (RuntimeError, ValueError) as error:
            if window.error is None:
                _give_up(error)
        error = window.error
        if error is None and not (window.missing and time.monotonic() < window.look_until):
            _compare(window, False)
    if error is not None:
        raise RankPolicyError(error)


def _give_up(error: Exception) -> None:
    """The store does not answer: training does not depend on this check."""
    _log.warning("torch_remat stops comparing the policies of ranks: the process group's store failed: %s", error)
    _close()


def _store() -> Any:
    """The default process group's store. Not kept: it must go with its process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _read(store: Any, keys: list[str]) -> list[str]:
    """The values of keys that exist."""
    try:
        return [value.decode() for value in store.multi_get(keys)]
    except (NotImplementedError, RuntimeError):  # a kind of store without it
        return [store.get(key).decode() for key in keys]


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _message(flag: str, rank: int) -> str:
    conflict = json.loads(flag)
    where = display_name(conflict["checkpoint"], conflict["region"])
    return (
        f"Ranks have different policies for region {where}: SAVE on {_ranks(conflict['save'])}, "
        f"RECOMPUTE on {_ranks(conflict['recompute'])} (this is rank {rank}). "
        f"A collective in the region, or in what is recomputed with it, would be issued by some ranks only and hang.\n"
        f"To fix: decide the policy from what is the same on every rank. Blocks that really differ need different "
        f"region_name values; TORCH_REMAT_RANK_CHECK=0 switches this check off."
    )


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
