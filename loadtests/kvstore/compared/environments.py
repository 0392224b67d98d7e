"""Packages of the compared systems' environments."""

from loadtests.environments import SystemDistribution

LMCACHE = SystemDistribution(
    name="LMCache",
    version="0.5.6",
    steps=(
        (("torch==2.13.0+cpu",), ("torch==2.13.0",)),  # the second one installs the CUDA build, which also works
        (("--no-deps", "lmcache==0.5.6"),),
        (
            (
                "numpy==2.2.6",
                "numba==0.68.1",
                "aiohttp==3.14.5",
                "aiofile==3.12.3",
                "aiofiles==25.1.0",
                "blake3==1.0.11",
                "cachetools==8.0.1",
                "cryptography==50.0.2",
                "msgspec==0.22.0",
                "opentelemetry-api==1.40.0",
                "opentelemetry-sdk==1.40.0",
                "opentelemetry-exporter-otlp==1.40.0",
                "opentelemetry-exporter-prometheus==0.61b0",
                "prometheus_client==0.24.1",
                "psutil==7.2.2",
                "py-cpuinfo==9.0.0",
                "pyyaml==6.0.3",
                "pyzmq==27.3.0",
                "safetensors==0.8.0",
                "sortedcontainers==2.4.0",
            ),
        ),
    ),
)

MOONCAKE = SystemDistribution(
    name="Mooncake",
    version="0.3.13.post1",
    steps=((("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.2.6"),),),
    system="apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4",
)
