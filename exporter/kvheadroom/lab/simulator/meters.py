"""What vLLM's `/metrics` counts: `PrometheusStatLogger.record` of `v1/metrics/loggers.py` of vLLM 0.33.0."""

from bisect import bisect_left

from kvheadroom.lab.simulator.engine import Request

# The bounds of v1/metrics/buckets.py.
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

HISTOGRAMS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_num_preemptions",
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
)
"""Those that are kept, in the page's order."""


class Histogram:
    """Values counted by the smallest bound that is not below them."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Meters:
    """Counters and histograms of one engine.

    Attributes:
        success: ended requests by `finished_reason`.
        cached_tokens: of the counted prompts, those that were found in a cache; `external_tokens` of these in the tier in host memory.
    """

    def __init__(self, max_model_len: int) -> None:
        self.preemptions = self.prompt_tokens = self.generation_tokens = 0
        self.cached_tokens = self.external_tokens = 0
        self.success = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        tokens = _token_bounds(max_model_len)
        bounds = (tokens, tokens, tokens, _PREEMPTIONS, _FIRST_TOKEN_SECONDS, _REQUEST_SECONDS)
        self.histograms = {name: Histogram(each) for name, each in zip(HISTOGRAMS, bounds, strict=True)}

    def first_token(self, request: Request, at: float) -> None:
        """A prompt is counted when its first token is there."""
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += request.num_cached_tokens or 0
        self.external_tokens += request.num_external_tokens
        self.histograms["time_to_first_token_seconds"].observe(at - request.arrived_at)

    def ended(self, request: Request, at: float) -> None:
        """A request has all its tokens."""
        self.success[request.ends_by] += 1
        for name, value in (
            ("request_prompt_tokens", request.num_prompt_tokens),
            ("request_generation_tokens", request.num_output_tokens),
            ("request_params_max_tokens", request.max_tokens),
            ("request_num_preemptions", request.num_preemptions),
            ("e2e_request_latency_seconds", at - request.arrived_at),
        ):
            self.histograms[name].observe(value)


def _token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the longest length."""
    bounds = [float(digit * 10**power) for power in range(len(str(max_model_len))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= max_model_len)
