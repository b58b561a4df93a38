"""The pressure ladder: what goes first, how much, and that nothing live is ever called dead."""

import random
from itertools import product
from pathlib import Path

import pytest

from services.core.ids import LayoutKind
from services.core.step import StepPlan
from services.mesh.host_memory import HostMemoryReader
from services.mesh.settings.paths import StatePaths
from services.scheduler.batch.pressure import Relief, Rung, climb, next_rung
from services.scheduler.memory_watch import LOOK_EVERY_S, MemoryWatch
from tests.mesh.support.toy_group import running_group
from tests.support.scripted_scheduler import open_log
from tests.support.toy_rank import Bench, answer, layout_of, limits_of

BOTH = pytest.mark.parametrize("kind", list(LayoutKind))
FLOOR, BLOCK = 1 << 20, 1 << 12


class Stand:
    """A ladder over a /proc that says what the test wrote there, and a clock that it moves."""

    def __init__(self, bench: Bench, proc: Path) -> None:
        self.bench, self.now_s, self._proc = bench, 0.0, proc
        self.taken: list[Relief] = []
        self._watch = MemoryWatch(FLOOR, BLOCK, HostMemoryReader(proc, proc), lambda: self.now_s)

    @property
    def rungs(self) -> list[str]:
        return [relief.rung.value for relief in self.taken]

    def look(self, num_missing: int, after_s: float = LOOK_EVERY_S) -> None:
        """With so many blocks' memory missing to the floor."""
        kilobytes = (FLOOR - num_missing * BLOCK) // 1024
        self._proc.joinpath("meminfo").write_text(f"MemTotal: 9999 kB\nMemFree: 0 kB\nMemAvailable: {kilobytes} kB\n")
        self.now_s += after_s
        if (seen := self._watch.look()) is not None:
            self.taken += climb(self.bench.batcher, seen.num_needed, is_enough=seen.is_enough)


@pytest.fixture
def bench() -> Bench:
    return Bench(limits_of(), layout_of(LayoutKind.TP))


@pytest.fixture
def stand(bench: Bench, tmp_path: Path) -> Stand:
    return Stand(bench, tmp_path)


def test_rungs_come_in_their_order_and_only_where_those_before_give_too_little() -> None:
    for needed, dead, cached, resident, frozen in product((-3, 0, 5), (0, 3, 5, 9), (0, 2), (0, 1, 2), (False, True)):
        rung = next_rung(needed, num_dead=dead, num_cached=cached, num_running=resident, is_frozen=frozen)
        if needed <= 0 or frozen:
            assert rung is None
        elif dead >= needed:
            assert rung is Rung.RELEASE, "enough is dead: nothing cached is given up for it"
        elif cached:
            assert rung is Rung.EVICT
        elif dead:
            assert rung is Rung.RELEASE
        else:
            assert rung is (Rung.RETRACT if resident > 1 else None), "the last request goes on"


def test_eviction_stops_as_soon_as_it_is_enough(bench: Bench, stand: Stand) -> None:
    bench.submit("now", [900], 200)
    for start in (0, 200, 400):
        bench.submit(f"r{start}", list(range(start, start + 160)), 2)
        while f"r{start}" not in bench.ends:
            bench.step()
    bench.batcher.release_dead()
    bench.step()
    assert bench.batcher.num_dead_blocks <= 1
    cached = bench.batcher.load().cached_blocks
    stand.look(0)
    assert not stand.taken, "at the floor nothing is given"
    stand.look(4)
    assert stand.rungs == ["evict", "release"]
    assert stand.taken[0].num_blocks == cached - bench.batcher.load().cached_blocks > 0
    bench.run()
    assert bench.outputs["now"] == answer([900], 200)


def test_a_look_a_second_and_none_of_a_pending_flip(bench: Bench, stand: Stand) -> None:
    bench.submit("a", list(range(40)), 20)
    bench.issue_all()
    bench.batcher.freeze()
    before = bench.batcher.census()
    stand.look(3)
    assert not stand.taken and bench.batcher.census() == before
    while bench.unreported:
        bench.report()
    bench.batcher.thaw(layout_of(LayoutKind.TP))
    stand.look(3, after_s=LOOK_EVERY_S / 2)
    assert not stand.taken
    stand.look(3, after_s=LOOK_EVERY_S / 2)
    assert stand.rungs == ["release"]


