"""Storages that are alive because of checkpoints: each counted once and whole, for whom it was met first."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.runtime.tape import Tape

__all__ = ["Resident"]


class _Entry:
    """A storage: `owners` are the tapes that hold it, None where it counts for as long as it is alive."""

    __slots__ = ("label", "owners", "reference", "size")

    def __init__(self, reference: StorageWeakRef, size: int, label: str, owner: weakref.ref[Tape] | None) -> None:
        self.reference = reference  # keeps the storage's address from being used again
        self.size = size
        self.label = label
        self.owners = None if owner is None else [owner]

    def is_alive(self) -> bool:
        if self.reference.expired():
            return False
        if self.owners is None:
            return True
        return any((tape := owner()) is not None and not tape.released for owner in self.owners)


class Resident:
    """Adds up living storages by label. Holds none of them.

    What dies is found out by `prune`, which has something to do after `stale` was set.

    Attributes:
        total: bytes of the entries.
        sizes: label -> bytes.
        stale: an entry may have died since the last `prune`.
    """

    def __init__(self) -> None:
        self.total = 0
        self.sizes: Counter[str] = Counter()
        self.stale = False
        self._entries: dict[int, _Entry] = {}

    def __contains__(self, address: int) -> bool:
        entry = self._entries.get(address)
        return entry is not None and entry.is_alive()

    def add(self, storage: Any, label: str, owner: weakref.ref[Tape] | None = None) -> None:
        """Count `storage` for `label`, unless it counts already.

        Args:
            storage: counts for its whole size.
            label: for whom.
            owner: the tape that holds it. Without one, for what autograd nodes hold, it counts for as long as it is
                alive, by whomever: no node tells when it lets go.
        """
        address = storage._cdata
        known = self._entries.get(address)
        if known is not None:
            if known.is_alive():
                if owner is None:
                    known.owners = None
                elif known.owners is not None and known.owners[-1] is not owner:
                    known.owners.append(owner)
                return
            self._drop(address, known)
        size = storage.nbytes()
        if size:
            self._entries[address] = _Entry(StorageWeakRef(storage), size, label, owner)
            self.sizes[label] += size
            self.total += size

    def prune(self) -> None:
        """Forget what is dead."""
        self.stale = False
        for address, entry in [(address, entry) for address, entry in self._entries.items() if not entry.is_alive()]:
            self._drop(address, entry)

    def _drop(self, address: int, entry: _Entry) -> None:
        del self._entries[address]
        self.sizes[entry.label] -= entry.size
        self.total -= entry.size
