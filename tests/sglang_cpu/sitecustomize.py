"""Lets SGLang be imported beside a CPU build of torch: put into site-packages by `make test-sglang`.

torchvision's CUDA build cannot load there, and its first import asks for operators that it would have
brought. They are declared, and never called.
"""

import importlib.abc
import sys
from typing import Any


class _Declare(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _Declare.library = library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _Declare())
