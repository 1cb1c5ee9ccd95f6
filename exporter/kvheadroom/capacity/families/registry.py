"""Every architecture whose rules are known."""

from collections.abc import Mapping

from kvheadroom.capacity.families import (
    attention,
    deepseek_v4,
    hybrid,
    hybrid_latent,
    hybrid_mamba,
    irregular,
    latent,
    minimax_m3,
    multimodal,
    qwen4_exp,
    windowed,
)
from kvheadroom.capacity.layer_stack import Reader

READERS: Mapping[str, Reader] = {
    **attention.READERS,
    **windowed.READERS,
    **irregular.READERS,
    **multimodal.READERS,
    **latent.READERS,
    **deepseek_v4.READERS,
    **minimax_m3.READERS,
    **hybrid.READERS,
    **hybrid_mamba.READERS,
    **hybrid_latent.READERS,
    **qwen4_exp.READERS,
}
KNOWN_ARCHITECTURES = frozenset(READERS)
