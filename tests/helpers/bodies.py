"""Random bodies as Python source: random regions, bare operations, views, in-place operations, containers, policies.

:func:`write_program` draws a program from a ``random.Random``; :func:`check_program` runs it with and without a
checkpoint and requires equal bits or an error of ours. The source is the reproducer.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import torch_remat as remat
from helpers.body_ops import (
    BINARY,
    COMPLEX,
    FROM_COMPLEX,
    FUNCTIONS,
    INPLACE,
    TO_COMPLEX,
    UNARY,
    VIEWS,
    Value,
    pick_shape_op,
)
from helpers.compare import Run, assert_same_run, grad_weight, run_once
from helpers.hooks import generator_hooks
from helpers.trees import tensors_of
from torch_remat.errors import RematError

FEATURES = (
    "inplace", "region_inplace", "random", "escape", "nested", "integers", "containers", "no_grad", "control_flow",
    "closures", "pass_through", "scopes", "weights", "complex", "functions", "raises", "grad_hooks",
)  # fmt: skip


@dataclass
class Program:
    """One random body."""

    source: str
    regions: list[str]
    features: frozenset[str]
    inputs: int
    switches: list[str]
    """Names in ``M`` that change the body between calls."""


@dataclass
class _Scope:
    """Values that a function under construction can read: its own, and those of the functions around it."""

    values: list[Value]
    outer: list[Value] = field(default_factory=list)


class _Writer:
    """Draws one program."""

    def __init__(self, rng: random.Random, features: frozenset[str], size: int) -> None:
        self.rng, self.features, self.size = rng, features, size
        self.lines: list[str] = []
        self.regions: list[str] = []
        self.switches: list[str] = []
        self.count = 0
        self.depth = 0

    def has(self, feature: str, chance: float = 1.0) -> bool:
        return feature in self.features and self.rng.random() < chance

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def emit(self, line: str) -> None:
        self.lines.append("    " * (self.depth + 1) + line)

    def floats(self, scope: _Scope) -> list[Value]:
        own = [value for value in scope.values if value.kind == "float"]
        if self.has("closures", 0.2) and scope.outer:
            own = own + [value for value in scope.outer if value.kind == "float"]
        return own

    def pick(self, scope: _Scope) -> Value:
        values = self.floats(scope)
        # Prefer recent values: deep graphs rather than wide ones.
        return values[-1 - min(int(self.rng.expovariate(0.7)), len(values) - 1)]

    def assign(self, scope: _Scope, expression: str, shape: tuple[int, ...], kind: str = "float") -> Value:
        value = Value(self.name("v"), shape, kind)
        self.emit(f"{value.name} = {expression}")
        scope.values.append(value)
        return value

    # ------------------------------------------------------------------------------------------------- statements

    def statement(self, scope: _Scope, level: int) -> None:
        """One random statement."""
        choices: list[tuple[float, Callable[[_Scope, int], None]]] = [
            (5, self._unary), (3, self._binary), (2, self._view), (5 if level < 2 else 0, self._region),
        ]  # fmt: skip
        for feature, weight, method in (
            ("inplace", 1.5, self._inplace),
            ("region_inplace", 1.0 if level else 0.0, self._inplace),
            ("random", 1.0, self._random),
            ("escape", 0.7 if level == 0 else 0.0, self._escape),
            ("nested", 1.0 if level < 2 else 0.0, self._nested),
            ("integers", 1.0, self._integers),
            ("no_grad", 0.8, self._no_grad),
            ("control_flow", 0.8, self._control_flow),
            ("weights", 2.0, self._weights),
            ("morph", 3.0, self._morph),
            ("complex", 2.5, self._complex),
            ("functions", 1.5, self._custom),
            ("raises", 0.8 if level < 2 else 0.0, self._raises),
            ("grad_hooks", 0.7, self._grad_hook),
        ):
            if feature in self.features:
                choices.append((weight, method))
        methods = [method for _, method in choices]
        self.rng.choices(methods, [weight for weight, _ in choices])[0](scope, level)

    def _unary(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope)
        self.assign(scope, self.rng.choice(UNARY).format(a=value.name), value.shape)

    def _binary(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope)
        others = [other for other in self.floats(scope) if other.shape == value.shape]
        other = self.rng.choice(others or [value])
        self.assign(scope, self.rng.choice(BINARY).format(a=value.name, b=other.name), value.shape)

    def _view(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope)
        found = pick_shape_op(self.rng, VIEWS, value.shape)
        if found is None:
            self._unary(scope, level)
            return
        template, shape = found
        self.assign(scope, template.format(a=value.name), shape)

    def _weights(self, scope: _Scope, level: int) -> None:
        candidates = [value for value in self.floats(scope) if len(value.shape) == 2 and value.shape[1] == 6]
        if not candidates:
            self._unary(scope, level)
            return
        value = self.rng.choice(candidates)
        template = self.rng.choice(
            ["F.linear({a}, W[0])", "{a} @ W[1]", "F.linear({a}, W[0].t(), W[2])", "F.layer_norm({a}, (6,), W[2])"]
        )
        self.assign(scope, template.format(a=value.name), value.shape)

    def _inplace(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope)
        others = [other for other in self.floats(scope) if other.shape == value.shape]
        if self.rng.random() < 0.5:  # most in-place code works on something fresh
            value = self.assign(scope, f"{value.name} * 1.25", value.shape)
        self.emit(self.rng.choice(INPLACE).format(a=value.name, b=self.rng.choice(others or [value]).name))

    def _random(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope)
        template = self.rng.choice(
            ["F.dropout({a}, 0.4)", "{a} * torch.rand_like({a})", "{a} + torch.randn({a}.shape, dtype={a}.dtype)"]
        )
        self.assign(scope, template.format(a=value.name), value.shape)

    def _escape(self, scope: _Scope, level: int) -> None:
        self.emit("if not remat.is_recomputing():")
        self.emit(f"    escaped.append({self.pick(scope).name})")

    def _integers(self, scope: _Scope, level: int) -> None:
        candidates = [value for value in self.floats(scope) if len(value.shape) >= 1 and value.shape[0] > 0]
        if not candidates:
            self._unary(scope, level)
            return
        value = self.rng.choice(candidates)
        rows = value.shape[0]
        index = self.name("i")
        form = self.rng.randrange(4)
        if form == 0:
            self.emit(f"{index} = {value.name}.detach().reshape({rows}, -1).sum(1).argsort()")
            self.assign(scope, f"{value.name}[{index}]", value.shape)
        elif form == 1:
            self.emit(f"{index} = ({value.name} > 0)")
            self.assign(scope, f"torch.where({index}, {value.name}, {value.name} * 0.1)", value.shape)
        elif form == 2:
            self.emit(f"{index} = ({value.name} > 0.1).nonzero()[:, 0]")
            self.assign(scope, f"{value.name}[{index}].sum() * {value.name}", value.shape)
        else:
            self.emit(f"{index} = {value.name}.reshape({rows}, -1).argmax(1) % {rows}")
            self.assign(scope, f"{value.name}.index_select(0, {index})", value.shape)

    def _no_grad(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope)
        self.emit("with torch.no_grad():")
        self.depth += 1
        made = self.assign(scope, self.rng.choice(UNARY).format(a=value.name), value.shape)
        self.depth -= 1
        self.assign(scope, f"{value.name} * {made.name}", value.shape)

    def _control_flow(self, scope: _Scope, level: int) -> None:
        value, made = self.pick(scope), Value(self.name("v"), (), "float")
        made = Value(made.name, value.shape, "float")
        self.emit(f"if float({value.name}.detach().sum()) > 0:")
        self.emit(f"    {made.name} = {self.rng.choice(UNARY).format(a=value.name)}")
        self.emit("else:")
        self.emit(f"    {made.name} = {self.rng.choice(UNARY).format(a=value.name)}")
        scope.values.append(made)

    def _complex(self, scope: _Scope, level: int) -> None:
        """Complex numbers, conjugate and negative views, through operations and regions, back to real ones."""
        value = self.pick(scope)
        name = self.assign(scope, self.rng.choice(TO_COMPLEX).format(a=value.name), value.shape, "complex").name
        for _ in range(self.rng.randint(0, 3)):
            text = self.rng.choice(COMPLEX)
            if self.rng.random() < 0.5:
                region = self.name("region")
                self.regions.append(region)
                function = f"lambda u: {text.format(a='u')}"
                text = f"remat.region({function}, '{region}', recompute=P['{region}'])({name})"
            name = self.assign(scope, text.format(a=name), value.shape, "complex").name
        self.assign(scope, self.rng.choice(FROM_COMPLEX).format(a=name), value.shape)

    def _custom(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope)
        self.assign(scope, self.rng.choice(FUNCTIONS).format(a=value.name), value.shape)

    def _raises(self, scope: _Scope, level: int) -> None:
        """A region that does some work and fails; the body goes on with something else."""
        value, made, region = self.pick(scope), self.name("v"), self.name("region")
        self.regions.append(region)
        function = self.name("f")
        self.emit(f"def {function}(u):")
        self.emit(f"    w = {self.rng.choice(UNARY).format(a='u')}")
        self.emit("    raise ValueError('planted', w.shape)")
        self.emit("try:")
        self.emit(f"    {made} = remat.region({function}, '{region}', recompute=P['{region}'])({value.name})")
        self.emit("except ValueError:")
        self.emit(f"    {made} = {self.rng.choice(UNARY).format(a=value.name)}")
        scope.values.append(Value(made, value.shape, "float"))

    def _grad_hook(self, scope: _Scope, level: int) -> None:
        value = self.pick(scope).name
        # Inputs and what aliases them belong to the caller: there, a body has to guard its side effects.
        self.emit(f"if {value}.requires_grad and not remat.is_recomputing():")
        self.emit(f"    {value}.register_hook(lambda g: None if g is None else g * 0.75)")

    def _morph(self, scope: _Scope, level: int) -> None:
        """Code that a switch changes between calls: another operand, another operation, one operation more."""
        switch = f"M['{self.name('m')}']"
        self.switches.append(switch[3:-2])
        value = self.pick(scope)
        others = [other for other in self.floats(scope) if other.shape == value.shape]
        other = self.rng.choice(others or [value])
        form = self.rng.randrange(4 if "inplace" not in self.features else 5)
        first, second = self.rng.choice(UNARY), self.rng.choice(UNARY)
        if form == 0:
            text = f"{first} if {switch} else {first.replace('{a}', '{b}')}"
            self.assign(scope, text.format(a=value.name, b=other.name), value.shape)
        elif form == 1:
            self.assign(scope, f"{first} if {switch} else {second}".format(a=value.name), value.shape)
        elif form == 2:
            region = self.name("region")
            self.regions.append(region)
            function = f"(lambda u: {first}) if {switch} else (lambda u: {second})".format(a="u")
            self.assign(
                scope, f"remat.region({function}, '{region}', recompute=P['{region}'])({value.name})", value.shape
            )
        elif form == 3:
            self.assign(scope, f"{value.name} * 1.5 if {switch} else {value.name}", value.shape)
        else:
            self.emit(f"if {switch}:")
            self.emit("    " + self.rng.choice(INPLACE).format(a=value.name, b=other.name))

    # ---------------------------------------------------------------------------------------------------- regions

    def _function(self, scope: _Scope, level: int) -> tuple[str, list[Value], list[tuple[str, Value]]]:
        """Write a nested function; returns its name, its arguments and its outputs as (path, value)."""
        args = [self.pick(scope) for _ in range(self.rng.randint(1, 3))]
        function = self.name("f")
        own = [Value(self.name("a"), arg.shape, "float") for arg in args]
        wrapped = self.has("containers", 0.3)
        self.emit(f"def {function}({'args' if wrapped else ', '.join(value.name for value in own)}):")
        self.depth += 1
        if wrapped:
            self.emit(f"{', '.join(value.name for value in own)}, = args['a'][0]")
        inner = _Scope(list(own), scope.outer + scope.values)
        for _ in range(self.rng.randint(1, 3)):
            self.statement(inner, level + 1)
        fresh = [value for value in inner.values if value not in own] or own
        count = self.rng.choice([1, 1, 1, 2, 3])
        results = [self.rng.choice(fresh if not self.has("pass_through", 0.2) else own) for _ in range(count)]
        results[0] = fresh[-1] if not self.has("pass_through", 0.15) else results[0]
        text, outputs = self._container(results)
        self.emit(f"return {text}")
        self.depth -= 1
        if wrapped:
            return function, [Value("{'a': [(" + ", ".join(arg.name for arg in args) + ",)]}", (), "tree")], outputs
        return function, args, outputs

    def _container(self, results: list[Value]) -> tuple[str, list[tuple[str, Value]]]:
        names = [value.name for value in results]
        if len(results) == 1:
            return names[0], [("", results[0])]
        form = self.rng.randrange(4) if "containers" in self.features else 0
        if form == 0:
            return f"({', '.join(names)})", [(f"[{i}]", value) for i, value in enumerate(results)]
        if form == 1:
            return f"[{', '.join(names)}, None]", [(f"[{i}]", value) for i, value in enumerate(results)]
        if form == 2:
            text = "{" + ", ".join(f"'k{i}': {name}" for i, name in enumerate(names)) + ", 'n': 3}"
            return text, [(f"['k{i}']", value) for i, value in enumerate(results)]
        text = f"({names[0]}, {{'rest': [{', '.join(names[1:])}]}}, 'text')"
        return text, [("[0]", results[0])] + [(f"[1]['rest'][{i}]", value) for i, value in enumerate(results[1:])]

    def _call(self, scope: _Scope, callee: str, args: list[Value], outputs: list[tuple[str, Value]]) -> None:
        result = self.name("r")
        self.emit(f"{result} = {callee}({', '.join(arg.name for arg in args)})")
        for path, value in outputs:
            self.assign(scope, f"{result}{path}", value.shape, value.kind)

    def _region(self, scope: _Scope, level: int) -> None:
        region = self.name("region")
        if self.rng.random() < 0.35:
            value = self.pick(scope)
            function = f"lambda u: {self.rng.choice(UNARY).format(a='u')}"
            args, outputs = [value], [("", value)]
        else:
            function, args, outputs = self._function(scope, level)
        self.regions.append(region)
        scoped = self.has("scopes", 0.3)
        if scoped:
            self.emit(f"with remat.name_scope('scope{self.count}'):")
            self.depth += 1
        self._call(scope, f"remat.region({function}, '{region}', recompute=P['{region}'])", args, outputs)
        if scoped:
            self.depth -= 1
        if self.has("declare", 0.1):  # in no property test: nothing has to be declared
            self.emit(f"remat.recompute_needs_tensor({scope.values[-1].name})")

    def _nested(self, scope: _Scope, level: int) -> None:
        function, args, outputs = self._function(scope, level)
        self._call(scope, f"nested('{self.name('nested')}')({function})", args, outputs)

    def program(self, inputs: int) -> Program:
        """The whole body."""
        values = [Value(f"x{index}", (4, 6), "float") for index in range(inputs)]
        scope = _Scope(values)
        self.lines.append(f"def body({', '.join(value.name for value in values)}):")
        for _ in range(self.size):
            self.statement(scope, 0)
        own = [value for value in scope.values if value not in values[:inputs]] or values
        results = [own[-1]] + [self.rng.choice(own) for _ in range(self.rng.choice([0, 0, 1, 2]))]
        text, _ = self._container(results)
        self.emit(f"return {text}")
        return Program("\n".join(self.lines) + "\n", self.regions, self.features, inputs, self.switches)


def write_program(rng: random.Random, *, features: frozenset[str] | None = None, size: int | None = None) -> Program:
    """Draw a program; ``features`` limits what it may contain (None: a random choice of features)."""
    if features is None:
        features = frozenset(feature for feature in FEATURES if rng.random() < 0.4)
    return _Writer(rng, features, rng.randint(2, 9) if size is None else size).program(rng.randint(1, 2))


# ------------------------------------------------------------------------------------------------------------ running


class Saves(torch.autograd.Function):
    """Sine that saves its input, its output and an internal tensor, and reads the saved ones twice."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        """Sine."""
        output = t.sin()
        ctx.save_for_backward(t, output, t.cos())
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Cosine times the gradient, with nothing of the output added."""
        t, output, _ = ctx.saved_tensors
        _, _, cos = ctx.saved_tensors
        return grad * (cos + 0 * output + t.cos()) / 2


