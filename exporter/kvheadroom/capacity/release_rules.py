"""What changed between vLLM releases, as data. One line per change, with where it was read."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvheadroom.capacity.offload_rules import OffloadRules, offload_rules
from kvheadroom.capacity.scheduler_rules import SchedulerRules, scheduler_rules

T = TypeVar("T")
Release = tuple[int, int, int]
# (release, value from it on), oldest first
_Since = tuple[tuple[tuple[int, ...], T], ...]

# The releases whose own planning functions (0.33, 0.32) and running engine (0.32) the tests hold us to.
VERIFIED = ((0, 32), (0, 33))
OLDEST_KNOWN_RELEASE = (0, 6, 0)

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)")


class PackedBlocks(enum.Enum):
    """How groups whose layers' blocks differ in size share the blocks of the pool (DeepSeek-V4)."""

    OVER_ONE_ANOTHER = enum.auto()
    """A block holds any one group; each lies dense in it."""
    BY_SLOTS = enum.auto()
    """Blocks of windows are padded to one of the sizes of full attention; a block has room for the most of each size."""
    BY_TUPLES = enum.auto()
    """The same, and there is as much room for every size as for the commonest."""


@dataclass(frozen=True, slots=True)
class SecondRunner:
    """Models that the second model runner ("V2") serves unless told otherwise.

    Attributes:
        dense: every model without experts and recurrent states.
        all: every model.
    """

    architectures: frozenset[str] = frozenset()
    dense: bool = False
    all: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """The rules of one vLLM release that a prediction or an observation needs.

    Attributes:
        taken_from: (major, minor) of the release whose rules are taken.
        assumed_because: why these rules are an assumption, or None when the release is verified.
        default_gpu_memory_utilization: vLLM's default of `--gpu-memory-utilization`.
        usage_counts_null_block: the usage gauge divides by all blocks and counts the null block as used.
        lookups_per_attempt: a request that waits for blocks counts as looked up in the prefix cache at every step.
        lookups_after_preemption: what a preempted request finds again of its own tokens counts as prefix hits.
        saves_states: recurrent states are saved within a prefill, which takes a block more.
        saves_delta_states: those of gated delta nets as well, and blocks are a multiple of what their kernel can save at.
        v32_packed_dtypes: beginnings of the kv_cache_dtypes that DeepSeek-V3.2's hook turns into fp8_ds_mla.
        offloading_checks_rings: the OffloadingConnector wants circular buffers divisible as well.
        reserves_null_block: a start needs room for the null block beside one request.
        windows_hold_batches_in_flight: a window keeps the tokens of every batch in flight; before, of one batch.
        logs_tokens_by_concurrency: the tokens of the start-up log are max concurrency x max_model_len; before, blocks
            // groups x the smallest block size, which are no tokens of any request where groups differ.
        chunks_are_local: chunked attention keeps its chunk only; before, every token.
        unread_keys: keys of config.json that the release does not read yet.
        caches_hybrid_prefixes: prefix caching is on by default for models with recurrent states beside attention.
        keeps_mamba_states: with prefix caching Mamba layers keep a state for every block of a request.
        aligns_states: states are kept at block boundaries for prefix caching; before, it was switched off for them.
        least_latent_unit: tokens that a hybrid's block of latent attention is at least a multiple of.
        largest_kind_factor: groups are as large as the commonest kind where it has less than this many times the
            layers of the rarest; 1: never.
        largest_batches: from 160 GiB on a GPU batches 16,384 tokens by default, not 8,192.
        packed_blocks: how groups of unlike blocks share the pool.
        scheduler: how waiting requests are admitted.
        offload: how a tier in host memory is cut.
        subtracts_graphs: an estimate of the CUDA graphs is taken off before the pool is sized.
        second_runner: which models vLLM's second model runner serves by default.
        second_runner_subtracts_graphs: it makes that estimate as well.
        second_runner_is_lean: its dummy step samples without a 32-bit copy of the logits.
        sorts_logits: the dummy step sorts all logits to sample.
        keeps_workspaces: workspaces of experts stay allocated after a step.
        prefills_whole: the first engine ("V0") is the default, which prefills a prompt in one step.
        blackwell_kv_dtypes: for each architecture, what kv_cache_dtype=auto becomes on GPUs of capability 10.x.
    """

    taken_from: tuple[int, int]
    assumed_because: str | None
    default_gpu_memory_utilization: float
    usage_counts_null_block: bool
    lookups_per_attempt: bool
    lookups_after_preemption: bool
    saves_states: bool
    saves_delta_states: bool
    blackwell_kv_dtypes: Mapping[str, str]
    v32_packed_dtypes: tuple[str, ...]
    offloading_checks_rings: bool
    reserves_null_block: bool
    windows_hold_batches_in_flight: bool
    logs_tokens_by_concurrency: bool
    chunks_are_local: bool
    unread_keys: frozenset[str]
    caches_hybrid_prefixes: bool
    keeps_mamba_states: bool
    aligns_states: bool
    least_latent_unit: int
    largest_kind_factor: float
    largest_batches: bool
    packed_blocks: PackedBlocks
    scheduler: SchedulerRules
    offload: OffloadRules
    subtracts_graphs: bool
    second_runner: SecondRunner
    second_runner_subtracts_graphs: bool
    second_runner_is_lean: bool
    sorts_logits: bool
    keeps_workspaces: bool
    prefills_whole: bool


