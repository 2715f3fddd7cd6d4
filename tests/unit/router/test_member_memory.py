"""What the metrics pages of members say of memory."""

from __future__ import annotations

from nerite.router.member_memory import memory_figures

GB = 10**9


def test_gpus_count_if_there_are_any() -> None:
    page = (
        b"# HELP nv_gpu_memory_total_bytes GPU total memory, in bytes\n"
        b'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 10000000000.000000\n'
        b'nv_gpu_memory_total_bytes{gpu_uuid="GPU-2"} 1e+10\n'
        b"nv_cpu_memory_total_bytes 50000000000\n"
    )
    assert memory_figures(page).total == 16 * GB
    assert memory_figures(page.split(b"\n")[-2]).total == 40 * GB


def test_versions_of_a_model_are_added_up() -> None:
    page = (
        b'nerite_model_memory_bytes{model="a",version="1"} 1000\n'
        b'nerite_model_memory_bytes{version="2",model="a"} 2000\n'
        b'nerite_model_memory_bytes{model="in the server",version="1"} 0\n'
        b'nerite_request_failures_total{model="b"} 7\n'
    )
    assert memory_figures(page) == (0, {"a": 3000})


def test_what_is_no_number_is_left_out() -> None:
    assert memory_figures(b"nv_cpu_memory_total_bytes 1e+\nnv_cpu_memory_total_bytes NaN\n\xff") == (0, {})
    assert memory_figures(b'nerite_model_memory_bytes{model="\xff"} 1\n').models == {"�": 1}
    assert memory_figures(b"nv_cpu_memory_total_bytes 9e999\n").total <= 2**60
    assert memory_figures(b'nerite_model_memory_bytes{model="a"} 9e999\n').models == {"a": 2**60}
