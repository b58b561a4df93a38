"""`python -m services.router.text.render_process`: renders chats for a router, one after the other, and nothing else.

It exists to be killed: whatever a template does, it does here, within the memory and the processor time that the system
allows this process, and the router starts another one. Standard input is a socket to the router. A frame is its length
in 8 bytes and a marshalled value, which is quicker than JSON and safe in this direction alone; the first says what to
render with, each later one is a chat. An answer is JSON and text: the router believes nothing that comes from here.
"""

import argparse
import json
import marshal
import resource
import signal
import socket
import struct
from typing import Any

from services.mesh.supervisor.parent_death import tie_to_parent
from services.router.text.control_texts import ControlTexts
from services.router.text.templates import ChatRefusedError, ChatTemplates

LENGTH = struct.Struct("<Q")
LENGTHS = struct.Struct("<IQ")
"""Of an answer: bytes of its head, which is JSON, and of its text, which is UTF-8."""
FORBIDDEN = (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)


def main() -> None:
    """Answers until the router hangs up."""
    parser = argparse.ArgumentParser(description="renders chats for a router")
    parser.add_argument("--parent-pid", type=int, required=True)
    tie_to_parent(parser.parse_args().parent_pid)
    link = socket.socket(fileno=0)
    setup = _receive(link)
    if setup is None:
        return
    for kind in FORBIDDEN:
        resource.setrlimit(kind, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    templates = ChatTemplates(setup["templates"], setup["special_texts"], ControlTexts(setup["control_texts"]))
    while (asked := _receive(link)) is not None:
        # The signal's default action ends the process, in the middle of native code as well.
        signal.setitimer(signal.ITIMER_PROF, setup["processor_s"])
        head, text = _rendered(templates, asked)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        raw = json.dumps(head).encode()
        link.sendall(LENGTHS.pack(len(raw), len(text)) + raw)
        link.sendall(text)


def _rendered(templates: ChatTemplates, asked: dict[str, Any]) -> tuple[dict[str, object], bytes]:
    try:
        rendered = templates.render(asked["template"], asked["values"])
        return {"masks": dict(rendered.masks)}, rendered.text.encode()
    except ChatRefusedError as error:
        return {"refused": str(error).encode(errors="replace").decode()}, b""
    except UnicodeEncodeError:
        return {"refused": "the model's chat template makes text that is not valid Unicode"}, b""
    except MemoryError:
        return {"out_of_memory": True}, b""


def _receive(link: socket.socket) -> Any:
    """The next frame's value; None: the router has hung up."""
    head = link.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        return None
    (num_bytes,) = LENGTH.unpack(head)
    frame = bytearray(num_bytes)
    view = memoryview(frame)
    while view:
        num_received = link.recv_into(view)
        if not num_received:
            return None
        view = view[num_received:]
    return marshal.loads(frame)


if __name__ == "__main__":
    main()
