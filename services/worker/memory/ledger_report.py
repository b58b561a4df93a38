"""A rank's own line in the memory ledger: what was estimated before anything was allocated, beside what it takes.

Never decides and never frees: a rank whose estimate is wrong serves all the same, and the log says by how much. Pages
are backed when first touched, so what is measured at boot is a part of what is estimated for the largest step.
"""

from services.core.errors import ConfigurationError
from services.core.ids import Rank
from services.core.layout import LayoutError
from services.mesh.host_memory import HostMemoryReader, process_memory
from services.mesh.settings.deployment import deployment_of
from services.mesh.settings.tables import Settings
from services.models.model_files import ModelFiles
from services.placement.demand import Model, plan_memory
from services.placement.ledger import Ledger
from services.worker.memory.device import RankDevice


def priced(settings: Settings, files: ModelFiles) -> Ledger:
    """The ledger of this deployment, before a byte of the model is read.

    Raises:
        ConfigurationError: mode, carrier, device or weights cannot be combined, or a vector does not fit the model.
    """
    model = Model(files.geometry, files.tensors, sum(len(buffer) for buffer in files.buffers))
    try:
        return plan_memory(deployment_of(settings), model)
    except LayoutError as error:
        raise ConfigurationError(f"[group] does not fit this model: {error}") from error


def memory_line(ledger: Ledger, rank: Rank, device: RankDevice) -> dict[str, object]:
    """Estimate and measurement as fields of one log line, in bytes, and the host and the device beside them."""
    account, host = ledger.ranks[rank], HostMemoryReader().read()
    line: dict[str, object] = {
        "estimated_bytes": account.fixed_bytes,
        "terms": {term.name: term.num_bytes for term in account.terms},
        "of_shared_bytes": account.charged_bytes,
        "host_left_bytes": host.left_bytes,
        "host_binding": host.binding,
    }
    if device.is_cuda:
        line |= {"device": str(device.place), "device_left_bytes": device.free_bytes()}
    if (own := process_memory()) is not None:
        line |= {
            "measured_pss_bytes": own.pss_bytes,
            "measured_anonymous_bytes": own.anonymous_bytes,
            "measured_file_bytes": own.file_bytes,
            "measured_shared_memory_bytes": own.shared_memory_bytes,
        }
    return line
