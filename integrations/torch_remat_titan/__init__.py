"""torch_remat for torchtitan 0.3: region policies for its models, and its trainer on machines without an accelerator.

Importing this package imports neither torchtitan nor torch; take what you need from its modules:

| module | what it holds | imports torchtitan |
|---|---|---|
| `regions` | blocks of a model become checkpoints, calls of their submodules become SAVE regions | no |
| `activation_checkpoint` | `RegionAC`, the same as a torchtitan activation checkpointing policy | yes |
| `cpu` | what torchtitan needs to be told to run on CPU ranks over gloo | no |
| `attention` | torchtitan override: SDPA in place of FlexAttention | yes |
| `text` | English text and a tokenizer made from the standard library, nothing downloaded | no |
| `measure` | bytes kept after forward and replays of a model's blocks | no |
| `pretrain` | the main job: Llama 3 debug model, three configurations | yes |

`python -m torch_remat_titan` is `python -m torchtitan.train` with the CPU settings where there is no accelerator.
"""
