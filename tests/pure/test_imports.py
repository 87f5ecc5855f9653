"""The deciding packages load nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "torch", "ray", "fastapi")


@pytest.mark.parametrize("package", ["engine", "memory", "cluster", "sim"])
def test_importing_a_pure_package_loads_no_heavy_library(package):
    script = f"""
import importlib, pkgutil, sys
package = importlib.import_module("headrace.{package}")
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
