"""Pages of NVIDIA's DCGM-exporter, written by hand after its documented forms.

The forms are those of its template (internal/pkg/rendermetrics/render_metrics.go of NVIDIA/dcgm-exporter), its labels
(internal/pkg/transformation/const.go) and pages in its README and issues (512 for MIG, 326 for pci_bus_id): version 4 writes
`gpu, UUID, pci_bus_id, device, modelName[, GPU_I_PROFILE, GPU_I_ID], Hostname`, then labels of its own in any number
(`DCGM_FI_DRIVER_VERSION`, `err_code`, pod, ...).
"""

from collections.abc import Mapping

HELP = {
    "DCGM_FI_DEV_SM_CLOCK": "SM clock frequency (in MHz).",
    "DCGM_FI_DEV_GPU_TEMP": "GPU temperature (in C).",
    "DCGM_FI_DEV_XID_ERRORS": "Value of the last XID error encountered.",
    "DCGM_FI_DEV_FB_FREE": "Framebuffer memory free (in MiB).",
    "DCGM_FI_DEV_FB_USED": "Framebuffer memory used (in MiB).",
    "DCGM_FI_DEV_FB_RESERVED": "Framebuffer memory reserved (in MiB).",
    "DCGM_FI_DEV_FB_TOTAL": "Total Frame Buffer of the GPU in MB.",
}
H200 = {"free": 13_167, "used": 130_003, "reserved": 601}
"""A busy H200 in MiB, whose total is 143,771."""


def series(uuid: str, index: int = 0, *, instance: str = "", name: str = "NVIDIA H200", **more: str) -> str:
    """The labels of one GPU, or of one GPU instance in MIG mode."""
    labels = {
        "gpu": str(index),
        "UUID": uuid,
        "pci_bus_id": f"00000000:{index:02X}:00.0",
        "device": f"nvidia{index}",
        "modelName": name,
        **({"GPU_I_PROFILE": "2g.35gb", "GPU_I_ID": instance} if instance else {}),
        "Hostname": "node-1",
        "DCGM_FI_DRIVER_VERSION": "570.124.06",
        **more,
    }
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def gpu(labels: str, *, xid: float = 0, **mib: float) -> dict[str, list[str]]:
    """The lines of one GPU, by metric; a number that is left out is none that the exporter tells."""
    lines = {"DCGM_FI_DEV_SM_CLOCK": [f"{labels} 1980"], "DCGM_FI_DEV_GPU_TEMP": [f"{labels} 41"]}
    lines["DCGM_FI_DEV_XID_ERRORS"] = [
        f'{labels[:-1]},err_code="{xid}",err_msg="No Error, {{of course}}"}} {xid}'
    ]
    return lines | {
        f"DCGM_FI_DEV_FB_{name.upper()}": [f"{labels} {value:.0f}"] for name, value in mib.items()
    }


def page(*gpus: Mapping[str, list[str]]) -> str:
    """A whole page: the exporter groups its lines by metric."""
    text = ""
    for metric, told in HELP.items():
        lines = [line for one in gpus for line in one.get(metric, ())]
        if lines:
            text += f"# HELP {metric} {told}\n# TYPE {metric} gauge\n"
            text += "".join(f"{metric}{line}\n" for line in lines)
    return text


def h200(uuid: str = "GPU-11111111-2222-3333-4444-555555555555", index: int = 0, **more: str) -> str:
    """The page of one busy H200."""
    return page(gpu(series(uuid, index, **more), **H200))
