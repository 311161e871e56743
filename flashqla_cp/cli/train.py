"""`flashqla-cp train`: the training program of launch/train.py under the product's command.

On several ranks: torchrun --nproc-per-node 2 --no-python flashqla-cp train --cp 2
"""

from __future__ import annotations

from flashqla_cp.launch.train import add_arguments, run

__all__ = ["add_arguments", "run"]
