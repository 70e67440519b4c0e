"""What the partitioner is told about the operations of a checkpoint in a graph: which to keep, which to recompute."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_remat.runtime.generators import GeneratorHook
from torch_remat.runtime.tensors import tensors_in

__all__ = ["CHECKPOINT_MARK", "REGION_MARK", "SAVE_MARK", "contexts", "is_view"]

# Keys in ``node.meta["custom"]``.
SAVE_MARK = "torch_remat_save"
"""Of what a SAVE region computes; the value is the region's name, with that of the checkpoint."""
REGION_MARK = "torch_remat_region"
"""Of what a region computes; the value is its name without that of the checkpoint."""
CHECKPOINT_MARK = "torch_remat_checkpoint"
"""Of what a checkpoint computes; the value is its number in the graph, a colon and its name."""


def contexts() -> Any:
    """The pair of contexts of a checkpoint in a graph: one for its forward, one for its recomputation.

    AOTAutograd asks for them when it traces the graph, and the operations get their marks. A backend without it runs
    the graph as it stands, and torch's checkpoint in it recomputes everything.
    """
    if not _is_traced():
        if _is_in_graph():
            warnings.warn(
                "This backend of torch.compile runs checkpoints without AOTAutograd: all of a checkpoint is "
                "recomputed, its SAVE regions too.\n"
                "To fix: use a backend that partitions the graph, such as inductor or aot_eager.",
                stacklevel=2,
            )
        forward = _Forward()
        return forward, _Recomputation(forward)
    changed = _ChangedInputs()
    policy = functools.partial(_policy, changed)
    pair = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
    for context in pair:
        context.supports_higher_order_operators = True
    _at_exit(pair[0], changed.keep_written)
    return pair


def _at_exit(mode: Any, last: Callable[[], None]) -> None:
    """Have ``last`` called when ``mode``, which torch wants to be of its own type, is left."""
    kind: Any = type(mode)

    class Left(kind):
        def __exit__(self, *error: Any) -> Any:
            last()
            return super().__exit__(*error)

    mode.__class__ = Left


