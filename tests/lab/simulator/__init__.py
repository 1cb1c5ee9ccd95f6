"""The simulator: held to recordings of a real vLLM, to its own scheduler, and to a plain pool of blocks."""
