"""DeepSpeed's ZeRO stages as contenders. Needs ``deepspeed``: see constraints-deepspeed.txt."""

import os
import warnings
from typing import Any

import torch

from benchmarks import gpt
from benchmarks.contenders import ADAMW, Batch


class ZeroContender:
    """``deepspeed.initialize`` with a stage and otherwise its defaults; ``torch.optim.AdamW(fused=True)`` as for the others."""

    is_global = False

    def __init__(self, shape: gpt.Shape, stage: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        warnings.filterwarnings("ignore")  # of torch's own deprecations
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        self.name = f"DeepSpeed ZeRO-{stage}"
        module = gpt.build(shape)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.AdamW(module.parameters(), fused=True, **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": shape.batch,
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # 1.0 by default, in this library alone
                "zero_optimization": {"stage": stage},
            },
        )

    def step(self, batch: Batch) -> torch.Tensor:
        loss: Any = self.engine(batch["inputs"], batch["targets"])
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def gradients(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError("DeepSpeed takes part in whole steps only")

    def settle(self) -> None:
        pass

    def optimizer_nbytes(self) -> int:
        raise NotImplementedError("DeepSpeed takes part in whole steps only")
