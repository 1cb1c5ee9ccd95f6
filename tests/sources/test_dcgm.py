"""Pages of DCGM-exporters: MiB, what is reserved, MIG, pods, shared GPUs, blanks, and pages that are none."""

import random
import re

import pytest

from kvheadroom.capacity.gpus import GpuFailure
from kvheadroom.capacity.remote_gpus import Pod, RemoteGpu
from kvheadroom.sources.dcgm import MAX_GPUS, MAX_PODS, OLD_SECONDS, NoGpusError, parse_dcgm_page
from tests.dcgm_pages import H200, gpu, h200, page, series

NOW = 1_795_990_000.0
MIB = 2**20
ONE, TWO = "GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa"


def read(text: str) -> tuple[tuple[RemoteGpu, ...], tuple[GpuFailure, ...]]:
    return parse_dcgm_page(text.encode(), "dcgm_exporters[0]", NOW)


def only(text: str) -> RemoteGpu:
    (found,), failures = read(text)
    assert failures == ()
    return found


def test_names_that_an_exporter_tells_are_short_and_can_be_printed() -> None:
    found = only(
        page(
            gpu(
                series(ONE, name="\x1b[31mH200\\nx", pod="p" * 1000, namespace="n", Hostname="h" * 1000),
                **H200,
            )
        )
    )
    assert found.name == "\N{REPLACEMENT CHARACTER}[31mH200\N{REPLACEMENT CHARACTER}x"
    assert found.host == "h" * 200
    assert found.pods == (Pod("n", "p" * 200),)


def test_a_gpu_that_is_told_to_be_of_endless_pods_is_of_some() -> None:
    text = "".join(
        page(gpu(series(ONE, pod=f"p{number}", namespace="n"), **H200)) for number in range(MAX_PODS + 100)
    )
    assert len(only(text).pods) == MAX_PODS


def test_a_gpu_is_read_in_bytes_and_its_total_is_the_sum_of_what_is_reserved_used_and_free() -> None:
    found = only(h200())
    assert (found.gpu, found.name, found.index, found.host) == (ONE, "NVIDIA H200", 0, "node-1")
    assert (found.reserved_bytes, found.used_bytes, found.free_bytes) == (
        601 * MIB,
        130_003 * MIB,
        13_167 * MIB,
    )
    assert found.total_bytes == 143_771 * MIB
    assert (found.parent, found.gpu_instance, found.pods, found.last_xid, found.unknown) == (
        None,
        None,
        (),
        None,
        (),
    )


@pytest.mark.parametrize(
    ("mib", "total", "why"),
    [
        ({"free": 13_167, "used": 130_003}, None, "tells no DCGM_FI_DEV_FB_RESERVED (nor"),
        ({"free": 13_167, "used": 130_003, "total": 143_771}, 143_771, None),
        ({"free": 13_167, "used": 130_003, "reserved": 601, "total": 143_772}, 143_771, None),
        (
            {"free": 13_167, "used": 130_003, "total": 100_000},
            None,
            "DCGM_FI_DEV_FB_TOTAL is less than its parts",
        ),
        ({"free": 13_167, "reserved": 601}, None, "tells no DCGM_FI_DEV_FB_USED (nor"),
        ({"used": 5}, None, "tells no DCGM_FI_DEV_FB_RESERVED and DCGM_FI_DEV_FB_FREE (nor"),
        ({"used": 5, "total": 143_771}, 143_771, None),
    ],
)
def test_without_what_is_reserved_the_total_is_told_by_dcgm_or_unknown_with_the_reason(
    mib: dict[str, float], total: int | None, why: str | None
) -> None:
    found = only(page(gpu(series(ONE), **mib)))
    assert found.total_bytes == (None if total is None else total * MIB)
    assert (found.free_bytes, found.used_bytes, found.reserved_bytes) == tuple(
        mib[name] * MIB if name in mib else None for name in ("free", "used", "reserved")
    )
    assert [why is not None and why in sentence for sentence in found.unknown] == [True] * (why is not None)


