"""The ranks of an engine on one node meet on the loopback address.

Torch's store listens on all interfaces, whatever address it is given, and does what any connection
says. So an engine on one node gives the store a socket that listens on that address alone.

    fault     torch's store listens on all interfaces and obeys every connection
    hooks     group "rendezvous"
    test      tests/engine/test_server.py
    upstream  no patch yet
    ends with a version of torch whose store takes an address
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from sgl_ext.engine.arguments import in_effect

_EVERY_INTERFACE = ("", "0.0.0.0", "::")


def listen_on_loopback(
    original: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    use_libuv: bool = True,
) -> Any:
    """Around torch's `_create_c10d_store`."""
    args = in_effect()
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    # Without an address from the operator, SGLang takes the one that the engine serves at.
    is_ours = args.dist_init_addr is None or hostname in (*_EVERY_INTERFACE, "localhost")
    address = "127.0.0.1" if is_ours else hostname
    if is_of_agent or args.nnodes > 1 or not _is_loopback(address):
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    if rank != 0:
        return original(address, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=2048)
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=use_libuv,
    )


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