# What kv_cache_dtype=auto becomes on GPUs of capability 10.x (models/config.py), and since when.
_BLACKWELL_KV_DTYPES = (
    ((0, 32), "GlmMoeDsaForCausalLM", "fp8_e4m3"),
    ((0, 33), "Glm5NextForCausalLM", "fp8"),
    ((0, 33), "Glm5NextForConditionalGeneration", "fp8"),
)

_KEYS_OF_SHARED_INDEXERS = frozenset({"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"})
# model_executor/models/config.py DeepseekV32ForCausalLM
_V32_PACKED_DTYPES: _Since[tuple[str, ...]] = (
    ((0, 0), ("auto", "fp8")),
    ((0, 11, 1), ("fp8",)),
    ((0, 18), ()),
)
# v1/core/kv_cache_utils.py _get_kv_cache_groups_uniform_page_size
_LARGEST_KIND_FACTORS: _Since[float] = (((0, 0), 1.0), ((0, 12), 1.25), ((0, 18), 1.5))
# v1/core/kv_cache_utils.py _pool_bytes_per_block, _get_kv_cache_groups_uniform_groups
_PACKED_BLOCKS: _Since[PackedBlocks] = (
    ((0, 0), PackedBlocks.BY_TUPLES),
    ((0, 24), PackedBlocks.BY_SLOTS),
    ((0, 27), PackedBlocks.OVER_ONE_ANOTHER),
)
# model_executor/models/config.py HybridAttentionMambaModelConfig, since 0.20 platforms/interface.py
_LEAST_LATENT_UNITS: _Since[int] = (((0, 0), 64), ((0, 20), 1), ((0, 27), 128))

