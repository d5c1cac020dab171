"""The peer: Hugging Face's accelerate around their Llama, as its users train it.

accelerate wraps, compiles, casts and accumulates. The gate, the audit and the clock are ours. FSDP
is version 2, which shards each layer of the transformer.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from labs.scale_out.strategies import Fsdp, Strategy
from workshop.request import Request


class Accelerate(Strategy):
    """accelerate's DDP, or its FSDP: a plain model in one process."""

    def __init__(self, asked: Request, accumulate: int, *, sharded: bool) -> None:
        super().__init__(asked, accumulate)
        self.sharded = sharded

    def build(self) -> nn.Module:
        return self.asked.build_on(self.asked.device)

    def configure_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        from accelerate.state import AcceleratorState

        own = super().configure_optimizer(learning_rate)
        AcceleratorState._reset_state(reset_partial_state=True)  # else the first one stays
        self.accelerator = self._accelerator()
        self.asked.precision.set_matmul_mode()  # accelerate changes it when it compiles
        plain: Any = self.plain
        (model,) = plain.whole
        self.engine, self.accelerated = self.accelerator.prepare(model, own)
        return own

    def _accelerator(self) -> Any:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import TorchDynamoPlugin

        plugin = None
        if self.sharded:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
            )
        dynamo, mode = TorchDynamoPlugin(), self.asked.compile_mode
        if mode != "none":
            dynamo = TorchDynamoPlugin("inductor", mode=mode, use_regional_compilation=self.sharded)
        return Accelerator(
            mixed_precision="bf16" if self.asked.precision.autocast_dtype else "no",
            gradient_accumulation_steps=self.accumulate,
            cpu=self.asked.device.type == "cpu",
            fsdp_plugin=plugin,
            dynamo_plugin=dynamo,
        )

    def forward(self, *batch: Tensor) -> Tensor:
        run, model = self.asked.module.run, self.engine
        if not self.sharded or len(batch) == 1:
            out: Tensor = run(model, *batch)
            return out
        # Outside of the model, whose output, so its loss, accelerate's FSDP rounds to bf16.
        tokens, targets = batch
        loss: Tensor = model.loss_function(
            run(model, tokens), targets, model.config.vocab_size, shift_labels=targets
        )
        return loss

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        counted: AbstractContextManager[Any] = self.accelerator.accumulate(self.engine)
        return counted

    def clear_gradients(self) -> None:
        self.accelerated.zero_grad()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)  # divides by the number of parts

    def update(self) -> None:
        self.accelerated.step()

    whole = Fsdp.whole
