"""The compatibility table, row by row: every conflict fires with its own words and stays quiet beside it."""

import itertools

import pytest

from services.core.errors import ConfigurationError
from services.core.layout import KvSharding
from services.models.ggml_types import GgmlType
from services.placement import compatibility
from services.placement.compatibility import CONFLICTS, SERVED, CarrierKind, Combination, Device, check_combination
from services.placement.ledger import MemoryMode, PoolBacking

M, C, D, P, K = MemoryMode, CarrierKind, Device, PoolBacking, KvSharding


def combined(mode: M, carrier: C, device: D, backing: P, kv_sharding: K) -> Combination:
    return Combination(mode, carrier, device, backing, kv_sharding=kv_sharding)


FORBIDDEN = {
    (M.SHARED, C.NCCL, D.CUDA, P.RESIDENT, K.HEADS): "belongs to one rank",
    (M.SHARED, C.SHM, D.CPU, P.EXCLUSIVE, K.HEADS): "one pool serves both layouts",
    (M.SHARED, C.SHM, D.CPU, P.RESIDENT, K.TOKENS): "a cut by tokens would free no memory",
    (M.EXCHANGE, C.SHM, D.CUDA, P.RESIDENT, K.HEADS): "kernels do not reach",
    (M.EXCHANGE, C.GLOO, D.CUDA, P.RESIDENT, K.HEADS): "gloo sends and receives host memory only",
    (M.DUAL, C.NCCL, D.CPU, P.RESIDENT, K.HEADS): "NCCL moves GPU memory only",
}
"""For each row of the table, a combination that no other row forbids."""


@pytest.mark.parametrize("row", range(len(CONFLICTS)), ids=lambda row: CONFLICTS[row].reason[:30])
def test_each_row_fires_alone(row: int) -> None:
    conflict = CONFLICTS[row]
    (found,) = [combined(*fields) for fields in FORBIDDEN if conflict.holds(combined(*fields))]
    assert [other for other in CONFLICTS if other.holds(found)] == [conflict]
    with pytest.raises(ConfigurationError) as refused:
        check_combination(found)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    expected = FORBIDDEN[found.mode, found.carrier, found.device, found.backing, found.kv_sharding]
    assert expected in message and conflict.remedy in message
    assert all(f'"{field.value}"' in message for field in (found.mode, found.carrier, found.device, found.kv_sharding))


def test_what_is_allowed_is_known_in_full() -> None:
    allowed = set()
    for fields in itertools.product(M, C, D, P, K):
        try:
            check_combination(combined(*fields))
        except ConfigurationError:
            continue
        allowed.add(fields)
    private = set(M) - {M.SHARED}
    assert allowed == {
        *itertools.product(private, (C.SHM, C.GLOO), (D.CPU,), P, K),
        *itertools.product(private, (C.NCCL,), (D.CUDA,), P, K),
        *itertools.product((M.SHARED,), (C.SHM, C.GLOO), (D.CPU,), (P.RESIDENT,), (K.HEADS,)),
    }


def test_several_conflicts_are_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_combination(Combination(M.SHARED, C.SHM, D.CUDA, P.EXCLUSIVE))
    assert len(str(refused.value).splitlines()) == 3


def test_every_weight_type_is_served_on_every_device_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    every = frozenset(GgmlType)
    check_combination(Combination(M.SHARED, C.SHM, D.CPU, weight_types=every))
    check_combination(Combination(M.EXCHANGE, C.NCCL, D.CUDA, weight_types=every))
    fewer = {pair: served for pair, served in SERVED.items() if pair != (D.CPU, GgmlType.Q3_K)}
    monkeypatch.setattr(compatibility, "SERVED", fewer)
    check_combination(Combination(M.EXCHANGE, C.NCCL, D.CUDA, weight_types=every))
    with pytest.raises(ConfigurationError, match=r'device = "cpu" has no kernel for weights of type Q3_K: .* Q2_K'):
        check_combination(Combination(M.SHARED, C.SHM, D.CPU, weight_types=every))
