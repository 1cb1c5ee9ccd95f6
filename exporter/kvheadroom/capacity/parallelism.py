"""How a model is spread over GPUs, as far as its KV cache goes."""

from dataclasses import dataclass

MOST_GPUS = 65_536
"""The largest parallel size that is planned: no engine has more GPUs, and more stages would only take time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes by vLLM's flags; data parallelism is left out: every data-parallel engine has a pool of its own.

    Attributes:
        decode_context: GPUs of a tensor-parallel group over which the tokens of one context are spread.
        prefill_context: further GPUs that share the prefill; their KV is a copy.
    """

    tensor: int = 1
    pipeline: int = 1
    decode_context: int = 1
    prefill_context: int = 1


def pipeline_stages(num_layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, first stage first.

    What does not divide evenly goes to the stages before the last, one layer each
    (vllm/distributed/utils.py get_pp_indices, 0.33.0; VLLM_PP_LAYER_PARTITION is not known here).
    """
    stages = [num_layers // pipeline] * pipeline
    for i in range(num_layers % pipeline):
        stages[-2 - i] += 1
    return tuple(stages)
