# Ostinato on NVIDIA GPUs. From the root of the repository:
#
#   docker build -f docker/cuda.Dockerfile -t ostinato:cuda .
#   docker run --gpus 1 --init --read-only --tmpfs /tmp -v ostinato:/cache -p 127.0.0.1:8000:8000 \
#     ostinato:cuda model=qwen3-0.6b
#
# The host has the driver and the NVIDIA container toolkit. CUDA's libraries come with torch.
# What follows the name of the image is added to `run serve`. docs/containers.md explains the rest.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/ostinato
ENV PATH=/opt/ostinato/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# The dependencies are a layer of their own: they change less often than the sources.
COPY pyproject.toml .
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *project['optional-dependencies']['otel'], 'setuptools>=77', sep='\n')" > requirements.txt
# torch with CUDA; https://download.pytorch.org/whl/cu126 and others are for older drivers.
ARG TORCH_INDEX=https://pypi.org/simple
RUN grep '^torch' requirements.txt > torch.txt \
    && pip install --index-url "${TORCH_INDEX}" --requirement torch.txt \
    && pip install --requirement requirements.txt
COPY . .
# The wheel carries the kernels of CPUs too: `device.name=cpu` works in this image.
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip install --no-deps /wheels/*.whl

FROM ${BASE}
# Triton compiles the functions that launch its kernels; it needs a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=10001 --group=0 --mode=0775 /cache
COPY --from=build /opt/ostinato /opt/ostinato
ENV PATH=/opt/ostinato/bin:$PATH \
    HOME=/cache \
    OSTINATO_CACHE_DIR=/cache/ostinato \
    HF_HOME=/cache/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["run", "serve", "server.host=0.0.0.0", "device.name=cuda"]
