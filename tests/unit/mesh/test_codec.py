"""Core values survive the wire: every field, through serialised bytes, for values drawn at random."""

from dataclasses import fields

import pytest
from flipmesh.scheduler.v1 import scheduler_service_pb2
from flipmesh.worker.v1 import worker_service_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.core.ids import BlockId, Epoch, FlipId, Generation, LayoutKind, LogIndex, RequestId, RequestIndex, TokenId
from services.core.request import (
    Admitted,
    Emitted,
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    RequestEvent,
    SamplingParams,
    Submission,
    TokenLogprobs,
)
from services.core.step import (
    AbandonEntry,
    AdmittedRequest,
    CommitEntry,
    FlipEntry,
    LogEntry,
    ResetEntry,
    SampledTokens,
    StepPlan,
    StepReport,
)
from services.mesh.codec.common import CodecError
from services.mesh.codec.scheduler import event_from_proto, event_to_proto, submission_from_proto, submission_to_proto
from services.mesh.codec.worker import entry_from_proto, entry_to_proto, report_from_proto, report_to_proto

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
f32 = st.floats(width=32, allow_nan=False)
tokens = st.lists(u32.map(TokenId), max_size=5).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=f32,
    top_k=u32,
    top_p=f32,
    min_p=f32,
    seed=u64,
    presence_penalty=f32,
    frequency_penalty=f32,
    repetition_penalty=f32,
    logit_bias=st.lists(st.tuples(u32.map(TokenId), f32), max_size=3).map(tuple),
)
logprobs = st.builds(TokenLogprobs, sampled=f32, top=st.lists(st.tuples(u32.map(TokenId), f32), max_size=3).map(tuple))
request_ids = st.text(max_size=12).map(RequestId)
indexes = u32.map(RequestIndex)
admitted = st.builds(
    AdmittedRequest,
    request_id=request_ids,
    request_index=indexes,
    token_ids=tokens,
    num_prompt_tokens=u32,
    block_ids=st.lists(u32.map(BlockId), max_size=4).map(tuple),
    sampling=sampling,
    num_logprobs=st.none() | u32,
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    blocks, rows = draw(st.integers(0, 3)), draw(st.integers(0, 3))

    def column(length: int) -> list[int]:
        return draw(st.lists(u32, min_size=length, max_size=length))

    return StepPlan(
        microbatch=draw(u32),
        released=draw(st.lists(indexes, max_size=2)),
        admitted=draw(st.lists(admitted, max_size=2)),
        block_request_index=[RequestIndex(x) for x in column(blocks)],
        block_position=column(blocks),
        block_id=[BlockId(x) for x in column(blocks)],
        row_request_index=[RequestIndex(x) for x in column(rows)],
        row_start=column(rows),
        row_num_tokens=column(rows),
        sampled_row=draw(st.lists(u32, max_size=2)),
        tokens_through=draw(st.none() | u64.map(LogIndex)),
        dead_from=draw(st.none() | u32.map(BlockId)),
    )


layouts = st.sampled_from(LayoutKind)
flip_ids = u64.map(FlipId)
runs = st.lists(st.tuples(u32.map(BlockId), u32), max_size=3).map(tuple)
entries = st.one_of(
    plans(),
    st.builds(ResetEntry, layouts, u32, u32, u32),
    st.builds(FlipEntry, flip_ids, layouts, runs),
    st.builds(CommitEntry, flip_ids, layouts),
    st.builds(AbandonEntry, flip_ids, st.text(max_size=5)),
)
log_entries = st.builds(LogEntry, u64.map(Generation), u64.map(Epoch), u64.map(LogIndex), entries)


@given(log_entries)
def test_log_entries_survive_the_wire(entry: LogEntry) -> None:
    wire = entry_to_proto(entry).SerializeToString()
    assert entry_from_proto(worker_service_pb2.ExecuteStepsRequest.FromString(wire)) == entry


@given(
    st.builds(
        StepReport,
        sequence=u64.map(LogIndex),
        digest=u64,
        compute_ns=u64,
        wait_ns=u64,
        tokens=st.none()
        | st.builds(
            SampledTokens,
            tokens,
            st.frozensets(u32, max_size=2),
            st.lists(st.tuples(u32, logprobs), max_size=2).map(tuple),
        ),
    )
)
def test_reports_survive_the_wire(report: StepReport) -> None:
    wire = report_to_proto(report).SerializeToString()
    assert report_from_proto(worker_service_pb2.StepReport.FromString(wire)) == report


@given(
    st.builds(
        Submission,
        request_id=request_ids,
        token_ids=tokens,
        num_prompt_tokens=u32,
        max_output_tokens=u32,
        sampling=sampling,
        stop_token_ids=st.frozensets(u32.map(TokenId), max_size=3),
        num_logprobs=st.none() | u32,
        priority=st.integers(-(2**31), 2**31 - 1),
    )
)
def test_submissions_survive_the_wire(submission: Submission) -> None:
    wire = submission_to_proto(submission).SerializeToString()
    assert submission_from_proto(scheduler_service_pb2.SubmitRequest.FromString(wire)) == submission


@given(
    st.one_of(
        st.builds(Admitted, request_ids, u32),
        st.builds(Emitted, request_ids, u32, tokens, st.lists(logprobs, max_size=2).map(tuple)),
        st.builds(Finished, request_ids, st.sampled_from(FinishReason), u32, u32, st.text(max_size=5)),
        st.builds(Rejected, request_ids, st.sampled_from(RejectReason), st.text(max_size=5), st.text(max_size=5)),
    )
)
def test_events_survive_the_wire(event: RequestEvent) -> None:
    wire = event_to_proto(event).SerializeToString()
    assert event_from_proto(scheduler_service_pb2.RequestEvent.FromString(wire)) == event


def test_every_field_of_the_log_has_its_proto_field() -> None:
    renamed = {"released": "released_request_index"}
    names = {renamed.get(field.name, field.name) for field in fields(StepPlan)}
    assert names == {field.name for field in worker_service_pb2.StepPlan.DESCRIPTOR.fields}


def test_an_entry_without_content_is_refused() -> None:
    with pytest.raises(CodecError, match="log entry 7 carries none"):
        entry_from_proto(worker_service_pb2.ExecuteStepsRequest(sequence=7))


def test_an_unspecified_layout_is_refused() -> None:
    message = worker_service_pb2.ExecuteStepsRequest(sequence=1, reset=worker_service_pb2.ResetEntry(num_blocks=4))
    with pytest.raises(CodecError, match=r"reset\.layout: layout number 0"):
        entry_from_proto(message)


def test_parallel_lists_of_unequal_length_are_refused() -> None:
    plan = worker_service_pb2.StepPlan(row_request_index=[1, 2], row_start=[0], row_num_tokens=[1, 1])
    with pytest.raises(CodecError, match=r"step\.row.*\[2, 1, 2\]"):
        entry_from_proto(worker_service_pb2.ExecuteStepsRequest(sequence=1, step=plan))