@pytest.mark.parametrize("blank", [2147483632, 140737488355328, 9223372036854775794, -1, "NaN", "+Inf", "x"])
def test_dcgms_blanks_and_what_is_no_amount_are_no_numbers(blank: float | str) -> None:
    text = page(gpu(series(ONE), free=1, used=2)) + f"DCGM_FI_DEV_FB_RESERVED{series(ONE)} {blank}\n"
    found = only(text)
    assert (found.reserved_bytes, found.total_bytes, found.used_bytes) == (None, None, 2 * MIB)


def test_a_gpu_whose_memory_is_not_told_or_is_nothing_at_all_fails_alone() -> None:
    found, failures = read(
        page(
            gpu(series(ONE), **H200),
            gpu(series(TWO, 1), reserved=300),
            gpu(series("GPU-bbbbbbbb", 2), free=0, used=0),
        )
    )
    assert [one.gpu for one in found] == [ONE]
    assert [(one.gpu, str(one.reason)) for one in failures] == [
        (TWO, "not_supported"),
        ("GPU-bbbbbbbb", "bad_answer"),
    ]
    assert "tells neither DCGM_FI_DEV_FB_USED nor DCGM_FI_DEV_FB_FREE of it" in failures[0].detail


def test_of_a_gpu_in_mig_mode_each_instance_is_read_and_the_gpu_itself_is_not() -> None:
    found, failures = read(
        page(
            gpu(series(ONE), **H200),
            gpu(series(ONE, instance="3"), free=30_000, used=3_000, reserved=24),
            gpu(series(ONE, instance="13"), free=100, used=200, reserved=7),
            gpu(series(TWO, 1), free=1, used=2, reserved=3),
        )
    )
    assert failures == ()
    assert [(one.gpu, one.parent, one.gpu_instance, one.total_bytes) for one in found] == [
        (f"MIG-{ONE}/3", ONE, 3, 33_024 * MIB),
        (f"MIG-{ONE}/13", ONE, 13, 307 * MIB),
        (TWO, None, None, 6 * MIB),
    ]


@pytest.mark.parametrize(
    ("labels", "pods"),
    [
        ({"pod": "chat-0", "namespace": "vllm", "container": "c"}, [Pod("vllm", "chat-0")]),
        ({"pod": "", "namespace": "", "container": ""}, []),
        ({"pod_name": "chat-0", "pod_namespace": "vllm", "container_name": "c"}, [Pod("vllm", "chat-0")]),
        (
            # As a Prometheus stores it that does not honor labels: its own are those of the exporter's pod.
            {
                "exported_pod": "chat-0",
                "exported_namespace": "vllm",
                "pod": "dcgm-x",
                "namespace": "gpu-operator",
            },
            [Pod("vllm", "chat-0")],
        ),
    ],
)
def test_the_pod_of_a_gpu_is_read_in_each_of_its_spellings(labels: dict[str, str], pods: list[Pod]) -> None:
    more = "".join(f',{name}="{value}"' for name, value in labels.items()) + "}"
    assert list(only(page(gpu(series(ONE)[:-1] + more, **H200))).pods) == pods


def test_older_names_and_labels_are_read() -> None:
    labels = f'{{gpu="1",uuid="{ONE}",device="nvidia1",modelName="A",hostname="n"}}'
    found = only(f"dcgm_fb_free{labels} 10\ndcgm_fb_used{labels} 20\n")
    assert (found.gpu, found.index, found.host) == (ONE, 1, "n")
    assert (found.free_bytes, found.used_bytes) == (10 * MIB, 20 * MIB)
    spaced = 'DCGM_FI_DEV_FB_USED{gpu="0", UUID="GPU-604ac76c-d9cf", container="",pod=""} 7\r\n'
    assert only(spaced).used_bytes == 7 * MIB


