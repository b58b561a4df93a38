"""What the settings ask of memory: the one place where tables of the TOML become what placement prices."""

from services.mesh.settings.tables import Settings
from services.placement.compatibility import CarrierKind, Device
from services.placement.demand import Deployment
from services.placement.ledger import MemoryMode, PoolBacking


def deployment_of(settings: Settings) -> Deployment:
    """The deployment that these settings describe."""
    group, scheduler = settings.group, settings.scheduler
    return Deployment(
        num_ranks=group.num_ranks,
        max_batch_rows=scheduler.max_batch_rows,
        max_resident_requests=scheduler.max_resident_requests,
        pp_layers=group.pp_layers,
        tp_weights=group.tp_weights,
        kv_tokens=group.token_vector,
        context_tokens=settings.model.context_tokens,
        mode=MemoryMode(group.mode),
        cold_image=group.cold_image,
        backing=PoolBacking(settings.pool.backing),
        carrier=CarrierKind(group.carrier),
        device=Device(group.device),
    )
