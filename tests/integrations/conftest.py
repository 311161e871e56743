"""Frameworks are imported once, in the fork server that ranks come from: a rank then starts in a second, not in ten."""

from __future__ import annotations

import os
from importlib.util import find_spec

from flashqla_cp.testing.spawn import preload

# Without it DeepSpeed looks for a GPU, and these tests use gloo.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
MODULES = {
    "transformers": ["transformers.models.qwen3_next.modeling_qwen3_next"],
    "deepspeed": ["deepspeed", "torch._dynamo"],
}

for framework, modules in MODULES.items():
    if find_spec(framework) is not None:
        preload(*modules)
