"""`flipmesh bench`, or `python -m tools.bench.run`: the figures of this machine in one table, with their spread.

Rates of both layouts, flips under streams beside a control without, readiness, processor time at rest, and other
engines on the same file where they are installed, as ratios. The mesh is one of its own unless `--running` names one.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import anyio

from services.core.errors import ConfigurationError, MeshError
from services.core.ids import LayoutKind
from services.mesh.settings.tables import Settings, load_settings
from services.models.model_files import resolve_model
from tools.acceptance.figures import spread
from tools.acceptance.report import shown
from tools.bench.machine_facts import MachineFacts, machine_facts, package_version
from tools.bench.mesh import LAYOUTS, PROMPT_LENGTHS, STREAM_COUNTS, FlipFigures, MeshBench, SampleRefusedError, Samples
from tools.bench.peers import ENGINES, decode_name, failure_text, prefill_name
from tools.load.own_mesh import ROOT, own_mesh
from tools.load.steering import NotSteeredError, set_mode
from tools.mesh_client import MeshClient, NotRunningError

PEER_S = 900.0
"""One engine, its loading included."""
NAME_WIDTH, CELL_WIDTH = 20, 24


@dataclass(slots=True)
class Bench:
    """What was measured."""

    facts: MachineFacts
    model: str
    num_ranks: int
    threads_per_rank: int
    repeat: int
    rates: dict[str, dict[str, Samples]] = field(default_factory=dict)
    """By figure, then by layout."""
    flips: FlipFigures = field(default_factory=FlipFigures)
    readiness_s: list[float] = field(default_factory=list)
    idle_cpu: dict[str, float] = field(default_factory=dict)
    """Percent of one core, by process."""
    peers: dict[str, dict[str, Samples] | str] = field(default_factory=dict)
    """By engine: its figures, or why there are none."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of either way to call it."""
    parser.add_argument("--repeat", type=int, default=3, help="samples of each figure (default 3)")
    parser.add_argument("--flips", type=int, default=10, help="each way (default 10)")
    parser.add_argument(
        "--ranks", type=int, default=None, help="of the mesh that is started (default: the deployment's)"
    )
    parser.add_argument("--running", action="store_true", help="use the running mesh that --config names")
    parser.add_argument("--no-peers", action="store_true", help="leave other engines out")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write everything there")
    parser.add_argument(
        "--config", type=Path, default=None, metavar="FILE", help="the deployment's TOML (default: FLIPMESH_CONFIG)"
    )


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `bench` to the command line."""
    parser = subparsers.add_parser("bench", help="figures of this machine: both layouts, flips, other engines")
    add_options(parser)
    parser.set_defaults(run=lambda arguments: asyncio.run(run_bench(arguments)))


async def run_bench(arguments: argparse.Namespace) -> int:
    """Measures and prints; 1 where a figure could not be had."""
    settings = load_settings(arguments.config)
    if arguments.repeat < 1 or arguments.flips < 1:
        raise ConfigurationError("--repeat and --flips: at least 1 each")
    facts = machine_facts(ROOT)
    print(facts.statement(), flush=True)
    try:
        async with _mesh(arguments, settings) as (client, readiness_s):
            bench = await measure_mesh(client, facts, arguments.repeat, arguments.flips)
    except (SampleRefusedError, NotSteeredError) as error:
        print(f"flipmesh bench: {error}", file=sys.stderr)
        return 1
    bench.readiness_s += readiness_s
    if not arguments.no_peers:
        bench.peers = await measure_peers(settings, bench)
    print("\n".join(lines_of(bench)))
    if arguments.json is not None:
        await asyncio.to_thread(arguments.json.write_text, json.dumps(asdict(bench), indent=1) + "\n")
    return 0


@asynccontextmanager
async def _mesh(arguments: argparse.Namespace, settings: Settings) -> AsyncIterator[tuple[MeshClient, list[float]]]:
    """A client of the mesh to be measured, under the policy `manual`, and how long its start took."""
    if not arguments.running:
        async with own_mesh(settings, num_ranks=arguments.ranks, policy={"mode": "manual"}) as mesh:
            client = MeshClient(load_settings(mesh.config))
            try:
                yield client, [mesh.readiness_s]
            finally:
                await client.close()
        return
    if arguments.ranks is not None:
        raise ConfigurationError("--ranks is for a mesh that is started here: leave out --running or --ranks")
    client = MeshClient(settings)
    before = await set_mode(client, "manual")
    try:
        yield client, []
    finally:
        with anyio.CancelScope(shield=True):
            await set_mode(client, before)
            await client.close()


async def measure_mesh(client: MeshClient, facts: MachineFacts, repeat: int, flips: int) -> Bench:
    """Every figure of one mesh; each as soon as it is there on standard error, since all of them take minutes."""
    settings = client.settings
    bench = Bench(facts, settings.model.name, settings.group.num_ranks, settings.group.threads_per_rank, repeat)
    mesh = MeshBench(client, repeat)
    for num_tokens in PROMPT_LENGTHS:
        _note(bench, prefill_name(num_tokens), await mesh.prefill(num_tokens))
    for num_streams in STREAM_COUNTS:
        _note(bench, decode_name(num_streams), await mesh.decode(num_streams))
    bench.flips = await mesh.flips(flips)
    bench.idle_cpu = await mesh.idle_cpu()
    return bench


def _note(bench: Bench, figure: str, found: dict[LayoutKind, Samples]) -> None:
    bench.rates[figure] = {layout.value.upper(): samples for layout, samples in found.items()}
    words = ", ".join(f"{layout} {samples.shown()}" for layout, samples in bench.rates[figure].items())
    print(f"  {figure}: {words} tokens/s", file=sys.stderr, flush=True)


async def measure_peers(settings: Settings, bench: Bench) -> dict[str, dict[str, Samples] | str]:
    """Other engines, one after the other, with as many threads as the mesh computes with."""
    model = resolve_model(settings.model.path or settings.model.name)
    if model.suffix != ".gguf":
        return {engine.name: "not measured: the model is no GGUF file" for engine in ENGINES.values()}
    threads = min(bench.num_ranks * bench.threads_per_rank, bench.facts.cores)
    return {peer.name: await _peer(engine, peer.name, model, threads, bench.repeat) for engine, peer in ENGINES.items()}


async def _peer(engine: str, name: str, model: Path, threads: int, repeat: int) -> dict[str, Samples] | str:
    print(f"  {name} {package_version(engine) or ''} with {threads} threads ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tools.bench.peers", engine, "--model", str(model)]
    command += ["--threads", str(threads), "--repeat", str(repeat)]
    try:
        with anyio.fail_after(PEER_S):
            done = await anyio.run_process(command, cwd=ROOT, check=False)
    except TimeoutError:
        return f"no figures within {PEER_S:g} s"
    if done.returncode != 0:
        return failure_text(engine, done.returncode, done.stderr.decode("utf-8", "replace"))
    figures = json.loads(done.stdout)
    return {figure: Samples(tuple(values)) for figure, values in figures.items()}


def lines_of(bench: Bench) -> Iterator[str]:
    """The table: medians, with the least and the greatest sample; then flips, readiness, rest."""
    yield f"\n{bench.model}, {bench.num_ranks} ranks of {bench.threads_per_rank} threads, {bench.repeat} samples each"
    peers = {name: found for name, found in bench.peers.items() if not isinstance(found, str)}
    columns = [layout.value.upper() for layout in LAYOUTS]
    yield _row(["tokens/s", *columns, *peers, *(f"better layout / {name}" for name in peers)])
    for figure, by_layout in bench.rates.items():
        best = max(samples.median for samples in by_layout.values())
        theirs = [found[figure] for found in peers.values()]
        cells = [by_layout[column].shown() for column in columns] + [samples.shown() for samples in theirs]
        yield _row([figure, *cells, *(f"{best / samples.median:.2f}" for samples in theirs)])
    yield from (f"{name}: {found}" for name, found in bench.peers.items() if isinstance(found, str))
    for way, pauses in bench.flips.pauses_ms.items():
        yield f"flip {way}, 8 streams: pause {shown(spread(pauses))}"
        yield f"  added to a token gap: {shown(spread(bench.flips.added_ms.get(way, [])))}"
    yield f"  where nothing flips: {shown(spread(bench.flips.control_added_ms))}"
    if bench.flips.num_abandoned:
        yield f"  {bench.flips.num_abandoned} flips did not commit"
    if bench.readiness_s:
        yield f"ready {bench.readiness_s[0]:.1f} s after the start"
    total = sum(bench.idle_cpu.values())
    most = max(bench.idle_cpu, key=lambda name: bench.idle_cpu[name], default="")
    yield f"at rest: {total:.1f} % of a core in all, most in {most} ({bench.idle_cpu.get(most, 0.0):.1f} %)"


def _row(cells: list[str]) -> str:
    return cells[0].ljust(NAME_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells[1:])


def main() -> int:
    """`python -m tools.bench.run`."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.run", description=__doc__)
    add_options(parser)
    try:
        return asyncio.run(run_bench(parser.parse_args()))
    except ConfigurationError as error:
        print(f"flipmesh: {error}", file=sys.stderr)
        return 78
    except (NotRunningError, MeshError) as error:
        print(f"flipmesh: {error}", file=sys.stderr)
        return 69


if __name__ == "__main__":
    sys.exit(main())