@BOTH
def test_the_youngest_wait_and_come_back_with_their_answers(kind: LayoutKind, tmp_path: Path) -> None:
    bench = Bench(limits_of(), layout_of(kind))
    stand = Stand(bench, tmp_path)
    prompts = {name: list(range(at, at + 20)) for at, name in enumerate("abc")}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 40)
    for _ in range(6):
        bench.step()
    for _ in range(8):
        stand.look(40)
        bench.step()
    assert [relief.request_id for relief in stand.taken if relief.rung is Rung.RETRACT] == ["c", "b"]
    load = bench.batcher.load()
    assert (load.running_requests, load.queued_requests, load.uncomputed_prefill_tokens) == (1, 2, 0)
    for _ in range(4):
        bench.step()
    assert bench.batcher.load().running_requests == 1, "nobody comes back while memory is short"
    stand.look(-FLOOR // BLOCK)
    for _ in range(4):
        bench.step()
    assert bench.batcher.load().running_requests == 3
    bench.run()
    for name, prompt in prompts.items():
        assert bench.outputs[name] == answer(prompt, 40)


def test_the_queue_goes_on_one_by_one_while_memory_stays_short(bench: Bench, stand: Stand) -> None:
    for at, name in enumerate("abc"):
        bench.submit(name, [at], 20)
    bench.step()
    for _ in range(400):
        stand.look(10)
        bench.step()
    assert {name: bench.outputs[name] for name in "abc"} == {name: answer([at], 20) for at, name in enumerate("abc")}


class Tables:
    """Which blocks ranks may still touch: of every step that is not acknowledged, those in any table."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._ends = bench, dict[int, int]()
        self.num_released = 0

    def issue(self) -> bool:
        bench = self._bench
        plan: StepPlan | None = bench.issue()
        if plan is None:
            return False
        sequence = bench.sequence - 1
        in_tables = (block for place in bench.rank.places.values() for block in place.blocks)
        self._ends[sequence] = max(in_tables, default=-1) + 1
        if plan.dead_from is not None:
            self.num_released += 1
            in_flight = {number for number, _ in bench.unreported}
            assert plan.dead_from >= max(self._ends[number] for number in in_flight)
            owned = [begin + length for begin, length in bench.batcher.live_runs()]
            assert plan.dead_from >= max(owned), "cached blocks and those of the undead are owned"
        return True


@BOTH
@pytest.mark.parametrize("seed", range(12))
def test_no_step_calls_a_block_dead_that_anybody_may_still_read(kind: LayoutKind, seed: int, tmp_path: Path) -> None:
    """Random load with a flip now and then, and looks at random; the toy forgets what is said to be dead."""
    draw = random.Random(seed)
    bench = Bench(limits_of(num_blocks=draw.choice((24, 64))), layout_of(kind))
    stand, tables, prompts, now = Stand(bench, tmp_path), Tables(bench), {}, kind
    for number in range(200):
        if draw.random() < 0.3 and len(prompts) < 30:
            prompt = [draw.randrange(900) % 3 for _ in range(draw.randrange(1, 90))]
            prompts[f"r{number}"] = (prompt, draw.randrange(1, 40))
            bench.submit(f"r{number}", *prompts[f"r{number}"])
        if draw.random() < 0.3:
            stand.look(draw.randrange(-40, 30))
        if draw.random() < 0.05:
            bench.batcher.freeze()
            stand.look(20)
            assert not tables.issue()
            while bench.unreported:
                bench.report()
            now = draw.choice(list(LayoutKind))
            bench.batcher.thaw(layout_of(now))
        while draw.random() < 0.7 and tables.issue():
            pass
        if bench.unreported and draw.random() < 0.7:
            bench.report()
    stand.look(-FLOOR // BLOCK)
    while tables.issue() or bench.unreported:
        bench.report()
    bench.run()
    assert tables.num_released, "else nothing was shown"
    for name, (prompt, num_output) in prompts.items():
        assert bench.outputs[name] == answer(prompt, num_output), name


async def test_what_is_dead_is_in_the_log_of_every_rank(tmp_path: Path) -> None:
    """Through the real loop, with nothing free at all: the first step says it, and the request has its answer."""
    tmp_path.joinpath("meminfo").write_text("MemTotal: 9999 kB\nMemFree: 0 kB\nMemAvailable: 0 kB\n")
    paths = StatePaths(tmp_path / "state")
    paths.create()
    with open_log(paths) as log:
        watch = MemoryWatch(FLOOR, BLOCK, HostMemoryReader(tmp_path, tmp_path))
        async with running_group(paths.root, log, memory=watch) as group:
            router = await group.joined()
            await router.submit("a", list(range(40)), 8)
            await router.ended("a")
            assert router.output("a") == answer(list(range(40)), 8)
            for worker in group.workers:
                first, *others = [plan.dead_from for plan in worker.plans]
                assert first == len(worker.plans[0].admitted[0].block_ids) and not any(others)