def _is_traced() -> bool:
    """Whether AOTAutograd or the like runs the code on stand-ins for tensors."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL, keys.FAKE))


def _is_in_graph() -> bool:
    """Whether a graph runs the checkpoint, and not what Dynamo has left of the function that called it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if "_higher_order_ops" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class _Forward:
    """A forward whose random numbers the recomputation draws again."""

    ac_graph_id: Any = None  # torch notes the graph here

    def __init__(self) -> None:
        self.hook = GeneratorHook()
        self.state: Any = None

    def __enter__(self) -> None:
        self.state = self.hook.snapshot()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class _Recomputation:
    """The recomputation of a :class:`_Forward`; leaves the generators as they were."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        hook = self._forward.hook
        self._outer.append(hook.snapshot())
        hook.restore(self._forward.state)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._forward.hook.restore(self._outer.pop())


def _policy(changed: _ChangedInputs, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    reads = changed.are_read(operation, args, kwargs)
    marks = traceback.current_meta.get("custom")
    if marks and SAVE_MARK in marks:
        # A view costs nothing to make again, and kept it would pin what it is a view of. One of the whole result of the
        # region pins nothing more, and has to say so: where Inductor puts an operation of its own in the place of
        # several (attention written by hand), it takes over what is said of the last of them.
        if is_view(operation) and not _is_whole_result(operation, args, marks[SAVE_MARK]):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE
    if any(isinstance(branch, torch.nn.Module) and _has_saves(branch) for branch in args):
        return CheckpointPolicy.MUST_SAVE  # control flow is kept as a whole
    if reads or _takes_the_place_of_what_is_kept(operation, args):
        return CheckpointPolicy.MUST_SAVE
    if _draws(operation, args, kwargs) and not _draws_the_same_again(operation):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _ChangedInputs:
    """The inputs that the graph which AOTAutograd traces now changes in place, and who reads them.

    What reads one has to be kept: the graph hands the input itself to its backward, and changes it before that runs.
    """

    def __init__(self) -> None:
        self._inputs: set[str] = set()
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not self._inputs:
            # Before Python 3.13, a look at a frame's locals copies them, and the copy lives as long as the frame.
            # A copy of the caller's would hold tensors for longer.
            if "fw_metadata" in frame.f_code.co_varnames:  # AOTAutograd tells nobody
                self._inputs = {f"primals_{number + 1}" for number in _changed(frame.f_locals.get("fw_metadata"))}
            frame = frame.f_back
        self._last = next(self._nodes(), None)
        self._written: list[torch.Tensor] = []  # running statistics whose new value is not in the graph yet
        self._kept: set[torch.fx.Node] = set()  # new values

    @staticmethod
    def _nodes() -> Any:
        """The nodes of the graph, last first."""
        mode = proxy_tensor.get_proxy_mode()
        return iter(() if mode is None else reversed(mode.tracer.graph.nodes))

    def are_read(self, operation: Any, args: Any, kwargs: Any) -> bool:
        """Whether ``operation`` reads one."""
        if not self._inputs:
            return False
        new = list(itertools.takewhile(lambda node: node is not self._last, self._nodes()))
        self._last = next(self._nodes(), None)
        for node in reversed(new):
            if _is_copy(node) and any(_viewed(one).name in self._inputs for one in node.all_input_nodes):
                self._inputs.add(node.name)
        statistics = _written_statistics(operation, args, kwargs)
        named = list(_named(operation, args, kwargs))
        self.keep_written()
        self._written += tensors_in(one for name, one in named if name in statistics)
        self.keep_written()
        read = _nodes_of(one for name, one in named if name not in statistics)
        if is_view(operation):
            return False
        if not statistics and getattr(getattr(operation, "_schema", None), "is_mutable", True):
            # Torch 2.12 and later ask when the operation is in the graph: what it changed is known by its new value.
            computing = [node for node in new if node.op == "call_function" and not _views(node)]
            read += [_viewed(one) for node in computing for one in node.all_input_nodes]
        return any(node.name in self._inputs for node in read)

    def keep_written(self) -> None:
        """Have the new values of running statistics kept, for whoever reads them: a second run would make others."""
        # Torch 2.11 asks before the operation is in the graph: the new value is known at the next one. Later ones ask
        # when it is, and then put the answer on all that has come into the graph since it ran.
        waiting = []
        for tensor in self._written:
            node = _node_of(tensor)
            if node is not None and node.op == "call_function" and node not in self._kept:
                self._kept.add(_own_node(tensor) if node.target is operator.getitem else node)
            else:
                waiting.append(tensor)
        self._written = waiting
        for node in self._kept:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _own_node(tensor: torch.Tensor) -> torch.fx.Node:
    """The node of a copy, which stands for ``tensor`` from now on: the min-cut partitioner keeps no getitem."""
    mode: Any = proxy_tensor.get_proxy_mode()
    slot = _slot_of(tensor)
    made = slot.proxy.node
    slot.proxy = mode.tracer.create_proxy("call_function", torch.ops.aten.clone.default, (slot.proxy,), {})
    slot.proxy.node.meta.update(made.meta)
    return slot.proxy.node


_COPIES = {"_to_copy", "cat", "clone", "constant_pad_nd", "convert_element_type", "copy", "copy_", "pow", "repeat"}
_COPIES |= {"slice_scatter", "stack"}


def _is_copy(node: torch.fx.Node) -> bool:
    """Whether Inductor may find that ``node`` is its input as it stands, and give readers the input instead."""
    return getattr(node.target, "__name__", "").partition(".")[0] in _COPIES


def _changed(metadata: Any) -> Iterator[int]:
    """The positions, among the inputs of a graph, of those that it changes in place."""
    inputs = getattr(metadata, "input_info", ())
    places = getattr(metadata, "subclass_inp_meta", None) or ()
    for number, one in enumerate(inputs):
        if not one.mutates_data:
            continue
        place = places[number] if len(places) == len(inputs) else number
        first = getattr(place, "flat_tensor_start_idx", None)
        if first is not None:  # a subclass, whose inner tensors are inputs
            yield from range(first, first + place.arg_count)
        else:
            found = getattr(place, "unwrapped_idx", place)
            if isinstance(found, int):
                yield found


def _named(operation: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The arguments of a call, with their names where they have some."""
    schema = getattr(operation, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    yield from itertools.zip_longest(names[: len(args)], args, fillvalue="")
    yield from kwargs.items()


_STATISTICS = ("running_mean", "running_var")


def _written_statistics(operation: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
    """The arguments of a batch norm in training, which it only writes."""
    is_norm = getattr(operation, "namespace", "") == "aten" and "batch_norm" in str(operation)
    return _STATISTICS if is_norm and _trains(operation, args, kwargs) else ()


def _nodes_of(values: Iterable[Any]) -> list[torch.fx.Node]:
    """The nodes of the tensors among ``values``, or what these are views of."""
    return [_viewed(node) for node in map(_node_of, tensors_in(values)) if node is not None]


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """What ``node`` is a view of, in the end, or the node."""
    while _views(node):
        node = node.all_input_nodes[0]
    return node


def _views(node: torch.fx.Node) -> bool:
    """Whether ``node`` makes no memory of its own; so does one of several views that are made at once."""
    if node.op == "call_function" and node.target is operator.getitem:
        return _views(node.all_input_nodes[0])
    return node.op == "call_function" and is_view(node.target)


_WHOLE = {
    getattr(torch.ops.aten, name)
    for name in ("_unsafe_view", "alias", "detach", "permute", "squeeze", "t", "transpose", "unsqueeze", "view")
}
"""Views of all of a tensor."""


def _is_whole_result(operation: Any, args: Any, region: str) -> bool:
    """Whether a view is of all that an operation of ``region`` has computed."""
    node = _node_of(args[0]) if operation.overloadpacket in _WHOLE and args else None
    while node is not None and _views(node):
        if getattr(node.target, "overloadpacket", None) not in _WHOLE:
            return False
        node = node.all_input_nodes[0]
    return node is not None and node.op == "call_function" and (node.meta.get("custom") or {}).get(SAVE_MARK) == region


def _node_of(tensor: Any) -> torch.fx.Node | None:
    """The node that has made ``tensor`` in the graph that is traced now."""
    slot = _slot_of(tensor)
    return None if slot is None else slot.proxy.node


def _slot_of(tensor: Any) -> Any:
    """Where the tracer notes which node ``tensor`` is."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor.elem)
    return proxy_tensor.get_proxy_slot(tensor, mode.tracer, None) if isinstance(tensor, torch.Tensor) else None


_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
"""What changes nothing, by operation."""


def _takes_the_place_of_what_is_kept(operation: Any, args: Any) -> bool:
    """Whether Inductor may find that this changes nothing: it puts what was given there, under the marks of this."""
    name = getattr(operation, "__name__", "").partition(".")[0]
    neutral = _NEUTRAL.get(name.rstrip("_"))
    if neutral is None or len(args) != 2 or not _breaks_down_for_inductor():
        return False
    for value, other in (args, args[::-1]):
        node = _node_of(value)
        if node is not None and name.endswith("_"):  # torch 2.12 and later ask when the value is the new one
            node = next(iter(node.all_input_nodes), node)
        while node is not None and (node.target is torch.ops.aten.clone.default or _views(node)):
            node = node.all_input_nodes[0]
        if node is None or node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE:
            continue
        if isinstance(other, torch.Tensor):
            nothing = _is_constant(_node_of(other))
        else:
            nothing = (
                type(other) in (int, float, bool) and other == neutral
            )  # one that the graph computes must not be asked
        if nothing:
            return True
    return False


def _is_constant(node: torch.fx.Node | None) -> bool:
    """Whether no input of the graph is in ``node``, but for sizes."""
    nodes = [] if node is None else [node]
    while nodes and nodes[-1].op in ("call_function", "get_attr"):
        inputs = nodes.pop().all_input_nodes
        nodes += [one for one in inputs if isinstance(one.meta.get("val"), torch.Tensor)]
    return node is not None and not nodes


def _trains(operation: Any, args: Any, kwargs: Any) -> bool:
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name in ("training", "train"):
            return bool(args[position] if position < len(args) else kwargs.get(argument.name))
    return True


def _has_saves(branch: torch.nn.Module) -> bool:
    """Whether a SAVE region is in a branch or body of control flow."""
    graphs = [module.graph for module in branch.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]  # inputs have copied marks
    return any(SAVE_MARK in (node.meta.get("custom") or ()) for node in nodes)


def is_view(operation: Any) -> bool:
    """Whether the operation makes no memory of its own."""
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    if operation is torch.ops.aten._unsafe_view.default:
        return True
    aliases = [argument.alias_info for argument in operation._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":  # attention is tagged for the dropout in it
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return value != 0
    return True


def _draws_the_same_again(operation: Any) -> bool:
    """Whether the compiler breaks the operation down to a seed that it keeps, as Inductor does."""
    aten = torch.ops.aten
    return _breaks_down_for_inductor() and (
        operation in _broken_down() or operation in (aten.rand.default, aten.randn.default, aten.randint.low)
    )


def _breaks_down_for_inductor() -> bool:
    """Whether the operations of the graph are those that Inductor wants."""
    return torch.ops.aten.rand_like.default in _broken_down()


def _broken_down() -> Any:
    """The operations that the compiler takes apart, with how."""
    mode: Any = proxy_tensor.get_proxy_mode()
    table: Any = getattr(mode, "decomposition_table", None)
    if table is None:  # before torch 2.13
        table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})
    return table.get({}) if isinstance(table, ContextVar) else table
