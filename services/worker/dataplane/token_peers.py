"""The two exchanges of attention by tokens, over a carrier: what a stage calls without knowing ranks or deadlines."""

from torch import Tensor

from kernels.cpu.collective_status import Purpose
from services.core.layout import Layout
from services.worker.dataplane.carrier import Carrier
from services.worker.model.token_attention import TokenPeers
from services.worker.steps.wait_clock import WaitClock


def token_peers(layout: Layout, carrier: Carrier, clock: WaitClock, deadline_s: float) -> TokenPeers:
    """The peers of `carrier`'s rank under a layout whose cache is cut by tokens; both raise CollectiveError."""

    def gather(part: Tensor, widths: list[int]) -> Tensor:
        purpose = Purpose.ATTENTION_INPUT
        everyone = clock.timed(
            carrier.all_gather_columns, part, widths, to_rank=None, deadline_s=deadline_s, purpose=purpose
        )
        assert everyone is not None, "every rank takes it"
        return everyone

    def all_to_all(source: Tensor, sizes: list[int], out: Tensor) -> None:
        purpose = Purpose.ATTENTION_PARTS
        clock.timed(carrier.all_to_all, source, sizes, out, deadline_s=deadline_s, purpose=purpose)

    return TokenPeers(carrier.rank, layout.shares, gather, all_to_all)
