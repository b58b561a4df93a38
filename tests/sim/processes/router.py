"""Clients and the router between them and the scheduler: the shipped choice keeps what each request was given and got.

Checks, at every delivery, that a client has a prefix of what the model says alone; and one ending at most.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.core.ids import RequestId, TokenId
from services.core.request import FinishReason, RequestEvent, SamplingParams, Submission
from services.router.openai.refusal import Kind, RefusalError
from services.router.streams.choice_text import ChoiceText
from services.router.streams.sessions import MAX_RESUBMISSIONS, Choice, FinishAt, TryAgain
from services.router.text.detokenize import StopStrings
from services.router.text.vocabulary import Vocabulary
from services.scheduler.batch.limits import BatchLimits
from tests.sim.case import ToyRequest
from tests.sim.processes.toy_model import VOCAB, Reference, letter, reference
from tests.sim.processes.world import Channel, InvariantError, Process

if TYPE_CHECKING:
    from tests.sim.processes.group import Group

RETRY_NS = 5_000_000
"""How long a resubmission that met a full queue waits."""

LETTERS = Vocabulary(tuple(letter(token).encode() for token in range(VOCAB)), {}, (), (), None, None, frozenset())


@dataclass(slots=True, eq=False)
class Client:
    """One open request and what its client has got."""

    asked: ToyRequest
    choice: Choice
    expected: Reference
    token_ids: list[TokenId] = field(default_factory=list)
    text: str = ""
    num_endings: int = 0
    is_gone: bool = False
    """The client hung up."""
    is_submitted: bool = False
    """To the generation that is open."""

    @property
    def is_over(self) -> bool:
        """Nothing is owed to it."""
        return self.is_gone or self.num_endings > 0


def client_of(asked: ToyRequest, limits: BatchLimits) -> Client:
    """A client with its own reference."""
    submission = Submission(
        request_id=RequestId(asked.name),
        token_ids=asked.prompt,
        num_prompt_tokens=len(asked.prompt),
        max_output_tokens=asked.max_output_tokens,
        sampling=SamplingParams(),
        stop_token_ids=asked.end_ids,
        priority=asked.priority,
    )
    text = ChoiceText(LETTERS, None if asked.stop is None else StopStrings([asked.stop]))
    max_tokens = min(len(asked.prompt) + asked.max_output_tokens, limits.context_tokens)
    return Client(
        asked,
        Choice(0, submission, text),
        reference(asked.prompt, max_tokens, asked.end_ids, asked.stop, asked.poison_index),
    )


class RouterProcess(Process):
    """Lives through every schedule: it is what makes the others replaceable."""

    def __init__(self, group: "Group") -> None:
        super().__init__(group.world, "router")
        self.group = group
        self.is_up = True
        self.scheduler: Channel | None = None
        self.clients: list[Client] = []
        self.num_unborn = len(group.case.asked)
        self._by_id: dict[RequestId, Client] = {}
        self._is_open = False

    @property
    def num_open(self) -> int:
        """Clients that wait, and those yet to come."""
        return self.num_unborn + sum(1 for client in self.clients if not client.is_over)

    # Clients.

    def arrive(self, asked: ToyRequest) -> None:
        """A client asks."""
        self.num_unborn -= 1
        client = client_of(asked, self.group.case.limits)
        self.clients.append(client)
        if asked.abort_ns is not None:
            self.world.at(asked.abort_ns, self, self._hang_up, client)
        self._submit(client)

    def _hang_up(self, client: Client) -> None:
        if client.is_over:
            return
        client.is_gone = True
        self.world.note(self.name, "hang-up", client.asked.name)
        if client.is_submitted and self.scheduler is not None:
            self.scheduler.send("abort", client.choice.request_id, None)

    def _submit(self, client: Client) -> None:
        if client.is_over or client.is_submitted or not self._is_open or self.scheduler is None:
            return
        client.is_submitted = True
        request_id = client.choice.request_id
        self._by_id[request_id] = client
        self.scheduler.send("submit", request_id, client.choice.submission)

    # The scheduler.

    def on_scheduler(self, what: str, argument: object) -> None:
        """A message of the scheduler."""
        if what == "opened":
            self._is_open = True
            for client in self.clients:
                self._submit(client)
        elif what == "lost":
            self.on_lost()
        else:
            assert isinstance(argument, tuple)
            for event in argument:
                self._take(event)

    def on_stream_end(self) -> None:
        """The scheduler is gone; the next stream is opened when it is back."""
        self.scheduler = None
        self.on_lost()
        self.group.connect_router()

    def on_lost(self) -> None:
        """The generation is gone: every open request is to be submitted again."""
        self._is_open = False
        self._by_id.clear()
        for client in self.clients:
            if client.is_submitted and not client.is_over:
                client.is_submitted = False
                client.choice.on_lost(self.world.now_ns / 1e9)
                self._give(client)

    def _take(self, event: RequestEvent) -> None:
        client = self._by_id.get(event.request_id)
        if client is None or client.is_gone:
            return
        effect = client.choice.on_event(event, self.world.now_ns / 1e9)
        if isinstance(effect, FinishAt) and self.scheduler is not None:
            self.scheduler.send("finish", client.choice.request_id, effect.num_output_tokens)
        elif isinstance(effect, TryAgain):
            client.is_submitted = False
            self.world.at(RETRY_NS, self, self._submit, client)
        self._give(client)

    def _give(self, client: Client) -> None:
        delta = client.choice.take()
        if delta is None:
            return
        client.token_ids.extend(delta.token_ids)
        client.text += delta.text
        name, expected = client.asked.name, client.expected
        if tuple(client.token_ids) != expected.token_ids[: len(client.token_ids)] or not expected.text.startswith(
            client.text
        ):
            raise InvariantError("answers", f"{name} got {client.text!r}, the model alone says {expected.text!r}")
        if delta.ending is None:
            return
        client.num_endings += 1
        self.world.note(self.name, "end", name, delta.ending.reason.value, client.text)
        if client.num_endings > 1:
            raise InvariantError("one ending", f"{name} has ended {client.num_endings} times")
        self._check_ending(client, delta.ending.reason)

    def _check_ending(self, client: Client, reason: FinishReason) -> None:
        name, expected, ending = client.asked.name, client.expected, client.choice.ending
        assert ending is not None
        if ending.failure is not None:
            self._check_failure(client, ending.failure)
            return
        wanted = FinishReason.STOP if expected.is_stopped else FinishReason.LENGTH
        if (
            expected.is_failed
            or reason is not wanted
            or tuple(client.token_ids) != expected.token_ids
            or client.text != expected.text
        ):
            raise InvariantError(
                "answers",
                f"{name} ended by {reason.value} with {client.text!r}, alone {wanted.value} {expected.text!r}",
            )

    def _check_failure(self, client: Client, failure: RefusalError) -> None:
        got, expected = tuple(client.token_ids), client.expected
        if expected.is_failed and failure.kind is Kind.FAILED and got == expected.token_ids:
            return
        if client.choice.num_resubmissions == MAX_RESUBMISSIONS:
            return
        allowed = {Kind.OVERLOADED, Kind.UNAVAILABLE}
        if len(client.asked.prompt) >= self.group.case.limits.context_tokens:
            allowed = {*allowed, Kind.INVALID}
        if failure.kind not in allowed or got:
            raise InvariantError("failures", f"{client.asked.name} failed after {client.text!r}: {failure}")

    def check_end(self) -> None:
        """Nobody waits any more."""
        for client in self.clients:
            if not client.is_over:
                raise InvariantError(
                    "wedge", f"{client.asked.name} waits for ever after {client.text!r}; {self.group.checks.waits}"
                )
