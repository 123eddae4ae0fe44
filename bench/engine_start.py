"""How long an engine process takes from its start to Ready, on one GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from duplet_core.engine import FromEngine, Ready, Shutdown
from duplet_core.errors import require
from duplet_engine.model_config import ModelConfig
from duplet_engine.shapes import random_weights
from duplet_pages.engine_config import EngineConfig
from duplet_runtime.engine_link import Arrival, encode_frame, read_from_engine, receive_some
from tests.parity.published import nested_config, write_json, write_shards

SLOTS = 64
SHARDS = 3


def start_to_ready_s(model: str) -> float:
    """Seconds from starting decode's engine to its Ready, everything in it captured and warm."""
    config = EngineConfig(
        "decode", device="cuda", model=model, dtype="bfloat16", pool_pages=0, slots=SLOTS
    )
    ours, theirs = socket.socketpair()
    began = time.perf_counter()
    with ours, theirs:
        options = ["--config", config.to_json(), "--link-fd", str(theirs.fileno())]
        command = [sys.executable, "-m", "duplet_engine", *options]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        reader = read_from_engine()
        arrivals: list[Arrival[FromEngine]] = []
        while not arrivals:
            data, fds = receive_some(ours)
            require(bool(data), "the engine ended before it was ready")
            arrivals = reader.feed(data, fds)
        took_s = time.perf_counter() - began
        require(isinstance(arrivals[0].message, Ready), "an engine says Ready first")
        for fd in arrivals[0].fds:
            os.close(fd)
        ours.sendall(encode_frame(Shutdown()))
        child.wait()
    return took_s


def write_checkpoint(config: ModelConfig, directory: Path) -> None:
    """A checkpoint of random bfloat16 weights as S2-Pro's, which the page cache then holds."""
    weights = random_weights(config, torch.device("cuda", 0), torch.bfloat16)
    write_json(directory / "config.json", nested_config(config))
    on_host = {name: tensor.cpu() for name, tensor in weights.items()}
    weights.clear()
    write_shards(directory, on_host, SHARDS)
