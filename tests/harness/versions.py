"""What torch 2.11 cannot do: see docs/versions.md."""

from __future__ import annotations

import pytest
import torch

OLD_TORCH = torch.__version__ < "2.12"

needs_torch_2_12 = pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 cannot (docs/versions.md)")
