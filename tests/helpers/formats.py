"""What tests of number formats share."""

import pytest
import torch

from areal_q.quant import FORMATS

E4M3 = torch.float8_e4m3fn
every_format = pytest.mark.parametrize("name", list(FORMATS))
