"""Stands in for SGLang's kernel package, whose x86-64 wheel is CUDA only. Installed into .env by setup-engine.sh.

SGLang imports kernels by name on paths that a CPU run never takes: every name and every submodule exists here, and a call
fails with the kernel's name.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0+cpu"


class Absent:
    """A kernel, class or constant that is not here."""

    def __init__(self, path):
        self.path, self.__name__ = path, path.rpartition(".")[2]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.path}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.path} needs a GPU")


class Anything(ModuleType):
    """A module in which every public name exists."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder:
    """Makes any `sgl_kernel.a.b` importable."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Finder, is_package=True) if name.startswith(__name__ + ".") else None

    @staticmethod
    def create_module(spec):
        return Anything(spec.name)

    @staticmethod
    def exec_module(module):
        module.__path__ = []


sys.meta_path.append(Finder)
sys.modules[__name__].__class__ = Anything
