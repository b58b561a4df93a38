"""What acknowledgements prove: order, digests, whose tokens, and who owes what."""

import pytest

from services.core.ids import LogIndex, Rank, RequestIndex
from services.core.step import SampledTokens, StepPlan, StepReport
from services.scheduler.batch.step_ledger import LogBrokenError, StepLedger

FIRST, LAST = Rank(0), Rank(1)


def report(sequence: int, digest: int = 7, tokens: SampledTokens | None = None) -> StepReport:
    return StepReport(LogIndex(sequence), digest, compute_ns=100 * sequence, wait_ns=sequence, tokens=tokens)


@pytest.fixture
def ledger() -> StepLedger:
    ledger = StepLedger(num_ranks=2, sampling_rank=LAST)
    for sequence in (2, 3):
        plan = StepPlan(microbatch=1, row_request_index=[RequestIndex(0)], row_start=[0], row_num_tokens=[5])
        ledger.issue(LogIndex(sequence), plan, now_ns=sequence * 1000)
    return ledger


def test_a_step_is_acknowledged_with_its_last_rank(ledger: StepLedger) -> None:
    tokens = SampledTokens(())
    heard = ledger.hear(LAST, report(2, tokens=tokens), 5000)
    assert heard.tokens is tokens and not heard.is_acknowledged
    heard = ledger.hear(FIRST, report(2), 6000)
    assert heard.tokens is None and heard.is_acknowledged
    [record] = ledger.records
    assert (record.num_rows, record.num_tokens, record.microbatch) == (1, 5, 1)
    assert (record.issued_ns, record.finished_ns) == (2000, 6000)
    assert (record.compute_ns, record.wait_ns) == ([200, 200], [2, 2])


def test_one_rank_may_be_ahead_of_another(ledger: StepLedger) -> None:
    ledger.hear(LAST, report(2), 0)
    ledger.hear(LAST, report(3), 0)
    ledger.hear(FIRST, report(2), 0)
    assert ledger.hear(FIRST, report(3), 0).is_acknowledged
    assert ledger.oldest_issued_ns is None


@pytest.mark.parametrize(
    ("sequence", "words"), [(3, "step 2 is owed"), (9, "step 2 is owed")], ids=["skipped", "never issued"]
)
def test_answers_come_in_the_logs_order(ledger: StepLedger, sequence: int, words: str) -> None:
    with pytest.raises(LogBrokenError, match=f"rank 0 acknowledges step {sequence}, {words}"):
        ledger.hear(FIRST, report(sequence), 0)


def test_a_step_is_answered_once(ledger: StepLedger) -> None:
    ledger.hear(FIRST, report(2), 0)
    ledger.hear(FIRST, report(3), 0)
    with pytest.raises(LogBrokenError, match="step 3, nothing is owed"):
        ledger.hear(FIRST, report(3), 0)


def test_digests_are_compared_between_ranks(ledger: StepLedger) -> None:
    ledger.hear(LAST, report(2, digest=7), 0)
    with pytest.raises(LogBrokenError, match=r"step 2: rank 0 has digest 0+8, rank 1 has 0+7"):
        ledger.hear(FIRST, report(2, digest=8), 0)


def test_only_the_sampling_rank_sends_tokens(ledger: StepLedger) -> None:
    with pytest.raises(LogBrokenError, match="tokens from rank 0; only rank 1 samples"):
        ledger.hear(FIRST, report(2, tokens=SampledTokens(())), 0)


def test_who_is_late_is_named_with_where_it_is(ledger: StepLedger) -> None:
    ledger.hear(LAST, report(2), 0)
    assert ledger.overdue(now_ns=2999, limit_ns=1000) is None
    reason = ledger.overdue(now_ns=3000, limit_ns=1000)
    assert reason is not None and "step 2" in reason and "rank 0 (last acknowledged: none)" in reason
    assert "rank 1" not in reason
    ledger.hear(FIRST, report(2), 0)
    late = ledger.overdue(now_ns=10_000, limit_ns=1000)
    assert late is not None and "step 3" in late and "rank 1 (last acknowledged: 2)" in late
    ledger.hear(FIRST, report(3), 0)
    ledger.hear(LAST, report(3), 0)
    assert ledger.overdue(now_ns=10**12, limit_ns=1000) is None
