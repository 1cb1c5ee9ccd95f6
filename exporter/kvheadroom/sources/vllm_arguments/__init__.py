"""The command line of a running vLLM server -> its settings, read as vLLM's own parser reads it."""
