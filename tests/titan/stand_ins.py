"""Packages of kernels, images and text encoders that some model families import, and that the tests never call."""

import importlib.machinery
import importlib.util
import sys
from unittest.mock import MagicMock


def stand_in_for_missing_packages(*packages):
    """Let `packages` be imported, where they are not installed."""

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in missing:
                return None
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

        def create_module(self, spec):
            module = MagicMock(name=spec.name)
            module.__spec__, module.__path__ = spec, []
            return module

        def exec_module(self, module):
            pass

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder())
