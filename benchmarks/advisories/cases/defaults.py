"""Defaults that DeepSpeed changed: DeepSpeed#8068, #8035, #8253, #8207."""

from __future__ import annotations

from deepspeed.constants import default_pg_timeout
from deepspeed.runtime.config import DeepSpeedConfig
from small_engine import answer

if __name__ == "__main__":
    config = DeepSpeedConfig(
        {
            "train_batch_size": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        }
    )
    answer(
        {
            "gradient_clipping": config.gradient_clipping,
            "bf16.check_grad_overflow": config.bfloat16_config.check_grad_overflow,
            "minutes of a collective operation until it times out": default_pg_timeout.total_seconds() / 60,
            "offload_optimizer.pin_memory": config.zero_config.offload_optimizer.pin_memory,
        }
    )
