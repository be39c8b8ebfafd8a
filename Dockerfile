# One image for every role: coordinator, worker, stage and gateway. CPU only; for a GPU, base it on an image with CUDA and
# install the torch build that fits.
#
#   docker build --tag blocktrain .
#   docker run --rm blocktrain doctor
#   docker compose up                       # a whole swarm with serving: see compose.yaml
FROM python:3.11-slim

# torch first and by itself, so that no other requirement chooses its version.
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH"

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ".[postgres]"

# State lives in volumes. The folders exist in the image so that new volumes belong to this user.
RUN useradd --create-home --uid 10001 blocktrain \
    && mkdir --parents /data /keys \
    && chown blocktrain /data /keys
USER blocktrain
VOLUME ["/data", "/keys"]

ENTRYPOINT ["blocktrain"]
CMD ["--help"]
