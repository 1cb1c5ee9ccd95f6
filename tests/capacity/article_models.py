"""The article's two checkpoints, as requests to plan."""

import json
from pathlib import Path
from typing import Any

from kvheadroom.capacity.deployment import PlanRequest
from kvheadroom.capacity.facts import OperatorFacts
from kvheadroom.capacity.stored_model import ModelFiles

FOLDER = Path(__file__).parent / "article"
CONFIGS = {
    "nvfp4": FOLDER / "glm-5.3-nvfp4.config.json",
    "fp8": FOLDER / "glm-5.3.config.json",
}
WEIGHTS_BYTES = {"nvfp4": 464_115_778_000, "fp8": 755_617_140_000}


def request(
    model: str = "nvfp4", *, overhead_gb: float = 12, gpus: int | None = 56, **flags: Any
) -> PlanRequest:
    """One start on B200, as the article has it."""
    return PlanRequest(
        model_files=ModelFiles(folder=model, config=json.loads(CONFIGS[model].read_text())),
        operator=OperatorFacts(
            flags=flags,
            gpu="B200",
            weights_bytes=WEIGHTS_BYTES[model],
            overhead_bytes=round(overhead_gb * 1e9),
        ),
        version="0.33.0",
        session_tokens=(262_144,),
        gpus=gpus,
    )
