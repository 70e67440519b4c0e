"""Memory reports: the layout of the text, rule by rule, on real programs."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.events import Hidden
from helpers.programs import DifferentiableOnce
from torch import Tensor

import torch_remat as remat


def saver(names: dict[str, Callable[[Tensor], Tensor]], result: Callable[[Tensor], Tensor] = lambda t: t * 2):
    """An operation that saves what ``names`` says, under those names."""

    class Saver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            remat.save_for_backward(ctx, {name: make(x) for name, make in names.items()})
            return result(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            _ = ctx.saved_tensors
            return grad * 2

    return Saver.apply


def report_in_body(function: Callable[..., Any], name: str = "attn.softmax", **options: Any) -> list[str]:
    """The text that a body reports behind one SAVE region, in three calls."""
    texts: list[str] = []
    log = Hidden(texts=texts)  # unseen by the runtime, for which a growing list is another body in each call

    def body(x: Tensor) -> Tensor:
        y = remat.region(function, name, recompute=False)(x)
        log["texts"].append(remat.format_current_memory_report(**options))
        return y

    x = torch.zeros(6, 9, requires_grad=True)
    for _ in range(3):
        remat.checkpoint(region_name="layers.0")(body)(x)
    assert texts[0] == texts[1] == texts[2]
    return texts[0].splitlines()


class TestCurrent:
    def test_the_layout_of_a_region_with_two_saves(self):
        saves = {"lse": lambda x: torch.ones(3), "probs": lambda x: torch.ones(4)}
        assert report_in_body(saver(saves)) == [
            "layers.0: 28 B resident in 2 storage(s)",
            "layers.0::attn.softmax: 28 B",
            "  12 B  lse    (3,)  float32",
            "  16 B  probs  (4,)  float32",
        ]

    def test_rows_are_padded_aliases_folded_and_parts_flagged(self):
        def forward(ctx, x):
            y = x * 3
            part = torch.ones(20, 10)[:4]
            remat.save_for_backward(ctx, {"y": y, "alias": y, "part": part, "m": torch.ones(6, 9, dtype=torch.bool)})
            return y

        first = type(
            "First",
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(lambda ctx, grad: grad)},
        )
        assert report_in_body(first.apply, "first") == [
            "layers.0: 1.04 KiB resident in 3 storage(s)",
            "layers.0::first: 1.04 KiB",
            "  216 B  y = alias (output at idx 0)  (6, 9)   float32",
            "  800 B  part                         (4, 10)  float32  ! held for 160 B of 800 B",
            "   54 B  m                            (6, 9)   bool",
        ]

    def test_other_values_stand_below_the_one_that_covers_the_storage(self):
        whole = torch.ones(4, 6)
        saves = {"row": lambda x: whole[2], "all": lambda x: whole, "column": lambda x: whole[:, 1]}
        assert report_in_body(saver(saves))[2:] == [
            "  96 B  all  (4, 6)  float32",
            "    - column  view (4,)  spans 76 B",
            "    - row  view (6,)  spans 24 B",
        ]

    def test_parts_without_an_owner_have_a_base(self):
        whole = torch.ones(8)
        saves = {"b": lambda x: whole[4:6], "a": lambda x: whole[0:3], "n": lambda x: torch.ones(2)}
        assert report_in_body(saver(saves))[2:] == [
            "  32 B  base of a, b        float32  ! held for 20 B of 32 B",
            "    - a  view (3,)  spans 12 B",
            "    - b  view (2,)  spans 8 B",
            "   8 B  n  (2,)  float32",
        ]

    def test_a_single_part_names_its_row_and_overlaps_count_once(self):
        whole = torch.ones(10)
        lines = report_in_body(saver({"x": lambda x: whole[0:4], "y": lambda x: whole[2:6]}))
        assert lines[2] == "  40 B  base of x, y    float32  ! held for 24 B of 40 B"

    def test_unnamed_saves_are_counted_and_rebuilt_ones_have_a_line(self):
        texts: list[str] = []
        log = Hidden(texts=texts)

        def body(x: Tensor) -> Tensor:
            y = remat.region(lambda t: torch.sigmoid(t * 2) * t, "tail", recompute=False)(torch.sin(x))
            log["texts"].append(remat.format_current_memory_report())
            return y

        x = torch.zeros(6, 9, requires_grad=True)
        for _ in range(3):
            remat.checkpoint(region_name="enc")(body)(x)
        assert texts == [texts[0]] * 3
        head, _, *rows, footer = texts[0].splitlines()
        assert footer == "  + 1 save rebuilt on recompute, not resident"
        assert head == "enc: 224 B resident in 2 storage(s)"
        assert rows == ["    8 B  saved.0            ()      int64", "  216 B  saved.1 = saved.3  (6, 9)  float32"]

    def test_persisted_output_is_named_by_its_index(self):
        def two(t):
            return t + 1, t + 2

        texts: list[str] = []
        log = Hidden(texts=texts)

        def body(x: Tensor) -> Tensor:
            _, second = remat.region(two, "two", recompute=False)(x)
            y = torch.exp(torch.sin(second))
            log["texts"].append(remat.format_current_memory_report())
            return y

        leaf = torch.zeros(6, 9, requires_grad=True)
        for _ in range(3):
            remat.checkpoint()(body)(leaf)
        for text in texts:
            assert text.splitlines() == [
                "<unnamed>: 216 B resident in 1 storage(s)",
                "two: 216 B",
                "  216 B  output at idx 1  (6, 9)  float32",
            ]

    def test_an_output_with_several_indices_names_them_all(self):
        def twice(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = t.exp()
            return t + 1, y, y.view_as(y)

        texts: list[str] = []
        log = Hidden(texts=texts)

        def body(x: Tensor) -> Tensor:
            _, second, third = remat.region(twice, "twice", recompute=False)(x)
            y = torch.sin(second) * torch.sin(third)
            log["texts"].append(remat.format_current_memory_report())
            return y

        for _ in range(3):
            remat.checkpoint(region_name="b")(body)(torch.zeros(6, 9, requires_grad=True))
        assert texts == [texts[0]] * 3
        assert texts[0].splitlines() == [
            "b: 216 B resident in 1 storage(s)",
            "b::twice: 216 B",
            "  216 B  saved.0 (output at idx 1, 2)  (6, 9)  float32",
        ]

    def test_only_save_regions_with_rows_have_sections_in_the_order_of_execution(self):
        texts: list[str] = []
        log = Hidden(texts=texts)

        def body(x: Tensor) -> Tensor:
            y = remat.region(torch.exp, "z first", recompute=False)(x)
            y = remat.region(torch.sin, "recomputed", recompute=True)(y)
            y = remat.region(torch.cos, "rebuilds all", recompute=False)(y)
            with remat.name_scope("tail"):
                y = remat.region(torch.exp, "a second", recompute=False)(y)
            log["texts"].append(remat.format_current_memory_report())
            return y

        for _ in range(2):
            remat.checkpoint(region_name="b")(body)(torch.zeros(6, 9, requires_grad=True))
        assert texts[1].splitlines() == [
            "b: 432 B resident in 2 storage(s)",
            "b::z first: 216 B",
            "  216 B  saved.0 (output at idx 0)  (6, 9)  float32",
            "b::tail/a second: 216 B",
            "  216 B  saved.0 (output at idx 0)  (6, 9)  float32",
        ]

    def test_what_is_used_is_the_extent_where_there_are_too_many_runs(self):
        whole = torch.ones(3 * 5000, dtype=torch.uint8)
        few, many = whole[: 3 * 4096 : 3], whole[::3]  # bytes, each a run of its own
        assert report_in_body(saver({"few": lambda x: few}))[2] == (
            "  14.65 KiB  few  (4096,)  uint8  ! held for 4.00 KiB of 14.65 KiB"
        )
        assert report_in_body(saver({"many": lambda x: many}))[2] == (
            "  14.65 KiB  many  (5000,)  uint8  ! held for 14.65 KiB of 14.65 KiB"
        )

    def test_weights_and_their_views_are_left_out(self):
        linear = torch.nn.Linear(9, 3)
        lines = report_in_body(lambda t: torch.tanh(linear(t)))
        assert len(lines) == 3
        assert "output at idx 0" in lines[2]

    @pytest.mark.parametrize(
        "view",
        [
            lambda leaf: leaf,
            lambda leaf: leaf.view(-1, 9),
            lambda leaf: leaf.t().view(9, 6).t(),
            lambda leaf: leaf[1:4],
            lambda leaf: leaf.unbind(0)[2],
            lambda leaf: leaf.view(2, 3, 9).select(0, 1).expand(4, 3, 9),
        ],
        ids=["leaf", "view", "views of a view", "slice", "unbind", "expand"],
    )
    @pytest.mark.parametrize("where", ["input", "captured"])
    def test_a_leaf_costs_nothing_as_whatever_view_a_node_saves_it(self, view: Any, where: str):
        leaf = torch.zeros(6, 9, requires_grad=True)

        def body(x: Tensor) -> Tensor:
            read = leaf if where == "captured" else x
            return remat.region(lambda t: torch.sin(view(t if where == "input" else leaf)), "sin", recompute=False)(
                read
            )

        outputs = [remat.checkpoint(region_name="b")(body)(leaf) for _ in range(2)]
        assert remat.saved_tensors_report(outputs).bytes == 0

    def test_a_gradient_that_cannot_be_differentiated_again_is_walked(self):
        """Its node has the number of a leaf's node, and is none."""
        h = torch.zeros(6, requires_grad=True) * 2
        upstream = torch.ones(6, requires_grad=True) * 2
        (gradient,) = torch.autograd.grad(DifferentiableOnce.apply(h), h, upstream, create_graph=True)
        assert gradient.grad_fn._sequence_nr() == (1 << 64) - 1
        report = remat.saved_tensors_report(gradient.view(2, 3).neg().sin())
        assert [row.bytes for row in report.outside] == [gradient.nbytes]

    @pytest.mark.parametrize("shape", [(6, 9), (2, 3, 9), (1, 6, 9), (1, 1, 6, 9)])
    def test_a_linear_layer_on_a_leaf_keeps_nothing_but_its_output(self, shape: tuple[int, ...]):
        linear = torch.nn.Linear(9, 3)
        body = remat.checkpoint(region_name="b")(lambda x: remat.region(linear, "wq", recompute=False)(x).sin())
        y = body(torch.zeros(shape, requires_grad=True))
        assert remat.saved_tensors_report(y).bytes == y.nbytes

    def test_annotator_is_called_per_row_and_falsy_is_no_label(self):
        saves = {"lse": lambda x: torch.ones(3), "probs": lambda x: torch.ones(4)}
        lines = report_in_body(saver(saves), annotate=lambda t: "made here" if t.numel() == 3 else "")
        assert lines[2:] == ["  12 B  lse    (3,)  float32  made here", "  16 B  probs  (4,)  float32"]

    def test_errors_of_an_annotator_go_through(self):
        def fails(tensor):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            report_in_body(saver({"a": lambda x: torch.ones(3)}), annotate=fails)

    def test_outside_of_a_body_it_is_refused(self):
        with pytest.raises(RuntimeError, match="No active torch_remat checkpoint region"):
            remat.format_current_memory_report()

    def test_print_writes_one_newline_more(self, capsys):
        stream = io.StringIO()

        def body(x):
            y = remat.region(torch.exp, "e", recompute=False)(x)
            remat.print_current_memory_report()
            remat.print_current_memory_report(stream)
            return y

        remat.checkpoint(region_name="b")(body)(torch.zeros(2, requires_grad=True))
        text = capsys.readouterr().out
        assert stream.getvalue() == text
        assert text.endswith("float32\n")
        assert not text.endswith("\n\n")

    def test_in_replay_it_shows_what_forward_kept(self):
        log = Hidden()

        def body(x):
            y = remat.region(saver({"a": lambda x: torch.ones(3)}), "r", recompute=False)(x)
            log[remat.is_recomputing()] = remat.format_current_memory_report()
            return torch.exp(torch.sin(y))

        for _ in range(2):
            remat.checkpoint(region_name="b")(body)(torch.zeros(2, requires_grad=True)).sum().backward()
        for replaying in (False, True):
            assert log[replaying].splitlines() == [
                "b: 20 B resident in 2 storage(s)",
                "b::r: 20 B",
                "  12 B  a                (3,)  float32",
                "   8 B  output at idx 0  (2,)  float32",
            ]

    def test_a_region_whose_graph_is_gone_is_said_to_be(self):
        def body(x):
            remat.region(torch.exp, "lost", recompute=False)(x)
            kept = remat.region(torch.exp, "kept", recompute=False)(x)
            log["texts"].append(remat.format_current_memory_report())
            return kept

        texts: list[str] = []
        log = Hidden(texts=texts)
        for _ in range(2):
            remat.checkpoint(region_name="b")(body)(torch.zeros(2, requires_grad=True))
        lines = texts[1].splitlines()
        assert lines[0] == "b: 8 B resident in 1 storage(s)"
        assert lines[1] == "b::lost: none of its saved tensors is alive any more: its output is gone"
        assert lines[2] == "b::kept: 8 B"

    def test_a_storage_of_two_regions_is_billed_to_the_first(self):
        def body(x):
            shared = torch.ones(5)
            x = remat.region(saver({"s": lambda _: shared, "own": lambda _: torch.ones(2)}), "one", recompute=False)(x)
            x = remat.region(saver({"t": lambda _: shared, "own": lambda _: torch.ones(3)}), "two", recompute=False)(x)
            reports.append(remat.current_memory_report())
            return x

        reports = []
        remat.checkpoint(region_name="b")(body)(torch.zeros(2, requires_grad=True))
        (report,) = reports
        assert report.format().splitlines() == [
            "b: 40 B resident in 3 storage(s)",
            "b::one: 28 B",
            "  20 B  s    (5,)  float32",
            "   8 B  own  (2,)  float32",
            "b::two: 12 B",
            "  12 B  own  (3,)  float32",
            "  + 1 storage billed to b::one",
        ]

    def test_hook_packed_and_offloaded_tensors_have_lines_of_their_own(self):
        texts: list[str] = []
        log = Hidden(texts=texts)

        def body(x):
            y = remat.region(saver({"a": lambda _: torch.ones(3)}), "r", recompute=False)(x)
            z = torch.exp(torch.sin(y))
            log["texts"].append(remat.format_current_memory_report())
            return z

        x = torch.zeros(2, requires_grad=True)
        for _ in range(3):
            with remat.saved_tensors_hooks(lambda t: ("cpu", t.clone()), lambda payload: payload[1]):
                remat.checkpoint(region_name="b")(body)(x * 1)
        assert texts[2].splitlines() == [
            "b: 0 B resident in 0 storage(s)",
            "",
            "also held:",
            "  3 tensors packed by hooks (28 B on cpu)",  # the input and the output 8 B each, a 12 B
        ]

    def test_inputs_that_are_no_weights_have_rows(self):
        texts: list[str] = []
        log = Hidden(texts=texts)

        def body(x):
            log["texts"].append(remat.format_current_memory_report())
            return torch.exp(torch.sin(x))

        remat.checkpoint(region_name="b")(body)(torch.zeros(6, 9, requires_grad=True) * 1)
        assert texts[0].splitlines() == [
            "b: 0 B resident in 0 storage(s)",
            "",
            "also held:",
            "  216 B  input 0  (6, 9)  float32",
        ]