_DENSE_MOE = ("DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM")
_SINCE_26 = (
    *_DENSE_MOE,
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "LongcatFlashNgramForCausalLM",
)
# config/vllm.py use_v2_model_runner, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES (0.22 to 0.28)
_SECOND_RUNNERS: _Since[SecondRunner] = (
    ((0, 0), SecondRunner()),
    ((0, 22), SecondRunner(frozenset({"Qwen3ForCausalLM"}))),
    ((0, 23), SecondRunner(frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"}))),
    (
        (0, 24),
        SecondRunner(frozenset({*_DENSE_MOE, "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"})),
    ),
    ((0, 25), SecondRunner(frozenset(_DENSE_MOE), dense=True)),
    ((0, 26), SecondRunner(frozenset(_SINCE_26), dense=True)),
    ((0, 27), SecondRunner(frozenset({*_SINCE_26, "KimiK3ForConditionalGeneration"}), dense=True)),
    (
        (0, 28),
        SecondRunner(
            frozenset({*_SINCE_26, "DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration"}), dense=True
        ),
    ),
    ((0, 29), SecondRunner(all=True)),
)


def parse_release(version: str) -> Release | None:
    """`0.32.0`, `0.33.0rc1`, `0.11.2.dev5+gabc` -> (0, 32, 0) ...; None for anything that is no release number.

    vLLM's source builds without tags call themselves `0.1.dev...`: no release is known for them.
    """
    match = _VERSION.match(version.strip())
    if match is None:
        return None
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    return None if release < OLDEST_KNOWN_RELEASE else release


def rules_for(version: str | None) -> ReleaseRules:
    """The rules of `version`; one that is not verified takes the nearest verified rules, and says so."""
    release = None if version is None else parse_release(version)
    oldest, newest = VERIFIED[0], VERIFIED[-1]
    taken = newest if release is None or release[:2] > newest else max(release[:2], oldest)
    name = ".".join(map(str, taken))
    if version is None:
        assumed = f"the server's release is not known; rules of vLLM {name} taken"
    elif release is None:
        assumed = f"{version[:40]!r} is not a release number; rules of vLLM {name} taken"
    elif release[:2] not in VERIFIED:
        assumed = f"the rules of vLLM {version[:40]} are not verified; those of {name} taken, but for the known differences"
    else:
        assumed = None
    known = release or (*newest, 0)
    return ReleaseRules(
        taken_from=taken,
        assumed_because=assumed,
        # vllm/config/cache.py: 0.9 up to 0.19, 0.92 from 0.20.0
        default_gpu_memory_utilization=0.92 if known >= (0, 20, 0) else 0.9,
        # vllm/v1/core/block_pool.py get_usage: divides by num_gpu_blocks up to 0.10.1, by one less from 0.10.2
        usage_counts_null_block=known < (0, 10, 2),
        # vllm/v1/core/sched/scheduler.py: counted at each attempt up to 0.26, on admission from 0.27.0
        lookups_per_attempt=known < (0, 27, 0),
        # vllm/v1/core/kv_cache_manager.py get_computed_blocks: kept apart from 0.11.1, not in 0.11.0
        lookups_after_preemption=known < (0, 11, 1),
        # layers/mamba/mamba_mixer2.py and models/glm5next/common/kda.py have checkpoint blocks from 0.32.0, not in 0.31.0
        saves_states=known >= (0, 32, 0),
        # layers/mamba/gdn/qwen_gdn_linear_attn.py get_prefill_checkpoint_alignment came with 0.33.0
        saves_delta_states=known >= (0, 33, 0),
        blackwell_kv_dtypes={
            architecture: dtype for since, architecture, dtype in _BLACKWELL_KV_DTYPES if known[:2] >= since
        },
        # Not in 0.32.0's build_offloading_config; GLM-5.3-Flash's first users met it, on the release before.
        offloading_checks_rings=known < (0, 32, 0),
        # v1/core/kv_cache_utils.py: get_kv_cache_configs reserves it from 0.29.0, not in 0.28.0
        reserves_null_block=known >= (0, 29, 0),
        # v1/kv_cache_interface.py: max_in_flight_tokens from 0.26.0, max_num_batched_tokens up to 0.25.1
        windows_hold_batches_in_flight=known >= (0, 26, 0),
        # v1/core/kv_cache_utils.py _report_kv_cache_config: from 0.20.1, not in 0.20.0
        logs_tokens_by_concurrency=known >= (0, 20, 1),
        # envs.py VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE: 0 up to 0.13.0, 1 from 0.14.0
        chunks_are_local=known >= (0, 14, 0),
        # model_executor/models/deepseek_v2.py reads them from 0.21.0, not in 0.20.2: every layer had an indexer
        unread_keys=frozenset() if known >= (0, 21, 0) else _KEYS_OF_SHARED_INDEXERS,
        # config/model.py is_prefix_caching_supported: hybrids False up to 0.25.1, True from 0.26.0
        caches_hybrid_prefixes=known >= (0, 26, 0),
        # model_executor/models/config.py: mamba_cache_mode becomes `all` up to 0.27.0, `align` from 0.28.0
        keeps_mamba_states=known < (0, 28, 0),
        # config/cache.py mamba_cache_mode: not in 0.14.1, in 0.16.0
        aligns_states=known >= (0, 15, 0),
        # engine/arg_utils.py get_batch_defaults: not in 0.27.0, from 0.28.0
        largest_batches=known >= (0, 28, 0),
        least_latent_unit=_of_release(_LEAST_LATENT_UNITS, known),
        v32_packed_dtypes=_of_release(_V32_PACKED_DTYPES, known),
        largest_kind_factor=_of_release(_LARGEST_KIND_FACTORS, known),
        packed_blocks=_of_release(_PACKED_BLOCKS, known),
        scheduler=scheduler_rules(known),
        offload=offload_rules(known),
        # envs.py VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS: 0 up to 0.19.1, 1 from 0.20.0
        subtracts_graphs=known >= (0, 20, 0),
        second_runner=_of_release(_SECOND_RUNNERS, known),
        # v1/worker/gpu/model_runner.py profile_cudagraph_memory: returns 0 up to 0.28.0
        second_runner_subtracts_graphs=known >= (0, 29, 0),
        # v1/worker/gpu/model_runner.py _dummy_sampler_run: a pass with for_sampler_warmup from 0.33.0, not in 0.32.0
        second_runner_is_lean=known < (0, 33, 0),
        # v1/sample/ops/topk_topp_sampler.py apply_top_k_top_p: a Triton kernel from 0.17.0, not in 0.16.0
        sorts_logits=known < (0, 17, 0),
        # v1/worker/workspace.py: from 0.13.0, not in 0.12.0
        keeps_workspaces=known >= (0, 13, 0),
        # engine/arg_utils.py: the second engine is the default from 0.8.0
        prefills_whole=known < (0, 8, 0),
    )


def _of_release(values: _Since[T], release: Release) -> T:
    return [value for since, value in values if release >= since][-1]
