"""What the OffloadingConnector asks of block sizes at start, and says in words that hide the cause.

Source: vLLM 0.32.0 and 0.33.0 `distributed/kv_transfer/kv_connector/v1/offloading/config.py`
(build_offloading_config), `v1/core/kv_cache_utils.py` (resolve_kv_cache_block_sizes).
"""

import math
from collections.abc import Sequence

from kvheadroom.capacity.kv_groups import KvGroup
from kvheadroom.capacity.kv_specs import Kind


def offloading_refusal(
    groups: Sequence[KvGroup], *, decode_context: int, prefix_caching: bool, rings_too: bool
) -> str | None:
    """Why blocks cannot be offloaded, one sentence; None where they can.

    vLLM demands that every group's block is a multiple of the tokens that one hash covers, which is the greatest common
    divisor of the blocks that take part in prefix caching, and the least common multiple of all where states do not.

    Args:
        rings_too: the release also puts buffers through the check that are never offloaded.
    """
    if len(groups) == 1:
        return None
    sizes = {group: group.context_tokens(decode_context) for group in groups}
    hashed = {group: size for group, size in sizes.items() if group.specs[0].prefix_cacheable}
    states = [group for group in groups if group.specs[0].kind is Kind.STATE]
    if states and not prefix_caching:
        unit = math.lcm(*sizes.values())
        short = next((size for group, size in hashed.items() if size % unit and group not in states), None)
        if short is None:
            return None
        return (
            f"KV offloading needs prefix caching for a model with recurrent states: without it their blocks have "
            f"{sizes[states[0]]} tokens, and those of attention ({short}) are no multiple of that; "
            "say --enable-prefix-caching"
        )
    unit = math.gcd(*hashed.values())
    checked = sizes if rings_too else hashed
    for group, size in checked.items():
        if size % unit:
            return (
                f"KV offloading puts the {group.specs[0].kind.value} of {size} tokens through the same check as blocks "
                f"of {max(hashed.values())}, though it is never offloaded: {size} is not divisible by {unit}; "
                "use vLLM 0.32 or newer"
            )
    return None