def test_of_a_gpu_that_pods_share_the_use_of_one_pod_is_not_taken_for_all() -> None:
    shared = [series(ONE, pod=pod, namespace="v", vgpu=number) for pod, number in (("a", "0"), ("b", "1"))]
    text = "".join(
        f"DCGM_FI_DEV_FB_FREE{labels} 1000\nDCGM_FI_DEV_FB_RESERVED{labels} 600\nDCGM_FI_DEV_FB_USED{labels} {used}\n"
        for labels, used in zip(shared, (100, 200), strict=True)
    )
    for told in (text, "\n".join(line for line in text.splitlines() if 'pod="b"' not in line)):
        found = only(told)
        assert (found.free_bytes, found.used_bytes, found.total_bytes) == (1000 * MIB, None, None)
        assert found.unknown == (
            "DCGM_FI_DEV_FB_USED is told for each pod that shares the GPU, and not for the whole",
        )
    assert only(text).pods == (Pod("v", "a"), Pod("v", "b"))


def test_values_that_contradict_each_other_are_none_and_equal_ones_are_one() -> None:
    assert only(h200() + h200(job="other")).total_bytes == 143_771 * MIB
    found = only(h200() + f"DCGM_FI_DEV_FB_USED{series(ONE, job='other')} 130004\n")
    assert (found.free_bytes, found.used_bytes, found.total_bytes) == (13_167 * MIB, None, None)
    assert found.unknown == ("DCGM_FI_DEV_FB_USED is told several times with different values",)


def test_the_last_xid_is_carried_as_such() -> None:
    assert only(page(gpu(series(ONE), xid=79, **H200))).last_xid == 79
    assert only(page(gpu(series(ONE), xid=9223372036854775794, **H200))).last_xid is None


def test_a_page_of_prometheus_with_old_timestamps_gives_no_numbers() -> None:
    for age, fresh in ((OLD_SECONDS - 1, True), (OLD_SECONDS + 30, False)):
        text = re.sub(r"(?m)^(DCGM.*)$", lambda m: f"{m[1]} {(NOW - age) * 1000:.0f}", h200())  # noqa: B023
        found, failures = read(text)
        assert bool(found) == fresh
        if not fresh:
            assert [(one.gpu, str(one.reason)) for one in failures] == [(ONE, "timeout")]
            assert "150 s old by their timestamp" in failures[0].detail


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "tells of no GPU; is it that of a DCGM-exporter?"),
        ("<html>sign in</html>", "tells of no GPU"),
        ('vllm:num_requests_running{engine="0"} 1\n', "tells of no GPU"),
        ('DCGM_FI_DEV_FB_USED{gpu="0"} 1\n', "tells of no GPU"),
        ('DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-<b>"} 1\n', "tells of no GPU"),
        ('DCGM_FI_DEV_FB_USED_X{gpu="0",UUID="GPU-1"} 1\n', "tells of no GPU"),
        ("# HELP DCGM_FI_DEV_FB_USED x\n# TYPE DCGM_FI_DEV_FB_USED gauge\n", "tells of no GPU"),
        (
            "".join(f'DCGM_FI_DEV_FB_USED{{UUID="GPU-{i}"}} 1\n' for i in range(MAX_GPUS + 1)),
            "tells of more than 2048 GPUs",
        ),
    ],
)
def test_a_page_that_tells_of_no_gpu_is_refused_with_words(text: str, why: str) -> None:
    with pytest.raises(NoGpusError, match=re.escape(why)):
        read(text)


def test_changed_bytes_never_raise_anything_else(seeded: random.Random) -> None:
    whole = (h200(pod="p", namespace="n") + page(gpu(series(TWO, instance="3"), **H200))).encode()
    for _ in range(300):
        body = bytearray(whole)
        for _ in range(seeded.randrange(1, 8)):
            body[seeded.randrange(len(body))] = seeded.randrange(256)
        try:
            found, _ = parse_dcgm_page(bytes(body), "x", NOW)
        except NoGpusError:
            continue
        for one in found:
            assert all(number is None or number >= 0 for number in one.numbers)
