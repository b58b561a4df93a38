"""Between `flipmesh.worker.v1` and the step log of core. Values are carried, not judged."""

from flipmesh.common.v1 import layout_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.ids import BlockId, Epoch, FlipId, Generation, LogIndex, RequestId, RequestIndex, TokenId
from services.core.step import (
    AbandonEntry,
    AdmittedRequest,
    CommitEntry,
    Entry,
    FlipEntry,
    LogEntry,
    ResetEntry,
    SampledTokens,
    StepPlan,
    StepReport,
)
from services.mesh.codec.common import (
    CodecError,
    layout_from_proto,
    layout_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)


def entry_to_proto(log_entry: LogEntry) -> pb.ExecuteStepsRequest:
    """One log entry; serialise it once and send the same bytes to every rank."""
    message = pb.ExecuteStepsRequest(
        fence=layout_pb2.Fence(generation=log_entry.generation, epoch=log_entry.epoch), sequence=log_entry.sequence
    )
    match log_entry.entry:
        case StepPlan() as plan:
            message.step.CopyFrom(_plan_to_proto(plan))
        case ResetEntry() as reset:
            message.reset.layout = layout_to_proto(reset.layout)
            message.reset.num_blocks = reset.num_blocks
            message.reset.max_resident_requests = reset.max_resident_requests
            message.reset.max_context_tokens = reset.max_context_tokens
        case FlipEntry() as flip:
            message.flip.flip_id = flip.flip_id
            message.flip.target = layout_to_proto(flip.target)
            message.flip.live_run_begin.extend(begin for begin, _ in flip.live_runs)
            message.flip.live_run_length.extend(length for _, length in flip.live_runs)
        case CommitEntry() as commit:
            message.commit.flip_id = commit.flip_id
            message.commit.layout = layout_to_proto(commit.layout)
        case AbandonEntry() as abandon:
            message.abandon.flip_id = abandon.flip_id
            message.abandon.reason = abandon.reason
    return message


def entry_from_proto(message: pb.ExecuteStepsRequest) -> LogEntry:
    """One log entry.

    Raises:
        CodecError: no entry, an unspecified enum, or parallel lists of different lengths.
    """
    return LogEntry(
        generation=Generation(message.fence.generation),
        epoch=Epoch(message.fence.epoch),
        sequence=LogIndex(message.sequence),
        entry=_entry_from_proto(message),
    )


def _entry_from_proto(message: pb.ExecuteStepsRequest) -> Entry:
    match message.WhichOneof("entry"):
        case "step":
            return _plan_from_proto(message.step)
        case "reset":
            return ResetEntry(
                layout=layout_from_proto(message.reset.layout, "reset.layout"),
                num_blocks=message.reset.num_blocks,
                max_resident_requests=message.reset.max_resident_requests,
                max_context_tokens=message.reset.max_context_tokens,
            )
        case "flip":
            begins, lengths = message.flip.live_run_begin, message.flip.live_run_length
            _require_parallel("flip.live_run", len(begins), len(lengths))
            return FlipEntry(
                flip_id=FlipId(message.flip.flip_id),
                target=layout_from_proto(message.flip.target, "flip.target"),
                live_runs=tuple(zip(map(BlockId, begins), lengths, strict=True)),
            )
        case "commit":
            return CommitEntry(
                FlipId(message.commit.flip_id), layout_from_proto(message.commit.layout, "commit.layout")
            )
        case "abandon":
            return AbandonEntry(FlipId(message.abandon.flip_id), message.abandon.reason)
        case None:
            raise CodecError(f"entry: log entry {message.sequence} carries none")


def _plan_to_proto(plan: StepPlan) -> pb.StepPlan:
    return pb.StepPlan(
        microbatch=plan.microbatch,
        released_request_index=plan.released,
        admitted=[_admitted_to_proto(admitted) for admitted in plan.admitted],
        block_request_index=plan.block_request_index,
        block_position=plan.block_position,
        block_id=plan.block_id,
        row_request_index=plan.row_request_index,
        row_start=plan.row_start,
        row_num_tokens=plan.row_num_tokens,
        sampled_row=plan.sampled_row,
        tokens_through=plan.tokens_through,
        dead_from=plan.dead_from,
    )


