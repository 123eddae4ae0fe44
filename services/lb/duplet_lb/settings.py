"""Settings of lb."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from duplet_core.ids import Role
from duplet_runtime.addresses import check_listen
from duplet_runtime.settings import ServiceSettings


class LbSettings(ServiceSettings):
    """Settings of lb, environment prefix DUPLET_LB_."""

    role: ClassVar[Role] = Role.LB

    listen: str = "127.0.0.1:50051"
    """Address of the public port; `unix:PATH` works too."""
    queue_limit: int = Field(default=16, ge=0)
    """Requests that may wait for a stream slot or pages."""
    queue_wait_ms: int = Field(default=20, ge=0)
    """Milliseconds a request waits before it is refused as overload."""
    longest_s: float = Field(default=300.0, gt=0, le=86_400, allow_inf_nan=False)
    """Most seconds a request may take, also when the client's deadline is later."""
    unread_rows: int = Field(default=1024, ge=1)
    """Rows that wait for a client that does not read; more ends its stream."""
    otlp_endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """OTLP collector over gRPC that gets each request's spans, such as http://localhost:4317;
    empty: none."""
    drain_s: float = Field(default=60.0, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds that running streams get after SIGTERM."""

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        return check_listen(value)
