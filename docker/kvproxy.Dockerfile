# kvproxy: moves KV between the pools; no torch.
# From the repository's root, with BuildKit:
#   docker build -f docker/kvproxy.Dockerfile -t duplet-kvproxy:0.1.0 .
# BASE: a Debian or Ubuntu with Python 3.11 or newer.
# CUDA: the variant for GPUs, such as 13.0: CUDA's bindings, and Triton. Empty: for CPUs.
# TORCH_INDEX is the other images' argument; nothing here depends on it.
# Optional secrets, for a mirror of PyPI: `pip` is a pip.conf, `ca` its bundle of certificates,
# which lies in /ca.crt while packages are installed.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* /usr/share/doc/* \
 && find /usr/lib/python3* -name __pycache__ -prune -exec rm -r {} + \
 && rm -r /usr/lib/python3*/test /usr/lib/python3*/pydoc_data /usr/lib/python3*/*/_test*.so

# What to install: asked of the pyproject files, so that the next stage sees only the answer.
FROM python AS manifest
ARG CUDA=
ARG TORCH_INDEX=https://download.pytorch.org/whl
WORKDIR /src
COPY . .
RUN python3 docker/dependencies.py kvproxy index ${CUDA} > /index.txt \
 && python3 docker/dependencies.py kvproxy constraints ${CUDA} > /constraints.txt \
 && python3 docker/dependencies.py kvproxy own > /own.txt

# What others made. Rebuilt only when the answer or a pinned version changes.
FROM python AS dependencies
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3-venv binutils
RUN python3 -m venv /pip && python3 -m venv --without-pip /opt/duplet
COPY --from=manifest /index.txt /constraints.txt /
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/ca.crt \
    /pip/bin/pip --no-cache-dir install -q -c /constraints.txt hatchling \
 && /pip/bin/pip --python /opt/duplet/bin/python --no-cache-dir install -q --no-compile \
    -c /constraints.txt -r /index.txt
COPY docker/trim.sh /
RUN sh /trim.sh /opt/duplet

# What we made, as a layer of its own over the same folder.
FROM dependencies AS code
COPY --from=manifest /src /src
COPY --from=manifest /own.txt /src/
RUN cd /src && sed 's#^#./#' own.txt \
    | xargs /pip/bin/pip wheel -q --no-deps --no-build-isolation -w /wheels \
 && /pip/bin/pip --python /opt/duplet/bin/python install -q --no-deps --no-index --no-compile \
    --prefix /layer /wheels/*.whl

FROM python
RUN groupadd --gid 10001 duplet \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp duplet \
 && install -d -o duplet -g duplet -m 0700 /run/duplet
COPY --from=dependencies /opt/duplet /opt/duplet
COPY --from=code /layer /opt/duplet
ENV PATH=/opt/duplet/bin:$PATH PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 \
    DUPLET_RUN_DIR=/run/duplet NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Bytecode of what a start loads, and no other.
RUN python -c "import duplet_kvproxy.__main__, duplet_unit.commands"
USER 10001:10001
ARG VERSION=0.1.0
ARG REVISION=
ARG SOURCE=
LABEL org.opencontainers.image.title="duplet-kvproxy" \
      org.opencontainers.image.description="Duplet's kvproxy: moves KV from prefill's pool to decode's" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 \
    CMD ["duplet-probe", "unix:/run/duplet/kvproxy.sock"]
CMD ["python", "-m", "duplet_kvproxy"]
