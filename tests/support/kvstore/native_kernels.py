"""Native kernels of the store, compiled for the tests."""

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from kvstore.native import kernels

SOURCE = Path(kernels.__file__).with_name("kernels.c")
FLAGS = ["-O3", "-ffp-contract=off", "-fno-trapping-math"]  # same as in pyproject.toml


@cache
def native_kernels() -> ModuleType:
    """Compile the kernels; skip the test if there is no compiler."""
    compiler = shutil.which("cc")
    headers = Path(sysconfig.get_paths()["include"])
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("no C compiler, or no Python headers")
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        built = Path(folder) / f"_kernels{importlib.machinery.EXTENSION_SUFFIXES[0]}"
        checks = ["-Wall", "-Wextra", "-Werror", "-std=c11"]
        command = [compiler, "-shared", "-fPIC", *FLAGS, *checks, f"-I{headers}", str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, timeout=60)
        specification = importlib.util.spec_from_file_location("_kernels", built)
        assert specification is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return module