class Many(torch.autograd.Function):
    """Two outputs, one of them not differentiable in part; saves nothing but a flag and its second output."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Double and exponential."""
        second = torch.exp(-t.abs())
        ctx.save_for_backward(second, t.sign())
        return t * 2, second

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Chain rule."""
        value, sign = ctx.saved_tensors
        return first * 2 - second * value * sign


def backward_modes(escaped: list[torch.Tensor]) -> dict[str, Callable[[Any, list[torch.Tensor]], Any]]:
    """Ways to run backward over outputs and escaped intermediates."""

    def roots(outputs: Any) -> list[torch.Tensor]:
        found = [t for t in [*tensors_of(outputs), *escaped] if t.requires_grad]
        unique = list({id(t): t for t in found}.values())
        return unique

    def together(outputs: Any, inputs: list[torch.Tensor]) -> None:
        tensors = roots(outputs)
        if tensors:
            torch.autograd.backward(tensors, [grad_weight(t) for t in tensors])

    def one_by_one(outputs: Any, inputs: list[torch.Tensor]) -> None:
        tensors = roots(outputs)
        for index, tensor in enumerate(reversed(tensors)):
            tensor.backward(grad_weight(tensor), retain_graph=index < len(tensors) - 1)

    def by_grad(outputs: Any, inputs: list[torch.Tensor]) -> Any:
        tensors, inputs = roots(outputs), [leaf for leaf in inputs if leaf.requires_grad]
        if not tensors or not inputs:
            return None
        weights = [grad_weight(t) for t in tensors]
        first = torch.autograd.grad(tensors, inputs, weights, retain_graph=True, allow_unused=True)
        return first, torch.autograd.grad(tensors, inputs[:1], weights, allow_unused=True)

    def double(outputs: Any, inputs: list[torch.Tensor]) -> Any:
        tensors, inputs = roots(outputs), [leaf for leaf in inputs if leaf.requires_grad]
        if not tensors or not inputs:
            return None
        weights = [grad_weight(t) for t in tensors]
        first = torch.autograd.grad(tensors, inputs, weights, create_graph=True, allow_unused=True)
        again = [grad for grad in first if grad is not None and grad.requires_grad]
        if again:
            torch.autograd.backward(again, [grad_weight(grad) for grad in again])
        return [None if grad is None else grad.detach() for grad in first]

    return {"together": together, "one by one": one_by_one, "grad": by_grad, "double": double}


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """A payload as offloading makes it; strided views stay as they are, for kernels round by layout in the last bit."""
    return (tensor.clone() if tensor.is_contiguous() else tensor), "payload"


@dataclass
class Outcome:
    """How a program fared: ``equal``, ``refused`` (an error of ours) or ``invalid`` (eager refuses it too)."""

    kind: str
    error: BaseException | None = None
    failed_in: str | None = None


def check_program(
    program: Program, policies: list[dict[str, bool]], *, mode: str = "together", calls: int = 2, seed: int = 0
) -> list[Outcome]:
    """Run ``program`` under each policy, with and without a checkpoint; one outcome for each checkpointed call.

    Before each policy the switches of the program are set anew: the same code takes another way.

    Raises:
        AssertionError: the bits differ, or eager refuses what the checkpoint accepts, or the error is not one of ours.
    """
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    weights = [values(6, 6), values(6, 6), values(6)]
    inputs = [values(4, 6) for _ in range(program.inputs)]
    if seed % 4 == 3:
        inputs[-1].requires_grad_(False)
    spread: Callable[..., Any] = lambda function: function
    if seed % 5 == 4 and program.inputs == 2:  # both inputs are views of one tensor, and may overlap
        inputs, start = [values(8, 6)], seed % 3
        spread = lambda function: lambda base: function(base[start : start + 4], (base * 1)[4:] if start else base[4:])
    escaped: list[torch.Tensor] = []
    policy: dict[str, bool] = {}
    switches: dict[str, bool] = {}
    namespace: dict[str, Any] = {
        "torch": torch, "F": F, "remat": remat, "W": weights, "P": policy, "M": switches, "escaped": escaped,
        "Saves": Saves, "Many": Many,
    }  # fmt: skip

    def plain_nested(name: str) -> Callable[..., Any]:
        return lambda function: function

    def checkpointed_nested(name: str) -> Callable[..., Any]:
        return remat.checkpoint(region_name=name)

    exec(compile(program.source, f"<random body {hash(program.source)}>", "exec"), namespace)
    body = namespace["body"]
    options: dict[str, Any] = {"recompute_state_hooks": generator_hooks()} if "random" in program.features else {}
    if seed % 7 == 6:
        options["saved_tensors_hooks"] = (_pack, operator.itemgetter(0))
    backward = backward_modes(escaped)[mode]
    outcomes: list[Outcome] = []
    for chosen in policies:
        policy.update(chosen)
        switches.update({name: bool(torch.rand((), generator=generator) < 0.5) for name in program.switches})
        call = remat.checkpoint(region_name="random", **options)(body)
        namespace["nested"] = plain_nested
        expected = _run(spread(body), inputs, weights, backward, escaped)
        namespace["nested"] = checkpointed_nested
        for index in range(calls):
            actual = _run(spread(call), inputs, weights, backward, escaped)
            outcomes.append(_judge(expected, actual, f"call {index}, policy {chosen}, mode {mode}"))
    return outcomes


def _run(
    call: Callable[..., Any],
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    backward: Callable[[Any, list[torch.Tensor]], Any],
    escaped: list[torch.Tensor],
) -> Run:
    escaped.clear()
    try:
        return run_once(call, inputs, params=weights, backward=backward, catch=(RuntimeError, RematError))
    finally:
        escaped.clear()


def _judge(expected: Run, actual: Run, where: str) -> Outcome:
    if expected.error is not None:
        assert actual.error is not None, f"{where}: eager refuses ({expected.error}), the checkpoint does not"
        return Outcome("invalid", actual.error)
    if actual.error is None:
        assert_same_run(expected, actual, where)
        return Outcome("equal")
    assert isinstance(actual.error, RematError), f"{where}: not an error of ours: {actual.error!r}"
    assert "internal error" not in str(actual.error), f"{where}: {actual.error}"
    return Outcome("refused", actual.error, actual.failed_in)
