# A node of the KV store, with all of its tiers. Built from the project's root: docker build -f deploy/images/kvstore.Dockerfile .
# `make images` gives BASE by digest (bases.lock).
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Extensions are compiled here: without a compiler they would be left out, and slower twins used.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt constraints-kube.txt pyproject.toml README.md LICENSE ./
COPY fleet fleet
COPY kvstore kvstore
COPY operators operators
COPY workers workers
RUN python -m venv /opt/fleet \
 && /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check --prefer-binary -c constraints.txt -c constraints-kube.txt '.[codecs,redis,s3,tracing]'
# With its dependencies NIXL would bring CUDA's libraries, which a node without GPUs has no use for.
RUN /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps -c constraints.txt nixl nixl-cu12
RUN /opt/fleet/bin/python -I -c 'import fleet.router.native._costs, kvstore.native._chain, kvstore.native._checksum, kvstore.native._kernels, kvstore.native._table'

FROM ${BASE}
COPY --from=build /opt/fleet /opt/fleet
ENV PATH=/opt/fleet/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fleet-kvstore" \
      org.opencontainers.image.description="Fleet: keeps KV blocks" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="Fleet maintainers" \
      org.opencontainers.image.base.name="${BASE}"
USER 65532:65532
WORKDIR /tmp
CMD ["fleet", "--help"]
