"""Outputs of SAVE regions that nobody reads before another SAVE region overwrites them: shells.

Replay must have a tensor to write into. Shells share memory with what forward left in them in the end, so that keeping
them is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_remat.runtime.body_graph import BodyGraph

__all__ = ["shells"]


def shells(graph: BodyGraph, needed: set[int], keep: dict[int, set[int]]) -> dict[int, set[int]]:
    """The shells of each region, by leaf; those and others that replay writes into are added to ``keep``.

    No shell is what replay writes an earlier version into that was kept as a copy: it would write into memory that has
    the last one, and that others have, too. That is kept as a copy as well.
    """
    found: dict[int, set[int]] = {}
    apart: set[int] = set()
    for after in sorted(graph.overwritten, reverse=True):
        before = graph.overwritten[after]
        changed, leaf = graph.nodes[after].detail
        if leaf not in keep.get(changed, ()) or before in needed:
            continue
        region, position = graph.nodes[before].detail
        sharing = graph.with_siblings(region, graph.tape.order[region], {position})
        keep.setdefault(region, set()).update(sharing)
        copied = dict(graph.tape.order[changed].changed)[-1 - leaf].cloned
        if after in apart or (copied and leaf not in found.get(changed, ())):
            apart.add(before)
        elif len(sharing) == 1:  # otherwise the part that is not overwritten may be read through another one
            found.setdefault(region, set()).add(position)
    return found