def _plan_from_proto(message: pb.StepPlan) -> StepPlan:
    blocks = len(message.block_request_index)
    rows = len(message.row_request_index)
    _require_parallel("step.block", blocks, len(message.block_position), len(message.block_id))
    _require_parallel("step.row", rows, len(message.row_start), len(message.row_num_tokens))
    return StepPlan(
        microbatch=message.microbatch,
        released=[RequestIndex(index) for index in message.released_request_index],
        admitted=[_admitted_from_proto(admitted) for admitted in message.admitted],
        block_request_index=[RequestIndex(index) for index in message.block_request_index],
        block_position=list(message.block_position),
        block_id=[BlockId(block) for block in message.block_id],
        row_request_index=[RequestIndex(index) for index in message.row_request_index],
        row_start=list(message.row_start),
        row_num_tokens=list(message.row_num_tokens),
        sampled_row=list(message.sampled_row),
        tokens_through=LogIndex(message.tokens_through) if message.HasField("tokens_through") else None,
        dead_from=BlockId(message.dead_from) if message.HasField("dead_from") else None,
    )


def _admitted_to_proto(admitted: AdmittedRequest) -> pb.AdmittedRequest:
    return pb.AdmittedRequest(
        request_id=admitted.request_id,
        request_index=admitted.request_index,
        token_ids=admitted.token_ids,
        num_prompt_tokens=admitted.num_prompt_tokens,
        block_ids=admitted.block_ids,
        sampling=sampling_to_proto(admitted.sampling),
        num_logprobs=admitted.num_logprobs,
    )


def _admitted_from_proto(message: pb.AdmittedRequest) -> AdmittedRequest:
    return AdmittedRequest(
        request_id=RequestId(message.request_id),
        request_index=RequestIndex(message.request_index),
        token_ids=tuple(map(TokenId, message.token_ids)),
        num_prompt_tokens=message.num_prompt_tokens,
        block_ids=tuple(map(BlockId, message.block_ids)),
        sampling=sampling_from_proto(message.sampling),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def report_to_proto(report: StepReport) -> pb.StepReport:
    """One rank's acknowledgement of one step."""
    message = pb.StepReport(
        sequence=report.sequence, digest=report.digest, compute_ns=report.compute_ns, wait_ns=report.wait_ns
    )
    if report.tokens is not None:
        message.tokens.token_ids.extend(report.tokens.token_ids)
        message.tokens.non_finite.extend(sorted(report.tokens.non_finite))
        message.tokens.logprobs_row.extend(row for row, _ in report.tokens.logprobs)
        message.tokens.logprobs.extend(logprobs_to_proto(logprobs) for _, logprobs in report.tokens.logprobs)
    return message


def report_from_proto(message: pb.StepReport) -> StepReport:
    """One rank's acknowledgement of one step.

    Raises:
        CodecError: parallel lists of different lengths.
    """
    return StepReport(
        sequence=LogIndex(message.sequence),
        digest=message.digest,
        compute_ns=message.compute_ns,
        wait_ns=message.wait_ns,
        tokens=_tokens_from_proto(message.tokens) if message.HasField("tokens") else None,
    )


def _tokens_from_proto(message: pb.SampledTokens) -> SampledTokens:
    _require_parallel("tokens.logprobs", len(message.logprobs_row), len(message.logprobs))
    logprobs = map(logprobs_from_proto, message.logprobs)
    return SampledTokens(
        token_ids=tuple(map(TokenId, message.token_ids)),
        non_finite=frozenset(message.non_finite),
        logprobs=tuple(zip(message.logprobs_row, logprobs, strict=True)),
    )


def _require_parallel(name: str, *lengths: int) -> None:
    if len(set(lengths)) > 1:
        raise CodecError(f"{name}*: parallel lists of lengths {list(lengths)}; they must be equal")
