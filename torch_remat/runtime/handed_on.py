"""What a SAVE region hands on beside its outputs: tensors that it leaves in a container, a variable or an attribute.

Replay skips the region. Recomputed code that reads such a tensor finds it in replay where it outlives the body (an
attribute, a cache), and finds something else where it does not (a dict that the body made, a container among the
arguments, a variable of the body). Which it is cannot be told in forward. So the replay of an observed call that read
such tensors is watched, and has to read the same memory.

Nothing is learned from a call before its replay has been watched. Afterwards those that a path leads to are watched
there (``externals.py``); where no path leads to one, the body stays observed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_remat.errors import ModifiedError, display_name
from torch_remat.runtime.host_reads import HostReads
from torch_remat.runtime.plan import Known, Plan
from torch_remat.runtime.state import SameOperations
from torch_remat.runtime.state_hooks import restoring
from torch_remat.runtime.tape import Tape, WeakStorage
from torch_remat.runtime.tensors import storage_keys, tensors_in

__all__ = ["HandedOn", "Reading", "Reads"]


class Reading(NamedTuple):
    """Recomputed code read, or saved, a tensor that a SAVE region made and did not return."""

    key: int
    storage: WeakStorage  # so that no other storage takes its identity
    region: str
    slots: int  # saves before it
    regions: int  # region calls before it


class HandedOn:
    """On the tape of an observed call: what its replay has to read, and what is learned once it has."""

    __slots__ = ("_known", "_plan", "readings")

    def __init__(self, readings: list[Reading], known: Known, plan: Plan | None) -> None:
        self.readings = readings
        self._known = known
        self._plan = plan

    def learn(self) -> None:
        """A replay has read what forward read."""
        if self._plan is not None:
            self._known.learn(self._plan)
            self._plan = None


class Reads(SameOperations):
    """Around a replay: which memory it reads."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._keys: set[int] = set()
        self._host_reads = HostReads(lambda tensor, _: self._keys.update(storage_keys(tensor)))
        slots = [reference() for reference in tape.slots]
        # Those that this replay fills: it stops at the last one, before what nothing alive needs.
        self._waiting = [index for index, slot in enumerate(slots) if slot is not None and slot.tensor is None]

    def __enter__(self) -> Any:
        self._host_reads.__enter__()
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._host_reads.__exit__(*exc_info)
        error = exc_info[1]
        if isinstance(error, Exception) and not isinstance(error, ModifiedError):  # an item is not there, say
            for reading in self._tape.handed_on.readings:
                if reading.key not in self._keys:
                    raise self._refusal(reading) from error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not restoring.get():
            self._keys.update(key for tensor in tensors_in((args, kwargs or {})) for key in storage_keys(tensor))
        return func(*args, **kwargs or {})

    def check(self, regions: int) -> None:
        """Refuse where something that forward read, in the part that was replayed, was not read now.

        ``regions``: how many region calls replay came to.
        """
        for slot in self._tape.living_slots():
            if slot.tensor is not None:
                self._keys.update(storage_keys(slot.tensor))
        last = max(self._waiting, default=-1)
        for reading in self._tape.handed_on.readings:
            due = last >= reading.slots or regions > reading.regions
            if due and reading.key not in self._keys:
                raise self._refusal(reading)
        self._tape.handed_on.learn()

    def _refusal(self, reading: Reading) -> ModifiedError:
        name = self._tape.name
        return ModifiedError(
            f"Recomputed code of checkpoint {display_name(name)} reads a tensor that region "
            f"{display_name(name, reading.region)} (recompute=False) made and did not return, but left in a container, "
            f"a variable or an attribute. Replay skips the region and finds something else there: it would compute "
            f"with that.\n"
            f"To fix: return the tensor from the region, and take it from there."
        )
