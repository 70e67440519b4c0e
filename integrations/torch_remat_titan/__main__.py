"""torchtitan's trainer, also on CPU ranks: `torchrun ... -m torch_remat_titan --module M --config F ...`."""

from torch_remat_titan.cpu import prepare_cpu_host


def main() -> None:
    """Run `torchtitan.train` with this process's command line, after the CPU settings where there is no accelerator."""
    prepare_cpu_host()
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
