"""Host memory from files as kernels write them: both cgroup versions, nested, absent; and from this very host."""

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.mesh.host_memory import HostMemoryReader, process_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


def host(tmp_path: Path, own: str, files: dict[str, str], meminfo: str = MEMINFO) -> HostMemoryReader:
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": own, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemoryReader(tmp_path / "proc", tmp_path / "cgroup")


def test_without_groups_the_machine_binds(tmp_path: Path) -> None:
    found = host(tmp_path, "0::/\n", {}).read()
    assert (found.left_bytes, found.limit_bytes, found.binding) == (600 * 1024, 1000 * 1024, "the machine")


def test_version_2_and_every_level_above(tmp_path: Path) -> None:
    files = {
        "cgroup/memory.stat": "inactive_file 0\n",
        "cgroup/a/memory.max": "409600\n",
        "cgroup/a/memory.current": "204800\n",
        "cgroup/a/memory.stat": "anon 1\ninactive_file 4096\n",
        "cgroup/a/b/memory.max": "max\n",
        "cgroup/a/b/memory.current": "204800\n",
    }
    found = host(tmp_path, "0::/a/b\n", files).read()
    (group,) = found.cgroups
    assert (group.version, group.limit_bytes, group.used_bytes, group.droppable_bytes) == (2, 409600, 204800, 4096)
    assert (found.left_bytes, found.limit_bytes) == (409600 - 204800 + 4096, 409600)
    assert found.binding.endswith("cgroup/a (v2)")


def test_version_1_counts_page_cache_which_can_be_dropped(tmp_path: Path) -> None:
    files = {
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cgroup/memory/memory.usage_in_bytes": "900000\n",
        "cgroup/memory/x/memory.limit_in_bytes": "500000\n",
        "cgroup/memory/x/memory.usage_in_bytes": "490000\n",
        "cgroup/memory/x/memory.stat": "cache 300000\ninactive_file 5\ntotal_inactive_file 250000\n",
    }
    found = host(tmp_path, "9:name=systemd:/x\n4:cpu,memory:/x\n0::/x\n", files).read()
    (group,) = found.cgroups
    assert (group.version, group.left_bytes, found.left_bytes) == (1, 260_000, 260_000)


def test_a_containers_path_that_is_the_hosts_leaves_its_root(tmp_path: Path) -> None:
    files = {"cgroup/memory.max": "300000\n", "cgroup/memory.current": "350000\n"}
    found = host(tmp_path, "0::/docker/abc\n", files).read()
    assert found.left_bytes == 0, "over its limit is nothing left, never below"


def test_the_machine_binds_where_a_group_has_more(tmp_path: Path) -> None:
    files = {"cgroup/memory.max": "1000000\n", "cgroup/memory.current": "0\n"}
    found = host(tmp_path, "0::/\n", files).read()
    assert (found.left_bytes, found.binding, found.limit_bytes) == (600 * 1024, "the machine", 1000 * 1024)


def test_limits_are_read_anew(tmp_path: Path) -> None:
    """P3.18: what is free now is what counts, whoever took or gave it."""
    reader = host(tmp_path, "0::/\n", {"cgroup/memory.max": "max\n", "cgroup/memory.current": "100000\n"})
    assert reader.read().cgroups == ()
    (tmp_path / "cgroup" / "memory.max").write_text("200000\n")
    assert reader.read().left_bytes == 100_000
    (tmp_path / "cgroup" / "memory.current").write_text("50000\n")
    assert reader.read().left_bytes == 150_000


def test_a_kernel_that_does_not_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no MemAvailable: set pool\.num_blocks"):
        host(tmp_path, "", {}, "MemTotal: 5 kB\n").read()


def test_this_host_and_this_process() -> None:
    found = HostMemoryReader().read()
    assert 0 < found.left_bytes <= found.limit_bytes <= found.total_bytes
    own = process_memory()
    assert own is not None
    assert own.pss_bytes >= own.anonymous_bytes > 2**20


def test_memory_that_is_taken_shows() -> None:
    before = process_memory()
    # A mapping of its own: the allocator may hand out memory that was counted before.
    with mmap(-1, 32 * 2**20, flags=MAP_PRIVATE | MAP_ANONYMOUS) as taken:
        taken.write(b"\x01" * len(taken))
        after = process_memory()
    assert before is not None and after is not None
    assert after.anonymous_bytes - before.anonymous_bytes > 24 * 2**20


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path) -> None:
    assert process_memory(1, tmp_path) is None
