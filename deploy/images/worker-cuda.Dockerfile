# A worker with vLLM on NVIDIA's GPUs. Built from the project's root: docker build -f deploy/images/worker-cuda.Dockerfile .
# The engine is its publishers' image of the version that constraints.txt names: they know which drivers and kernels go together. What it
# has stays as it is, and the rest comes in the locked versions. Fleet's own wheel is named by its path: an index may have another one of
# that name. `make images` gives BASE by digest (bases.lock).
ARG BASE=vllm/vllm-openai:v0.32.0

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY fleet fleet
COPY kvstore kvstore
COPY operators operators
COPY workers workers
RUN python3 -m pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels .

FROM ${BASE}
COPY constraints.txt constraints-kube.txt deploy/images/missing_constraints.py /tmp/lock/
COPY --from=build /wheels /tmp/wheels
RUN python3 /tmp/lock/missing_constraints.py /tmp/lock/constraints.txt /tmp/lock/constraints-kube.txt > /tmp/lock/beside.txt \
 && python3 -m pip install --no-cache-dir --disable-pip-version-check --prefer-binary -c /tmp/lock/beside.txt "$(echo /tmp/wheels/*.whl)[codecs,etcd,kubernetes,nixl,redis,s3,tracing]" \
 && python3 -I -c 'import fleet.router.native._costs, kvstore.native._chain, kvstore.native._checksum, kvstore.native._kernels, kvstore.native._table, vllm' \
 && rm -rf /tmp/lock /tmp/wheels
ENV HOME=/tmp PYTHONUNBUFFERED=1
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fleet-worker-cuda" \
      org.opencontainers.image.description="Fleet: serves models with vLLM on NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="Fleet maintainers" \
      org.opencontainers.image.base.name="${BASE}"
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT []
CMD ["fleet", "--help"]
