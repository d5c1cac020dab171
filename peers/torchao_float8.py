"""A peer for fp8: V2 compiled, its step captured, its linear layers by torchao's float8 training.

`compare_versions.py --precision bf16 fp8 --versions v1 v2 v3 v4 torchao` measures it: at bf16 it is
V2 compiled and captured, at `fp8` and `fp8-rowwise` torchao's recipes `tensorwise` and `rowwise`.
It needs the `torchao` package.
"""

import sys
from typing import Any

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

    from workshop.cli import leave_if_missing

    leave_if_missing("torchao")

from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from workshop import versions

v2: Any = versions.load("v2")
TinyLlamaConfig, configure_optimizer = v2.TinyLlamaConfig, v2.configure_optimizer


class TinyLlama(v2.TinyLlama):
    """V2, whose layers torchao converts where the harness asks for fp8."""

    def to_float8(self, recipe: str) -> None:
        """Takes torchao's layers of this recipe, not the harness's own."""
        convert_to_float8_training(
            self,
            config=Float8LinearConfig.from_recipe_name(recipe),
            # As in the versions, the head stays; and what is converted is not converted again.
            module_filter_fn=lambda part, name: type(part) is nn.Linear and name != "lm_head",
        )


if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
