"""The version of the package that is installed."""

from __future__ import annotations

import importlib.metadata

try:
    VERSION = importlib.metadata.version("torch_uvm")
except importlib.metadata.PackageNotFoundError:  # a checkout that was built in place
    VERSION = "0+unknown"
