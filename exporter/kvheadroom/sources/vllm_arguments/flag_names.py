"""The names of all flags of `vllm serve`: an abbreviation can only be read by whoever knows every name that it could be.

Those of 0.33.0, as its parser registers them (`entrypoints/common/cli_args.py`, `engine/arg_utils.py`), and those that only
earlier releases had (the same files of 0.8.5, 0.9.2, 0.10.2, 0.11.2, 0.14.1, 0.17.1, 0.20.2, 0.24.0 and 0.28.0). With more names than
one release has, an abbreviation that fits one flag here fits no other there.
"""

from dataclasses import dataclass
from enum import Enum


class Arity(Enum):
    """How many words of the command line are a flag's value."""

    SWITCH = "none"
    ONE = "one"
    AT_MOST_ONE = "at most one"
    SEVERAL = "one or more"


@dataclass(frozen=True, slots=True)
class Flag:
    """What a word of the command line that is a flag stands for.

    Attributes:
        name: as vLLM's settings call it, with underscores.
        switched: what a switch is set to by this spelling of it; None for flags with values.
    """

    name: str
    arity: Arity
    switched: bool | None = None


_ONE = """
additional-config all2all-backend allowed-headers allowed-local-media-path allowed-methods allowed-origins
anthropic-disabled-thinking-effort api-server-count,-asc attention-backend attention-config,-ac
aux-output-config block-size chat-template chat-template-content-format code-revision cohere-format
compilation-config,-cc config config-format convert cp-kv-cache-interleave-size
cpu-distributed-timeout-seconds cpu-offload-gb custom-histogram-buckets data-parallel-address,-dpa
data-parallel-backend,-dpb data-parallel-rank,-dpn data-parallel-rpc-port,-dpp data-parallel-size,-dp
data-parallel-size-local,-dpl data-parallel-start-rank,-dpr data-parallel-supervisor-port
dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size
decode-context-parallel-size,-dcp default-chat-template-kwargs default-mm-loras device-ids
diffusion-config,-dc disable-access-log-for-endpoints distributed-executor-backend
distributed-timeout-seconds download-dir dp-supervisor-probe-failure-threshold
dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-sync-interval dtype ec-manager-config
ec-transfer-config elastic-ep-max-dp-size engram-config eplb-config expert-placement-strategy
fault-tolerance-config fingerprint-mode fingerprint-value gdn-prefill-backend generation-config
gpu-memory-utilization,--device-memory-utilization grpc-port h11-max-header-count
h11-max-incomplete-event-size hf-config-path hf-overrides host io-processor-plugin ir-op-priority
jit-monitor-mode kda-decode-backend kda-prefill-backend kernel-config kv-cache-dtype kv-cache-memory-bytes
kv-cache-metrics-sample kv-events-config kv-offloading-backend kv-offloading-size kv-transfer-config
limit-mm-per-prompt linear-backend load-format log-config-file log-level logging-config logprobs-mode
long-prefill-token-threshold lora-dtype mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode
mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr master-port max-cpu-loras
max-cudagraph-capture-size max-log-len max-logprobs max-lora-cls-labels max-lora-rank max-loras
max-model-len max-num-active-seqs max-num-batched-tokens max-num-queued-reqs max-num-queued-tokens
max-num-scheduled-tokens max-num-seqs max-parallel-loading-workers media-io-kwargs middleware
mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
mm-encoder-fp8-scale-save-path mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb
mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs
mm-shm-cache-max-object-size-mb mm-tensor-ipc model model-class-overrides model-impl
model-loader-extra-config moe-backend nnodes,-n node-rank,-r num-gpu-blocks-override offload-backend
offload-group-size offload-num-in-group offload-prefetch-step optimization-level otlp-traces-endpoint
override-generation-config per-request-spec-decode-metrics performance-mode pipeline-parallel-size,-pp
pooler-config port prefill-context-parallel-size,-pcp prefill-schedule-interval
prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit profiler-config
pt-load-map-location quantization,-q quantization-config reasoning-config reasoning-effort-map
reasoning-parser reasoning-parser-plugin renderer-num-workers replayssm-buffer-len response-role revision
root-path runner safetensors-load-strategy safetensors-prefetch-block-size
safetensors-prefetch-num-threads scheduler-cls scheduling-policy seed show-hidden-metrics-for-version
shutdown-timeout sleep-mode-backend sparse-indexer-topk-backend spec-method spec-model spec-tokens
speculative-config,-sc sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers
ssl-keyfile stream-interval structured-outputs-config tensor-parallel-size,-tp tokenizer tokenizer-mode
tokenizer-revision tool-call-parser tool-parser-plugin tool-server tool-strict-level ubatch-size uds
uvicorn-log-level video-pruning-method video-pruning-rate watchdog-config watermark watermark-config
weight-transfer-config worker-cls worker-extension-cls
"""
_SEVERAL = """
allowed-media-domains api-key collect-detailed-traces cpu-offload-params cudagraph-capture-sizes
ignore-patterns kv-cache-dtype-skip-layers logits-processors lora-modules lora-target-modules
numa-bind-cpus numa-bind-nodes offload-params served-model-name sleep-preserve-parameter-names
"""
_AT_MOST_ONE = """
hf-token
"""
_SWITCHES = """
aggregate-engine-logging data-parallel-multi-port-external-lb,-dpm disable-log-stats grpc headless
"""
_PAIRED = """
allow-credentials allow-deprecated-quantization async-scheduling cohere-is-reasoning-model
cudagraph-metrics data-parallel-external-lb,-dpe data-parallel-hybrid-lb,-dph dcp-q-replicate
disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs
disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization disable-sliding-window
disable-uvicorn-access-log enable-auto-tool-choice enable-batch-sharded-sampling enable-chunked-prefill
enable-cumem-allocator enable-dbo enable-elastic-ep enable-ep-weight-filter enable-eplb
enable-expert-parallel,-ep enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune
enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs
enable-log-requests enable-logging-iteration-details enable-lora enable-mamba-cache-stochastic-rounding
enable-mamba-shared-prefix-checkpoint enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds
enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs enable-per-request-metrics
enable-prefix-caching enable-prompt-embeds enable-prompt-tokens-details enable-request-id-headers
enable-return-routed-experts enable-scale-out enable-server-load-tracking enable-shm-tensor-arena
enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint enable-tower-connector-lora
enable-trace-replay enforce-eager exclude-tools-when-tool-choice-none fail-on-environ-validation
fully-sharded-loras interleave-mm-strings jit-monitor-verbose kv-cache-metrics kv-sharing-fast-prefill
language-model-only log-error-stack long-prefill-token-threshold-adaptive mm-device-do-normalize
mm-encoder-only monokernel numa-bind ray-workers-use-nsight return-sampling-mask
return-tokens-as-token-ids scheduler-reserve-full-isl skip-mm-profiling skip-tokenizer-init
sleep-mode-offload-cudagraph specialize-active-lora swa-bounded-replay tokens-only trust-remote-code
trust-request-chat-template trust-request-mm-kwargs use-fp64-gumbel use-replayssm use-tqdm-on-load
"""

