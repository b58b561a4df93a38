"""Where the ranks of a gloo group meet: rank 0 listens, on a port of its own choice unless one is given.

Who binds chooses: the port is never probed first and taken later. On one host the choice travels through the inherited
`flags` region, which is fresh in every generation, so that no earlier group's port can be found there.
"""

import os
import struct
import time

from torch._C._distributed_c10d import TCPStore

from services.core.errors import ConfigurationError
from services.core.ids import Rank
from services.worker.dataplane.gloo_watch import GlooAddress, listen

PORT = struct.Struct("<Q")
LOOK_AGAIN_S = 0.01
"""While rank 0 is still starting; ranks start within a second of each other."""


def meet(flags_fd: int, rank: Rank, rendezvous: str, deadline_s: float) -> tuple[GlooAddress, TCPStore | None]:
    """The group's address, and on rank 0 the store that serves it.

    Raises:
        ConfigurationError: `rendezvous` is no `host:port`, cannot be bound, or rank 0 did not come in time.
    """
    host, _, port_text = rendezvous.rpartition(":")
    if not host or not port_text.isdecimal() or int(port_text) > 65_535:
        raise ConfigurationError(f'group.gloo_rendezvous = "{rendezvous}": "host:port" expected, port 0 for a free one')
    os.ftruncate(flags_fd, max(PORT.size, os.fstat(flags_fd).st_size))
    if rank == 0:
        try:
            store = listen(host, int(port_text))
        except RuntimeError as error:
            raise ConfigurationError(f'group.gloo_rendezvous = "{rendezvous}" cannot be bound: {error}') from error
        os.pwrite(flags_fd, PORT.pack(store.port), 0)
        return GlooAddress(host, store.port, bind_host=host), store
    return GlooAddress(host, int(port_text) or _published_port(flags_fd, deadline_s), bind_host=host), None


def _published_port(flags_fd: int, deadline_s: float) -> int:
    ends_s = time.monotonic() + deadline_s
    while True:
        (port,) = PORT.unpack(os.pread(flags_fd, PORT.size, 0))
        if port:
            return int(port)
        if time.monotonic() >= ends_s:
            raise ConfigurationError(f"rank 0 published no gloo port within {deadline_s:g} s: see its log")
        time.sleep(LOOK_AGAIN_S)
