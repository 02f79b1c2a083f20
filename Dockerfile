# The server as an image. `docker build .` is for CPUs; `docker build --target cuda .` adds torch with
# CUDA, for hosts with NVIDIA's container runtime (`docker run --gpus all`).
#
#   docker build -t streamkv .
#   docker run -p 8000:8000 -v streamkv:/data streamkv --model Qwen/Qwen3-0.6B --api-key KEY
#
# What follows the image's name are flags of `streamkv serve`. /data keeps what is downloaded. The
# server listens on port 8000 of all addresses: publish it under another port rather than moving it.

FROM debian:bookworm-slim AS base
SHELL ["/bin/bash", "-o", "errexit", "-o", "pipefail", "-c"]
ENV PATH=/opt/streamkv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

FROM base AS build
# The base image's release fixes the versions of its packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/streamkv
WORKDIR /src
# What it depends on first: a layer that a change of the source leaves as it is.
COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > /tmp/requirements.txt \
    && pip install --requirement /tmp/requirements.txt
COPY README.md LICENSE ./
COPY cuda_ext cuda_ext/
COPY web web/
COPY streamkv streamkv/
RUN pip wheel --no-deps --wheel-dir /wheels . && pip install /wheels/*.whl

FROM build AS build-cuda
# The version of torch is the wheel's to say.
# hadolint ignore=DL3013
RUN for wheel in /wheels/*.whl; do pip install "${wheel}[torch]"; done

FROM base AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin streamkv \
    && install --directory --owner=10001 --group=10001 /data
ENV STREAMKV_HOST=0.0.0.0 \
    STREAMKV_CACHE=/data/streamkv \
    HF_HOME=/data/huggingface
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
# 503 while the model is downloaded and loaded: that may take its time.
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s --retries=3 \
    CMD ["python", "-m", "streamkv.healthcheck"]
ENTRYPOINT ["streamkv", "serve"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/streamkv /opt/streamkv

FROM runtime AS cpu
COPY --from=build /opt/streamkv /opt/streamkv
