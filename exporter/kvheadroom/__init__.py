"""kvheadroom: KV-cache headroom of running vLLM servers, observed against an analytic prediction."""

__version__ = "0.1.0"
