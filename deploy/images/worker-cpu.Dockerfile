# A worker with vLLM on CPUs. Built from the project's root: docker build -f deploy/images/worker-cpu.Dockerfile .
# BASE takes a digest too, for builds that are to be the same next year.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Extensions are compiled here: without a compiler they would be left out, and slower twins used.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt constraints-kube.txt pyproject.toml README.md LICENSE ./
# The locked list as it stands: resolving would bring torchvision's CUDA build, see the Makefile. It has the tools of the tests too.
RUN python -m venv /opt/fleet \
 && /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check uv==0.13.8 \
 && VIRTUAL_ENV=/opt/fleet /opt/fleet/bin/uv pip install --no-cache --torch-backend cpu torch==2.13.0 \
 && /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check --prefer-binary --no-deps -r constraints.txt
COPY fleet fleet
COPY kvstore kvstore
COPY operators operators
COPY workers workers
RUN /opt/fleet/bin/python -m pip install --no-cache-dir --disable-pip-version-check --prefer-binary -c constraints.txt -c constraints-kube.txt '.[codecs,etcd,kubernetes,redis,s3]'
RUN /opt/fleet/bin/python -I -c 'import fleet.router.native._costs, kvstore.native._chain, kvstore.native._checksum, kvstore.native._kernels, kvstore.native._table'

FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libnuma1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/fleet /opt/fleet
ENV PATH=/opt/fleet/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
CMD ["fleet", "--help"]
