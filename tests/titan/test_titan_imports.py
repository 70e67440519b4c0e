"""What may be imported when, in processes of their own."""

import pytest
from titan_hosts import needs_0_3, python


def test_importing_the_package_imports_neither_torchtitan_nor_torch():
    done = python(
        "import sys, torch_remat_titan\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'torchtitan', 'tokenizers'}))"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "module", ["options", "presets", "apply", "versions", "cpu", "text", "measure", "rows", "train"]
)
def test_modules_that_work_without_torchtitan(module):
    done = python(
        "import sys\n"
        "sys.modules['torchtitan'] = sys.modules['tokenizers'] = None\n"
        f"import torch_remat_titan.{module}\n"
        "print('fine')"
    )
    assert done.stdout == "fine\n", done.stderr


def test_without_an_accelerator_torch_cpu_gets_what_the_trainer_calls():
    done = python(
        "import torch\n"
        "torch.accelerator.is_available = lambda: False\n"
        "from torch_remat_titan.cpu import prepare_cpu_host\n"
        "print(prepare_cpu_host(), prepare_cpu_host())\n"
        "import torch._utils\n"
        "print(torch._utils._get_available_device_type(), torch.cpu.current_device(), torch.cpu.memory_stats())\n"
        "print(torch.cpu.get_device_properties(0).total_memory > 2**28)"
    )
    assert done.stdout == "True True\ncpu 0 {}\nTrue\n", done.stderr


def test_with_an_accelerator_nothing_is_touched():
    done = python(
        "import torch\n"
        "torch.accelerator.is_available = lambda: True\n"
        "import torch._utils\n"
        "before = torch._utils._get_available_device_type, torch.cpu.current_device\n"
        "from torch_remat_titan.cpu import prepare_cpu_host\n"
        "print(prepare_cpu_host())\n"
        "print(before == (torch._utils._get_available_device_type, torch.cpu.current_device))"
    )
    assert done.stdout == "False\nTrue\n", done.stderr


def test_preparing_after_torchtitan_was_imported_is_refused_with_the_fix():
    done = python(
        "import sys, torch, types\n"
        "torch.accelerator.is_available = lambda: False\n"
        "sys.modules['torchtitan.tools.utils'] = types.ModuleType('utils')\n"
        "from torch_remat_titan.cpu import prepare_cpu_host\n"
        "try:\n"
        "    prepare_cpu_host()\n"
        "except RuntimeError as error:\n"
        "    print(error)"
    )
    assert done.stdout == (
        "torchtitan was imported before prepare_cpu_host() and has already looked for an accelerator.\n"
        "To fix: call torch_remat_titan.cpu.prepare_cpu_host() before the first import of torchtitan.\n"
    ), done.stderr


@needs_0_3
@pytest.mark.slow
def test_the_three_configurations_differ_in_the_policy_only():
    done = python(
        "import re\n"
        "from torch_remat_titan.cpu import prepare_cpu_host\n"
        "prepare_cpu_host()\n"
        "from torch_remat_titan import pretrain\n"
        "configs = [getattr(pretrain, name)().to_dict() for name in ('none', 'full', 'regions')]\n"
        "policies = [config.pop('activation_checkpoint') for config in configs]\n"
        "saved = [policy['save_regions'] for policy in policies[1:]]\n"
        "texts = {re.sub('0x[0-9a-f]+', 'address', repr(config)) for config in configs}\n"
        "print(len(texts), policies[0], saved)"
    )
    saved = ["attention.inner_attention", "attention.wo", "feed_forward.*"]
    assert done.stdout == f"1 None {[[], saved]}\n", done.stderr
