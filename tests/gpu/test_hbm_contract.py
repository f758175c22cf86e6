"""The contract of tiers, held by the HBM tier on a GPU: the very tests of tests/tiers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "tiers" / "test_contract.py"

_spec = importlib.util.spec_from_file_location("contract_of_tiers", PATH)
assert _spec is not None
assert _spec.loader is not None
_contract = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _contract
_spec.loader.exec_module(_contract)

pytestmark = pytest.mark.gpu
put = _contract.put
for _name, _test in vars(_contract).items():
    if _name.startswith("test_"):
        globals()[_name] = _test
