"""torch_remat for torchtitan 0.2.x and 0.3.x: `activation_checkpoint.mode = "remat"`.

    torchrun ... -m torch_remat_titan.train <the host's own arguments> --activation_checkpoint.mode remat \
        --activation_checkpoint.save_regions "attention.wo,feed_forward.*"

Importing this package imports neither torchtitan nor torch; its modules do:

| module | what it holds | imports torchtitan |
|---|---|---|
| `train` | the launcher, for both versions | when it runs |
| `options` | `RematOptions`, the one set of options behind both versions | no |
| `presets` | what the presets save | no |
| `apply` | options on a model or a pipeline stage | no |
| `versions` | which torchtitan is installed | no |
| `job_config` | 0.2: the mode and its options in the host's `JobConfig` and TOML | 0.2 |
| `titan_0_2` | 0.2: the policy just before the host parallelizes a model | 0.2 |
| `activation_checkpoint` | 0.3: `RematAC`, one of the host's policies, and its subcommand | 0.3 |
| `recipes` | 0.3: configurations to start from | 0.3 |
| `cpu` | what torchtitan needs to be told to run on CPU ranks over gloo | no |
| `attention` | 0.3: torchtitan override, SDPA in place of FlexAttention | 0.3 |
| `rows` | loss and gradient norm of each step with every digit | when asked to |
| `text` | English text and a tokenizer made from the standard library, nothing downloaded | no |
| `memory_dashboard` | option `memory_dashboard`: the job writes a run for TensorBoard | no |
| `measure` | bytes kept after forward and replays of a model's blocks | no |
| `pretrain` | 0.3: the main job, Llama 3 debug model, three configurations | 0.3 |
"""