# Only of earlier releases. The last line is of V0, up to 0.7.
_ONE_EARLIER = """
cuda-graph-sizes device eplb-step-interval eplb-window-size guided-decoding-backend logits-processor-pattern
long-lora-scaling-factors lora-extra-vocab-size max-long-partial-prefills max-num-partial-prefills
max-prompt-adapter-token max-prompt-adapters max-seq-len-to-capture num-lookahead-slots
num-redundant-experts num-scheduler-steps override-attention-dtype override-neuron-config
override-pooler-config preemption-mode qlora-adapter-name-or-path rope-scaling rope-theta
scheduler-delay-factor swap-space task tokenizer-pool-extra-config tokenizer-pool-size tokenizer-pool-type
speculative-model num-speculative-tokens
"""
_SEVERAL_EARLIER = """
prompt-adapters
"""
_PAIRED_EARLIER = """
calculate-kv-scales disable-async-output-proc disable-frontend-multiprocessing
disable-mm-preprocessor-cache enable-bf16x3-router-gemm enable-lora-bias
enable-multimodal-encoder-data-parallel enable-prompt-adapter enable-reasoning eplb-log-balancedness
expand-tools-even-if-tool-choice-none guided-decoding-disable-additional-properties
guided-decoding-disable-any-whitespace guided-decoding-disable-fallback multi-step-stream-outputs
use-gpu-for-pooling-score use-v2-block-manager
"""


def _options() -> dict[str, Flag]:
    found: dict[str, Flag] = {}
    for text, arity in (
        (_ONE + _ONE_EARLIER, Arity.ONE),
        (_SEVERAL + _SEVERAL_EARLIER, Arity.SEVERAL),
        (_AT_MOST_ONE, Arity.AT_MOST_ONE),
    ):
        for entry in text.split():
            long, *others = entry.split(",")
            found |= dict.fromkeys((f"--{long}", *others), Flag(long.replace("-", "_"), arity))
    for entry in (_SWITCHES + _PAIRED + _PAIRED_EARLIER).split():
        long, *others = entry.split(",")
        name = long.replace("-", "_")
        found |= dict.fromkeys((f"--{long}", *others), Flag(name, Arity.SWITCH, switched=True))
    for entry in (_PAIRED + _PAIRED_EARLIER).split():
        long = entry.partition(",")[0]
        off = Flag(long.replace("-", "_"), Arity.SWITCH, switched=False)
        found[f"--no-{long}"] = off
        first, _, rest = long.partition("-")
        if first in _INVERSE:
            found.setdefault(f"--{_INVERSE[first]}-{rest}", off)
    return found


# 0.33.0 pairs these (`EnableDisableAction`, utils/argparse_utils.py).
_INVERSE = {"enable": "disable", "disable": "enable"}

OPTIONS = _options()
"""Every spelling of every flag, dashes included."""
