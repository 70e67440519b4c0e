"""What stays in memory from forward to backward in a Llama block, counted in bytes and derived on paper.

The model: equal layers of RMSNorm, attention (wq, wk, wv, scaled_dot_product_attention, wo) and SwiGLU (w1, w3, w2), no
biases. Saved: the attention core, wo, w1, w3 and w2. "Annotated" means that `recompute_needs_tensor` names the outputs
that a replay of the whole layer reads: those of wo, w1, w3 and w2.

**Kept bytes.** The storages that an operation of the forward created, and the input of the model, that are alive when
the forward has returned: watched by weak references under a dispatch mode, each storage once and whole, with the
garbage collector off. Parameters do not count, nor does the output, which the caller holds. What is left lives because
autograd or a checkpoint holds it. No device counter is read, so the figure has no noise.

**Peak in backward.** The greatest sum of such storages alive at any operation of the backward, its gradients of
activations included. Parameters have their gradients before the step, so these do not count. "Above kept" is the peak
less the kept bytes: with checkpoints it is one layer's rebuilt tensors and its temporaries, however many layers.

Each case runs four steps, the last one is shown. The first must keep as much; where it does not, a line says so. Its
gradients are compared with those without checkpointing, bit for bit. The released 0.2.2 runs in a process of its own.

Exit status 0, or with `--check` 1 when ours does not keep what `paper_bytes` derives, to the byte.
"""

import argparse
import sys
from dataclasses import asdict, replace

from bench_common import Worker, add_peer_options, failure_cell, machine, serve, start_workers, table
from bench_memory_cases import ANNOTATED, PLAIN, SAC, SAVED, TORCH, Measured, Shape, worker

TITLES = {
    ("ours", PLAIN): PLAIN,
    ("ours", TORCH): TORCH,
    ("ours", SAC): SAC,
    ("peer", SAVED): f"torch_remat 0.2.2, {SAVED}",
    ("peer", ANNOTATED): f"torch_remat 0.2.2, {ANNOTATED}",
    ("ours", SAVED): f"torch_remat, {SAVED}",
    ("ours", ANNOTATED): f"torch_remat, {ANNOTATED}",
}
# On paper -------------------------------------------------------------------------------------------------------------


def paper_bytes(case: str, shape: Shape) -> int:
    """What `case` of ours or of torch's keeps after forward, from shapes alone."""
    residual, hidden = shape.residual_bytes, shape.token_bytes * shape.hidden
    # What SDPA's backward reads besides q, k, v and its output: one float32 log-sum-exp per query and head, whatever
    # the dtype of the elements.
    log_sum_exp = shape.batch * shape.heads * shape.seq * 4
    layer = residual  # [batch, seq, dim] the layer's input: replay starts there
    if case in (SAVED, ANNOTATED):
        layer += (
            residual  # [batch, seq, heads, dim / heads] core: its own backward and wo's read its output, one storage
        )
        layer += log_sum_exp
        layer += residual  # [batch, seq, dim] wo: the residual sum that the norm reads is made from its output
        layer += hidden  # [batch, seq, hidden] w1: SiLU's and the product's backward read its output
        layer += hidden  # [batch, seq, hidden] w3: the product's backward reads its output
        # Not kept: q, k, v (core saves them, replay makes them), the input of w1, w3 (the norm's output) and of w2 (the
        # product), and the output of w2, which is only added to the residual.
    if case == ANNOTATED:
        layer += residual  # [batch, seq, dim] w2: named, so kept, although nothing that backward needs is made from it
    if case == SAC:
        layer += (
            3 * residual
        )  # wq, wk, wv: every matrix product is saved, for a policy per operator cannot tell them apart
        layer += residual + log_sum_exp  # SDPA
        layer += residual + 2 * hidden + residual  # wo; w1, w3; w2
    return layer * shape.layers


# The parent: table and verdict ----------------------------------------------------------------------------------------


