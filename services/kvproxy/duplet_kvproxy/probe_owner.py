"""The other process of a handle's trial: owns a small pool and passes it on.

`python -m duplet_kvproxy.probe_owner KIND FD`: makes a pool with a handle of this kind on the
only GPU that it sees, or in CPU memory, and sends description and descriptor over FD, one end
of a Unix SEQPACKET socket pair. What failed goes out as `{"error": …}`. Stays until FD closes.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import get_args

import numpy as np

from duplet_memory.cuda_driver import CudaError, open_devices
from duplet_memory.cuda_pool import CudaPool, create_cuda_pool
from duplet_memory.digest import page_digests
from duplet_memory.layout import HandleKind, describe_pool
from duplet_memory.pool import Pool, create_pool

PAGES = 64
SEED = 5


def make_pool(kind: HandleKind) -> CudaPool | Pool:
    """A pool of the article's shape, 144 MiB, or a quarter of it on the CPU, with content.

    Raises:
        CudaError: there is no GPU, or the handle was refused.
    """
    description = describe_pool(
        layers=36,
        page_rows=16,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        pages=PAGES,
        arrangement="page-major",
    )
    if kind != "memfd":
        return create_cuda_pool(description, kind, open_devices()[0])
    pool = create_pool(description)
    body = pool.memory[description.offset :].view(np.uint64)
    body[:] = np.random.default_rng(SEED).integers(0, 2**63, len(body), np.uint64)
    return pool


def main() -> int:
    kind: HandleKind = next(k for k in get_args(HandleKind) if k == sys.argv[1])
    with socket.socket(fileno=int(sys.argv[2])) as sock:
        try:
            pool = make_pool(kind)
        except CudaError as error:
            sock.send(json.dumps({"error": error.detail}).encode())
            return 1
        answer = {"pool": pool.description.to_json(), "digests": ""}
        if isinstance(pool, Pool):
            rows = PAGES * pool.description.page_rows
            digests = page_digests(pool, range(PAGES), rows)
            answer["digests"] = b"".join(digests).hex()
        fds = [pool.fd] if pool.fd >= 0 else []
        socket.send_fds(sock, [json.dumps(answer).encode()], fds)
        sock.recv(1)
        pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
