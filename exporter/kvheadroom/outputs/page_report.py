"""What `kvheadroom inspect` prints: one record per engine of a vLLM page."""

from collections.abc import Iterator

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.outputs.numbers import count, percent


def page_report(page: VllmPage) -> Iterator[str]:
    """One line after the other."""
    for e in page.engines:
        yield (f"engine {e.engine}  model {e.model_name or 'not told'}")
        yield (
            f"  pool      {count(e.num_blocks)} blocks of {count(e.block_size)} tokens, "
            f"{count(e.pool_tokens)} tokens, {count(e.max_concurrency)} requests of max_model_len"
        )
        yield (f"  KV dtype  {e.kv_cache_dtype or '–'}")
        yield (f"  in use    {percent(e.kv_usage_ratio)}")
        yield (
            f"  requests  {count(e.requests_running)} running, {count(e.requests_waiting)} waiting "
            f"(capacity {count(e.requests_waiting_capacity)}, deferred {count(e.requests_waiting_deferred)})"
        )
        yield (f"  preempted {count(e.preemptions_total)} times since its start")
        yield (
            f"  prefix    {count(e.prefix_cache_hits_total)} of {count(e.prefix_cache_queries_total)} tokens "
            f"hit; connector {count(e.external_prefix_cache_hits_total)} of "
            f"{count(e.external_prefix_cache_queries_total)}"
        )
        yield (
            f"  tokens    {count(e.prompt_tokens_total)} prompt, {count(e.generation_tokens_total)} generated"
        )