def run(workers: dict[str, Worker], shape: Shape) -> tuple[dict[tuple[str, str], Measured], dict[tuple[str, str], str]]:
    """The figures by (side, case), and why the others are missing."""
    found: dict[tuple[str, str], Measured] = {}
    failed: dict[tuple[str, str], str] = {}
    for side, case in TITLES:
        if side not in workers:
            continue
        reply = workers[side].ask({"do": "measure", "case": case, "shape": asdict(shape)})
        if "failed" in reply:
            failed[side, case] = reply["failed"]
        else:
            found[side, case] = Measured(**reply)
    return found, failed


def memory_table(
    found: dict[tuple[str, str], Measured], failed: dict[tuple[str, str], str], paper: dict[str, int], layers: int
) -> str:
    """The table of all cases that were asked for."""
    rows = []
    base = found["ours", PLAIN].kept
    for key, title in TITLES.items():
        derived = f"{paper[key[1]]:,}" if key[0] == "ours" and key[1] in paper else ""
        if key in found:
            one = found[key]
            per_layer = f"{one.kept // layers:,}" if one.kept % layers == 0 else f"{one.kept / layers:,.2f}"
            share = f"{one.kept / base:.3f}"
            rows.append(
                [title, f"{one.kept:,}", derived, per_layer, share, f"{one.peak:,}", f"{one.peak - one.kept:,}"]
            )
        elif key in failed:
            rows.append([title, failure_cell(failed[key]), derived, "", "", "", ""])
    header = ("case", "kept, bytes", "on paper", "per layer", "of none", "peak in backward", "above kept")
    return table(header, rows)


def verdict(found: dict[tuple[str, str], Measured], paper: dict[str, int], shape: Shape) -> tuple[list[str], bool]:
    """What the figures say, a line each, and whether ours keeps what was derived, to the byte."""
    lines: list[str] = []
    exact = True
    for case in (SAVED, ANNOTATED):
        mine = found.get(("ours", case))
        if mine is None:
            lines.append(f"ours, {case}: did not run")
            exact = False
            continue
        difference = mine.kept - paper[case]
        lines.append(
            f"ours, {case}: " + ("equal to the sum on paper" if not difference else f"{difference:+,} bytes off")
        )
        exact = exact and not difference
    ours = found.get(("ours", SAVED))
    peer = found.get(("peer", ANNOTATED))
    if ours is not None and peer is not None:
        less = (peer.kept - ours.kept) / shape.layers / shape.residual_bytes
        lines.append(f"ours keeps {less:g} tensor(s) [batch, seq, dim] per layer less than 0.2.2 annotated")
    sac = found.get(("ours", SAC))
    if ours is not None and sac is not None:
        lines.append(f"ours keeps {1 - ours.kept / sac.kept:.1%} less than SAC")
    for (side, case), one in found.items():
        if one.first_kept != one.kept:
            lines.append(f"{TITLES[side, case]}: the first step keeps {one.first_kept - one.kept:+,} bytes")
    return lines, exact


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_peer_options(parser)
    shape = Shape()
    for name, default in asdict(shape).items():
        if name != "element_bytes":
            parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 unless ours is equal to the sum on paper"
    )
    options = parser.parse_args()
    if options.worker:
        return serve(lambda: worker(options.worker))

    sizes = {name: getattr(options, name) for name in asdict(shape) if name != "element_bytes"}
    shape = replace(shape, **sizes, element_bytes=4 if options.dtype == "float32" else 2)
    workers = start_workers(__file__, options)
    try:
        found, failed = run(workers, shape)
        print(machine(workers["ours"].info))
    finally:
        for one in workers.values():
            one.close()
    print(", ".join(f"{name} {size}" for name, size in sizes.items()) + f", {options.dtype}\n")
    paper = {case: paper_bytes(case, shape) for case in (TORCH, SAC, SAVED, ANNOTATED)}
    print(memory_table(found, failed, paper, shape.layers) + "\n")
    lines, exact = verdict(found, paper, shape)
    print("\n".join(lines))
    for key, why in failed.items():
        print(f"{TITLES[key]}: {why}")
    return 1 if options.check and not exact else 0


if __name__ == "__main__":
    sys.exit(main())
