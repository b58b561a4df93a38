"""`flipmesh budget`: does this model fit on these ranks, in which mode, how many KV tokens; what binds, what to change.

Prices alone: nothing is loaded, no device is touched. Beside the estimate of the deployment's own mesh stands what its
processes take, if it runs.
"""

import argparse
import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from services.core.errors import ConfigurationError
from services.core.ids import BLOCK_SLOTS
from services.core.layout import LayoutError
from services.mesh.host_memory import HostMemory, HostMemoryReader
from services.mesh.settings.deployment import deployment_of
from services.mesh.settings.tables import Settings, load_settings
from services.models.model_files import open_model
from services.placement.compatibility import CarrierKind, Device
from services.placement.demand import Deployment, Model, plan_memory
from services.placement.ledger import Capacity, Ceiling, Ledger, MemoryMode, PoolBacking
from tools.absence import Absence
from tools.mesh_client import add_common, mesh_client
from tools.status import Answers, ask_all

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MEMORY_KINDS = ("cpu", "unified", "gpu")
_CEILINGS = MappingProxyType(
    {
        "--host-memory": "what the host has (default: what this one has, less what others hold)",
        "--carve-out": "unified: what firmware keeps from the host",
        "--translation-limit": "unified: what the device's translation table reaches",
        "--cgroup": "limit of the control group",
    }
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is: per rank, and on the host where ranks share it."""

    kind: str
    budgets: tuple[int, ...] | None
    ceilings: tuple[Ceiling, ...]
    max_tokens: int | None = None
    """Tokens that the settings allow at once; None: as many as fit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One mode's answer."""

    mode: MemoryMode
    ledger: Ledger | None
    capacity: Capacity | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether two blocks, the least that serves, are there."""
        return self.capacity is not None and self.capacity.num_blocks >= 2


@dataclass(frozen=True, slots=True)
class Measured:
    """One process of the running mesh."""

    pss_bytes: int
    pool_bytes: int
    """Of the KV pool it maps; 0: none."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `budget` to the command line."""
    parser = subparsers.add_parser("budget", help="whether a model fits, how many KV tokens, and what binds")
    add_common(parser)
    parser.add_argument("--model", metavar="REF", help="file, directory, name or hub id (default: the settings')")
    parser.add_argument("--ranks", type=int, metavar="N")
    modes = [mode.value for mode in MemoryMode]
    parser.add_argument("--mode", choices=modes, help="list the terms of this mode (default: the settings')")
    backings = [backing.value for backing in PoolBacking]
    parser.add_argument("--pools", choices=backings, help="both layouts' at once or in turns (default: the settings')")
    parser.add_argument("--kind", choices=MEMORY_KINDS, default="cpu", help="where ranks' memory is")
    parser.add_argument("--memory", type=_sizes, metavar="BYTES", help="per rank, such as 8G, or one each: 8G,24G")
    for flag, meaning in _CEILINGS.items():
        parser.add_argument(flag, type=parse_bytes, metavar="BYTES", help=meaning)
    parser.add_argument("--kv-tokens", type=_vector, metavar="T,T", help="token vector of the TP layout")
    parser.add_argument("--kv-element-bytes", type=int, default=4, choices=(1, 2, 4))
    parser.add_argument("--context", type=int, metavar="TOKENS")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0: it fits. 1: it does not, in the mode deployment for."""
    settings = load_settings(arguments.config)
    measured = {} if arguments.model else asyncio.run(_measured(arguments.config))
    host = HostMemoryReader().read()
    machine = machine_of(arguments, settings, host)
    deployment = deployment_asked(arguments, settings, others_bytes(arguments, host, measured))
    model = priced_model(arguments.model or settings.model.path or settings.model.name)
    findings = [find(replace(deployment, mode=mode), model, machine) for mode in MemoryMode]
    chosen = next(finding for finding in findings if finding.mode is deployment.mode)
    if arguments.json:
        print(json.dumps(as_json(findings, chosen, machine, measured), indent=2))
    else:
        console = Console()
        for table in as_tables(findings, chosen, machine, measured):
            console.print(table, soft_wrap=isinstance(table, str), markup=not isinstance(table, str))
            console.print()
    return 0 if chosen.fits else 1


def parse_bytes(text: str) -> int:
    """`512M`, `8G`, `1.5GiB` or plain bytes; powers of 1024."""
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = digits[-1:] if digits[-1:] in UNITS else ""
    try:
        size = int(float(digits.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 8G, 512M or a number of bytes") from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return size


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_bytes(part) for part in text.split(","))


def _vector(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def deployment_asked(arguments: argparse.Namespace, settings: Settings, others: int = 0) -> Deployment:
    """The deployment of the settings, with what the command line changes."""
    stated, is_gpu = deployment_of(settings), arguments.kind == "gpu"
    if arguments.ranks is not None and arguments.ranks != stated.num_ranks:
        stated = replace(stated, num_ranks=arguments.ranks, pp_layers=None, tp_weights=None, kv_tokens=None)
    default = MemoryMode.EXCHANGE if is_gpu else stated.mode
    return replace(
        stated,
        context_tokens=arguments.context or stated.context_tokens,
        mode=MemoryMode(arguments.mode) if arguments.mode else default,
        backing=PoolBacking(arguments.pools) if arguments.pools else stated.backing,
        carrier=CarrierKind.NCCL if is_gpu else stated.carrier,
        device=Device.CUDA if is_gpu else Device.CPU,
        kv_element_bytes=arguments.kv_element_bytes,
        kv_tokens=arguments.kv_tokens or stated.kv_tokens,
        others_bytes=others,
    )


def others_bytes(arguments: argparse.Namespace, host: HostMemory, measured: dict[str, Measured]) -> int:
    """What others hold here; of a host that is only described, nobody knows."""
    if arguments.host_memory is not None:
        return 0
    return max(0, host.limit_bytes - host.left_bytes - sum(process.pss_bytes for process in measured.values()))


def machine_of(arguments: argparse.Namespace, settings: Settings, host: HostMemory) -> Machine:
    """Budgets and ceilings: given, or read from this host.

    Raises:
        ConfigurationError: GPUs without a size, or another number of sizes than ranks.
    """
    num_ranks = arguments.ranks or settings.group.num_ranks
    budgets = arguments.memory or (settings.group.budgets if num_ranks == settings.group.num_ranks else None)
    if arguments.kind == "gpu" and budgets is None:
        raise ConfigurationError("--kind gpu needs --memory: bytes of each GPU, such as 24G or 24G,16G")
    if budgets is not None and len(budgets) == 1:
        budgets = budgets * num_ranks
    if budgets is not None and len(budgets) != num_ranks:
        raise ConfigurationError(f"--memory has {len(budgets)} sizes for {num_ranks} ranks: give one, or one for each")
    return Machine(arguments.kind, budgets, tuple(_ceilings(arguments, host)), settings.pool.max_total_tokens)


def _ceilings(arguments: argparse.Namespace, host: HostMemory) -> list[Ceiling]:
    """All cap the same memory, so each stands for itself and the least binds."""
    carved = arguments.carve_out or 0
    limit = host.limit_bytes if arguments.host_memory is None else arguments.host_memory
    name = host.binding if arguments.host_memory is None else "host memory"
    remedy = "end other processes here" if arguments.host_memory is None else "use a host with more memory"
    if carved:
        name, remedy = f"{name} less firmware carve-out", "lower the carve-out in the firmware's setup"
    found = [Ceiling(name, limit - carved, remedy)]
    if arguments.translation_limit is not None:
        remedy = "raise the translation table's limit (a kernel parameter of the device's driver)"
        found.append(Ceiling("translation-table limit", arguments.translation_limit, remedy, addressed_only=True))
    if arguments.cgroup is not None:
        found.append(Ceiling("control group", arguments.cgroup, "raise memory.max of the control group"))
    return found


def priced_model(reference: str | Path) -> Model:
    """What prices need of a model; raises ConfigurationError where it cannot be opened."""
    files = open_model(reference)
    return Model(files.geometry, files.tensors, sum(len(buffer) for buffer in files.buffers))


def find(deployment: Deployment, model: Model, machine: Machine) -> Finding:
    """One mode's ledger and capacity, or why there is none."""
    if deployment.mode is MemoryMode.SHARED:
        deployment = replace(deployment, backing=PoolBacking.RESIDENT)
    try:
        ledger = plan_memory(deployment, model)
    except (ConfigurationError, LayoutError) as error:
        return Finding(deployment.mode, None, None, str(error))
    return Finding(
        deployment.mode, ledger, _capped(ledger.capacity(machine.budgets, machine.ceilings), machine.max_tokens)
    )


def _capped(capacity: Capacity, max_tokens: int | None) -> Capacity:
    """The explicit cap holds in both layouts, whatever memory there is."""
    if max_tokens is None or capacity.num_tokens <= max_tokens:
        return capacity
    return Capacity(max_tokens // BLOCK_SLOTS, "pool.max_total_tokens", "raise that cap", capacity.left_bytes)


async def _measured(config: Path | None) -> dict[str, Measured]:
    """The processes that run, by name."""
    async with mesh_client(config) as client:
        answers: Answers = await ask_all(client)
    return {
        name: Measured(answer.memory_bytes, answer.worker.pool_bytes)
        for name, answer in answers.items()
        if not isinstance(answer, Absence)
    }


def as_json(
    findings: list[Finding], chosen: Finding, machine: Machine, measured: dict[str, Measured]
) -> dict[str, Any]:
    """One document; sizes in bytes."""
    return {
        "kind": machine.kind,
        "budgets": machine.budgets,
        "ceilings": {ceiling.name: ceiling.limit_bytes for ceiling in machine.ceilings},
        "mode": chosen.mode.value,
        "fits": chosen.fits,
        "modes": {finding.mode.value: _summary(finding) for finding in findings},
        "ranks": [] if chosen.ledger is None else [_terms(chosen.ledger, rank) for rank in _ranks(chosen.ledger)],
        "host": {} if chosen.ledger is None else {term.name: term.num_bytes for term in chosen.ledger.host_terms},
        "equalising_kv_tokens": equalising(chosen, machine),
        "measured_pss_bytes": {name: process.pss_bytes for name, process in measured.items()},
    }


def _summary(finding: Finding) -> dict[str, Any]:
    if finding.capacity is None or finding.ledger is None:
        return {"fits": False, "refusal": finding.refusal}
    capacity, blocks = finding.capacity, finding.capacity.num_blocks
    return {
        "fits": finding.fits,
        "kv_tokens": capacity.num_tokens,
        "binding": capacity.binding,
        "left_before_pool_bytes": capacity.left_bytes,
        "remedy": capacity.remedy,
        "fixed_host_bytes": finding.ledger.host_bytes(0),
        "host_bytes": finding.ledger.host_bytes(blocks),
    }


def _ranks(ledger: Ledger) -> range:
    return range(len(ledger.ranks))


def _terms(ledger: Ledger, rank: int) -> dict[str, int]:
    account = ledger.ranks[rank]
    pools = {f"KV of a block, {kind.value}": cost.num_bytes(1) for kind, cost in account.pools.items()}
    shared = {"part of what ranks share": account.charged_bytes} if account.charged_bytes else {}
    return {term.name: term.num_bytes for term in account.terms} | shared | pools


def equalising(finding: Finding, machine: Machine) -> list[int] | None:
    """The token vector under which budgets fill up together; None: nothing to equalise, or no room."""
    if finding.ledger is None or machine.budgets is None:
        return None
    try:
        return list(finding.ledger.equalising_tokens(machine.budgets))
    except LayoutError:
        return None


def as_tables(
    findings: list[Finding], chosen: Finding, machine: Machine, measured: dict[str, Measured]
) -> list[Table | str]:
    """Modes, then the terms of the one that was deployment for, then its processes if they run."""
    tables: list[Table | str] = [_modes_table(findings, chosen), _advice(chosen)]
    if chosen.ledger is not None:
        tables.append(_terms_table(chosen.ledger))
        if (vector := equalising(chosen, machine)) is not None:
            tables.append(f"kv_tokens that fill these budgets together: {','.join(map(str, vector))}")
    if measured and chosen.ledger is not None:
        tables.append(_measured_table(chosen.ledger, measured))
    return tables


def _modes_table(findings: list[Finding], chosen: Finding) -> Table:
    table = _table("mode", "fits", "KV tokens", "before the pool", "binds")
    for finding in findings:
        mark = f"[bold]{finding.mode.value}[/bold]" if finding is chosen else finding.mode.value
        fits = "[green]yes[/green]" if finding.fits else "[red]no[/red]"
        if finding.capacity is None or finding.ledger is None:
            table.add_row(mark, fits, "", "", "cannot be combined")
            continue
        fixed = finding.ledger.host_bytes(0) if finding.ledger.on_host else _largest(finding.ledger)
        table.add_row(mark, fits, f"{finding.capacity.num_tokens}", _mib(fixed), _binding(finding.capacity))
    return table


def _binding(capacity: Capacity) -> str:
    return capacity.binding + ("" if capacity.left_bytes >= 0 else f", lacks {_mib(-capacity.left_bytes)}")


def _advice(finding: Finding) -> str:
    if finding.capacity is None:
        return finding.refusal
    return f"{finding.mode.value}: {_binding(finding.capacity)} binds; to raise it, {finding.capacity.remedy}"


def _largest(ledger: Ledger) -> int:
    return max(account.fixed_bytes for account in ledger.ranks)


def _terms_table(ledger: Ledger) -> Table:
    table = _table(f"term ({ledger.mode.value})", *(f"rank {rank}" for rank in _ranks(ledger)), "host, once")
    columns = [_terms(ledger, rank) for rank in _ranks(ledger)]
    for name in columns[0]:
        table.add_row(name, *(_mib(column[name]) for column in columns), "")
    for term in ledger.host_terms:
        table.add_row(term.name, *("" for _ in columns), _mib(term.num_bytes))
    return table


def _measured_table(ledger: Ledger, measured: dict[str, Measured]) -> Table:
    """A rank's estimate is for its largest step and a full pool; pages are backed when first touched."""
    table = _table("process", "estimated", "with its full pool", "measured (PSS)")
    num_sharing = len(ledger.ranks) if ledger.mode is MemoryMode.SHARED else 1
    for name, process in measured.items():
        rank = name.removeprefix("worker-")
        estimates = ["", ""]
        if rank.isdecimal():
            fixed = ledger.ranks[int(rank)].fixed_bytes
            estimates = [_mib(fixed), _mib(fixed + process.pool_bytes // num_sharing)]
        table.add_row(name, *estimates, _mib(process.pss_bytes))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 104_858 else f"{num_bytes / 2**10:,.1f} KiB"
