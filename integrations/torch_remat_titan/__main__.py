"""`python -m torch_remat_titan` is `python -m torch_remat_titan.train`."""

from torch_remat_titan.train import main

if __name__ == "__main__":
    main()
