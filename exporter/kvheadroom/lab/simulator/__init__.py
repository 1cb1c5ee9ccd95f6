"""vLLM's scheduler and block pool without a vLLM: requests in, the pages of `/metrics` out (docs/simulator.md)."""
