"""Imports, and kernels ready to run, that the fork server of test_faults.py loads once."""

import numpy as np

from kvkit.kernels.pages.api import pack, unpack
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace

_layout = small_layout()
_engine = Engine(_layout, small_namespace(_layout))
_record = np.zeros(_layout.chunk_bytes(4), np.uint8)
pack(_engine.pages[0], [_record], blocks=np.zeros((1, 1), np.int64), threads=1)
unpack(_engine.pages[0], [_record], blocks=np.zeros((1, 1), np.int64), threads=1)
