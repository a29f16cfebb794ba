"""Lets a torchvision built for CUDA import beside a CPU build of torch. Installed by setup_env.py where it is needed.

SGLang's configuration classes import torchvision; its compiled operators cannot load there, and serving text calls none
of them. Declaring the operators that torchvision registers meta functions for is enough for the import.
"""

import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                sys.torchvision_without_ops = library  # the declarations live as long as this object
        return None


sys.meta_path.insert(0, _DeclareOperators())