SQUARE = saver({"y": lambda x: x * x, "gf": lambda x: x * 2})


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        remat.save_for_backward(ctx, {"y": y, "gf": x * 2})
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, gf = ctx.saved_tensors
        return grad * gf


def square_layers(names: list[str], x: Tensor) -> Tensor:
    for name in names:
        x = remat.checkpoint(region_name=name)(lambda t: remat.region(Square.apply, "sq", recompute=False)(t))(x)
    return x


class TestWholeModel:
    def test_the_layout_of_two_equal_layers(self):
        for _ in range(3):
            loss = square_layers(["layer.0", "layer.1"], torch.zeros(3, 4, requires_grad=True)).tanh().sum()
            assert remat.format_saved_tensors_report(loss).splitlines() == [
                "saved for backward: 240 B resident -- 2 region(s) 192 B, outside regions 48 B",
                "",
                "regions:",
                "  96 B  x2  layer.0-1  (2 storages each)",
                "",
                "outside regions: 48 B in 1 storage",
                "       48 B  TanhBackward0 (x1)",
                "",
                "region detail:",
                "[x2: layer.0-1]",
                "layer.0: 96 B resident in 2 storage(s)",
                "layer.0::sq: 96 B",
                "  48 B  y (output at idx 0)  (3, 4)  float32",
                "  48 B  gf                   (3, 4)  float32",
            ]

    def test_without_roots_the_outside_is_not_walked(self):
        loss = square_layers(["a"], torch.zeros(3, 4, requires_grad=True)).tanh().sum()
        lines = remat.format_saved_tensors_report().splitlines()
        assert lines[0] == "saved for backward: 96 B resident -- 1 region(s) 96 B, outside regions not walked"
        assert lines[3] == "  96 B  a  (2 storages)"
        assert lines[5] == "outside regions: not walked; pass the loss as roots to see what is saved there"
        assert "[x" not in "".join(lines)
        del loss

    def test_without_regions_only_the_outside_is_there(self):
        loss = torch.zeros(3, 4, requires_grad=True).tanh().sum()
        assert remat.format_saved_tensors_report([loss, "no tensor", 3]).splitlines() == [
            "saved for backward: 48 B resident -- 0 region(s) 0 B, outside regions 48 B",
            "",
            "outside regions: 48 B in 1 storage",
            "       48 B  TanhBackward0 (x1)",
        ]

    @pytest.mark.parametrize(
        ("names", "written"),
        [
            (["L0", "L1", "L2", "L11"], "L0-2, L11"),
            (["L10", "L2", "L9"], "L2, L9-10"),
            (["enc.0", "enc.0", "dec.0"], "dec.0, enc.0 x2"),
            (["enc", "enc", "dec.3"], "dec.3, enc x2"),
            (["a.0.x", "a.1.x"], "a.0.x, a.1.x"),
        ],
    )
    def test_names_of_a_group(self, names: list[str], written: str):
        kept = square_layers(names, torch.zeros(3, 4, requires_grad=True))
        assert (
            f"  96 B  x{len(names)}  {written}  (2 storages each)" in remat.format_saved_tensors_report().splitlines()
        )
        del kept

    def test_groups_come_in_the_order_of_their_first_member_and_differ_by_sizes(self):
        big, small = torch.zeros(4, 4, requires_grad=True), torch.zeros(2, 4, requires_grad=True)
        kept = [square_layers(["L0", "L3"], small), square_layers(["L1", "L2"], big)]
        lines = remat.format_saved_tensors_report().splitlines()
        assert lines[2:5] == [
            "regions:",
            "  64 B  x2  L0, L3  (2 storages each)",
            "  128 B  x2  L1-2  (2 storages each)",
        ]
        del kept

    def test_a_region_left_with_nothing_says_that_its_storages_are_billed_earlier(self):
        shared = torch.ones(5)
        apply = saver({"s": lambda _: shared})

        def layer(t):
            return remat.region(apply, "r", recompute=False)(t)

        y = torch.zeros(2, requires_grad=True)
        for name in ("a", "b"):
            y = remat.checkpoint(region_name=name)(layer)(y)
        lines = remat.format_saved_tensors_report(y).splitlines()
        assert lines[0] == "saved for backward: 20 B resident -- 2 region(s) 20 B, outside regions 0 B"
        assert lines[3:5] == ["  20 B  a  (1 storage)", "  0 B  b  (0 storages)"]
        assert lines[-2:] == ["b: 0 B resident in 0 storage(s)", "  its storages are billed to regions above"]

    def test_outside_is_sorted_by_bytes_and_a_storage_of_several_nodes_named_by_all(self):
        x = torch.zeros(3, 4, requires_grad=True)
        h = torch.exp(x)
        loss = (torch.sin(h) + torch.tanh(x[:2]).sum()).sum()
        lines = remat.format_saved_tensors_report(loss).splitlines()
        assert lines[2:] == [
            "outside regions: 80 B in 2 storages",
            "       48 B  ExpBackward0 / SinBackward0 (x1)",
            "       32 B  TanhBackward0 (x1)",
        ]

    def test_outside_leaves_out_weights_and_what_hooks_packed(self):
        weight = torch.nn.Parameter(torch.ones(4, 3))
        x = torch.zeros(3, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            packed = torch.tanh(x).sin()
        h = torch.nn.functional.linear(torch.exp(x), weight.t())  # saves its input and a view of the weight
        lines = remat.format_saved_tensors_report(
            iter([packed, h.tanh().sum() + x[:2].tanh().sum(), None])
        ).splitlines()
        assert lines[2:] == [
            "outside regions: 116 B in 3 storages",
            "       68 B  TanhBackward0 (x2)",
            "       48 B  ExpBackward0 / MmBackward0 (x1)",
        ]

    def test_offloaded_outputs_have_a_footer(self):
        def layer(t: Tensor) -> Tensor:
            y = remat.region(torch.exp, "r", recompute=False)(t)
            return torch.exp(torch.sin(y))

        for _ in range(2):
            y = torch.zeros(2, requires_grad=True)
            with remat.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                for name in ("a", "b"):
                    y = remat.checkpoint(region_name=name)(layer)(y)
        assert remat.format_saved_tensors_report().splitlines()[2:5] == [
            "regions:",
            "  0 B  x2  a, b  (0 storages each)",
            "  + 2 outputs offloaded, not resident on device",
        ]

    def test_footers_are_summed_over_all_regions(self):
        def layer(t):
            return remat.region(torch.cos, "c", recompute=False)(torch.sin(t))

        x = torch.zeros(3, requires_grad=True)
        for _ in range(2):
            y = x
            for name in ("a", "b"):
                y = remat.checkpoint(region_name=name)(layer)(y)
        lines = remat.format_saved_tensors_report(y).splitlines()
        assert "  + 2 saves rebuilt on recompute, not resident" in lines

    def test_a_thousand_layers_stay_readable(self):
        for _ in range(2):
            y = square_layers([f"layers.{i}" for i in range(1000)], torch.zeros(3, 4, requires_grad=True))
        lines = remat.format_saved_tensors_report(y).splitlines()
        assert "  96 B  x1000  layers.0-999  (2 storages each)" in lines
        assert len(lines) < 20

    @pytest.mark.parametrize(("experts", "grouped"), [(49, False), (50, True), (600, True)])
    def test_many_regions_of_one_checkpoint_stay_readable(self, experts: int, grouped: bool):
        def body(t: Tensor) -> Tensor:
            t = remat.region(Square.apply, "attn", recompute=False)(t)
            parts = []
            for index in range(experts):
                with remat.name_scope(f"experts.{index}"):
                    h = remat.region(torch.exp, "up", recompute=False)(t[:1])
                    parts.append(remat.region(torch.exp, "down", recompute=False)(h[:, :2]))
            return torch.cat(parts)

        y = remat.checkpoint(region_name="layers.0")(body)(torch.zeros(3, 4, requires_grad=True))
        lines = remat.format_saved_tensors_report(y).splitlines()
        start = lines.index("layers.0::attn: 96 B")
        if not grouped:
            assert sum(line.startswith("layers.0::experts.") for line in lines) == 2 * experts
            return
        assert lines[start + 3 :] == [
            f"[x{experts}: layers.0::experts.*/up]",
            "layers.0::experts.0/up: 16 B",
            "  16 B  saved.0 (output at idx 0)  (1, 4)  float32",
            f"[x{experts}: layers.0::experts.*/down]",
            "layers.0::experts.0/down: 8 B",
            "  8 B  saved.0 (output at idx 0)  (1, 2)  float32",
        ]

    def test_data_and_json(self):
        loss = square_layers(["layer.0"], torch.zeros(3, 4, requires_grad=True)).tanh().sum()
        report = remat.saved_tensors_report(loss)
        data = json.loads(report.to_json())
        assert (data["bytes"], data["region_bytes"], data["outside_bytes"]) == (144, 96, 48)
        assert data["outside"] == [{"bytes": 48, "node_types": ["TanhBackward0"], "count": 1}]
        (row, _) = data["checkpoints"][0]["regions"][0]["rows"]
        assert (row["name"], row["shape"], row["bytes"]) == ("y (output at idx 0)", [3, 4], 48)
        with pytest.raises(AttributeError):
            report.outside = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1048575, "1.00 MiB"),
        (1 << 20, "1.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3.00 TiB"),
        (5000 << 40, "5000.00 TiB"),
    ],
)
def test_bytes(count: int, text: str):
    from torch_remat.diagnostics.report import format_bytes

    assert format_bytes(count) == text
